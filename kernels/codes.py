"""Codes: values to e4m3 / e2m1 / int8 / int4 and back, and 4-bit packing. Torch twins, exact on every device.

Rounding is to nearest, ties to even, after an explicit clamp (torch's own casts saturate or not by version).
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from torchq.keys import ELEMENTS

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_BIAS = 8


def encode(values: Tensor, element: str) -> Tensor:
    """Return the stored codes of f32 ``values`` that are already divided by their scale; NaN becomes code 0.

    ``(..., K)`` f32 to ``(..., K)`` e4m3 or int8, or to ``(..., K/2)`` uint8 for the 4-bit elements.
    """
    limit = ELEMENTS[element].max
    values = values.nan_to_num(nan=0.0).clamp_(-limit, limit)
    if element == "e4m3":
        return values.to(torch.float8_e4m3fn)
    if element == "int8":
        return values.round_().to(torch.int8)
    if element == "int4":
        return pack(values.round_().add_(INT4_BIAS).to(torch.uint8))
    return pack(_encode_e2m1(values))


def decode(codes: Tensor, element: str) -> Tensor:
    """Return the f32 values of stored codes, before the scale: the inverse of ``encode``."""
    if element == "e2m1":
        return embedding(codes.int(), _byte_table(E2M1_VALUES, codes.device)).flatten(-2)
    if element == "int4":
        return embedding(codes.int(), _byte_table(range(-8, 8), codes.device)).flatten(-2)
    return codes.to(torch.float32)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, element 2i in the low nibble and 2i + 1 in the high one: ``(..., K)`` to ``(..., K/2)``."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo ``pack``: ``(..., K/2)`` uint8 to ``(..., K)`` uint8 codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _encode_e2m1(values: Tensor) -> Tensor:
    # The grid's step is 1/2 below 2, 1 below 4 and 2 above: in units of the step, codes count on from 0, 2 and 4, and
    # rounding half to even there is rounding to the even code.
    magnitude = values.abs()
    code = torch.where(
        magnitude < 2,
        (magnitude * 2).round_(),
        torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round_() + 4),
    )
    return code.to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


def _byte_table(values, device: torch.device) -> Tensor:
    values = torch.tensor(list(values), dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)  # [256, 2]
