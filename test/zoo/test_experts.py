"""Every kind of expert model computes what the dense model does, and a mix-up of experts is noticed."""

import pytest
import torch

from torchq.zoo import experts
from torchq.zoo import smollm2 as zoo_smollm2
from torchq.zoo.measure import logits_sqnr

LAYERS = 4


@pytest.fixture(scope="module")
def dense(smollm2):
    return zoo_smollm2.load(layers=LAYERS)[0]


@pytest.fixture(scope="module")
def ids(smollm2, wikipedia):
    return smollm2[1](wikipedia[:1000], return_tensors="pt")["input_ids"][:, :64]


@pytest.mark.parametrize("kind", experts.KINDS)
@torch.no_grad()
def test_equals_dense(smollm2, dense, ids, kind):
    model = experts.build(smollm2[0], kind, layers=LAYERS)
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("kind", "count"), [("mixtral", 8), ("upcycle", 3), ("gpt_oss", 2), ("glm4_moe", 8)])
@torch.no_grad()
def test_other_numbers_of_experts(dense, ids, kind, count):
    model = experts.build(dense, kind, experts=count)
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=1e-3, rtol=0)


@torch.no_grad()
def test_upcycle_routes_to_every_expert_and_notices_a_mix_up(dense, ids):
    model = experts.build(dense, "upcycle")
    chosen = []
    layers = [layer.mlp.experts for layer in model.model.layers]
    hook = layers[1].register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    expected = model(ids).logits
    hook.remove()
    assert chosen[0].shape == (64, 2)
    assert chosen[0].unique().tolist() == [0, 1, 2, 3]
    for layer in layers:
        layer.down_proj.copy_(layer.down_proj.roll(1, 0))
    assert logits_sqnr(expected, model(ids).logits) < 10


@torch.no_grad()
def test_building_leaves_the_dense_model_alone(dense, ids):
    before = dense(ids).logits
    for kind in experts.KINDS:
        for parameter in experts.build(dense, kind).parameters():
            parameter.zero_()
    assert torch.equal(dense(ids).logits, before)


def test_refuses_what_it_cannot_build(dense):
    with pytest.raises(ValueError, match="'switch' is not a kind of expert model; choose from mixtral, "):
        experts.build(dense, "switch")
    with pytest.raises(ValueError, match="1536 inner neurons cannot be cut into 5 equal slices"):
        experts.build(dense, "llama4", experts=4)
