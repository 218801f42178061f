"""Scales: the shared exponent of every rule in exact arithmetic, E8M0 bytes, floors, and what is not finite."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchq.kernels.scales import (
    e8m0_from_amax,
    e8m0_to_float,
    global_scale_from_amax,
    scale_values,
    stored_scale,
)
from torchq.keys import QUANT_KEYS

RULES = ("floor", "ceil", "even")
FP8_FLOOR = np.float32(1 / (448 * 512))
MAX_FLOAT = float(np.finfo(np.float32).max)


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


# checkpoints.md, section 8: amax, then byte for e2m1 and for e4m3
SECTION_8 = {
    "amax": (4, 5, 6, 6.0004, 6.96, 7, 7.0004, 7.5, 7.96),
    "floor": ((127,) * 9, (121,) * 9),
    "ceil": ((127, 127, 127, 128, 128, 128, 128, 128, 128), (121,) * 6 + (122,) * 3),
    "even": ((127,) * 5 + (128,) * 4, (121,) * 8 + (122,)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_table_of_rules(rule):
    amax = f32(*SECTION_8["amax"])
    e2m1, e4m3 = SECTION_8[rule]
    assert e8m0_from_amax(amax, "e2m1", rule).tolist() == list(e2m1)
    assert e8m0_from_amax(amax, "e4m3", rule).tolist() == list(e4m3)


def test_default_rules():
    assert stored_scale(f32(6.96, 7.0), QUANT_KEYS["mxfp4"]).tolist() == [127, 128]
    assert stored_scale(f32(448, 449), QUANT_KEYS["mxfp8"]).tolist() == [127, 128]
    assert stored_scale(f32(448, 449), QUANT_KEYS["mxfp8"], "floor").tolist() == [127, 127]
    assert stored_scale(f32(6.96, 7.0), QUANT_KEYS["mxfp4"], "ceil").tolist() == [128, 128]


powers_of_two = st.integers(-149, 127).map(lambda e: math.ldexp(1, e))
finite = st.one_of(
    st.floats(0, MAX_FLOAT, width=32, allow_subnormal=True),
    powers_of_two,
    powers_of_two.map(lambda p: float(np.nextafter(np.float32(p), np.float32(0)))),
    powers_of_two.map(lambda p: float(np.nextafter(np.float32(p), np.float32(np.inf)))),
    st.builds(
        lambda m, e: math.ldexp(m, e), st.sampled_from([1.5, 1.75, 1.875, 1.9375, 1.96875]), st.integers(-126, 127)
    ),
    st.integers(0, 0x7F7FFFFF).map(lambda b: float(np.uint32(b).view(np.float32))),
)


@given(st.lists(finite, min_size=64, max_size=64))
@example(
    [0.0, 2.0**-149, 2.0**-127, 2.0**-126, MAX_FLOAT, 448.0, float(np.nextafter(np.float32(448), np.float32(449)))]
)
@settings(max_examples=60, deadline=None)
def test_shared_exponent_equals_exact_arithmetic(oracle, values):
    amax = f32(*values)
    for rule in RULES:
        for element in ("e2m1", "e4m3"):
            got = e8m0_from_amax(amax, element, rule)
            want = [oracle.shared_exponent(v, element, rule) for v in amax.tolist()]
            assert got.tolist() == want, (rule, element)
            assert got.max() < 255


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
def test_shared_exponent_at_every_edge_of_every_exponent(element, rule, oracle):
    fractions = (
        0,
        1,
        0x1FFFFF,
        0x200000,
        0x3FFFFF,
        0x400000,
        0x400001,
        0x5FFFFF,
        0x600000,
        0x600001,
        0x77FFFF,
        0x780000,
    )
    bits = torch.tensor([[e << 23 | f for f in (*fractions, 0x7FFFFF)] for e in range(255)], dtype=torch.int32)
    got = e8m0_from_amax(bits.view(torch.float32), element, rule)
    want = [[oracle.shared_exponent(v, element, rule) for v in row] for row in bits.view(torch.float32).tolist()]
    assert got.tolist() == want
    assert got.dtype == torch.uint8 and got.max() < 255


@pytest.mark.parametrize("rule", RULES)
def test_ceil_never_saturates_and_floor_always_fills_the_grid(rule):
    amax = (torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 40 - 20).exp2()
    for element, largest, emax in (("e2m1", 6.0, 2), ("e4m3", 448.0, 8)):
        ratio = amax.double() / e8m0_to_float(e8m0_from_amax(amax, element, rule)).double()
        if rule == "ceil":
            assert ratio.max() <= largest and ratio.min() > largest / 2
        else:
            assert ratio.max() < 2 ** (emax + 1) and ratio.min() >= 2**emax * (1 if rule == "floor" else 0.5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
def test_only_what_is_not_finite_gives_byte_255(rule, bits):
    amax = torch.tensor([bits, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert e8m0_from_amax(amax, "e2m1", rule).tolist() == [255, 125]
    assert e8m0_from_amax(amax[::2].expand(3), "e4m3", rule).tolist() == [255] * 3


def test_all_256_e8m0_bytes_decode_as_ml_dtypes():
    byte = torch.arange(256, dtype=torch.uint8)
    got = e8m0_to_float(byte)
    np.testing.assert_array_equal(got.numpy(), byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert got[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]
    assert got.isnan().tolist() == [False] * 255 + [True]


NAN = [math.inf, math.nan]


def over(amax, largest):
    return np.float32(amax) / np.float32(largest)


@pytest.mark.parametrize(
    "key, amax, want",
    [
        ("fp8_per_tensor_static", [0, 1e-40, 0.5 / 512, 3], [FP8_FLOOR] * 3 + [over(3, 448)]),
        ("fp8_per_channel_static", [0, 1e-40, 3e38], [FP8_FLOOR, FP8_FLOOR, over(3e38, 448)]),
        ("fp8_per_token", [0, 448], [FP8_FLOOR, 1]),
        ("fp8_per_block_static", [0, 1e-5, 448], [over(1e-4, 448), over(1e-4, 448), 1]),
        ("fp8_per_block_dynamic", [0, 1e-11, 1e-5], [over(1e-10, 448), over(1e-10, 448), over(1e-5, 448)]),
        ("int8_per_channel_static", [0, 127, 1e-44, 1e-40], [1, 1, 1, over(1e-40, 127)]),
        ("int4_per_group_32", [0, 7, 1], [1, 1, over(1, 7)]),
    ],
)
def test_f32_scales_and_their_floors(key, amax, want):
    key = QUANT_KEYS[key]
    got = stored_scale(f32(*amax), key)
    assert got.dtype == torch.float32 and got.tolist() == [float(np.float32(w)) for w in want]
    assert stored_scale(f32(*NAN), key).isnan().all()
    assert torch.equal(scale_values(got, key), got)


def test_nvfp4_block_scales_round_to_e4m3_and_clamp():
    key, whole = QUANT_KEYS["nvfp4"], f32(6 / 2688)[0]
    stored = stored_scale(f32(6, 0.5, 0, 7, 3e38, *NAN), key, global_scale=whole)
    assert stored.dtype == torch.float8_e4m3fn
    assert stored.view(torch.uint8).tolist() == [0x7E, 0x61, 0, 0x7E, 0x7E, 0x7F, 0x7F]
    values = scale_values(stored, key, whole)
    assert torch.equal(values[:5], stored.float()[:5] * whole) and values[5:].isnan().all()


@pytest.mark.parametrize(
    "amax, byte", [(0.0142299123108387, 0x39), (0.01422991044819355, 0x38), (0.9107143878936768, 0x69)]
)
def test_nvfp4_divides_by_6_and_then_by_the_global_scale(amax, byte):
    # Beside a tie of e4m3: dividing by 6 * global, or multiplying by a reciprocal, rounds to the other side.
    stored = stored_scale(f32(amax), QUANT_KEYS["nvfp4"], global_scale=f32(0.0022321429)[0])
    assert stored.view(torch.uint8).tolist() == [byte]


def test_global_scale():
    assert global_scale_from_amax(f32(6, 0, 1e-44)).tolist() == [float(np.float32(6) / np.float32(2688)), 1, 1]
    assert global_scale_from_amax(f32(MAX_FLOAT)).isfinite()
