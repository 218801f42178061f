"""The orthonormal Sylvester-Hadamard rotation, block by block along the last dimension."""

import math

import torch
from torch import Tensor


def hadamard(x: Tensor, size: int) -> Tensor:
    """Rotate (..., K) by H in blocks of ``size`` (a power of two that divides K), in f32, back in the dtype of ``x``.

    H has entries +-1/sqrt(size), H[i, j] = (-1)^popcount(i & j) / sqrt(size), and is its own inverse, so that
    x W^T = (x H)(W H)^T. Computed by butterflies: log2(size) passes of sums and differences.
    """
    y = x.float().unflatten(-1, (-1, size))  # [..., K/size, size]
    span = 1
    while span < size:
        low, high = y.unflatten(-1, (-1, 2, span)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        span *= 2
    return (y / math.sqrt(size)).flatten(-2).to(x.dtype)
