"""A second, slow implementation of numerics.md in numpy, Fractions and tables: what the torch twins must equal.

It shares nothing with torchq.kernels but the QuantKey. Elements are found in sorted tables of every code's value.
"""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

F32 = np.float32
E4M3_VALUES = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MAGNITUDES = {
    "e4m3": np.array(E4M3_VALUES),
    "e2m1": np.array(E2M1_VALUES),
    "int8": np.arange(128.0),
    "int4": np.arange(8.0),
}


def nearest(magnitude, table):
    """Index of the table value nearest to each f64 magnitude, ties to the even index, saturating."""
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    below = above - 1
    up, down = table[above] - magnitude, magnitude - table[below]
    return np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)


def encode(ratio, element):
    """Unpacked stored codes (uint8, or int8) of f32 ratios; NaN gives code 0."""
    ratio = np.where(np.isnan(ratio), F32(0), ratio)
    index = nearest(np.abs(ratio).astype(np.float64), MAGNITUDES[element])
    sign = np.signbit(ratio)
    if element == "int8":
        return np.where(sign, -index, index).astype(np.int8)
    if element == "int4":
        return (np.where(sign, -index, index) + 8).astype(np.uint8)
    return (index + np.where(sign, 128 if element == "e4m3" else 8, 0)).astype(np.uint8)


def decode(codes, element):
    """f32 values of unpacked codes."""
    if element.startswith("int"):
        return codes.astype(F32) - F32(8 if element == "int4" else 0)
    sign_bit = 128 if element == "e4m3" else 8
    magnitude = MAGNITUDES[element][np.minimum(codes & (sign_bit - 1), len(MAGNITUDES[element]) - 1)].astype(F32)
    return np.where(codes & sign_bit, -magnitude, magnitude)


def shared_exponent(amax, element, rule):
    """E8M0 byte of one finite amax by rule, in exact arithmetic."""
    largest, emax, mantissa_bits = {"e4m3": (448, 8, 3), "e2m1": (6, 2, 1)}[element]
    amax = Fraction(float(amax))
    if amax == 0:
        return 0
    exponent = math.frexp(amax)[1] - 1  # floor(log2 amax)
    if rule == "floor":
        power = exponent - emax
    elif rule == "even":
        # Rounded half up to mantissa_bits, as adding half a step to the bits does.
        fraction = amax / Fraction(2) ** exponent
        power = exponent - emax + (fraction + Fraction(1, 2 ** (mantissa_bits + 1)) >= 2)
    else:
        power = exponent - emax - 2
        while Fraction(2) ** power < amax / largest:
            power += 1
    return min(max(power + 127, 0), 254)


def _groups(x, key):
    """Yield (scale row, scale column, row slice, column slice) of every group."""
    rows, columns = (size if g < 0 else g for g, size in zip(key.group, x.shape, strict=True))
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            yield i // rows, j // columns, slice(i, i + rows), slice(j, j + columns)


def _amax(x):
    return np.abs(x).max(initial=F32(0))


def quantize(x, key, rule=None, global_scale=None):
    """Return unpacked codes, stored scales as numbers (E8M0 bytes as int), and the global scale, of one f32 matrix."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % key.column_multiple)))
    rule = rule or key.scale_rounding
    if key.global_scale and global_scale is None:
        finite = np.where(np.isfinite(x), np.abs(x), F32(0))
        amax = finite.max(axis=1, keepdims=True) if key.global_scale == "token" else finite.max()
        global_scale = np.asarray(amax / F32(2688), dtype=F32)
        global_scale = np.where(global_scale == 0, F32(1), global_scale)
    shape = [max((1 if i < 0 else -(-n // i)), 0) for i, n in zip(key.group, x.shape, strict=True)]
    codes = np.zeros(x.shape, np.int8 if key.element == "int8" else np.uint8)
    scales = np.zeros(shape, np.uint8 if key.scale == "e8m0" else F32)
    values = np.zeros(x.shape, F32)
    with np.errstate(all="ignore"):
        for i, j, rows, columns in _groups(x, key):
            part, amax = x[rows, columns], _amax(x[rows, columns])
            whole = global_scale if key.global_scale != "token" else global_scale[i, 0]
            scales[i, j] = _stored_scale(amax, key, rule, whole)
            multiplier = scales[i, j]
            if key.scale == "e8m0":
                multiplier = F32(np.nan if multiplier == 255 else 2.0 ** (int(multiplier) - 127))
            if key.scale == "e4m3":
                multiplier = F32(multiplier * whole)
            usable = multiplier > 0
            codes[rows, columns] = encode(part / multiplier if usable else np.zeros_like(part), key.element)
            values[rows, columns] = decode(codes[rows, columns], key.element) * multiplier
    return SimpleNamespace(codes=codes, scale=scales, global_scale=global_scale, values=values)


def _stored_scale(amax, key, rule, whole):
    if not np.isfinite(amax):
        return 255 if key.scale == "e8m0" else np.nan
    if key.scale == "e8m0":
        return shared_exponent(amax, key.element, rule)
    if key.scale == "e4m3":
        ratio = F32(F32(amax / F32(6)) / F32(whole))
        return E4M3_VALUES[int(nearest(np.float64(ratio), MAGNITUDES["e4m3"]))]
    if key.element != "e4m3":
        scale = F32(amax / F32(127 if key.element == "int8" else 7))
        return scale if scale else F32(1)
    if -1 in key.group:
        return max(F32(amax / F32(448)), F32(1 / (448 * 512)))
    return F32(max(amax, F32(1e-10 if key.dynamic else 1e-4)) / F32(448))


def assert_same(q, want):
    """A QuantizedTensor of a matrix has the oracle's codes, scales and global scale, to the bit."""
    key, data = q.key, q.data
    if key.bits == 4:
        data = data.view(torch.uint8)
        data = torch.stack((data & 15, data >> 4), -1).flatten(1)
    elif data.dtype == torch.float8_e4m3fn:
        data = data.view(torch.uint8)
    scale = q.scale if q.scale.dtype == torch.uint8 else q.scale.float()
    np.testing.assert_array_equal(scale.numpy().reshape(want.scale.shape), want.scale, err_msg=f"scales of {key}")
    np.testing.assert_array_equal(data.numpy(), want.codes, err_msg=f"codes of {key}")
    if key.global_scale:
        np.testing.assert_array_equal(q.global_scale.numpy(), want.global_scale, err_msg=f"global scale of {key}")


def random_matrix(seed, rows, columns, exponent=0.0, spread=2.0, special=()):
    """Normal values times 2^exponent, columns' sizes spread over 2^(+-spread), with some special values strewn in."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** (exponent + rng.uniform(-spread, spread, columns))
    with np.errstate(over="ignore", under="ignore"):
        x = np.clip(rng.standard_normal((rows, columns)) * size, -3.4e38, 3.4e38).astype(F32)
    for value in special:
        if x.size:
            x[rng.integers(rows), rng.integers(columns)] = value
    return torch.from_numpy(x)


@pytest.fixture(scope="session", name="oracle")
def _oracle():
    return SimpleNamespace(
        encode=encode,
        decode=decode,
        shared_exponent=shared_exponent,
        quantize=quantize,
        assert_same=assert_same,
        random_matrix=random_matrix,
    )
