"""The native CPU kernels equal the torch twins on every instruction set: codes and scales to the bit."""

import os

import pytest
import torch

from torchq.kernels import cpu, twin
from torchq.kernels.cpu_backend import Kernels
from torchq.keys import QuantKey, key_names

WEIGHTS = [QuantKey.from_name(n, "weight") for n in key_names("weight")]
ACTIVATIONS = [QuantKey.from_name(n, "activation") for n in key_names("activation")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (6, 33), (33, 123), (3, 431), (130, 300), (2, 5, 64))


def runs_here(level: str) -> bool:
    try:
        cpu.load(level)
    except cpu.BuildError:
        return False
    return True


@pytest.fixture(scope="module")
def paths():
    """The kernels of every instruction set that this CPU has: each test compares all of them with one twin."""
    found = {level: Kernels(level) for level in cpu.LEVELS if runs_here(level)}
    return found or pytest.skip("native kernels can't be built here")


def same_bytes(a, b):
    if a is None or b is None:
        return a is b
    nan = a.isnan() & b.isnan() if a.dtype == torch.float32 else torch.zeros(a.shape, dtype=torch.bool)
    a, b = (t.contiguous().view(-1).view(torch.uint8).view(-1, t.element_size()) for t in (a, b))
    return bool(((a == b).all(1) | nan.view(-1)).all())


def assert_same(paths, x, key, rounding=None, global_scale=None):
    expected_error = torch.zeros(2, dtype=torch.float64)
    expected = twin.quantize(x, key, rounding, global_scale, expected_error)
    values = {dtype: twin.dequantize(expected, dtype) for dtype in DTYPES}
    for level, kernels in paths.items():
        what = f"{level}: {key} {rounding} {x.dtype} {tuple(x.shape)}"
        error = torch.zeros(2, dtype=torch.float64)
        for got in (kernels.quantize(x, key, rounding, global_scale, e) for e in (error, None)):
            for name in ("data", "scale", "global_scale"):
                assert same_bytes(getattr(got, name), getattr(expected, name)), f"{name} of {what}"
        torch.testing.assert_close(error, expected_error, rtol=1e-5, atol=1e-300, equal_nan=True)
        for dtype in DTYPES:
            assert same_values(kernels.dequantize(expected, dtype), values[dtype]), f"{dtype} values of {what}"


def same_values(a, b):
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def values_of(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn((*shape[:-1], 1), generator=generator).exp()
    return x.to(dtype)


def damaged(x):
    """Zeros, -0, NaN, inf and a row of zeros among ordinary values."""
    x = x.clone()
    flat = x.view(-1)
    flat[::7] = 0
    flat[3], flat[5], flat[-1] = -0.0, torch.inf, torch.nan
    x[..., 0, :] = 0
    return x


@pytest.mark.parametrize("key", dict.fromkeys((*WEIGHTS, *ACTIVATIONS)), ids=lambda k: k.spelled_out())
def test_quantize_and_dequantize_equal_the_twin(paths, key):
    for dtype in DTYPES:
        for shape in SHAPES:
            x = values_of(shape, dtype)
            assert_same(paths, x, key)
            if x.numel() > 8:
                assert_same(paths, damaged(x), key)
        for factor in (1e-38, 3e37):  # subnormals; scales and values near the largest f32
            assert_same(paths, (values_of((5, 96), torch.float32) * factor).to(dtype), key)
        assert_same(paths, values_of((96, 40), dtype).t(), key)  # not contiguous
        assert_same(paths, torch.empty(0, 64, dtype=dtype), key)
    assert_same(paths, values_of((4, 64), torch.float64), key)  # f64 is the twin's


@pytest.mark.parametrize("rounding", ("floor", "ceil", "even"))
@pytest.mark.parametrize("name", ("mxfp4", "mxfp8"))
def test_every_scale_rule(paths, name, rounding):
    key = QuantKey.from_name(name)
    steps = torch.arange(0x3F000000, 0x41000000, 0x8000, dtype=torch.int32).view(torch.float32)  # 2^-1 .. 2^3 in 1/256
    x = torch.zeros(steps.numel(), 32)
    x[:, 7] = steps
    assert_same(paths, x, key, rounding)
    for dtype in DTYPES:
        assert_same(paths, values_of((33, 123), dtype), key, rounding)


@pytest.mark.parametrize("key", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_16_bit_value_beside_others_of_its_size(paths, key, dtype):
    # Sorted, so that a group holds neighbours and its scale makes the most of them; shuffled, it holds mostly zeros.
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite()].sort().values.view(-1, 256)
    assert_same(paths, x, key)
    generator = torch.Generator().manual_seed(0)
    small = x[(x.float().abs() > 1e-4).all(1) & (x.float().abs() < 1e4).all(1)].flatten()
    assert_same(paths, small[torch.randperm(small.numel(), generator=generator)].view(-1, 256), key)


@pytest.mark.parametrize("name", ("mxfp4", "mxfp8", "int8_per_channel_static", "int4_per_group_32"))
def test_every_rounding_tie(paths, name):
    # A first column fixes each row's scale at a power of two; the rest walks the codes' grid in quarter steps.
    key = QuantKey.from_name(name)
    top = {"e2m1": 6.0, "e4m3": 448.0, "int8": 127.0, "int4": 7.0}[key.element]
    grid = torch.arange(-31, 32) / (16.0 if key.element == "e4m3" else 4.0)
    x = torch.full((64, 64), top)
    for row in range(64):
        x[row, 1:] = grid * 2.0 ** (row % 12 - 8 if key.element == "e4m3" else 0) + (row % 3 - 1) * 1e-6
        x[row, 32] = top
    assert_same(paths, x, key)


def test_a_global_scale_that_is_given(paths):
    key = QuantKey.from_name("nvfp4")
    for scale in (0.01, 1e-30):
        assert_same(paths, damaged(values_of((33, 123), torch.bfloat16)), key, None, torch.tensor(scale))
    experts = values_of((3, 6, 64), torch.bfloat16)
    assert_same(paths, experts, key, None, torch.tensor([0.1, 0.2, 0.3]))


def test_keys_without_a_name(paths):
    for text in (
        "e4m3/f32/1x64/dynamic",
        "e2m1/e8m0/1x64/static",
        "e4m3/f32/64x32/static",
        "e2m1/e4m3/1x32/tensor/static",
    ):
        key = QuantKey.from_name(text)
        assert all(kernels.unusable("linear", key, None, "cpu") is None for kernels in paths.values())
        assert_same(paths, values_of((70, 200), torch.bfloat16), key)
    kernels = next(iter(paths.values()))
    assert "groups" in kernels.unusable("quantize", QuantKey("e4m3", "f32", (1, 24)), None, "cpu")
    assert "CPU" in kernels.unusable("quantize", WEIGHTS[0], None, "cuda")


@pytest.mark.parametrize("key", WEIGHTS, ids=str)
def test_dequantize_every_code_and_scale(paths, key):
    q = twin.quantize(torch.randn(128, 512), key)
    codes = torch.arange(256, dtype=torch.uint8).repeat(q.data.numel() // 256)
    q.data.view(torch.uint8).view(-1).copy_(codes)
    if q.scale.element_size() == 1:
        q.scale.view(torch.uint8).view(-1).copy_(torch.arange(q.scale.numel()) % 256)
    for dtype in DTYPES:
        expected = twin.dequantize(q, dtype)
        for level, kernels in paths.items():
            assert same_values(kernels.dequantize(q, dtype), expected), f"{level} {dtype}"


# Beside one rounding to the result's dtype, sums may differ by the order of addition.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_close(got, expected, sizes, what=""):
    """``sizes``: what the absolute values of the products add up to."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    limit = ROUNDING[got.dtype] * expected.float().abs() + 4e-6 * sizes
    fine = ((got.float() - expected.float()).abs() <= limit) | (got == expected) | (got.isnan() & expected.isnan())
    assert fine.all(), f"{what}: {(~fine).sum()} of {fine.numel()} off, first at {(~fine).nonzero()[0].tolist()}"


def check_linear(paths, x, q, bias, activation):
    rows = x.float() if activation is None else twin.dequantize(twin.quantize(x, activation))
    sizes = rows.abs() @ twin.dequantize(q).abs().T
    expected = twin.linear(x, q, bias, activation)
    for level, kernels in paths.items():
        got = kernels.linear(x, q, bias, activation)
        assert_close(got, expected, sizes, f"{level}: {q.key} x {activation} {tuple(x.shape)} {x.dtype} N={q.shape[0]}")


@pytest.mark.parametrize("key", WEIGHTS, ids=str)
def test_linear_for_any_number_of_rows(paths, key):
    for rows, columns in ((6, 33), (33, 123), (40, 431), (18, 2500)):
        q = twin.quantize(values_of((rows, columns), torch.float32), key)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 65):
            for dtype in DTYPES if m in (1, 9) else (torch.bfloat16,):
                bias = values_of((1, rows), dtype, 2)[0] if m % 2 else None
                check_linear(paths, values_of((m, columns), dtype, m), q, bias, None)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_linear_with_an_activation(paths, activation):
    for key in WEIGHTS:
        q = twin.quantize(values_of((33, 123), torch.float32), key)
        for m, dtype in ((1, torch.bfloat16), (3, torch.float16), (9, torch.bfloat16), (9, torch.float32)):
            check_linear(paths, values_of((m, 123), dtype, m), q, None, activation)


@pytest.mark.parametrize("key", WEIGHTS, ids=str)
def test_linear_of_long_rows_in_several_passes(paths, key):
    q = twin.quantize(values_of((35, 9000), torch.float32), key)
    for activation in (None, *("mxfp4", "int8_per_token", "fp8_per_block_dynamic", "nvfp4")):
        activation = activation and QuantKey.from_name(activation, "activation")
        for m in (2, 27):
            check_linear(paths, values_of((m, 9000), torch.bfloat16, m), q, None, activation)


def test_linear_of_extreme_scales_and_damaged_weights(paths):
    for name, low, high in (("mxfp4", 0, 252), ("mxfp8", 0, 246), ("mxfp4", 118, 137)):  # no value overflows
        q = twin.quantize(torch.randn(40, 256), QuantKey.from_name(name))
        q.data.view(torch.uint8).copy_(torch.randint(0, 256, q.data.shape, dtype=torch.uint8))
        q.scale.copy_(torch.randint(low, high + 1, q.scale.shape, dtype=torch.uint8))
        q.scale[::5, 3] = 255
        for m in (1, 3, 9):
            # A column of ones at a time keeps the sums from mixing inf with the rest.
            x = torch.zeros(m, 256, dtype=torch.bfloat16)
            x[:, 70] = 1
            expected = twin.linear(x, q, None, None)
            normal = expected.isnan() | (expected.abs() > 2.0**-126) | (expected == 0)  # subnormal bf16 may flush
            for level, kernels in paths.items():
                got = kernels.linear(x, q, None, None)
                assert same_values(got[normal], expected[normal]), f"{level} {name} M={m}"


def test_linear_shapes_and_strides(paths):
    key = QuantKey.from_name("mxfp4")
    q = twin.quantize(values_of((40, 96), torch.float32), key)
    x = values_of((96, 10), torch.bfloat16).t()  # not contiguous
    check_linear(paths, x, q, None, None)
    double = values_of((3, 96), torch.float32).double()
    for kernels in paths.values():
        assert kernels.linear(values_of((2, 3, 96), torch.bfloat16), q, None, None).shape == (2, 3, 40)
        assert kernels.linear(torch.empty(0, 96), q, None, None).shape == (0, 40)
        assert torch.equal(kernels.linear(double, q, None, None), twin.linear(double, q, None, None))
    bias = torch.randn(40)
    check_linear(paths, values_of((3, 96), torch.bfloat16), q, bias, None)


@pytest.mark.parametrize("activation", (None, "own"))
def test_grouped_linear(paths, activation):
    own = {"e2m1/e8m0": "mxfp4", "e2m1/e4m3": "nvfp4", "int8/f32": "int8_per_token", "e4m3/e8m0": "mxfp8"}
    offsets = torch.tensor([0, 0, 1, 1, 10, 12])  # experts without rows, and a row of no expert
    x = values_of((13, 123), torch.bfloat16)
    for key in WEIGHTS:
        q = twin.quantize(values_of((5, 33, 123), torch.float32), key)
        name = own.get(f"{key.element}/{key.scale}", "fp8_per_token")
        act = None if activation is None else QuantKey.from_name(name, "activation")
        for bias in (None, torch.randn(5, 33)):
            expected = twin.grouped_linear(x, offsets, q, bias, act)
            for level, kernels in paths.items():
                got = kernels.grouped_linear(x, offsets, q, bias, act)
                assert_close(got, expected, torch.full_like(expected.float(), 300.0), f"{level} {key}")
                assert not got[12].any()


def test_integer_products_are_exact(paths):
    weight, activation = (
        QuantKey.from_name("int8_per_channel_static"),
        QuantKey.from_name("int8_per_token", "activation"),
    )
    x = torch.randint(-127, 128, (7, 70000)).float()  # long enough to overflow 32-bit sums
    w = torch.randint(-127, 128, (5, 70000)).float()
    x[:, 0], w[:, 0] = 127, 127  # scales are 1
    x[0] = 127
    w[0] = 127
    q = twin.quantize(w, weight)
    for level, kernels in paths.items():
        got = kernels.linear(x, q, None, activation)
        assert torch.equal(got, (x.double() @ w.double().T).float()), level


def test_threads_are_torchs(paths):
    kernels = paths[max(paths, key=cpu.LEVELS.index)]
    key = QuantKey.from_name("mxfp4")
    x = values_of((512, 512), torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = kernels.quantize(x, key, None, None, None)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone.data, kernels.quantize(x, key, None, None, None).data)


def test_best_level_is_what_load_takes():
    if "TORCHQ_CPU_ISA" not in os.environ and runs_here(cpu.best_level()):
        assert cpu.load() is cpu.load()
        assert cpu.best_level() in cpu.LEVELS
