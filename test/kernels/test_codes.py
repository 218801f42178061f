"""Codes, exhaustively: every e2m1, e4m3, int8 and int4 code, every bf16 value, the ties, and packing."""

import ml_dtypes
import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline

from torchq.kernels.codes import decode, encode, pack, unpack

ELEMENTS = ("e4m3", "e2m1", "int8", "int4")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MAX = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}
CODES = {
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "e2m1": torch.arange(256, dtype=torch.uint8),
    "int8": torch.arange(-128, 128).to(torch.int8),
    "int4": torch.arange(256, dtype=torch.uint8),
}
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
FINITE_BF16 = EVERY_BF16[EVERY_BF16.isfinite()]


def numbers(stored):
    """Stored codes as a list of plain unpacked numbers."""
    return stored.view(torch.uint8).tolist() if stored.dtype == torch.float8_e4m3fn else stored.tolist()


def test_e2m1_codes_have_these_values():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode(pack(codes), "e2m1")
    assert values.tolist() == E2M1 + [-v for v in E2M1]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8
    assert unpack(encode(values, "e2m1")).tolist() == codes.tolist()


def test_e4m3_bytes_are_ml_dtypes_values():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = decode(CODES["e4m3"], "e4m3")
    assert got.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(got.numpy(), want)
    back = numbers(encode(got, "e4m3"))
    assert [b for b in range(256) if back[b] != b] == [0x7F, 0xFF]  # NaN has no code of its own: it becomes 0
    assert back[0x7F] == back[0xFF] == 0


def test_int8_codes():
    values = torch.arange(-127.0, 128.0)
    assert encode(values, "int8").tolist() == values.tolist() == decode(encode(values, "int8"), "int8").tolist()
    assert decode(CODES["int8"], "int8").tolist() == list(range(-128, 128))


def test_int4_codes_are_biased_by_8():
    assert decode(pack(torch.arange(16, dtype=torch.uint8)), "int4").tolist() == list(range(-8, 8))
    assert unpack(encode(torch.arange(-7.0, 9.0)[:14], "int4")).tolist() == list(range(1, 15))


@pytest.mark.parametrize("element", ["e2m1", "int4"])
def test_each_byte_holds_two_codes_and_survives(element):
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes[:, None], element)  # [256, 2]
    assert values.dtype == torch.float32 and values.shape == (256, 2)
    back = encode(values, element)[:, 0]
    low = (codes & 15 == 0) | (codes >> 4 == 0) if element == "int4" else torch.zeros(256, dtype=torch.bool)
    assert torch.equal(back[~low], codes[~low])  # int4 code 0 is -8, which no value is encoded to
    single = {0: 0.5, 1: 2.0} if element == "e2m1" else {0: -7.0, 1: -4.0}  # byte 0x41: code 1 first, then code 4
    assert decode(torch.tensor([0x41], dtype=torch.uint8), element).tolist() == [single[0], single[1]]


def test_packing_puts_element_2i_in_the_low_nibble():
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert unpack(torch.tensor([0x21, 0x0F], dtype=torch.uint8)).tolist() == [1, 2, 15, 0]
    every = torch.arange(256, dtype=torch.uint8).view(2, 4, 32)
    assert torch.equal(pack(unpack(every)), every)
    assert unpack(every).shape == (2, 4, 64)


TIES = [  # element, value, stored code
    ("e2m1", 0.25, 0), ("e2m1", 0.75, 2), ("e2m1", 1.25, 2), ("e2m1", 1.75, 4),
    ("e2m1", 2.5, 4), ("e2m1", 3.5, 6), ("e2m1", 5.0, 6), ("e2m1", -2.5, 12), ("e2m1", -5.0, 14),
    ("e2m1", np.nextafter(np.float32(0.25), 1), 1), ("e2m1", np.nextafter(np.float32(5), 6), 7),
    ("e2m1", np.nextafter(np.float32(0.75), 0), 1), ("e2m1", np.nextafter(np.float32(3.5), 0), 5),
    ("e2m1", 0.0, 0), ("e2m1", -0.0, 8), ("e2m1", -0.1, 8), ("e2m1", 7.0, 7), ("e2m1", -1e30, 15),
    ("e2m1", float("inf"), 7), ("e2m1", float("-inf"), 15), ("e2m1", float("nan"), 0),
    ("e4m3", 448.0, 0x7E), ("e4m3", 464.0, 0x7E), ("e4m3", 1e30, 0x7E), ("e4m3", -1e30, 0xFE),
    ("e4m3", float("inf"), 0x7E), ("e4m3", float("-inf"), 0xFE), ("e4m3", float("nan"), 0),
    ("e4m3", 2.0**-10, 0), ("e4m3", 3 * 2.0**-10, 2), ("e4m3", 1.0625, 0x38), ("e4m3", 1.1875, 0x3A),
    ("e4m3", 432.0, 0x7E), ("e4m3", 0.0, 0), ("e4m3", -0.0, 0x80),
    ("int8", 0.5, 0), ("int8", 1.5, 2), ("int8", -0.5, 0), ("int8", -2.5, -2), ("int8", 126.5, 126),
    ("int8", 127.5, 127), ("int8", 300.0, 127), ("int8", -300.0, -127), ("int8", float("-inf"), -127),
    ("int8", float("nan"), 0), ("int8", -0.0, 0),
    ("int4", 0.5, 8), ("int4", 1.5, 10), ("int4", -2.5, 6), ("int4", 6.5, 14), ("int4", 7.5, 15),
    ("int4", -9.0, 1), ("int4", float("inf"), 15), ("int4", float("nan"), 8),
]  # fmt: skip


@pytest.mark.parametrize("element, value, code", TIES)
def test_encode_rounds_half_to_even_and_saturates(element, value, code):
    stored = encode(torch.full((4,), float(value)), element)
    assert numbers(unpack(stored) if element in ("e2m1", "int4") else stored) == [code] * 4


@pytest.mark.parametrize("element, name", [("e4m3", "float8_e4m3fn"), ("e2m1", "float4_e2m1fn")])
def test_encode_is_the_cast_of_ml_dtypes_on_every_bf16_value(element, name):
    assert FINITE_BF16.numel() == 65536 - 2 * 128
    clamped = FINITE_BF16.clamp(-MAX[element], MAX[element])
    want = clamped.numpy().astype(getattr(ml_dtypes, name)).view(np.uint8)
    stored = encode(FINITE_BF16, element)
    got = unpack(stored) if element == "e2m1" else stored.view(torch.uint8)
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_finds_the_nearest_code_of_every_bf16_value(element, oracle):
    stored = encode(EVERY_BF16, element)
    got = unpack(stored) if element in ("e2m1", "int4") else stored
    want = oracle.encode(EVERY_BF16.numpy(), element)
    np.testing.assert_array_equal(got.view(torch.int8).numpy(), want.view(np.int8))


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_leaves_its_argument_alone_and_decode_inverts_it(element):
    values = torch.linspace(-9, 9, 64).reshape(2, 32)
    before = values.clone()
    stored = encode(values, element)
    assert torch.equal(values, before)
    assert stored.shape == ((2, 16) if element in ("e2m1", "int4") else (2, 32))
    again = decode(stored, element)
    assert again.dtype == torch.float32 and again.shape == values.shape
    assert torch.equal(encode(again, element).view(torch.uint8), stored.view(torch.uint8))


def test_shapes_survive_leading_dimensions_and_empty_rows():
    lines = []
    for element in ELEMENTS:
        for shape in ((0, 32), (3, 0), (2, 3, 4, 8)):
            stored = encode(torch.ones(shape), element)
            back = decode(stored, element)
            lines.append(f"{element} {shape} {tuple(stored.shape)} {tuple(back.shape)}")
    assert_expected_inline(
        "\n".join(lines),
        """\
e4m3 (0, 32) (0, 32) (0, 32)
e4m3 (3, 0) (3, 0) (3, 0)
e4m3 (2, 3, 4, 8) (2, 3, 4, 8) (2, 3, 4, 8)
e2m1 (0, 32) (0, 16) (0, 32)
e2m1 (3, 0) (3, 0) (3, 0)
e2m1 (2, 3, 4, 8) (2, 3, 4, 4) (2, 3, 4, 8)
int8 (0, 32) (0, 32) (0, 32)
int8 (3, 0) (3, 0) (3, 0)
int8 (2, 3, 4, 8) (2, 3, 4, 8) (2, 3, 4, 8)
int4 (0, 32) (0, 16) (0, 32)
int4 (3, 0) (3, 0) (3, 0)
int4 (2, 3, 4, 8) (2, 3, 4, 4) (2, 3, 4, 8)""",
    )
