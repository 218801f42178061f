"""Rules on experts: one expert, one projection, ignore lists that name them all, containers, and the time it takes."""

import re
import time
import warnings

import pytest
import torch
from torch import nn

from torchq import ConfigError, Quantizer, UnsupportedError, quantize_
from torchq.kernels import announce
from torchq.nn import ExpertsLayout, Projection, QuantLinear, QuantMoE, register_experts
from torchq.nn.qmoe import DenseProjection

EXPERTS, HIDDEN, INNER = 4, 64, 32
MXFP4 = {"weight": "mxfp4", "activation": None}


class Experts(nn.Module):
    """What transformers' decorated classes look like, with no transformers."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, experts=EXPERTS, device=None):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN, device=device))
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, INNER, device=device))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))


def moe_block(experts, device=None):
    shared = nn.Module()
    for name in ("gate_proj", "up_proj", "down_proj"):
        shared.add_module(name, nn.Linear(HIDDEN, HIDDEN, device=device))
    block = nn.Module()
    block.mlp = nn.Module()
    block.mlp.gate = nn.Linear(HIDDEN, EXPERTS, device=device)
    block.mlp.experts, block.mlp.shared_experts = experts, shared
    block.q_proj = nn.Linear(HIDDEN, HIDDEN, device=device)
    return block


def model_of(*experts, device=None):
    model = nn.Module()
    model.layers = nn.ModuleList(moe_block(e, device) for e in experts)
    return model


def specs(config, model=None):
    plan = Quantizer(config).plan(model or model_of(Experts()))
    return {row.name.partition(".")[2].partition(".")[2]: row.spec for row in plan.quantized}


@pytest.mark.parametrize(
    "patterns",
    [
        ["*.mlp.experts"],
        ["*mlp.experts.*"],
        [f"*.mlp.experts.{e}" for e in range(EXPERTS)],
        [f"*.mlp.experts.{e}.*" for e in range(EXPERTS)],
        ["re:.*mlp\\.experts\\.[0-3]\\..*"],
        ["*.experts.*.gate_proj", "*.experts.*.up_proj", "*.experts.*.down_proj"],
        ["*.experts.*.w1", "*.experts.*.w2", "*.experts.*.w3"],
        ["*.experts.gate_up_proj", "*.experts.down_proj"],
        ["*.mlp.experts.?.*"],
        [f"layers.0.mlp.experts.{e}.{p}" for e in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")],
    ],
)
def test_uniform_rules_on_parts_give_one_layer(patterns):
    assert specs({"targets": dict.fromkeys(patterns, MXFP4)}) == {"mlp.experts": "mxfp4 x 16-bit"}


def test_gate_up_and_down_may_differ():
    model = model_of(Experts())
    config = {"*experts.*.gate_proj": MXFP4, "*experts.*.up_proj": MXFP4, "*experts.*.down_proj": "mxfp8"}
    report = quantize_(model, {"targets": config})
    assert report.quantized[0].spec == "gate_up: mxfp4 x 16-bit; down: mxfp8 x mxfp8"
    assert "from targets: *experts.*.gate_proj + *experts.*.down_proj, " in report.summary()
    experts = model.layers[0].mlp.experts
    assert (str(experts.gate_up.weight_key), str(experts.down.weight_key)) == ("mxfp4", "mxfp8")
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("config", [{"targets": {"*experts.*.down_proj": MXFP4}}, {"moe": MXFP4, "ignore": ["*gate*"]}])
def test_one_projection_alone_leaves_the_other_dense(config):
    model = model_of(Experts())
    experts = model.layers[0].mlp.experts
    dense = experts.gate_up_proj.detach().clone()
    report = quantize_(model, config)
    assert report.quantized[0].spec == "gate_up: dense; down: mxfp4 x 16-bit"
    experts = model.layers[0].mlp.experts
    assert isinstance(experts.gate_up, DenseProjection) and torch.equal(experts.gate_up.weight, dense)
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    x, index = torch.randn(5, HIDDEN), torch.randint(0, EXPERTS, (5, 2))
    weights = torch.rand(5, 2)
    down = experts.down.dequantize()
    expected = torch.zeros(5, HIDDEN)
    for t in range(5):
        for k in range(2):
            gate, up = (dense[index[t, k]] @ x[t]).chunk(2)
            expected[t] += weights[t, k] * (down[index[t, k]] @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(experts(x, index, weights), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"targets": {"*.mlp.experts.3.*": "mxfp4"}},
            r"names some parts of the experts layers.0.mlp.experts, but not layers.0.mlp.experts.0.gate_proj",
        ),
        ({"targets": {"*.experts.*.gate_proj": "mxfp4"}}, "but not layers.0.mlp.experts.0.up_proj"),
        (
            {"targets": {"*.experts.[0-2].*": "mxfp4", "*.experts.3.*": "mxfp8"}},
            r"different quantization_config.targets values for the experts .*mlp.experts.0.\w+ .* = mxfp4\)"
            r".*mlp.experts.3.\w+ .* = mxfp8\)",
        ),
        (
            {"targets": {"*.experts.*.gate_proj": "mxfp4", "*.experts.*.up_proj": "mxfp8"}},
            "only the down projection may differ",
        ),
        (
            {"targets": {"*.experts.*.down_proj": "mxfp4", "*.experts.*.d*_proj": "mxfp4"}},
            "Found multiple quantization_config.targets matches for layers.0.mlp.experts.0.down_proj",
        ),
        (
            {"moe": "mxfp4", "ignore": ["*.experts.0.*", "*.experts.2.*"]},
            "ignore names some parts of the experts layers.0.mlp.experts, but not layers.0.mlp.experts.1.gate_proj",
        ),
        (
            {"targets": {"*experts.*.down_proj": "mxfp4"}, "ignore": ["*.down_proj"]},
            r"down projection of layers.0.mlp.experts matches both .*ignore and",
        ),
        ({"targets": {"*.experts": "mxfp4", "*.experts.3.*": "mxfp8"}}, r"target '\*.experts.3.\*' matches no layer"),
        ({"targets": {"*.experts.4.*": "mxfp4"}}, "matches no layer"),
    ],
)
def test_rules_that_split_the_experts_raise_with_the_names(config, message):
    with pytest.raises(ConfigError, match=message):
        Quantizer(config).plan(model_of(Experts()))


def test_an_ignore_list_of_every_expert_skips_the_layer():
    names = [f"layers.0.mlp.experts.{e}.{p}" for e in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every name is used
        plan = Quantizer({"linear": "mxfp8", "moe": "mxfp4", "ignore": names}).plan(model_of(Experts()))
    assert {row.name: row.skipped for row in plan.rows}["layers.0.mlp.experts"] == "ignored"


def test_an_ignore_of_other_layers_does_not_split_experts_that_nobody_quantizes():
    plan = Quantizer({"linear": "mxfp8", "ignore": ["*.up_proj"]}).plan(model_of(Experts()))
    skipped = {row.name: row.skipped for row in plan.rows if row.skipped}
    assert skipped["layers.0.mlp.experts"] == "no weight format for moe"
    assert skipped["layers.0.mlp.shared_experts.up_proj"] == "ignored"


def test_experts_pattern_hits_shared_and_routed():
    assert set(specs({"targets": {"*experts*": "mxfp4"}})) == {
        "mlp.experts",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    }


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ("mxfp4", "shared_experts: same spec as the routed experts, so fusing the two is legal"),
        ({"linear": "mxfp8", "moe": "mxfp4"}, "shared_experts: mxfp8 x mxfp8, unlike the routed experts, so fusing"),
        ({"moe": "mxfp4"}, "shared_experts: 16-bit, unlike the routed experts, so fusing the two is not legal"),
    ],
)
def test_the_plan_says_whether_shared_experts_may_be_fused(config, note):
    assert note in str(Quantizer(config).plan(model_of(Experts())))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"targets": {"layers.0.mlp.experts": "mxfp4", "layers.1.mlp.experts": "mxfp8"}},
            "layers.0.mlp.experts, mxfp4; layers.1.mlp.experts: targets: layers.1.mlp.experts, mxfp8",
        ),
        (
            {"moe": "mxfp4", "ignore": ["layers.1.mlp.experts.*.down_proj"]},
            "layers.0.mlp.experts: moe: mxfp4; layers.1.mlp.experts: gate_up moe: mxfp4, down ignored",
        ),
    ],
)
def test_one_module_under_two_names(config, message):
    experts = Experts()
    with pytest.raises(ConfigError, match=f"one module has several names that get different specs: .*{message}"):
        Quantizer(config).plan(model_of(experts, experts))
    model = model_of(experts, experts)
    quantize_(model, {"moe": "mxfp4"})
    assert model.layers[0].mlp.experts is model.layers[1].mlp.experts


def test_shared_experts_that_are_quantized_already_count_as_what_they_are():
    model = model_of(Experts())
    quantize_(model, {"linear": "mxfp4"})
    assert "shared_experts: same spec as the routed experts" in str(Quantizer({"moe": "mxfp4"}).plan(model))
    assert "shared_experts: mxfp4 x mxfp4, unlike" in str(Quantizer({"moe": "mxfp8"}).plan(model))


def test_log_lines_of_the_release(caplog):
    announce.cache_clear()
    model = model_of(*(Experts() for _ in range(3)))
    with caplog.at_level("INFO", "torchq"):
        quantize_(model, {"targets": {"*mlp.experts*": MXFP4}})
    label = '*mlp.experts*, {"weight":"mxfp4","activation":null}'
    assert f"Quantized 3 layers of types: mlp.experts: 3 (from targets: {label})" in caplog.messages
    assert sum(re.fullmatch(r"Using '\w+' Mxfp4 MoE backend\.", line) is not None for line in caplog.messages) == 1


class TestLists:
    """A ModuleList of modules with linears of their own."""

    def build(self):
        return model_of(nn.ModuleList(Expert() for _ in range(EXPERTS)))

    def test_moe_takes_it_as_one_layer_and_linear_as_linears(self):
        model = self.build()
        report = quantize_(model, {"moe": "nvfp4"})
        assert [(row.name, row.kind) for row in report.quantized] == [("layers.0.mlp.experts", "moe")]
        assert report.quantized[0].shape == ((EXPERTS, HIDDEN, HIDDEN),) * 3
        assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        for expert in model.layers[0].mlp.experts:
            assert all(isinstance(linear, QuantLinear) for linear in (expert.w1, expert.w2, expert.w3))
            assert torch.equal(expert.w1.global_scale, expert.w3.global_scale)
            assert not torch.equal(expert.w1.global_scale, expert.w2.global_scale)
        kinds = {row.kind for row in Quantizer({"linear": "mxfp8"}).plan(self.build()).quantized}
        assert kinds == {"linear"}

    def test_a_pattern_that_hits_the_container_and_its_linears_has_no_conflict(self):
        assert specs({"targets": {"*.experts*": "mxfp4"}}, self.build()) == {"mlp.experts": "mxfp4 x mxfp4"}

    def test_linears_of_one_expert_share_a_global_scale_too(self):
        model = self.build()
        quantize_(model, {"linear": "nvfp4"})
        for expert in model.layers[0].mlp.experts:
            assert torch.equal(expert.w1.global_scale, expert.w3.global_scale)
            assert not torch.equal(expert.w1.global_scale, expert.w2.global_scale)

    def test_a_pattern_on_the_linears_leaves_them_layers_of_their_own(self):
        assert len(specs({"targets": {"*.experts.*.w2": "mxfp4"}}, self.build())) == EXPERTS

    def test_ignore_lists(self):
        every = [f"layers.0.mlp.experts.{e}.{w}" for e in range(EXPERTS) for w in ("w1", "w2", "w3")]
        config = {"linear": "mxfp8", "moe": "mxfp4", "ignore": every}
        assert "mlp.experts" not in specs(config, self.build())
        with pytest.raises(ConfigError, match="names some of the experts in layers.0.mlp.experts, but not layers.0"):
            Quantizer({"moe": "mxfp4", "ignore": every[1:]}).plan(self.build())

    def test_targeted_and_ignored(self):
        config = {"targets": {"*.experts": "mxfp4", "*.q_proj": "mxfp8"}, "ignore": ["*.experts.*.w?"]}
        with pytest.raises(
            ConfigError, match=r"layers.0.mlp.experts matches quantization_config.targets \('\*.experts'\)"
        ):
            Quantizer(config).plan(self.build())

    def test_linears_keep_their_hooks(self):
        model, calls = self.build(), []
        model.layers[0].mlp.experts[1].w2.register_forward_hook(lambda *args: calls.append(args))
        quantize_(model, {"moe": "mxfp4"})
        model.layers[0].mlp.experts[1].w2(torch.zeros(1, HIDDEN))
        assert len(calls) == 1

    def test_a_list_of_other_quantized_layers_is_no_experts(self):
        model = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList(Expert() for _ in range(2))}))
        quantize_(model, "mxfp8")
        report = quantize_(model, {"targets": {"*.w1": "mxfp4", "*.w2": "mxfp8"}})
        assert [row.name for row in report.quantized] == ["0.layers.0.w1", "0.layers.1.w1"]
        assert {row.kind for row in Quantizer("mxfp4").plan(model).rows} == {"linear"}

    def test_again(self):
        model = self.build()
        quantize_(model, {"moe": "mxfp8"})
        plan = Quantizer({"moe": "mxfp4"}).plan(model)
        assert {row.skipped for row in plan.rows if row.kind == "moe"} == {
            "quantized already (mxfp8 x mxfp8); name it in targets to quantize it again"
        }
        report = quantize_(model, {"targets": {"*.experts": "mxfp4"}})
        assert "quantized again from its mxfp8 weight" in report.quantized[0].notes[0]


def test_experts_quantized_again():
    model = model_of(Experts())
    quantize_(model, {"moe": "mxfp8"})
    report = quantize_(model, {"targets": {"*experts.*.down_proj": "mxfp4", "*q_proj": "mxfp4"}})
    assert report.quantized[0].notes[0] == "layers.0.mlp.experts: quantized again from its mxfp8 weight"
    experts = model.layers[0].mlp.experts
    assert (str(experts.gate_up.weight_key), str(experts.down.weight_key)) == ("mxfp8", "mxfp4")
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    model2 = model_of(Experts())
    quantize_(model2, {"targets": {"*experts.*.down_proj": "mxfp4"}})
    report = quantize_(model2, {"targets": {"*experts.gate_up_proj": "mxfp8"}})
    assert "again" not in str(report.quantized[0].notes)  # it was dense
    experts = model2.layers[0].mlp.experts
    assert (str(experts.gate_up.weight_key), str(experts.down.weight_key)) == ("mxfp8", "mxfp4")
    plan = Quantizer({"targets": {"*experts.*.down_proj": "mxfp4", "*q_proj": "mxfp8"}}).plan(model)
    assert "quantized to this spec already" in {row.skipped for row in plan.rows}


class Stranger(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.w13 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.relu = nn.ReLU()

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for e, w in zip(index[t], weights[t], strict=True):
                gate, up = (x[t] @ self.w13[e]).chunk(2)
                out[t] += w * ((self.relu(gate) * up) @ self.w2[e])
        return out


def test_experts_that_are_not_understood_are_named_until_they_are_registered():
    model = model_of(Stranger())
    reason = r"Stranger resembles experts, .*register_experts\(Stranger, torchq.nn.ExpertsLayout"
    plan = Quantizer("mxfp4").plan(model)
    assert "Stranger resembles experts" in str(plan) and "mlp.experts" not in {row.name for row in plan.quantized}
    with pytest.raises(UnsupportedError, match=f"layers.0.mlp.experts can't be quantized: {reason}"):
        quantize_(model, {"targets": {"*.experts": "mxfp4"}})
    layout = ExpertsLayout(Projection("w13", transposed=True), Projection("w2", transposed=True), act="relu")
    register_experts(Stranger, layout)
    x, index, weights = torch.randn(6, HIDDEN), torch.randint(0, EXPERTS, (6, 2)), torch.rand(6, 2)
    with torch.no_grad():
        dense = model.layers[0].mlp.experts(x, index, weights)
    quantize_(model, {"targets": {"*.experts": {"weight": "int8_per_channel_static", "activation": None}}})
    experts = model.layers[0].mlp.experts
    assert isinstance(experts, QuantMoE)
    error = (experts(x, index, weights) - dense).norm() / dense.norm()
    assert 0 < error < 0.02


def test_a_plan_of_many_experts_and_many_names_is_fast():
    layers, experts = 60, 256
    model = model_of(*(Experts(experts, "meta") for _ in range(layers)), device="meta")
    targets = {"*.q_proj": "mxfp8"}
    targets |= {f"*.layers.{i}.mlp.experts.*.{p}_proj": "mxfp8" for i in range(6, 18) for p in ("gate", "up")}
    targets |= {f"re:layers\\.{i}\\.mlp\\.experts\\..*\\.down_proj": "mxfp4" for i in range(6, 18)}
    targets |= {f"re:layers\\.{i}\\d\\.mlp\\.experts$": "mxfp4" for i in (2, 3, 4, 5)}
    targets = {p.replace("*.layers", "layers"): v for p, v in targets.items()}
    parts = ("gate_proj", "up_proj", "down_proj")
    ignore = [f"layers.{i}.mlp.experts.{e}.{p}" for i in range(6) for e in range(experts) for p in parts]
    ignore += [f"layers.{i}.mlp.shared_experts.{p}" for i in range(layers) for p in parts]
    ignore += [f"layers.{i}.gone.{k}" for i in range(8) for k in range(26)]
    assert len(targets) + len(ignore) > 5000
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = Quantizer({"targets": targets, "ignore": ignore}).plan(model)
    took = time.perf_counter() - began
    mixed = [row for row in plan.quantized if row.parts]
    assert len(mixed) == 12 and sum(row.kind == "moe" for row in plan.quantized) == 12 + 40
    print(f"{took:.2f} s")
    assert took < 3
