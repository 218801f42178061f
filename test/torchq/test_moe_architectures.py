"""Every experts layout of the zoo: recognised, quantized bit for bit, called as before, compiled, saved and loaded."""

import pytest
import torch
from torch import nn

from torchq import Quantizer, kernels, quantize_
from torchq.nn import QuantLinear, QuantMoE
from torchq.nn.qmoe import QuantParallelExperts
from torchq.zoo.measure import logits_sqnr
from torchq.zoo.tiny import MOE

# Experts modules by architecture, where not two; each with one name as patterns see it.
COUNTS = {"step3p7": 1, "jetmoe": 8, "hy_v3": 1, "deepseek_v3": 1, "deepseek_v4": 3, "glm4_moe": 1, "glm_moe_dsa": 1}
COUNTS |= {"kimi_linear": 1, "kimi_k25": 1, "longcat_flash": 1, "nemotron_h": 1, "jamba": 1}
LISTS = ("switch", "nllb_moe")  # experts that are modules with linears of their own
QUANTIZED = (QuantMoE, QuantParallelExperts)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


def weight_only(key):
    return {"moe": {"weight": key, "activation": None}}


@torch.no_grad()
def run(name, model):
    return MOE[name].output(model(**MOE[name].inputs()))


def experts_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QUANTIZED)}


def canonical(module):
    """The matrices of every expert as (N, K), gate rows first, read off the original module by hand."""
    cls, p = type(module).__name__, {n: v.detach() for n, v in module.named_parameters()}
    if cls == "DbrxExperts":
        w1, v1, w2 = (p[f"mlp.{n}"].view(module.num_experts, -1, module.hidden_size) for n in ("w1", "v1", "w2"))
        return {"gate_up": [torch.cat([g, u]) for g, u in zip(w1, v1, strict=True)], "down": [w.T for w in w2]}
    if cls == "JetMoeParallelExperts":
        return {"weight": list(p["weight"])}
    up, down = p.get("gate_up_proj", p.get("up_proj")), p["down_proj"]
    up = up[: len(down)]  # LongcatFlash has rows for experts that compute nothing
    if cls == "GptOssExperts":
        up = torch.stack([torch.cat([w[:, 0::2].T, w[:, 1::2].T]) for w in up])
        return {"gate_up": list(up), "down": [w.T for w in down]}
    if cls in ("Llama4TextExperts", "AriaExperts", "OpenAIPrivacyFilterExperts"):
        return {"gate_up": [w.T for w in up], "down": [w.T for w in down]}
    return {"gate_up": list(up), "down": list(down)}


def stored(module):
    if isinstance(module, QuantMoE):
        return {"gate_up": module.gate_up.quantized, "down": module.down.quantized}
    return {"weight": module.quantized}


@torch.no_grad()
def write_back(quantized, model):
    """Puts the dequantized weights of a quantized model into one of the original modules."""
    for name, module in quantized.named_modules():
        if isinstance(module, QuantMoE):
            original = model.get_submodule(name)
            for which, projection in module.layout.projections.items():
                for parameter, value in projection.unswizzle(getattr(module, which).dequantize()).items():
                    original.get_parameter(parameter)[: len(value)].copy_(value)
        elif isinstance(module, QuantLinear | QuantParallelExperts):
            model.get_submodule(name).weight.copy_(module.dequantize())


@pytest.mark.parametrize("name", MOE)
def test_experts_are_quantized_and_nothing_else(name, capsys):
    model = MOE[name].build()
    dense, kinds = run(name, model), {n: type(m) for n, m in model.named_modules()}
    report = quantize_(model, {"moe": "mxfp4"})
    rows = report.quantized
    assert len(rows) == COUNTS.get(name, 2) and {row.kind for row in rows} == {"moe"}
    changed = {n for n, m in model.named_modules() if n in kinds and type(m) is not kinds[n]}
    assert all(any(n == row.name or n.startswith(f"{row.name}.") for row in rows) for n in changed)
    assert not any(part in n for n in changed for part in ("router", "gate.", "shared"))
    out = run(name, model)
    assert out.shape == dense.shape and out.dtype == dense.dtype and torch.isfinite(out).all()
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert report.bytes_after == sum(tensors.values())
    with capsys.disabled():
        shapes = " ".join("x".join(map(str, s)) for s in rows[0].shape if isinstance(s, tuple))
        print(f"\n{name}: {len(rows)} x {shapes}, logits SQNR {logits_sqnr(dense, out):.1f} dB", end="")


@pytest.mark.parametrize("name", sorted(set(MOE) - set(LISTS)))
def test_codes_are_those_of_each_experts_own_matrix(name):
    model, original = MOE[name].build(), MOE[name].build()
    report = quantize_(model, {"targets": {"re:.*(experts|put_linear)$": "nvfp4"}})
    assert len(report.quantized) == COUNTS.get(name, 2)
    for path, module in experts_of(model).items():
        expected = canonical(original.get_submodule(path))
        assert stored(module).keys() == expected.keys()
        for which, q in stored(module).items():
            assert len(expected[which]) == q.shape[0]
            for expert, matrix in enumerate(expected[which]):
                reference = kernels.quantize(matrix, "nvfp4", backend="torch")
                for part in ("data", "scale", "global_scale"):
                    assert torch.equal(getattr(q[expert], part), getattr(reference, part)), (path, which, expert, part)


@pytest.mark.parametrize("name", MOE)
def test_output_is_that_of_the_original_module_with_the_dequantized_weights(name):
    model, original = MOE[name].build(), MOE[name].build()
    dense = run(name, original)
    quantize_(model, weight_only("mxfp4"))
    write_back(model, original)
    expected = run(name, original)
    assert logits_sqnr(dense, expected) < 60  # the weights did change
    torch.testing.assert_close(run(name, model), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "dbrx", "longcat_flash", "nemotron_h", "jetmoe"])
def test_a_mix_up_of_experts_would_show(name):
    model, original = MOE[name].build(), MOE[name].build()
    quantize_(model, weight_only("mxfp8"))
    write_back(model, original)
    expected = run(name, original)
    for mutate in (_next_expert, _swap_gate_and_up):
        mutated = MOE[name].build()
        quantize_(mutated, weight_only("mxfp8"))
        if any([mutate(m) for m in experts_of(mutated).values()]):
            assert logits_sqnr(expected, run(name, mutated)) < 40


def _next_expert(module):
    projection = module.down if isinstance(module, QuantMoE) else module
    projection.codes, projection.scale = projection.codes.roll(1, 0), projection.scale.roll(1, 0)
    return True


def _swap_gate_and_up(module):
    if not isinstance(module, QuantMoE) or not module.layout.gated:
        return False
    half, projection = module.gate_up.shape[1] // 2, module.gate_up
    projection.codes, projection.scale = projection.codes.roll(half, 1), projection.scale.roll(half, 1)
    return True


@pytest.mark.parametrize("name", sorted(set(MOE) - set(LISTS)))
def test_module_compiles_as_one_graph(name):
    model = MOE[name].build()
    quantize_(model, {"moe": "mxfp8"})
    module = next(iter(experts_of(model).values()))
    calls = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    run(name, model)
    hook.remove()
    args, kwargs = calls[0]
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args, **kwargs), module(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_model_compiles(name):
    model = MOE[name].build()
    quantize_(model, {"moe": "mxfp8"})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert logits_sqnr(run(name, model), run(name, compiled)) > 100


@pytest.mark.parametrize("name", MOE)
def test_state_dict_round_trip(name):
    model, other = MOE[name].build(), MOE[name].build()
    quantize_(model, {"moe": "mxfp4"})
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    quantize_(other, {"moe": "mxfp4"})
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(run(name, model), run(name, other))


def test_every_experts_implementation_is_left_behind():
    reference = None
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = MOE["gpt_oss"].build()
        model.set_experts_implementation(implementation)
        quantize_(model, {"moe": "mxfp4"})
        out = run("gpt_oss", model)
        reference = out if reference is None else reference
        assert torch.equal(out, reference)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "llama4"])
def test_linear_leaves_experts_and_routers(name):
    model = MOE[name].build()
    routers = {n: m for n, m in model.named_modules() if n.endswith((".gate", ".router"))}
    report = quantize_(model, {"linear": "mxfp8"})
    assert not experts_of(model) and routers
    assert all(model.get_submodule(n) is m and not isinstance(m, QuantLinear) for n, m in routers.items())
    assert {row.skipped for row in report.rows if row.kind == "moe"} == {"no weight format for moe"}


@pytest.mark.parametrize("name", sorted(set(MOE) - set(LISTS) - {"jamba"}))
def test_routers_stay_protected_once_experts_are_quantized(name):
    model = MOE[name].build()
    expected = [row.name for row in Quantizer({"linear": "mxfp8"}).plan(model).quantized]
    quantize_(model, {"moe": "mxfp4"})
    assert [row.name for row in Quantizer({"linear": "mxfp8"}).plan(model).quantized] == expected


# Where each class keeps its limit, which the tiny models have at 0.5.
@pytest.mark.parametrize(
    ("name", "limit"),
    [("gpt_oss", "limit"), ("deepseek_v4", "limit"), ("minimax_m3", "swiglu_limit"), ("step3p7", "limit")],
)
def test_the_clamp_acts_on_large_weights(name, limit):
    outputs = []
    for at in (0.5, 1e9):
        model, original = MOE[name].build(), MOE[name].build()
        for each in (model, original):
            for path, module in each.named_modules():
                if path.endswith("experts") and hasattr(module, limit):
                    assert getattr(module, limit) == 0.5
                    setattr(module, limit, at)
                    for parameter in module.parameters():
                        parameter.data *= 40
        quantize_(model, weight_only("mxfp8"))
        write_back(model, original)
        outputs.append(run(name, model))
        torch.testing.assert_close(outputs[-1], run(name, original), atol=1e-3, rtol=1e-4)
    assert logits_sqnr(*outputs) < 10


def test_hidden_layers_of_one_model_may_differ():
    model = MOE["mixtral"].build()
    config = {"*layers.0.mlp.experts": "mxfp4", "*layers.1.mlp.experts": {"weight": "mxfp8", "activation": None}}
    quantize_(model, {"targets": config})
    keys = [(str(m.gate_up.weight_key), str(m.gate_up.activation)) for m in experts_of(model).values()]
    assert keys == [("mxfp4", "mxfp4"), ("mxfp8", "None")]


def test_lists_of_experts_keep_their_container():
    model = MOE["switch"].build()
    container = model.encoder.block[1].layer[1].mlp.experts
    quantize_(model, {"moe": "mxfp4"})
    assert model.encoder.block[1].layer[1].mlp.experts is container
    linears = [m for m in container.modules() if isinstance(m, nn.Linear | QuantLinear)]
    assert len(linears) == 8 and all(isinstance(m, QuantLinear) for m in linears)
