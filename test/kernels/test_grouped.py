"""kernels.grouped_linear and kernels.grouped_mm: each expert's product of its own rows, as torch.library ops."""

import itertools

import pytest
import torch

from torchq import kernels

EXPERTS, ROWS, COLUMNS = 4, 24, 96
OFFSETS = torch.tensor([1, 3, 3, 6, 8])  # rows 0 and 8 on belong to no expert


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_each_expert_is_a_linear_of_its_rows(backend):
    q, x, bias = kernels.quantize(random(EXPERTS, ROWS, COLUMNS), "mxfp8"), random(10, COLUMNS), random(EXPERTS, ROWS)
    y = kernels.grouped_linear(x, OFFSETS, q, bias, backend=backend)
    for expert, (start, stop) in enumerate(itertools.pairwise(OFFSETS)):
        expected = kernels.linear(x[start:stop], q[expert], bias[expert], backend=backend)
        torch.testing.assert_close(y[start:stop], expected)
    assert not y[0].any() and not y[8:].any()


@pytest.mark.parametrize("weight, activation", [("mxfp4", None), ("int8_per_channel_static", "int8_per_token")])
def test_opcheck_grouped_linear(weight, activation):
    q = kernels.quantize(random(EXPERTS, ROWS, COLUMNS), weight)
    for x, bias in (
        (random(10, COLUMNS).requires_grad_(), random(EXPERTS, ROWS).requires_grad_()),
        (random(10, COLUMNS, dtype=torch.bfloat16), None),
    ):
        arguments = (x, OFFSETS, q.data, q.scale, q.global_scale, bias, weight, activation, COLUMNS, "torch")
        torch.library.opcheck(torch.ops.torchq.grouped_linear.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck_grouped_mm(dtype):
    x, weight = random(8, COLUMNS, dtype=dtype), random(EXPERTS, COLUMNS, ROWS, dtype=dtype)
    arguments = (x.requires_grad_(), weight.requires_grad_(), OFFSETS[1:].to(torch.int32))
    torch.library.opcheck(torch.ops.torchq.grouped_mm.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_grouped_mm_are_those_of_torch(dtype):
    ends, found = OFFSETS[1:].to(torch.int32), []
    for call in (kernels.grouped_mm, lambda x, w, ends: torch.nn.functional.grouped_mm(x, w, offs=ends)):
        x = random(8, COLUMNS, dtype=dtype).requires_grad_()
        weight = random(EXPERTS, COLUMNS, ROWS, dtype=dtype).requires_grad_()
        y = call(x, weight, ends)
        y.float().square().sum().backward()
        found.append((y, x.grad, weight.grad))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)
