"""Whole tensors against other implementations: numpy (conftest), torchao's to_mx and compressed-tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchq.kernels import quantize
from torchq.kernels.codes import unpack
from torchq.kernels.twin import dequantize
from torchq.keys import QUANT_KEYS, QuantKey, key_names

KEYS = [QuantKey.from_name(name, role) for role in ("weight", "activation") for name in key_names(role)]
KEYS = list(dict.fromkeys(KEYS))
MX = ("mxfp4", "mxfp8")
RULES = ("floor", "ceil", "even")


def name_of(key):
    return f"{key}-{'dynamic' if key.dynamic else 'static'}" if isinstance(key, QuantKey) else None


matrices = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.sampled_from([1, 2, 6, 33]) | st.integers(1, 12),
        "columns": st.sampled_from([1, 6, 16, 31, 32, 33, 48, 123, 129]) | st.integers(1, 70),
        "exponent": st.sampled_from([0, 0, 0, -10, -126, -140, 60, 126]) | st.floats(-149, 127),
        "spread": st.sampled_from([0.0, 2.0, 12.0]),
        "special": st.lists(
            st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -3e38, 448.0, 6.0, 1e-45]), max_size=3
        ),
    }
)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])


@pytest.mark.parametrize("key", KEYS, ids=name_of)
@given(matrix=matrices, dtype=dtypes)
@settings(max_examples=60, deadline=None)
def test_twin_is_the_numpy_oracle(key, oracle, matrix, dtype):
    x = oracle.random_matrix(**matrix).to(dtype)
    q = quantize(x, key, backend="torch")
    want = oracle.quantize(x.float().numpy(), key)
    oracle.assert_same(q, want)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(q).numpy(), want.values[:, : x.shape[1]])


@pytest.mark.parametrize("key", [QUANT_KEYS[k] for k in MX], ids=str)
@given(matrix=matrices, rule=st.sampled_from(RULES))
@settings(max_examples=40, deadline=None)
def test_other_rules_are_the_numpy_oracle(key, oracle, matrix, rule):
    x = oracle.random_matrix(**matrix)
    oracle.assert_same(quantize(x, key, scale_rounding=rule, backend="torch"), oracle.quantize(x.numpy(), key, rule))


@pytest.mark.parametrize("key", [k for k in KEYS if k.global_scale], ids=name_of)
@given(matrix=matrices, whole=st.sampled_from([1.0, 0.002, 1e-6, 1e3]))
@settings(max_examples=60, deadline=None)
def test_a_given_global_scale_is_the_numpy_oracle(key, oracle, matrix, whole):
    x = oracle.random_matrix(**matrix)
    shape = (x.shape[0], 1) if key.global_scale == "token" else ()
    whole = np.full(shape, whole, np.float32)
    q = quantize(x, key, global_scale=torch.from_numpy(whole), backend="torch")
    oracle.assert_same(q, oracle.quantize(x.numpy(), key, global_scale=whole))


@pytest.mark.parametrize("rows, columns", [(129, 257), (300, 150), (128, 384)])
def test_block_edges_are_partial_blocks(rows, columns, oracle):
    x = oracle.random_matrix(rows * columns, rows, columns)
    key = QUANT_KEYS["fp8_per_block_static"]
    oracle.assert_same(quantize(x, key, backend="torch"), oracle.quantize(x.numpy(), key))


# --- torchao: to_mx ---


def torchao_mx(x, element, rule):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = {"floor": Mode.FLOOR, "ceil": Mode.RCEIL, "even": Mode.EVEN}[rule]
    dtype = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}[element]
    scale, data = to_mx(x.contiguous(), dtype, 32, mode)
    return scale.view(torch.uint8).view(x.shape[0], -1), data.view(torch.uint8)


def log2_is_exact(x, largest):
    """Where torchao's RCEIL, ceil(log2(amax / max)) in f32, is the exact ceiling: not beside a power of two."""
    ratio = (x.view(x.shape[0], -1, 32).abs().amax(-1).float() / largest).double()
    return (ratio.log2() - ratio.log2().round()).abs() > 1e-6


# Where torchao 0.18 computes something else, and ours is the specification: inf (it saturates to bytes 253, 254 or
# 247), amax within 2^12 of 2^-127 (its multiplier is 1, or the smallest normal), and f32 log2 beside a power of two.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("exponent", [0, -100, -12, 60, 118])
def test_mx_is_torchaos(name, rule, dtype, exponent, oracle):
    key = QUANT_KEYS[name]
    x = oracle.random_matrix(exponent + 200, 96, 512, exponent, spread=6.0, special=[np.nan, 0.0, -0.0]).to(dtype)
    x[5] = 0
    scale, data = torchao_mx(x, key.element, rule)
    q = quantize(x, key, scale_rounding=rule, backend="torch")
    if rule == "ceil":
        exact = log2_is_exact(x, 6.0 if name == "mxfp4" else 448.0) | (scale == 0) | (scale == 255)
        assert exact.float().mean() > 0.9
    else:
        exact = torch.ones_like(scale, dtype=torch.bool)
    assert torch.equal(q.scale[exact], scale[exact])
    # Codes of NaN blocks mean nothing: torchao keeps some, ours are 0.
    mine = q.data.view(torch.uint8).view(*scale.shape, -1)
    same = exact & (scale != 255)
    assert torch.equal(mine[same], data.view_as(mine)[same])
    assert not mine[scale == 255].any()


def test_torchao_differs_on_infinity():
    x = torch.ones(1, 64)
    x[0, 3] = torch.inf
    for rule, byte in (("floor", 254), ("ceil", 254), ("even", 254)):
        theirs = torchao_mx(x, "e2m1", rule)[0]
        ours = quantize(x, "mxfp4", scale_rounding=rule, backend="torch").scale
        assert ours[0, 0] == 255 and theirs[0, 0] != 255 and theirs[0, 0] <= byte
        assert ours[0, 1] == theirs[0, 1]


# --- compressed-tensors ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [-60, -8, 0, 60])
def test_mxfp4_is_compressed_tensors(exponent, dtype, oracle):
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    x = oracle.random_matrix(exponent + 900, 64, 256, exponent, spread=6.0).to(dtype)
    blocks = x.view(64, -1, 32)
    scale = generate_mx_scales(blocks.abs().amax(-1), num_bits=4)  # [64, 8]
    ratio = blocks.float() / torch.exp2(scale.float() - 127)[..., None]
    data = pack_fp4_to_uint8(cast_to_fp4(ratio.clone()).view(64, 256))
    q = quantize(x, "mxfp4", backend="torch")
    assert torch.equal(q.scale, scale.to(torch.uint8))
    # A value that rounds to zero keeps its sign here and loses it there.
    nibbles, theirs = unpack(q.data), unpack(data)
    assert torch.equal(torch.where(nibbles == 8, 0, nibbles), torch.where(theirs == 8, 0, theirs))


@pytest.mark.parametrize("name, strategy, args", [
    ("int8_per_channel_static", "channel", {"num_bits": 8, "type": "int"}),
    ("fp8_per_channel_static", "channel", {"num_bits": 8, "type": "float"}),
])  # fmt: skip
def test_channels_are_compressed_tensors_given_the_scales(name, strategy, args, oracle):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize

    x = oracle.random_matrix(11, 48, 160)
    q = quantize(x, name, backend="torch")
    args = QuantizationArgs(strategy=strategy, symmetric=True, **args)
    theirs = ct_quantize(x, q.scale, torch.zeros_like(q.scale), args, dtype=q.data.dtype)
    assert torch.equal(theirs.view(torch.uint8), q.data.view(torch.uint8))
