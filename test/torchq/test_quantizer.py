"""quantize_ on small models: what is swapped, what is kept, and that a failing call changes nothing."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import torchq
from torchq import ConfigError, Quantizer, QuantKey, UnsupportedError, quantize_
from torchq.nn import QuantLinear, register_linear


class Block(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, 32, bias=False)
        self.v_proj = nn.Linear(hidden, 32, bias=False)
        self.o_proj = nn.Linear(32, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        return self.norm(x + self.q_proj(x) + self.o_proj(self.k_proj(x) * self.v_proj(x)))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(64, 100, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(12).view(2, 6)


def snapshot(model):
    return {n: (type(m), *(p.clone() for p in m.parameters(recurse=False))) for n, m in model.named_modules()}


def same(a, b):
    return a.keys() == b.keys() and all(
        x[0] is y[0] and all(torch.equal(s, t) for s, t in zip(x[1:], y[1:], strict=True))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def quantized_names(model):
    return [n for n, m in model.named_modules() if isinstance(m, QuantLinear)]


def test_a_blanket_takes_every_linear_but_the_head():
    model = Model()
    report = quantize_(model, "mxfp8")
    assert len(quantized_names(model)) == 8 and type(model.lm_head) is nn.Linear
    [head] = report.skipped
    assert head.name == "lm_head" and "output embedding" in head.skipped
    assert torch.isfinite(model(IDS)).all()


def test_bytes_in_the_report_are_those_of_the_model():
    model = Model()
    before = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    report = quantize_(model, {"linear": "nvfp4"})
    after = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert (report.bytes_before, report.bytes_after) == (before, after)
    for row in report.quantized:
        module = model.get_submodule(row.name)
        assert row.bytes_after == sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def test_a_literal_a_glob_and_a_regex_target_and_an_ignore():
    model = Model()
    report = quantize_(
        model,
        {
            "targets": {
                "layers.0.q_proj": "mxfp4",
                "*.o_proj": "int8_per_channel",
                r"re:layers\.1\.[kv]_proj": "mxfp8",
            },
            "ignore": ["layers.0.k_proj"],
        },
    )
    got = {row.name: str(row.resolution.weight) for row in report.quantized}
    int8 = "int8_per_channel_static"
    assert got == {
        "layers.0.q_proj": "mxfp4",
        "layers.0.o_proj": int8,
        "layers.1.o_proj": int8,
        "layers.1.k_proj": "mxfp8",
        "layers.1.v_proj": "mxfp8",
    }
    why = {row.name: row.skipped for row in report.skipped}
    assert why["layers.0.k_proj"] == "ignored" and why["layers.1.q_proj"] == "not in targets"


def test_a_fused_name_takes_the_shards_and_they_share_the_nvfp4_global_scale():
    model = Model(1)
    with torch.no_grad():
        model.layers[0].k_proj.weight.mul_(7)
    dense = copy.deepcopy(model.layers[0])
    quantize_(model, {"targets": {"*.qkv_proj": "nvfp4"}})
    layer = model.layers[0]
    assert quantized_names(model) == ["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]
    fused = torch.cat([dense.q_proj.weight, dense.k_proj.weight, dense.v_proj.weight])
    whole = torchq.kernels.quantize(fused, "nvfp4")
    shards = [layer.q_proj, layer.k_proj, layer.v_proj]
    assert all(torch.equal(shard.global_scale, whole.global_scale) for shard in shards)
    assert torch.equal(torch.cat([shard.codes for shard in shards]), whole.data)
    assert torch.equal(torch.cat([s.scale for s in shards]).view(torch.uint8), whole.scale.view(torch.uint8))


def test_every_problem_is_listed_in_one_error_and_nothing_changes():
    model = Model()
    before = snapshot(model)
    config = {
        "targets": {"*.q_proj": {"weight": "mxfp4", "hadamard_size": 128}, "*.typo": "mxfp8", "layers.0.norm": "mxfp8"}
    }
    with pytest.raises(ConfigError) as error:
        quantize_(model, config)
    text = str(error.value)
    assert text.startswith("4 problems, and nothing was changed:")
    assert "layers.0.q_proj: hadamard_size 128 does not divide its in_features 64" in text
    assert "the largest power of two that does is 64" in text
    assert "layers.1.q_proj: hadamard_size" in text and "target '*.typo' matches no layer" in text
    assert "layers.0.norm was matched by quantization_config.targets ('layers.0.norm'), but quantization is not" in text
    assert "supported for LayerNorm" in text
    assert same(before, snapshot(model))


@pytest.mark.parametrize(
    "config, error, text",
    [
        ({"targets": {"layers.0.q_prj": "mxfp4"}}, ConfigError, "(did you mean 'layers.0.q_proj'"),
        (
            {"targets": {"*norm": "mxfp4"}},
            ConfigError,
            "matches only modules that can't be quantized, such as layers.0.norm",
        ),
        ({"targets": {"layers.0": "mxfp4"}}, UnsupportedError, "to mean the layers inside, type 'layers.0.*'"),
        ({"targets": {"*": "mxfp4"}, "ignore": ["*q_proj"]}, ConfigError, "matches both quantization_config.ignore"),
        ({"targets": {"*.q_proj": "mxfp4", "*.qkv_proj": "mxfp8"}}, ConfigError, "for the shards of layers.0.qkv_proj"),
        ({"linear": "mxfp4", "ignore": ["*"]}, ConfigError, "the config quantizes nothing in this model"),
        ("int8_per_channel_weight_only", ConfigError, "the config quantizes nothing in this model"),
    ],
)
def test_errors_name_the_layer_and_what_to_type(config, error, text):
    model = Model()
    before = snapshot(model)
    with pytest.raises(error) as raised:
        quantize_(model, config)
    assert text in str(raised.value)
    assert same(before, snapshot(model))


def test_on_unmatched():
    config = {"targets": {"*.q_proj": "mxfp4", "*.nothing": "mxfp8"}}
    with pytest.warns(UserWarning, match=r"target '\*.nothing' matches no layer"):
        quantize_(Model(), config, on_unmatched="warn")
    assert len(quantize_(Model(), config, on_unmatched="ignore").quantized) == 2
    with pytest.raises(ConfigError, match="on_unmatched is 'error', 'warn' or 'ignore', not 'no'"):
        quantize_(Model(), config, on_unmatched="no")


def test_an_ignore_that_hits_nothing_warns():
    with pytest.warns(UserWarning, match=r"ignore 'lm_hed' matches no module \(did you mean 'lm_head'\?\)"):
        quantize_(Model(), {"linear": "mxfp8", "ignore": ["lm_hed"]})


def test_backend_by_name():
    model = Model()
    with pytest.raises(ConfigError, match="unknown backend 'tritn'"):
        quantize_(model, "mxfp4", backend="tritn")
    with pytest.raises(
        UnsupportedError, match=r"layers.0.q_proj: no backend for linear of weight mxfp4.*torchao: it serves"
    ):
        quantize_(model, "mxfp4", backend="torchao")
    assert {row.backend for row in quantize_(model, "mxfp4", backend="torch").quantized} == {"torch"}
    assert model.layers[0].q_proj.backend == "torch"


def test_plan_works_on_meta_and_quantize_says_what_is_missing():
    with torch.device("meta"):
        model = Model()
    plan = Quantizer("mxfp4").plan(model)
    real = Quantizer("mxfp4").plan(Model())
    assert [(r.name, r.shape, r.bytes_before, r.bytes_after) for r in plan] == [
        (r.name, r.shape, r.bytes_before, r.bytes_after) for r in real
    ]
    with pytest.raises(ConfigError, match="8 layers are on the meta device and have no data"):
        quantize_(model, "mxfp4")


def test_the_model_itself_can_not_be_swapped():
    with pytest.raises(
        ConfigError, match=r"itself one Linear, which can't swap itself; wrap it: model = torch.nn.Sequ"
    ):
        quantize_(nn.Linear(64, 64), "mxfp4")


def test_a_tied_head_by_target_leaves_the_embedding(caplog):
    model = Model()
    model.lm_head.weight = model.embed.weight
    dense = model.embed.weight.clone()
    report = quantize_(copy.deepcopy(model), "mxfp8")
    assert {r.name: r.skipped for r in report.skipped}["lm_head"].startswith("output embedding of the model, tied")
    report = quantize_(model, {"targets": {"lm_head": "mxfp8"}})
    assert isinstance(model.lm_head, QuantLinear) and torch.equal(model.embed.weight, dense)
    assert report.quantized[0].notes == ["lm_head was tied to embed, which keeps the dense weight"]
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_a_shared_module_is_quantized_once_and_stays_shared():
    model = Model()
    model.layers[1].q_proj = model.layers[0].q_proj
    report = quantize_(model, "mxfp8")
    assert model.layers[1].q_proj is model.layers[0].q_proj and isinstance(model.layers[0].q_proj, QuantLinear)
    [row] = [row for row in report.rows if row.name == "layers.0.q_proj"]
    assert row.aliases == ("layers.1.q_proj",)
    model = Model()
    model.layers[1].q_proj = model.layers[0].q_proj
    with pytest.raises(ConfigError, match="one module has several names that get different specs: layers.0.q_proj"):
        quantize_(model, {"targets": {"layers.0.q_proj": "mxfp4", "layers.1.q_proj": "mxfp8"}})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "wrap, text",
    [
        (parametrizations.weight_norm, "remove_parametrizations"),
        (weight_norm, "its weight is computed"),
    ],
)
def test_computed_weights_are_left_and_named(wrap, text):
    model, other = Model(), Model()
    wrap(model.layers[0].q_proj)
    wrap(other.layers[0].q_proj)
    report = quantize_(other, "mxfp8")
    assert text in {row.name: row.skipped for row in report.skipped}["layers.0.q_proj"]
    with pytest.raises(UnsupportedError, match="layers.0.q_proj") as error:
        quantize_(model, {"targets": {"layers.0.q_proj": "mxfp8"}})
    assert text in str(error.value)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Plain(nn.Linear):
    pass


def test_subclasses_are_left_and_named_until_registered():
    model = nn.Sequential(Doubled(64, 64), Plain(64, 64), nn.Linear(64, 64))
    report = quantize_(model, "mxfp8")
    assert [type(m).__name__ for m in model] == ["Doubled", "Plain", "QuantLinear"]
    assert "register_linear(Doubled)" in report.skipped[0].skipped
    with pytest.raises(UnsupportedError, match=r"not supported for Doubled: .*register_linear\(Doubled\)"):
        quantize_(model, {"targets": {"0": "mxfp8"}})
    register_linear(Plain)
    assert [row.name for row in quantize_(model, "mxfp8").quantized] == ["1"]


def test_low_rank_adapters_stay_dense_and_their_base_answers_to_the_wrapper_name():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64, bias=False)})

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    model = Model(1)
    model.layers[0].q_proj = Adapted(model.layers[0].q_proj)
    by_target = copy.deepcopy(model)
    report = quantize_(model, "mxfp8")
    assert "layers.0.q_proj.base_layer" in quantized_names(model)
    assert sum("low-rank adapter" in row.skipped for row in report.skipped) == 2
    quantize_(by_target, {"targets": {"layers.0.q_proj": "mxfp8"}})
    assert quantized_names(by_target) == ["layers.0.q_proj.base_layer"]
    by_target(IDS).sum().backward()
    assert by_target.layers[0].q_proj.lora_A["default"].weight.grad is not None


def test_hooks_train_flag_and_bias_requires_grad_survive():
    model = Model()
    layer = model.layers[0].q_proj
    seen = []
    layer.register_forward_hook(lambda m, a, out: seen.append(type(m)))
    layer.bias.requires_grad_(False)
    model.layers[0].eval()
    quantize_(model, "mxfp8")
    model(IDS)
    assert seen == [QuantLinear]
    assert not model.layers[0].q_proj.training and model.layers[1].q_proj.training
    assert not model.layers[0].q_proj.bias.requires_grad and model.layers[1].q_proj.bias.requires_grad


def test_a_forward_patched_on_the_instance_is_never_dropped():
    model = Model()
    layer = model.layers[0].q_proj
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 0
    report = quantize_(model, "mxfp8")
    assert "patched on the instance" in {row.name: row.skipped for row in report.skipped}["layers.0.q_proj"]


def test_quantized_layers_are_kept_reported_or_quantized_again(caplog):
    model = Model()
    quantize_(model, "int8_per_channel")
    layer = model.layers[0].q_proj
    caplog.set_level(logging.INFO, logger="torchq")
    assert {r.skipped for r in quantize_(model, "int8_per_channel").skipped if r.name != "lm_head"} == {
        "quantized to this spec already"
    }
    assert "nothing to quantize" in caplog.text and "Quantized 0" not in caplog.text
    report = quantize_(model, "mxfp8")
    assert "quantized already (int8_per_channel_static x int8_per_token)" in report.skipped[0].skipped
    assert model.layers[0].q_proj is layer
    expected = torchq.kernels.quantize(layer.dequantize(torch.float32), "mxfp8")
    report = quantize_(model, {"targets": {"layers.0.q_proj": "mxfp8"}})
    assert report.quantized[0].notes == ["layers.0.q_proj: quantized again from its int8_per_channel_static weight"]
    assert torch.equal(model.layers[0].q_proj.codes.view(torch.uint8), expected.data.view(torch.uint8))


def test_ignoring_a_quantized_layer_does_not_undo_it():
    model = Model()
    quantize_(model, "mxfp8")
    quantize_(model, {"targets": {"lm_head": "mxfp8"}, "ignore": ["layers.*"]})
    assert len(quantized_names(model)) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", ["mxfp4", "int8_per_channel", {"linear": {"weight": "nvfp4", "activation": None}}])
def test_dtypes_run_and_outputs_keep_them(dtype, config):
    model = Model().to(dtype)
    quantize_(model, config)
    out = model(IDS)
    assert out.dtype == dtype and torch.isfinite(out).all()
    assert model.layers[0].q_proj.weight.dtype == dtype


def test_the_output_is_that_of_the_dequantized_weights():
    model = Model()
    reference = copy.deepcopy(model)
    quantize_(model, {"linear": {"weight": "mxfp4", "activation": None}})
    for name in quantized_names(model):
        reference.get_submodule(name).weight.data = model.get_submodule(name).dequantize()
    torch.testing.assert_close(model(IDS), reference(IDS))


def test_hadamard_rotates_weight_and_input_and_the_weight_reads_back():
    model = Model()
    dense = model.layers[0].q_proj.weight.detach().clone()
    report = quantize_(model, {"targets": {"*.q_proj": {"weight": "mxfp8", "activation": None, "hadamard_size": 64}}})
    layer = model.layers[0].q_proj
    assert (layer.weight - dense).norm() / dense.norm() < 0.04 and report.quantized[0].sqnr > 28
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)


def test_columns_that_do_not_divide_are_padded_and_said_so():
    model = nn.Sequential(nn.Linear(33, 50), nn.Linear(50, 7))
    report = quantize_(model, "mxfp4")
    assert report.quantized[0].notes == ["K = 33 is stored with zeros up to 64 for mxfp4"]
    assert model[0].weight.shape == (50, 33) and model(torch.randn(2, 33)).shape == (2, 7)


def test_sqnr_is_that_of_the_weights_and_can_be_turned_off():
    model = Model()
    dense = copy.deepcopy(model)
    report = quantize_(model, "mxfp4")
    for row in report.quantized:
        w, q = dense.get_submodule(row.name).weight, model.get_submodule(row.name).weight
        assert row.sqnr == pytest.approx(10 * torch.log10(w.square().sum() / (w - q).square().sum()).item(), abs=1e-3)
    assert all(row.sqnr is None for row in quantize_(dense, "mxfp4", sqnr=False).quantized)


def test_a_failure_on_the_way_leaves_a_working_model_and_says_how_far_it_came(monkeypatch):
    model = Model()
    real, calls = torchq.kernels.quantize_measured, []

    def fails_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no more")
        return real(*args, **kwargs)

    monkeypatch.setattr(torchq.kernels, "quantize_measured", fails_third)
    with pytest.raises(MemoryError) as error:
        quantize_(model, "mxfp8")
    assert error.value.__notes__ == ["torchq: 2 of 8 layers were quantized before this; the model works as it is"]
    assert torch.isfinite(model(IDS)).all() and len(quantized_names(model)) == 2


def test_packed_modules_mapping_of_the_model_and_of_the_caller():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.wqkv = nn.Linear(64, 192)

    model = nn.ModuleDict({"attn": Fused()})
    model.packed_modules_mapping = {"wqkv": ["wq", "wk", "wv"]}
    config = {"targets": {"attn.wq": "mxfp4", "attn.wk": "mxfp4", "attn.wv": "mxfp4"}}
    assert [row.name for row in Quantizer(config).plan(model).quantized] == ["attn.wqkv"]
    with pytest.raises(ConfigError, match="Found unmatched shards"):
        Quantizer({"targets": {"attn.wq": "mxfp4"}}).plan(model)
    del model.packed_modules_mapping
    mapping = {"wqkv": ("wq", "wk", "wv")}
    assert [row.name for row in quantize_(model, config, fused_mapping=mapping).quantized] == ["attn.wqkv"]


def test_a_compiled_model_is_matched_by_its_own_names():
    model = torch.compile(Model(1), backend="eager")
    quantize_(model, {"targets": {"layers.0.q_proj": "mxfp8"}})
    assert isinstance(model._orig_mod.layers[0].q_proj, QuantLinear)


def test_the_quantized_model_copies_pickles_and_loads():
    model = Model()
    quantize_(model, "nvfp4")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(IDS), model(IDS))
    other = Model()
    with torch.no_grad():
        other.layers[0].q_proj.weight.mul_(2)
    quantize_(other, "nvfp4")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS), model(IDS))


def test_resolve_needs_no_model():
    quantizer = Quantizer({"targets": {"*experts*": {"weight": "mxfp4", "activation": None}}})
    found = quantizer.resolve("model.layers.0.mlp.experts", "moe")
    assert (found.weight, found.activation, found.activation_explicit) == (QuantKey.from_name("mxfp4"), None, True)
    assert quantizer.resolve("model.layers.0.mlp.gate", "linear") is None
