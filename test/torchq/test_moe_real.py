"""Experts with real weights: with the same input, a block of experts gives what the quantized dense MLP gives.

Perplexities differ by more (bench/moe.py): attention that sums in another order puts some activations on the other side
of a rounding boundary.
"""

import copy

import pytest
import torch

from torchq import SHORTHANDS, quantize_
from torchq.zoo import experts
from torchq.zoo import smollm2 as zoo_smollm2
from torchq.zoo.measure import logits_sqnr

LAYERS = 2
FORMATS = ("mxfp4", "mxfp8", "fp8_per_channel", "int8_per_channel_weight_only")
EXPERTS = r"re:.*\.(experts|shared_experts?\.\w+_proj)$"


@pytest.fixture(scope="module")
def dense(smollm2, wikipedia):
    """The first layers of the language model, and what goes into the MLP of each."""
    model, inputs = zoo_smollm2.load(layers=LAYERS)[0], []
    hooks = [b.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for b in blocks(model)]
    with torch.no_grad():
        model(smollm2[1](wikipedia[:1000], return_tensors="pt")["input_ids"][:, :64])
    for hook in hooks:
        hook.remove()
    return model, inputs


def blocks(model):
    return [getattr(layer, "mlp", None) or layer.feed_forward for layer in model.model.layers]


@torch.no_grad()
def outputs(model, inputs):
    found = [block(x) for block, x in zip(blocks(model), inputs, strict=True)]
    found = [y[0] if isinstance(y, tuple) else y for y in found]
    return [y.reshape(x.shape) for y, x in zip(found, inputs, strict=True)]


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_experts_agree_with_the_dense_mlp(dense, name, kind):
    (mlp, inputs), spec = dense, SHORTHANDS[name].moe
    before = outputs(mlp, inputs)
    mlp = copy.deepcopy(mlp)
    quantize_(mlp, {"targets": {"*.mlp.*_proj": spec}})
    expected = outputs(mlp, inputs)
    moe = experts.build(dense[0], kind)
    quantize_(moe, {"targets": {EXPERTS: spec}})
    found = outputs(moe, inputs)
    if kind == "upcycle" or name.startswith("mx"):  # the same values share a scale
        assert min(map(logits_sqnr, expected, found)) > 90
    else:  # an expert's row of down has a scale of its own, where the dense row has one for all
        for x, y, z in zip(before, expected, found, strict=True):
            assert 20 < logits_sqnr(x, y) - 0.5 < logits_sqnr(x, z)
