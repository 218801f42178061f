"""The Hadamard rotation against the matrix of its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchq.transforms.hadamard import hadamard

SIZES = (1, 2, 4, 16, 32, 64, 256)


def matrix(size):
    """H[i, j] = (-1)^popcount(i & j) / sqrt(size), in f64."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_product_with_the_matrix_block_by_block(size):
    x = random(3, 2 * size)
    blocks = x.double().view(3, 2, size) @ matrix(size)
    torch.testing.assert_close(hadamard(x, size), blocks.view(3, -1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_unit_vectors_give_the_columns_to_the_bit(size):
    assert torch.equal(hadamard(torch.eye(size), size), (matrix(size) * math.sqrt(size)).float() / math.sqrt(size))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_its_own_inverse_and_keeps_norms(size):
    x = random(5, 256)
    y = hadamard(x, size)
    torch.testing.assert_close(hadamard(y, size), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


@given(st.integers(0, 8), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_rotated_inputs_and_weights_give_the_same_product(power, blocks, seed):
    size = 2**power
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(4, size * blocks, generator=generator) for _ in range(2))
    torch.testing.assert_close(hadamard(x, size) @ hadamard(w, size).T, x @ w.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_computed_in_f32_and_rounded_once(dtype):
    x = random(3, 64, dtype=dtype)
    y = hadamard(x, 32)
    assert y.dtype == dtype and torch.equal(y, hadamard(x.float(), 32).to(dtype))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 3, 64), (2, 0, 64)])
def test_shapes(shape):
    x = random(*shape)
    before = x.clone()
    assert hadamard(x, 32).shape == shape and torch.equal(x, before)
    if x.numel():
        assert torch.equal(hadamard(x, 32).view(-1, 64), hadamard(x.view(-1, 64), 32))


def test_strides_do_not_matter():
    x = random(64, 6).T
    assert not x.is_contiguous() and torch.equal(hadamard(x, 16), hadamard(x.contiguous(), 16))


def test_an_outlier_is_spread():
    x = torch.zeros(1, 64)
    x[0, 7] = 8.0
    assert hadamard(x, 64).abs().unique().tolist() == [1.0]


def test_gradients_are_rotated_back():
    x = random(2, 32, dtype=torch.float32).requires_grad_()
    upstream = torch.ones(2, 32)
    hadamard(x, 32).backward(upstream)
    assert torch.equal(x.grad, hadamard(upstream, 32))


def test_a_nan_stays_in_its_block():
    x = random(1, 64)
    x[0, 3] = torch.nan
    y = hadamard(x, 32)
    assert y[0, :32].isnan().all() and y[0, 32:].isfinite().all()


@pytest.mark.parametrize("shape", [(4, 48), (2, 16), (31,)])
def test_blocks_that_do_not_fit_are_refused(shape):
    # (4, 48) has whole blocks of 32 in all, but not in each row.
    with pytest.raises(ValueError, match=r"in blocks of 32 does not fit a tensor of shape \("):
        hadamard(torch.ones(shape), 32)
