"""The cpu backend: native kernels on LibTorch's stable ABI, built on first use; see the folder ``cpu``.

What they can't take at run time (f64, an empty tensor) goes to the torch twin, whose numbers are the same.
"""

import functools
import logging
import math

import torch

from torchq.kernels import cpu, twin
from torchq.kernels.qtensor import QuantizedTensor
from torchq.keys import WHOLE, QuantKey, stored_shapes

logger = logging.getLogger("torchq")
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_ELEMENTS = ("e4m3", "e2m1", "int8", "int4")
_SCALES = ("f32", "e8m0", "e4m3")
_GLOBALS = (None, "tensor", "token")
_ROUNDINGS = {"floor": 0, "ceil": 1, "even": 2, None: 0}


class Kernels:
    """``level`` picks the instruction set ("scalar", "avx2", "avx512"); by default what ``cpu.load`` picks."""

    name = "cpu"

    def __init__(self, level: str | None = None):
        self._level = level

    @functools.cached_property
    def _ops(self):
        return cpu.load(self._level)

    def unusable(self, op, weight, activation, device):
        if device != "cpu":
            return "runs on CPU only"
        for key in filter(None, (weight, activation)):
            rows, columns = key.group
            if rows not in (1, WHOLE) if columns == WHOLE else rows == WHOLE or columns % 16:
                return f"has no kernel for groups of {key}"
        return self._why_not

    @functools.cached_property
    def _why_not(self) -> str | None:
        """Why the library can't be used here, said once in the log, or None when it can."""
        try:
            self._ops  # noqa: B018
        except cpu.BuildError as error:
            logger.warning("native CPU kernels are off, torch does their work with the same numbers, slower: %s", error)
            return str(error)
        return None

    def quantize(self, x, key, rounding, global_scale, error):
        if x.dtype not in _DTYPES or x.numel() == 0:
            return twin.quantize(x, key, rounding, global_scale, error)
        shapes = stored_shapes(tuple(x.shape), key)
        stored = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        data, scale, own = stored["data"], stored["scale"], stored.get("global_scale")
        if global_scale is not None:
            own.copy_(global_scale)
        rounding = rounding or key.scale_rounding
        self._ops.quantize(
            *(x.contiguous(), data, scale, own, error),
            *(*_matrices(x.shape, key), _packed(key), _ROUNDINGS[rounding], global_scale is None),
        )
        return QuantizedTensor(data, scale, own, key, x.shape, rounding)

    def dequantize(self, q, dtype):
        if dtype not in _DTYPES or q.data.numel() == 0:
            return twin.dequantize(q, dtype)
        out = torch.empty(q.shape, dtype=dtype)
        parts = (None if t is None else t.contiguous() for t in (q.data, q.scale, q.global_scale))
        self._ops.dequantize(*parts, out, *_matrices(q.shape, q.key), _packed(q.key))
        return out

    def linear(self, x, weight, bias, activation):
        if not _fits(x, weight, bias):
            return twin.linear(x, weight, bias, activation)
        rows, columns = weight.shape
        out = x.new_empty(*x.shape[:-1], rows)
        self._ops.linear(*_operands(x, weight, bias), out, rows, columns, *_packed_pair(weight.key, activation))
        return out

    def grouped_linear(self, x, offsets, weight, bias, activation):
        if not _fits(x, weight, bias):
            return twin.grouped_linear(x, offsets, weight, bias, activation)
        rows, columns = weight.shape[1:]
        out = x.new_empty(x.shape[0], rows)
        x, *parts = _operands(x, weight, bias)
        pair = _packed_pair(weight.key, activation)
        self._ops.grouped_linear(x, offsets.contiguous(), *parts, out, rows, columns, *pair)
        return out


def _fits(x, weight, bias) -> bool:
    return x.dtype in _DTYPES and x.numel() and weight.data.numel() and (bias is None or bias.dtype in _DTYPES)


def _operands(x, weight, bias):
    tensors = (x, weight.data, weight.scale, weight.global_scale, bias)
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


@functools.cache
def _packed_pair(weight: QuantKey, activation: QuantKey | None) -> tuple[int, int]:
    return _packed(weight), -1 if activation is None else _packed(activation)


@functools.cache
def _packed(key: QuantKey) -> int:
    """The key as Format::unpack reads it."""
    rows, columns = (0 if g == WHOLE else g for g in key.group)
    small = _ELEMENTS.index(key.element) | _SCALES.index(key.scale) << 2 | _GLOBALS.index(key.global_scale) << 4
    return small | key.dynamic << 6 | rows << 8 | columns << 32


def _matrices(shape: torch.Size, key: QuantKey) -> tuple[int, int, int]:
    """The tensor as (batch, rows, columns): a dynamic key sees one matrix."""
    *lead, columns = shape
    if key.dynamic:
        return 1, math.prod(lead), columns
    return math.prod(lead[:-1]), lead[-1], columns
