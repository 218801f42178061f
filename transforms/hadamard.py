"""The orthonormal Sylvester-Hadamard rotation, block by block along the last dimension."""

import math

import torch
from torch import Tensor


def hadamard(x: Tensor, size: int) -> Tensor:
    """Rotate (..., K) by H in blocks of ``size`` (a power of two that divides K), in f32, back in the dtype of ``x``.

    H has entries +-1/sqrt(size), H[i, j] = (-1)^popcount(i & j) / sqrt(size), and is its own inverse, so that
    x W^T = (x H)(W H)^T. Computed by butterflies: log2(size) passes of sums and differences.
    Raises ``ValueError`` where ``size`` does not divide K.
    """
    if x.shape[-1] % size:
        raise ValueError(f"a Hadamard rotation in blocks of {size} does not fit a tensor of shape {tuple(x.shape)}")
    y = x.float().reshape(math.prod(x.shape) // size, size)  # all blocks of all rows; torch.compile traces fixed widths
    span = 1
    while span < size:
        low, high = y.view(-1, size // (2 * span), 2, span).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2)
        span *= 2
    return (y / math.sqrt(size)).view(x.shape).to(x.dtype)
