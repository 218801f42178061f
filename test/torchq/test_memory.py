"""quantize_ holds one expert's matrix at a time beside what goes in and comes out."""

import pytest
import torch
from torch import nn

from torchq import quantize_
from torchq.nn import ExpertsLayout, Projection, register_experts
from torchq.zoo.measure import allocated_peak

MB = 1 << 20
EXPERTS, INNER, HIDDEN = 24, 1024, 1024  # 144 MB in bf16


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.ones(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16))
        self.act_fn = nn.SiLU()


class Interleaved(Halves):
    def __init__(self):
        super().__init__()
        for weight in self.parameters():
            weight.data = weight.data.transpose(1, 2).contiguous()


register_experts(Halves, ExpertsLayout(Projection("gate_up_proj"), Projection("down_proj")))
register_experts(
    Interleaved,
    ExpertsLayout(
        Projection("gate_up_proj", transposed=True, interleaved=True), Projection("down_proj", transposed=True)
    ),
)


@pytest.mark.parametrize("cls", [Halves, Interleaved])
@pytest.mark.parametrize("config", ["mxfp4", "nvfp4", "fp8_per_channel", {"targets": {"experts.down_proj": "mxfp4"}}])
def test_experts(cls, config):
    model = nn.ModuleDict({"experts": cls()})
    report, peak = allocated_peak(lambda: quantize_(model, config))
    assert peak - report.bytes_after <= 64 * MB
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) == report.bytes_after


def test_the_layers_before_are_freed():
    model = nn.ModuleDict({name: Halves() for name in ("experts0", "experts1", "experts2")})
    before = sum(p.nbytes for p in model.parameters())
    report, peak = allocated_peak(lambda: quantize_(model, "mxfp4"))
    assert peak <= before / 3 + 64 * MB
    assert report.bytes_after < before / 3
