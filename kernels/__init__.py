"""Bytes and arithmetic: every format's torch twin, and the backends that compute the same thing faster.

Sees tensors and keys, never module names or configurations.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torchq.errors import ConfigError, did_you_mean
from torchq.kernels import ops
from torchq.kernels.ops import grouped_mm
from torchq.kernels.qtensor import QuantizedTensor
from torchq.kernels.registry import BACKENDS, announce, load, select
from torchq.kernels.scales import global_scale_from_amax
from torchq.kernels.supported import Support, supported
from torchq.kernels.twin import finite_amax
from torchq.keys import QUANT_KEYS, QuantKey, ScaleRounding

__all__ = [
    "BACKENDS",
    "QuantizedTensor",
    "Support",
    "announce",
    "decibels",
    "grouped_linear",
    "grouped_mm",
    "linear",
    "load",
    "quantize",
    "quantize_measured",
    "select",
    "shared_global_scale",
    "supported",
]


def quantize(
    x: Tensor,
    key: QuantKey | str,
    *,
    scale_rounding: ScaleRounding | None = None,
    global_scale: Tensor | None = None,
    check_finite: bool = False,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantize a float tensor (..., K) to ``key`` (a name means the weight of that name, else the activation).

    A static key takes the leading dimensions before (N, K) as separate matrices; a dynamic key takes all leading
    dimensions as rows. ``scale_rounding`` ("floor", "ceil", "even") is for power-of-two scales; the default is the
    key's. ``global_scale`` (f32) replaces the one of NVFP4. A value that is not finite makes its group NaN, or raises
    ``ValueError`` with ``check_finite``. Raises ``ConfigError`` for a tensor or option that does not fit the key.
    """
    key = _as_key(key)
    _check(x, key, scale_rounding, global_scale)
    if check_finite and not _all_finite(x):
        raise ValueError(
            f"the tensor of shape {tuple(x.shape)} has values that are not finite; clean it, or leave out "
            "check_finite to get NaN in their groups alone"
        )
    kernels = select("quantize", key, None, x.device.type, backend)
    return kernels.quantize(x.detach(), key, scale_rounding, global_scale, None)


def quantize_measured(
    x: Tensor,
    key: QuantKey,
    *,
    global_scale: Tensor | None = None,
    measure: bool = True,
    backend: str = "auto",
) -> tuple[QuantizedTensor, tuple[float, float]]:
    """Quantize, and return beside it the sums of squares of the values and of their error, for ``decibels``.

    The sums are taken while the values are at hand; without ``measure`` they are (0, 0).
    """
    _check(x, key, None, global_scale)
    error = torch.zeros(2, dtype=torch.float64, device=x.device) if measure else None
    kernels = select("quantize", key, None, x.device.type, backend)
    quantized = kernels.quantize(x.detach(), key, None, global_scale, error)
    return quantized, (0.0, 0.0) if error is None else tuple(error.tolist())


def shared_global_scale(matrices: Iterable[Tensor]) -> Tensor:
    """Return the f32 NVFP4 global scale of several matrices that a reader may fuse into one."""
    return global_scale_from_amax(torch.stack([finite_amax(m).cpu() for m in matrices]).amax())


def decibels(signal: float, noise: float) -> float:
    """Return the SQNR 10 log10(signal / noise) in dB: inf for an exact result, NaN where a sum is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def linear(
    x: Tensor,
    qweight: QuantizedTensor,
    bias: Tensor | None = None,
    activation: QuantKey | str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return ``x @ qweight.T + bias`` for x (..., K), qweight (N, K), bias (N,): shape (..., N), dtype of x.

    With ``activation``, x is quantized to that key on the way. Gradients flow to x (straight through the rounding) and
    to the bias. Raises ``ConfigError`` for shapes that do not fit, ``UnsupportedError`` when no backend can run.
    """
    if len(qweight.shape) != 2 or x.shape[-1] != qweight.shape[1]:
        raise ConfigError(
            f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(qweight.shape)}; "
            "the last dimension of x is the weight's last dimension"
        )
    if bias is not None and bias.shape != qweight.shape[:1]:
        raise ConfigError(f"bias of shape {tuple(bias.shape)} does not fit {qweight.shape[0]} output features")
    return ops.linear(x, qweight, bias, _as_activation(activation), backend)


def grouped_linear(
    x: Tensor,
    offsets: Tensor,
    qweight: QuantizedTensor,
    bias: Tensor | None = None,
    activation: QuantKey | str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return each expert's ``linear`` of its own rows: x (T, K) sorted by expert, qweight (E, N, K), bias (E, N).

    ``offsets`` (E + 1,) int64: expert e has the rows offsets[e]:offsets[e + 1]; rows of no expert give zeros. The
    result is (T, N) in the dtype of x. With ``activation``, x is quantized to that key once. Gradients flow as in
    ``linear``. Raises ``ConfigError`` for shapes that do not fit, ``UnsupportedError`` when no backend can run.
    """
    if len(qweight.shape) != 3 or x.dim() != 2 or x.shape[1] != qweight.shape[2]:
        raise ConfigError(
            f"x of shape {tuple(x.shape)} does not fit experts of shape {tuple(qweight.shape)}; give x as (T, K) and "
            "the experts as (E, N, K)"
        )
    if offsets.shape != (qweight.shape[0] + 1,):
        raise ConfigError(f"offsets of shape {tuple(offsets.shape)} do not fit {qweight.shape[0]} experts; give E + 1")
    return ops.grouped_linear(x, offsets, qweight, bias, _as_activation(activation), backend)


def _as_activation(key: QuantKey | str | None) -> QuantKey | None:
    return QuantKey.from_name(key, "activation") if isinstance(key, str) else key


def _as_key(key: QuantKey | str) -> QuantKey:
    if isinstance(key, QuantKey):
        return key
    if not isinstance(key, str) or "/" in key:
        return QuantKey.from_name(key)
    if key not in QUANT_KEYS:
        raise ConfigError(f"unknown key {key!r}{did_you_mean(key, QUANT_KEYS)}; known: {', '.join(QUANT_KEYS)}")
    return QUANT_KEYS[key]


def _check(x: Tensor, key: QuantKey, rounding: str | None, global_scale: Tensor | None) -> None:
    if not x.is_floating_point() or x.element_size() < 2:
        raise ConfigError(f"can't quantize a tensor of {x.dtype}; give float32, bfloat16 or float16 values")
    if x.dim() < (1 if key.dynamic else 2):
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has too few dimensions for {key}; give (..., N, K)")
    if rounding is not None and (key.scale != "e8m0" or rounding not in ("floor", "ceil", "even")):
        raise ConfigError(
            f"scale_rounding {rounding!r} does not go with {key}; power-of-two scales take 'floor', "
            "'ceil' or 'even', other scales none"
        )
    if global_scale is not None and key.global_scale is None:
        raise ConfigError(f"{key} has no global scale; leave out global_scale")


def _all_finite(x: Tensor) -> bool:
    # A finite sum has finite terms only, and needs no mask of x's size; a sum may overflow where no term does.
    return bool(torch.isfinite(x.sum())) or bool(x.isfinite().all())
