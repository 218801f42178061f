"""Every tiny architecture builds, runs, and has no value left at zero or to chance."""

import pytest
import torch

from torchq.zoo.tiny import TINY


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_builds_and_runs(name):
    entry = TINY[name]
    model = entry.build()
    assert not model.training
    logits = entry.output(model(**entry.inputs()))
    assert logits.isfinite().all()
    assert logits.std() > 0.01

    again = entry.build()
    assert torch.equal(entry.output(again(**entry.inputs())), logits)

    assert entry.experts == any("Experts" in type(module).__name__ for module in model.modules())
    for key, value in model.state_dict().items():
        assert value.any(), f"{key} is all zero"


@pytest.mark.parametrize("name", [name for name, entry in TINY.items() if entry.experts])
@torch.no_grad()
def test_experts_matter(name):
    """Turning the experts off moves the output, so a test on this model can see them go wrong."""
    entry = TINY[name]
    model = entry.build()
    logits = entry.output(model(**entry.inputs()))
    for module in model.modules():
        if "Experts" in type(module).__name__:
            for weight in module.parameters():
                weight.zero_()
    changed = entry.output(model(**entry.inputs()))
    assert (changed - logits).norm() > 0.1 * logits.norm()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4", "minimax_m3", "step3p7"])
@torch.no_grad()
def test_gate_clamps_act(name):
    entry = TINY[name]
    model = entry.build()
    logits = entry.output(model(**entry.inputs()))
    for module in model.modules():
        for limit in ("limit", "swiglu_limit"):
            if hasattr(module, limit):
                setattr(module, limit, 1e9)
    unclamped = entry.output(model(**entry.inputs()))
    assert (unclamped - logits).norm() > 0.1 * logits.norm()
