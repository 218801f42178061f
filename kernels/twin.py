"""The torch twin of every format: quantize, dequantize, linear. What every faster kernel must equal.

Work goes tile by tile, so that the transient memory is a few tiles of ``TILE`` f32 values whatever the tensor's size.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchq.kernels.codes import decode, encode
from torchq.kernels.qtensor import QuantizedTensor
from torchq.kernels.scales import global_scale_from_amax, scale_values, stored_scale
from torchq.keys import WHOLE, QuantKey, ScaleRounding, stored_shapes

TILE = 1 << 20  # values in a tile: 4 MB in f32, and at most ten such temporaries live at once


def quantize(
    x: Tensor,
    key: QuantKey,
    rounding: ScaleRounding | None = None,
    global_scale: Tensor | None = None,
    error: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize ``x`` (..., K), any float dtype, any strides.

    ``global_scale`` replaces the tensor-wide scale that would be computed from ``x`` (shards that share one).
    ``error``, a f64 tensor of two, gets the sums of squares of the values and of what quantization changed.
    """
    rounding = rounding or key.scale_rounding
    stored = {
        name: torch.empty(s, dtype=d, device=x.device) for name, (s, d) in stored_shapes(tuple(x.shape), key).items()
    }
    if global_scale is not None:
        stored["global_scale"].copy_(global_scale)
    out = QuantizedTensor(stored["data"], stored["scale"], stored.get("global_scale"), key, x.shape, rounding)
    if out.data.numel() == 0:
        return _quantize_empty(out, global_scale is None)
    for matrix, target in zip(_matrices(x, key), _target_matrices(out), strict=True):
        _quantize_matrix(matrix, target, rounding, global_scale is None, error)
    return out


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return code * scale in f32, rounded once to ``dtype``; shape ``q.shape``."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if out.numel():
        for target, matrix in zip(_target_matrices(q), _matrices(out, q.key), strict=True):
            for start, stop, values in dequantized_rows(target):
                matrix[start:stop] = values
    return out


def dequantized_rows(q: QuantizedTensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, f32 values) over the rows of a matrix, a tile at a time."""
    rows, columns = q.shape
    step = _row_step(q.key, columns)
    fitting = max(1, TILE // max(1, columns))
    if fitting < q.key.group[0]:  # a tile is part of a group's rows, which all have the same scales
        step = math.gcd(q.key.group[0], 1 << fitting.bit_length() - 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start, stop, _dequantize_tile(q.rows(start, stop))


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, activation: QuantKey | None) -> Tensor:
    """Return ``x @ weight.T + bias``: exact dequantized values, f32 accumulation, one rounding to ``x.dtype``.

    x (..., K), weight (N, K), result (..., N). With ``activation`` x is quantized to that key first.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [M, K]
    rows = rows.to(dtype) if activation is None else dequantize(quantize(rows, activation), dtype)
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=x.device)  # [M, N]
    with no_autocast(x.device.type):
        for start, stop, values in dequantized_rows(weight):
            out[:, start:stop] = rows @ values.to(dtype).T
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def no_autocast(device: str) -> AbstractContextManager:
    """Keep a product in the dtype of its factors: autocast would round both to 16 bits first."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def grouped_linear(
    x: Tensor, offsets: Tensor, weight: QuantizedTensor, bias: Tensor | None, activation: QuantKey | None
) -> Tensor:
    """Apply each expert's linear to its own rows of ``x``; see ``linear`` for the arithmetic.

    x (T, K) sorted by expert, offsets (E + 1,) int64: expert e has rows offsets[e]:offsets[e + 1]; weight (E, N, K),
    bias (E, N) or None; result (T, N) in x's dtype. Rows outside every expert's range give zeros.
    """
    rows = x if activation is None else dequantize(quantize(x, activation))
    out = x.new_zeros(x.shape[0], weight.shape[1])  # [T, N]
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > start:
            expert_bias = None if bias is None else bias[expert]
            out[start:stop] = linear(rows[start:stop], weight[expert], expert_bias, None)
    return out


def _quantize_matrix(x: Tensor, out: QuantizedTensor, rounding, own_global: bool, error: Tensor | None) -> None:
    key = out.key
    row_scale, whole_scale = key.group[1] == WHOLE, key.group[0] == WHOLE
    if whole_scale:
        out.scale.copy_(stored_scale(_amax(x, per_row=False), key))
    if key.global_scale and own_global:
        # Of finite values only: a NaN stays in its own block.
        out.global_scale.copy_(global_scale_from_amax(finite_amax(x, per_row=key.global_scale == "token")))
    step = _row_step(key, x.shape[1])
    for start in range(0, x.shape[0], step):
        tile = out.rows(start, min(start + step, x.shape[0]))
        values = x[start : start + step]
        if row_scale and not whole_scale:
            tile.scale.copy_(stored_scale(_amax(values, per_row=True), key))
        for first, last in _column_steps(key, x.shape[1], values.shape[0]):
            _quantize_tile(values[:, first:last].float(), tile, first, rounding, error)


def _quantize_tile(x: Tensor, out: QuantizedTensor, first: int, rounding, error: Tensor | None) -> None:
    key, (rows, columns) = out.key, x.shape
    group_rows, group_columns = key.group
    width = math.ceil(columns / key.column_multiple) * key.column_multiple
    x = pad(x, (0, width - columns)) if width > columns else x
    if group_columns == WHOLE:
        multiplier = scale_values(out.scale, key)
    else:
        blocks = _blocks(x, group_rows, group_columns)
        scale = stored_scale(blocks.abs().amax((1, 3)), key, rounding, out.global_scale)
        out.scale[:, first // group_columns : first // group_columns + scale.shape[1]] = scale
        multiplier = _spread(scale_values(scale, key, out.global_scale), key, rows, width)
    # A zero or NaN multiplier has no codes: dividing by NaN gives NaN, which encodes to 0.
    codes = encode(x / torch.where(multiplier > 0, multiplier, torch.nan), key.element)
    per_byte = x.shape[1] // codes.shape[1]
    out.data[:, first // per_byte : first // per_byte + codes.shape[1]] = codes
    if error is not None:
        error[0] += x.square().sum(dtype=torch.float64)
        error[1] += (decode(codes, key.element) * multiplier - x).square_().sum(dtype=torch.float64)


def _dequantize_tile(q: QuantizedTensor) -> Tensor:
    rows, columns = q.shape
    values = decode(q.data, q.key.element)
    multiplier = scale_values(q.scale, q.key, q.global_scale)
    if q.key.group[1] != WHOLE:
        multiplier = _spread(multiplier, q.key, rows, values.shape[1])
    return (values * multiplier)[:, :columns]


def finite_amax(x: Tensor, per_row: bool = False) -> Tensor:
    """Return the f32 largest magnitude among the finite values of a matrix, or of each row as (N, 1)."""
    return _amax(x, per_row, finite=True)


def _amax(x: Tensor, per_row: bool, finite: bool = False) -> Tensor:
    rows = []
    step = max(1, TILE // x.shape[1])
    for start in range(0, x.shape[0], step):
        parts = []
        for first in range(0, x.shape[1], TILE):
            part = x[start : start + step, first : first + TILE].abs()
            if finite:
                part = part.float()  # first: a f64 value may be finite here and infinite in f32
                part = torch.where(part.isfinite(), part, 0)
            parts.append(part.amax(1, keepdim=True))
        rows.append(torch.cat(parts, 1).amax(1, keepdim=True).float())
    amax = torch.cat(rows)
    return amax if per_row else amax.amax()


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    x = pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _spread(multiplier: Tensor, key: QuantKey, rows: int, columns: int) -> Tensor:
    spread = multiplier.repeat_interleave(key.group[1], 1)[:, :columns]
    return spread if key.group[0] == 1 else spread.repeat_interleave(min(key.group[0], rows), 0)[:rows]


def _row_step(key: QuantKey, columns: int) -> int:
    unit = max(1, key.group[0])
    return max(unit, TILE // max(1, columns) // unit * unit)


def _column_steps(key: QuantKey, columns: int, rows: int) -> Iterator[tuple[int, int]]:
    unit = max(key.group[1], key.column_multiple, 2)
    rows = math.ceil(rows / max(1, key.group[0])) * max(1, key.group[0])  # a part of a block is padded to a whole one
    step = max(unit, TILE // rows // unit * unit)
    for first in range(0, columns, step):
        yield first, min(first + step, columns)


def _matrices(x: Tensor, key: QuantKey) -> Iterator[Tensor]:
    if key.dynamic:
        yield x.reshape(-1, x.shape[-1])
    elif x.dim() == 2:
        yield x
    else:
        for part in x:
            yield from _matrices(part, key)


def _target_matrices(q: QuantizedTensor) -> Iterator[QuantizedTensor]:
    if q.key.dynamic:
        rows = math.prod(q.shape[:-1])

        def flat(t):
            return t if t is None or t.dim() == 0 else t.view(rows, t.shape[-1])

        shape = torch.Size((rows, q.shape[-1]))
        yield QuantizedTensor(flat(q.data), flat(q.scale), flat(q.global_scale), q.key, shape, q.scale_rounding)
    elif len(q.shape) == 2:
        yield q
    else:
        for i in range(q.shape[0]):
            yield from _target_matrices(q[i])


def _quantize_empty(out: QuantizedTensor, own_global: bool) -> QuantizedTensor:
    amax = torch.zeros((), device=out.device)
    if out.key.global_scale and own_global:
        out.global_scale.copy_(global_scale_from_amax(amax))
    if out.key.scale == "f32":
        out.scale.copy_(stored_scale(amax, out.key))
    return out
