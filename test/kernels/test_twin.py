"""The torch twins at their edges: values that are not numbers, layouts, shapes, dtypes, tiles, and their errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchq.kernels import quantize, twin
from torchq.kernels.twin import dequantize
from torchq.keys import QuantKey, key_names, stored_nbytes, stored_shapes

KEYS = [QuantKey.from_name(name, role) for role in ("weight", "activation") for name in key_names(role)]
KEYS = list(dict.fromkeys(KEYS))
PARTS = ("data", "scale", "global_scale")
every_key = pytest.mark.parametrize("key", KEYS, ids=lambda k: f"{k}-{'dynamic' if k.dynamic else 'static'}")


def q_of(x, key, **options):
    return quantize(x, key, backend="torch", **options)


def bytes_of(t):
    return None if t is None else t.contiguous().reshape(-1).view(torch.uint8)


def assert_equal(a, b):
    """Same key, shape and stored bytes; the first difference is named."""
    assert (a.key, a.shape, a.scale_rounding) == (b.key, b.shape, b.scale_rounding)
    for part in PARTS:
        mine, theirs = (getattr(q, part) for q in (a, b))
        if mine is None:
            assert theirs is None
            continue
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), part
        different = (bytes_of(mine) != bytes_of(theirs)).nonzero().flatten().tolist()
        assert not different, f"{part} of {a.key} {tuple(a.shape)} differs first at byte {different[0]}"


def group_of(key, x, row, column):
    """Mask of the values of a matrix that share a scale with (row, column)."""
    mask = torch.zeros(x.shape, dtype=torch.bool)
    rows, columns = (s if g < 0 else g for g, s in zip(key.group, x.shape, strict=True))
    mask[
        row // rows * rows : (row // rows + 1) * rows, column // columns * columns : (column // columns + 1) * columns
    ] = True
    return mask


@every_key
@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (33, 123), (2, 431), (5, 64), (3, 5, 33), (2, 1, 3, 48), (130, 140)])
def test_stored_as_the_table_of_formats_says(key, shape, oracle):
    x = oracle.random_matrix(3, 1, int(torch.tensor(shape).prod())).view(shape)
    q = q_of(x, key)
    shapes = stored_shapes(shape, key)
    got = {p: (tuple(getattr(q, p).shape), getattr(q, p).dtype) for p in PARTS if getattr(q, p) is not None}
    assert got == shapes
    assert q.nbytes == stored_nbytes(shape, key) and q.shape == shape and q.key == key and q.device == x.device
    y = dequantize(q, torch.bfloat16)
    assert y.shape == shape and y.dtype == torch.bfloat16 and torch.equal(y, dequantize(q).to(torch.bfloat16))
    error = (dequantize(q) - x).norm() / x.norm()
    assert error < {"int8": 0.05, "e4m3": 0.06, "int4": 0.3, "e2m1": 0.3}[key.element]


@every_key
def test_leading_dimensions_of_a_static_key_are_separate_matrices(key, oracle):
    x = oracle.random_matrix(4, 8, 33 * 4).view(2, 4, 4, 33)
    q = q_of(x, key)
    if key.dynamic:
        want, flat = q_of(x.reshape(32, 33), key), dequantize(q).reshape(32, 33)
        for part in PARTS:
            mine, theirs = bytes_of(getattr(q, part)), bytes_of(getattr(want, part))
            assert mine is theirs is None or torch.equal(mine, theirs)
        assert torch.equal(flat, dequantize(want))
    else:
        for i, j in itertools.product(range(2), range(4)):
            assert_equal(q[i][j], q_of(x[i, j], key))


@every_key
def test_16_bit_inputs_give_the_codes_of_their_f32_values(key, oracle):
    for dtype in (torch.bfloat16, torch.float16):
        x = oracle.random_matrix(5, 6, 123).to(dtype)
        assert_equal(q_of(x, key), q_of(x.float(), key))
    assert_equal(q_of(x.double(), key), q_of(x.float(), key))


@every_key
def test_strides_do_not_matter(key, oracle):
    x = oracle.random_matrix(6, 40, 96)
    layouts = {
        "transposed": x.T.contiguous().T,
        "strided": torch.stack((x, -x), -1).flatten(1)[:, ::2],
        "every second row": torch.stack((x, -x), 1).flatten(0, 1)[::2],
        "sliced": torch.nn.functional.pad(x, (3, 5, 1, 1))[1:-1, 3:-5],
    }
    for name, y in layouts.items():
        assert not y.is_contiguous() and torch.equal(y, x), name
        before = y.clone()
        assert_equal(q_of(y, key), q_of(x, key))
        assert torch.equal(y, before)
    row = x[:1].expand(40, 96)
    assert_equal(q_of(row, key), q_of(row.contiguous(), key))


@every_key
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (2, 0, 32), (0, 4, 32), (2, 3, 0)])
def test_empty(key, shape):
    q = q_of(torch.empty(shape), key)
    assert {p: tuple(getattr(q, p).shape) for p in PARTS if getattr(q, p) is not None} == {
        p: s for p, (s, _) in stored_shapes(shape, key).items()
    }
    assert dequantize(q).shape == shape
    assert all(bool(t.float().isfinite().all()) for t in (q.scale, q.global_scale) if t is not None)


@every_key
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-45, 2.9e38, -2.9e38, 2.0**-127])
def test_extreme_values_stay_finite(key, value):
    x = torch.full((3, 64), value)
    x[1, 0] *= 0.5
    y = dequantize(q_of(x, key))
    assert y.isfinite().all()
    if value == 0:
        assert not y.any()

    elif abs(value) > 1:
        assert ((y - x).abs() <= 0.26 * x.abs()).all()
    else:
        assert ((y - x).abs() <= 0.26 * abs(value)).all() or not y.any()  # some formats have no scale this small


def test_the_even_rule_may_decode_the_largest_values_to_infinity():
    # 3e38 is above 1.75 * 2^127, so that the scale is 2^126: the code of 3.53 is 4, and 4 * 2^126 is no f32 number.
    q = q_of(torch.full((1, 32), 3e38), "mxfp4")
    assert q.scale.item() == 253 and set(q.data.flatten().tolist()) == {0x66} and dequantize(q).isinf().all()
    assert dequantize(q_of(torch.full((1, 32), 3e38), "mxfp4", scale_rounding="floor")).isfinite().all()


@every_key
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan_in_its_own_group_alone(key, value, oracle):
    x = oracle.random_matrix(8, 140, 150, spread=0.5)
    clean = x.clone()
    x[3, 40] = value
    clean[3, 40] = 0
    hit = group_of(key, x, 3, 40)
    got, want = dequantize(q_of(x, key)), dequantize(q_of(clean, key))
    assert got[hit].isnan().all()
    assert got[~hit].isfinite().all() and torch.equal(got[~hit], want[~hit])


@every_key
@given(st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_a_scale_belongs_to_its_group(key, oracle, seed):
    x = oracle.random_matrix(seed, 140, 150, spread=0.1)
    row, column = seed % 140, seed % 150
    y = x.clone()
    y[row, column] = 30.0  # larger than the rest: its group's scale changes
    options = {"global_scale": torch.tensor(0.01)} if key.global_scale else {}
    changed = dequantize(q_of(x, key, **options)) != dequantize(q_of(y, key, **options))
    assert changed[row, column] and not changed[~group_of(key, x, row, column)].any()


@every_key
@pytest.mark.parametrize(
    "rows, columns, tiles",
    [(1, 1, (1, 2)), (5, 33, (1, 7, 32, 64)), (300, 70, (999, 4097)), (2, 700, (33, 100, 1399)), (129, 257, (2050,))],
)
def test_tiles_do_not_show(key, rows, columns, tiles, monkeypatch, oracle):
    x = oracle.random_matrix(rows, rows, columns, special=[torch.nan, 1e30, torch.inf][: rows - 1])
    whole, error = q_of(x, key), torch.zeros(2, dtype=torch.float64)
    twin.quantize(x, key, error=error)
    values = dequantize(whole)
    for tile in tiles:
        monkeypatch.setattr(twin, "TILE", tile)
        again, tiled_error = q_of(x, key), torch.zeros(2, dtype=torch.float64)
        assert_equal(again, whole)
        torch.testing.assert_close(dequantize(again), values, rtol=0, atol=0, equal_nan=True)
        twin.quantize(x, key, error=tiled_error)
        torch.testing.assert_close(tiled_error, error, equal_nan=True)


@every_key
def test_a_very_wide_row(key):
    columns = 4 << 20
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, columns - 1] = 9.0
    q = q_of(x, key)
    tail = q_of(x[:, -1024:], key, global_scale=q.global_scale) if key.global_scale else None
    if key.group[1] > 0:
        tail = tail or q_of(x[:, -1024:], key)
        codes = tail.data.shape[1]
        assert torch.equal(q.data[:, -codes:].view(torch.uint8), tail.data.view(torch.uint8))
        assert torch.equal(bytes_of(q.scale[:, -tail.scale.shape[1] :]), bytes_of(tail.scale))
    else:
        largest = 448.0 if key.element == "e4m3" else 127.0
        assert torch.equal(q.scale.flatten(), torch.tensor([9.0]) / largest)
    y = dequantize(q, torch.bfloat16)
    assert (y.float() - x.float()).norm() / x.float().norm() < 0.3
    assert abs(y[0, -1].item() - 9.0) <= 1.0


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_quantizing_mx_values_again_changes_nothing(name, rule, oracle):
    # It does not hold where a scale is a quotient: amax / 448 * 448 need not be amax, and an f32 scale may move a bit.
    x = oracle.random_matrix(9, 64, 256, spread=8.0)
    first = q_of(x, name, scale_rounding=rule)
    again = dequantize(q_of(dequantize(first), name, scale_rounding=rule))
    assert torch.equal(again, dequantize(first))


@every_key
def test_quantizing_again_is_near_where_scales_are_quotients(key, oracle):
    x = oracle.random_matrix(10, 64, 256)
    first = dequantize(q_of(x, key))
    again = dequantize(q_of(first, key))
    assert (again - first).norm() <= 1e-2 * first.norm()
