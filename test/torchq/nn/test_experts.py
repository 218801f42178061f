"""What an experts module must be to be quantized: each way in which it does not fit its layout has a reason."""

import re

import pytest
import torch
from torch import nn

from torchq import ConfigError, Quantizer, UnsupportedError, quantize_
from torchq.nn import ExpertsLayout, Projection, QuantMoE, register_experts

PLAIN = ExpertsLayout(Projection("up"), Projection("down"), act="act")
FLAT = ExpertsLayout(Projection("up", flat=True), Projection("down", flat=True), act="act")
BIASED = ExpertsLayout(Projection("up", "bias"), Projection("down"), act="act")
NORMED = ExpertsLayout(Projection("up"), Projection("down"), act="act", post_norm="norm")


def experts(layout, up=(4, 64, 64), down=(4, 64, 32), act=None, **attributes):
    """A module of a class of its own, registered with ``layout``, under the name ``experts``."""
    module = type("Custom", (nn.Module,), {})()
    register_experts(type(module), layout)
    module.up, module.down = (nn.Parameter(torch.randn(shape)) for shape in (up, down))
    module.act = act or nn.SiLU()
    for name, value in attributes.items():
        setattr(module, name, value)
    return nn.ModuleDict({"experts": module, "linear": nn.Linear(64, 64)})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (experts(PLAIN, up=(3, 64, 64)), r"its up has shape \(3, 64, 64\), which does not go with 4 experts"),
        (experts(PLAIN, up=(4, 32, 64)), "gate_up gives 32 columns, which gated experts with 32 inner neurons don't"),
        (experts(PLAIN, up=(64, 64)), r"its up has shape \(64, 64\), not 3 dimensions"),
        (experts(PLAIN, up=(0, 64, 64), down=(0, 64, 32)), "it has no experts"),
        (experts(PLAIN, act="silu"), "it has no function or module act, which the ExpertsLayout names"),
        (experts(PLAIN, extra=nn.Parameter(torch.zeros(4))), "it holds extra beside the matrices of its experts"),
        (experts(PLAIN, extra=nn.Buffer(torch.zeros(4))), "it holds extra beside the matrices of its experts"),
        (experts(NORMED), "it has no function or module norm, which the ExpertsLayout names"),
        (experts(BIASED), "it has no parameter bias, which the layout of Custom names"),
        (experts(BIASED, bias=nn.Parameter(torch.zeros(4, 60))), r"its bias has shape \(4, 60\), not \(4, 64\)"),
        (experts(FLAT, up=(256, 64), down=(256, 32)), "no num_experts that counts them"),
        (experts(FLAT, up=(256, 64), down=(256, 32), num_experts=3), "which does not go with 3 experts"),
        (
            experts(ExpertsLayout(Projection("mlp.w1"), Projection("mlp.w2"))),
            "it has no parameter mlp.w1 or mlp.w2, which the layout of Custom names",
        ),
        (
            experts(
                ExpertsLayout(Projection("up"), Projection("down", "weight"), act="act"),
                weight=nn.Parameter(torch.zeros(4, 32)),
            ),
            r"its weight has shape \(4, 32\), not \(4, 64\)",
        ),
        (
            experts(ExpertsLayout(Projection("fixed"), Projection("down")), fixed=nn.Buffer(torch.zeros(4, 64, 64))),
            "it has no parameter fixed",
        ),
    ],
)
def test_a_target_names_the_reason_and_a_blanket_rule_lists_it(model, reason):
    with pytest.raises(UnsupportedError, match=f"^experts can't be quantized: .*{reason}"):
        Quantizer({"targets": {"experts": "mxfp4"}}).plan(model)
    plan = Quantizer("mxfp4").plan(model)
    assert [row.name for row in plan.quantized] == ["linear"]
    assert re.search(reason, plan.skipped[0].skipped)


def test_an_activation_with_weights_stays():
    model = experts(PLAIN, act=nn.PReLU())
    report = quantize_(model, "mxfp4")
    assert isinstance(model["experts"], QuantMoE) and "experts.act.weight" in dict(model.named_parameters())
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_a_layout_with_a_routing_that_is_not_known():
    with pytest.raises(ConfigError, match="routing is 'top_k' or 'blocks', not 'block'"):
        ExpertsLayout(Projection("up"), Projection("down"), routing="block")


@pytest.mark.parametrize(("cls", "layout"), [(Projection("up"), PLAIN), (nn.Linear, "halves")])
def test_registering_something_else(cls, layout):
    with pytest.raises(ConfigError, match="register_experts"):
        register_experts(cls, layout)
