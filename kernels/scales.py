"""Scales: from a group's largest magnitude to the stored scale, and from the stored scale to the multiplier.

All arithmetic is f32 with true division; exponents come from the bits, never from log2 (which misses powers of two). A
group whose amax is not finite gets a scale that decodes to NaN, so that the damage shows and stays in its group.
"""

import torch
from torch import Tensor

from torchq.keys import ELEMENTS, WHOLE, QuantKey, ScaleRounding

FP8_FLOOR = 1 / (448 * 512)  # smallest scale of whole-row and whole-tensor fp8
FP8_BLOCK_AMAX_FLOOR = 1e-4  # smallest amax of a static fp8 block
FP8_GROUP_AMAX_FLOOR = 1e-10  # smallest amax of a dynamic fp8 group
_E8M0_NAN = 255
_MANTISSA_BITS = 23


def stored_scale(
    amax: Tensor, key: QuantKey, rounding: ScaleRounding | None = None, global_scale: Tensor | None = None
) -> Tensor:
    """Return the scale as stored (f32, e8m0 byte or e4m3) for groups with f32 ``amax``.

    ``global_scale`` broadcasts against ``amax`` and is needed for e4m3 scales (NVFP4: e4m3(amax / 6 / global)).
    """
    element = ELEMENTS[key.element]
    if key.scale == "e8m0":
        return e8m0_from_amax(amax, key.element, rounding or key.scale_rounding)
    if key.scale == "e4m3":
        block = (amax / element.max / global_scale).clamp(max=448.0)
        return torch.where(amax.isfinite(), block, torch.nan).to(torch.float8_e4m3fn)
    if key.element == "e4m3":
        if WHOLE in key.group:
            scale = (amax / element.max).clamp(min=FP8_FLOOR)
        else:
            scale = amax.clamp(min=FP8_GROUP_AMAX_FLOOR if key.dynamic else FP8_BLOCK_AMAX_FLOOR) / element.max
    else:
        scale = amax / element.max
        scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def global_scale_from_amax(amax: Tensor) -> Tensor:
    """Return NVFP4's f32 global scale amax / (448 * 6), and 1 where that is zero (an all-zero tensor)."""
    scale = amax / (448.0 * 6.0)
    return torch.where(scale == 0, 1.0, scale)


def scale_values(stored: Tensor, key: QuantKey, global_scale: Tensor | None = None) -> Tensor:
    """Return the f32 multiplier of each group: value = code * multiplier."""
    if key.scale == "e8m0":
        return e8m0_to_float(stored)
    if key.scale == "e4m3":
        return stored.to(torch.float32) * global_scale
    return stored


def e8m0_from_amax(amax: Tensor, element: str, rounding: ScaleRounding) -> Tensor:
    """Return the E8M0 byte of groups with f32 ``amax``; 255 (NaN) exactly where amax is not finite.

    ``floor``: floor(log2 amax) - emax (OCP Microscaling text). ``ceil``: smallest power of two >= amax / max.
    ``even``: amax rounded to the element's precision (half a mantissa step added to the bits), then floor.
    """
    e = ELEMENTS[element]
    bits = amax.contiguous().view(torch.int32)
    if rounding == "floor":
        exponent = bits >> _MANTISSA_BITS
    elif rounding == "even":
        exponent = (bits + (1 << (_MANTISSA_BITS - 1 - e.mantissa_bits))) >> _MANTISSA_BITS
    else:
        # amax = m * 2^x and max = m_max * 2^emax with both m in [1, 2): one more than x - emax when m > m_max.
        max_fraction = round((e.max / 2**e.emax - 1) * (1 << _MANTISSA_BITS))
        fraction = bits & ((1 << _MANTISSA_BITS) - 1)
        exponent = (bits >> _MANTISSA_BITS) + (fraction > max_fraction).int()
    byte = (exponent - e.emax).clamp(0, _E8M0_NAN - 1)
    return torch.where(amax.isfinite(), byte, _E8M0_NAN).to(torch.uint8)


def e8m0_to_float(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) in f32 (subnormal for byte 0), NaN for 255."""
    bits = byte.to(torch.int32) << _MANTISSA_BITS
    bits = torch.where(byte == 0, 1 << (_MANTISSA_BITS - 1), bits)
    return torch.where(byte == _E8M0_NAN, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
