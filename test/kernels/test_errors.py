"""kernels.quantize and its neighbours: options, measured error, shared scales, and what the errors say."""

import math

import pytest
import torch

from torchq.errors import ConfigError
from torchq.kernels import decibels, grouped_linear, linear, quantize, quantize_measured, shared_global_scale
from torchq.kernels.twin import dequantize
from torchq.keys import QUANT_KEYS, QuantKey

X = torch.ones(2, 32)


@pytest.mark.parametrize(
    "x, key, options, text",
    [
        (X.int(), "mxfp4", {}, "can't quantize a tensor of torch.int32; give float32"),
        (X.to(torch.float8_e4m3fn), "mxfp4", {}, "can't quantize a tensor of torch.float8_e4m3fn"),
        (X[0], "mxfp4", {}, r"shape \(32,\) has too few dimensions for mxfp4; give \(\.\.\., N, K\)"),
        (torch.tensor(1.0), "fp8_per_token", {}, r"shape \(\) has too few dimensions"),
        (X, "mxfp4", {"scale_rounding": "up"}, "scale_rounding 'up' does not go with mxfp4; .* 'ceil' or 'even'"),
        (X, "nvfp4", {"scale_rounding": "even"}, "scale_rounding 'even' does not go with nvfp4"),
        (X, "int8_per_token", {"scale_rounding": "floor"}, "does not go with int8_per_token"),
        (X, "mxfp8", {"global_scale": torch.ones(())}, "mxfp8 has no global scale; leave out global_scale"),
        (X, "mxfp5", {}, r"unknown key 'mxfp5' \(did you mean 'mxfp.*; known: fp8_per_tensor_static"),
        (X, "int4_per_grop_32", {}, "did you mean 'int4_per_group_32'"),
        (X, "fp8_per_tokens", {}, "did you mean 'fp8_per_token'"),
        (X, 4, {}, "the weight key is a name, a QuantKey or null, not 4"),
        (X, "e4m3/f32/8", {}, "quantization key 'e4m3/f32/8' can't be read"),
        (X, "mxfp4", {"backend": "torhc"}, r"unknown backend 'torhc' \(did you mean 'torch.*known: auto"),
    ],
)
def test_quantize_says_what_to_type(x, key, options, text):
    with pytest.raises(ConfigError, match=text):
        quantize(x, key, **options)


@pytest.mark.parametrize(
    "x, weight, bias, activation, text",
    [
        (X[:, :16], X, None, None, r"x of shape \(2, 16\) does not fit a weight of shape \(2, 32\); the last"),
        (X, X.view(1, 2, 32), None, None, r"does not fit a weight of shape \(1, 2, 32\)"),
        (X, X, torch.ones(3), None, r"bias of shape \(3,\) does not fit 2 output features"),
        (X, X, torch.ones(1), None, r"bias of shape \(1,\) does not fit 2 output features"),
        (X, X, None, "fp8_per_channel_static", "'fp8_per_channel_static' exists only as a weight"),
    ],
)
def test_linear_says_what_fits(x, weight, bias, activation, text):
    with pytest.raises(ConfigError, match=text):
        linear(x, quantize(weight, "mxfp4", backend="torch"), bias, activation)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_check_finite(value, dtype):
    x = X.to(dtype)
    assert quantize(x, "mxfp4", check_finite=True, backend="torch").scale.tolist() == [[125], [125]]
    x = x.clone()
    x[1, 3] = value
    with pytest.raises(ValueError, match=r"shape \(2, 32\) has values that are not finite; clean it, or leave out"):
        quantize(x, "mxfp4", check_finite=True, backend="torch")
    assert quantize(x, "mxfp4", backend="torch").scale.tolist() == [[125], [255]]


def test_check_finite_takes_a_sum_that_overflows_for_finite():
    big = torch.full((64, 64), 60000.0, dtype=torch.float16)
    assert big.sum().isinf()
    assert dequantize(quantize(big, "mxfp8", check_finite=True, backend="torch")).isfinite().all()
    cancels = torch.tensor([[torch.inf, -torch.inf] * 16])
    with pytest.raises(ValueError, match="not finite"):
        quantize(cancels, "mxfp8", check_finite=True, backend="torch")


def test_a_name_is_the_weight_key_where_it_can_be_one():
    assert quantize(X, "mxfp4", backend="torch").key == QUANT_KEYS["mxfp4"]
    assert not quantize(X, "mxfp4", backend="torch").key.dynamic
    assert quantize(X, "fp8_per_token", backend="torch").key.dynamic
    spelled = quantize(X, "e4m3/f32/1x8/static", backend="torch")
    assert spelled.scale.shape == (2, 4) and torch.equal(dequantize(spelled), X)


def test_gradients_stop_at_quantize():
    assert not quantize(X.clone().requires_grad_(), "mxfp8", backend="torch").scale.requires_grad


@pytest.mark.parametrize(
    "name", ["fp8_per_block_static", "mxfp4", "nvfp4", "int8_per_channel_static", "int4_per_group_32"]
)
def test_measured_error_is_the_error(name, oracle):
    w = oracle.random_matrix(1, 140, 150)
    q, (signal, noise) = quantize_measured(w, QUANT_KEYS[name], backend="torch")
    difference = (dequantize(q).double() - w.double()).square().sum().item()
    assert signal == pytest.approx(w.double().square().sum().item(), rel=1e-6)
    assert noise == pytest.approx(difference, rel=1e-4)
    again, nothing = quantize_measured(w, QUANT_KEYS[name], measure=False, backend="torch")
    assert nothing == (0.0, 0.0) and torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


def test_decibels():
    assert decibels(100.0, 1.0) == 20.0
    assert decibels(1.0, 0.0) == math.inf and decibels(0.0, 0.0) == math.inf and decibels(0.0, 1.0) == -math.inf
    assert math.isnan(decibels(math.nan, 1.0)) and math.isnan(decibels(1.0, math.inf))


def test_shared_global_scale_is_that_of_the_fused_matrix(oracle):
    a, b = oracle.random_matrix(1, 8, 64), oracle.random_matrix(2, 4, 64, exponent=3)
    b[1, 1] = torch.nan
    fused = quantize(torch.cat((a, b)), "nvfp4", backend="torch")
    whole = shared_global_scale([a, b])
    assert whole.shape == () and whole.dtype == torch.float32
    assert torch.equal(whole, fused.global_scale)
    parts = [quantize(m, "nvfp4", global_scale=whole, backend="torch") for m in (a, b)]
    assert torch.equal(torch.cat([p.data for p in parts]), fused.data)
    assert torch.equal(torch.cat([p.scale.view(torch.uint8) for p in parts]), fused.scale.view(torch.uint8))


def test_a_global_scale_is_stored_even_for_nothing():
    q = quantize(torch.empty(0, 32), "nvfp4", global_scale=torch.tensor(0.5), backend="torch")
    assert q.global_scale.item() == 0.5


def test_f64_beyond_f32_is_infinite_in_its_own_block():
    x = torch.ones(1, 32, dtype=torch.float64)
    x[0, 0] = 1e300
    q = quantize(x, "nvfp4", backend="torch")
    assert q.global_scale.isfinite()
    assert dequantize(q)[0, :16].isnan().all() and torch.equal(dequantize(q)[0, 16:], torch.ones(16))


@pytest.mark.parametrize("x, offsets, text", [
    (X[:, :16], [0, 1, 2], r"x of shape \(2, 16\) does not fit experts of shape \(2, 2, 32\)"),
    (X, [0, 2], r"offsets of shape \(2,\) do not fit 2 experts; give E \+ 1"),
])  # fmt: skip
def test_grouped_linear_says_what_fits(x, offsets, text):
    experts = quantize(torch.ones(2, 2, 32), QuantKey.from_name("mxfp4"), backend="torch")
    with pytest.raises(ConfigError, match=text):
        grouped_linear(x, torch.tensor(offsets), experts)
