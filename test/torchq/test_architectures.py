"""Every architecture of the zoo: its linears are quantized or named, it runs, and its outputs stay close."""

import pytest
import torch
from torch import nn

from torchq import ConfigError, Quantizer, quantize_
from torchq.nn import QuantLinear, register_linear
from torchq.zoo.measure import logits_sqnr
from torchq.zoo.tiny import TINY

# Layers that a blanket rule must leave alone, by architecture; the rest of their linears is quantized.
PROTECTED = {
    "llama": {"lm_head"},
    "qwen2_moe": {"lm_head", "mlp.shared_expert_gate"},
    "llama4": {"lm_head"},
    "phimoe": {"lm_head"},
    "dbrx": {"lm_head", "ffn.router.layer"},
    "jetmoe": {"lm_head", "mlp.router.layer", "self_attention.experts.router.layer"},
    "gemma4_moe": {"lm_head", "router.proj"},
    "switch": {"lm_head", "mlp.router.classifier"},
    "t5": {"lm_head", "DenseReluDense.wo"},
    "deepseek_v4": {"lm_head", "compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj"}
    | {"scorer.weights_proj"},
    "qwen3_5_moe": {"lm_head", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.shared_expert_gate"},
}


def quantized(model):
    return {name for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def test_a_model_of_unknown_linears_says_what_to_register():
    model = TINY["falcon"].build()
    with pytest.raises(ConfigError, match=r"FalconLinear is not nn.Linear itself; .*register_linear\(FalconLinear\)"):
        quantize_(model, "mxfp8")
    register_linear(type(model.transformer.h[0].mlp.dense_h_to_4h))


@pytest.mark.parametrize("name", TINY)
def test_linears_are_quantized_or_named_and_the_model_runs(name, capsys):
    tiny = TINY[name]
    model = tiny.build()
    with torch.no_grad():
        dense = tiny.output(model(**tiny.inputs()))
    linears = {n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    report = quantize_(model, {"linear": "fp8_per_channel"})
    with torch.no_grad():
        out = tiny.output(model(**tiny.inputs()))
    accounted = {n for row in report.rows for n in (row.name, *row.aliases)}
    assert linears <= accounted, f"silently left: {linears - accounted}"
    assert all(row.skipped for row in report.rows if row.name not in quantized(model))
    assert quantized(model) and torch.isfinite(out).all()
    sqnr = logits_sqnr(dense, out)
    with capsys.disabled():
        print(f"\n{name}: {len(report.quantized)} of {len(report.rows)} layers, logits SQNR {sqnr:.1f} dB", end="")
    # A discrete choice (a router's top-k, a hash) may flip on a random model; the rest follows the fp8 error.
    assert sqnr > (3 if tiny.experts else 15)


@pytest.mark.parametrize("name", PROTECTED)
def test_routers_and_heads_are_protected_with_a_reason(name):
    plan = Quantizer({"linear": "mxfp8"}).plan(TINY[name].build())
    left = [row for row in plan.skipped if row.kind == "linear"]
    suffixes = PROTECTED[name]
    assert {s for s in suffixes if any(row.name.endswith(s) for row in left)} == suffixes
    assert all(any(row.name.endswith(s) for s in suffixes) for row in left), left


def test_a_target_that_names_a_router_is_obeyed():
    model = TINY["dbrx"].build()
    report = quantize_(model, {"targets": {"*ffn.router.layer": "mxfp8"}})
    assert {row.name for row in report.quantized} == {f"transformer.blocks.{i}.ffn.router.layer" for i in range(2)}


def test_conv1d_is_a_linear_with_its_weight_transposed():
    tiny = TINY["gpt2"]
    model = tiny.build()
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    report = quantize_(model, {"targets": {"*.c_attn": "fp8_per_channel"}})
    layer = model.transformer.h[0].attn.c_attn
    assert report.quantized[0].shape == tuple(weight.T.shape) == (layer.out_features, layer.in_features)
    assert (layer.weight - weight.T).norm() / weight.norm() < 0.03


def test_albert_shares_one_physical_layer_under_all_names():
    model = TINY["albert"].build()
    report = quantize_(model, "mxfp8")
    assert len({row.name for row in report.rows}) == len(report.rows)
