"""The golden vectors of the numerics, to the bit: what vLLM, compressed-tensors and ModelOpt write for these values."""

import numpy as np
import pytest
import torch

from torchq.kernels import quantize
from torchq.kernels.codes import unpack
from torchq.keys import QuantKey


def rows_of(*rows, width=None):
    """A bf16 matrix of these rows, each padded with zeros to ``width``."""
    width = width or len(rows[0])
    return torch.tensor([[*r, *[0.0] * (width - len(r))] for r in rows], dtype=torch.float64).to(torch.bfloat16)


def hexes(codes):
    return [" ".join(f"{c:02X}" for c in row) for row in codes.view(torch.uint8).tolist()]


ROWS = ([1, -0.5, 0.25, 3], [0.1, 0.2, -0.3, 0], [0, 0, 0, 0])


def test_fp8_tensor():
    q = quantize(rows_of(*ROWS), "fp8_per_tensor_static", backend="torch")
    assert q.scale.shape == () and q.scale.item() == np.float32(0.0066964286)
    assert hexes(q.data) == ["71 E9 61 7E", "57 5F E3 00", "00 00 00 00"]


@pytest.mark.parametrize("key", ["fp8_per_channel_static", "fp8_per_token"])
def test_fp8_channel_and_token(key):
    q = quantize(rows_of(*ROWS), key, backend="torch")
    assert q.scale.flatten().tolist() == [np.float32(s) for s in (0.0066964286, 0.00067138672, 4.3596542e-6)]
    assert hexes(q.data) == ["71 E9 61 7E", "71 79 FE 00", "00 00 00 00"]


@pytest.mark.parametrize("role", ["weight", "activation"])
@pytest.mark.parametrize(
    "values, byte, codes",
    [
        ([1, -0.3, 0.001], 119, "78 EA 28"),
        ([448, 1], 127, "7E 38"),
        ([449, 1], 128, "76 30"),
        ([1.75], 119, "7E"),
        ([1.76], 120, "76"),
        ([896], 128, "7E"),
    ],
)
def test_mxfp8_blocks(values, byte, codes, role):
    # In f32: 449 is no bf16 number.
    x = torch.tensor([[*values, *[0.0] * (32 - len(values))]])
    q = quantize(x, QuantKey.from_name("mxfp8", role), backend="torch")
    assert q.scale.tolist() == [[byte]]
    assert hexes(q.data)[0].startswith(codes) and set(hexes(q.data)[0][len(codes) :].split()) == {"00"}


@pytest.mark.parametrize("role", ["weight", "activation"])
@pytest.mark.parametrize(
    "values, byte, codes",
    [
        ([6, -3, 0.75, 0.25], 127, "7D20"),
        ([7, 3.5, 1, -0.5], 128, "6418"),
        ([6.9375, 5, -2.5], 127, "76C0"),
        ([1, -0.3, 0.06, 0], 125, "6A00"),
        ([4], 127, None),
        ([8], 128, None),
        ([1.75], 126, None),
        ([1.742], 125, None),
    ],
)
def test_mxfp4_blocks(values, byte, codes, role):
    q = quantize(rows_of(values, width=32), QuantKey.from_name("mxfp4", role), backend="torch")
    assert q.scale.tolist() == [[byte]]
    got = "".join(f"{c:X}" for c in unpack(q.data)[0].tolist())
    assert codes is None or got == codes + "0" * (32 - len(codes))


@pytest.mark.parametrize(
    "amax, floor, ceil, even",
    [(4, 127, 127, 127), (6, 127, 127, 127), (6.96, 127, 128, 127), (7, 127, 128, 128), (7.5, 127, 128, 128)],
)
def test_scale_byte_by_rule_and_amax(amax, floor, ceil, even):
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    got = {r: quantize(x, "mxfp4", scale_rounding=r, backend="torch") for r in ("floor", "ceil", "even")}
    assert {r: q.scale.item() for r, q in got.items()} == {"floor": floor, "ceil": ceil, "even": even}
    assert {r: q.scale_rounding for r, q in got.items()} == {r: r for r in got}


@pytest.mark.parametrize("key", ["nvfp4", "nvfp4_per_token"])
def test_nvfp4(key):
    x = rows_of([6, -3, 0.7, *[0] * 13, 0.5, 0.1, *[0] * 14])
    q = quantize(x, key, backend="torch")
    assert q.global_scale.item() == np.float32(0.0022321429)
    assert hexes(q.scale) == ["7E 61"] and q.scale.float().tolist() == [[448, 36]]
    codes = unpack(q.data)[0].tolist()
    assert codes[:16] == [7, 0xD, 1, *[0] * 13] and codes[16:] == [7, 2, *[0] * 14]


@pytest.mark.parametrize("key", ["int8_per_channel_static", "int8_per_token"])
def test_int8(key):
    x = rows_of([1, -0.5, 0.337], [0.01, 0.02, -0.03])
    q = quantize(x, key, backend="torch")
    assert q.data.tolist() == [[127, -64, 43], [42, 85, -127]]
    assert q.scale.dtype == torch.float32
    assert q.scale.flatten().tolist() == [
        np.float32(1) / np.float32(127),
        np.float32(-x[1, 2].item()) / np.float32(127),
    ]


def test_zero_groups():
    stored = {}
    for key in ("mxfp8", "mxfp4", "nvfp4", "int8_per_channel_static", "int4_per_group_32", "fp8_per_block_static"):
        q = quantize(torch.zeros(1, 32), key, backend="torch")
        stored[key] = (set(q.data.view(torch.uint8).flatten().tolist()), q.scale.float().flatten().tolist())
        assert q.global_scale is None or q.global_scale.item() == 1
    assert stored == {
        "mxfp8": ({0}, [0]),
        "mxfp4": ({0}, [0]),
        "nvfp4": ({0}, [0, 0]),
        "int8_per_channel_static": ({0}, [1]),
        "int4_per_group_32": ({0x88}, [1]),
        "fp8_per_block_static": ({0}, [float(np.float32(1e-4) / np.float32(448))]),
    }


def test_minus_zero_keeps_its_sign_in_the_float_elements():
    x = torch.full((1, 32), -0.0)
    x[0, 0] = 1
    first = {k: quantize(x, k, backend="torch") for k in ("mxfp4", "mxfp8", "nvfp4", "int8_per_channel_static")}
    assert unpack(first["mxfp4"].data)[0, 1:].unique().tolist() == [8]
    assert first["mxfp8"].data.view(torch.uint8)[0, 1:].unique().tolist() == [0x80]
    assert unpack(first["nvfp4"].data)[0, 1:16].unique().tolist() == [8]
    assert first["int8_per_channel_static"].data[0, 1:].unique().tolist() == [0]
    # a group of nothing but -0 keeps code 8 too
    assert unpack(quantize(torch.full((1, 32), -0.0), "mxfp4", backend="torch").data).unique().tolist() == [8]
