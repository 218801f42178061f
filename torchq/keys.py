"""QuantKey, what a quantized tensor is made of, and QUANT_KEYS, the one table of formats.

This file and ``errors.py`` are the vocabulary that every room shares; they import nothing else of torchq.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from torchq.errors import ConfigError, did_you_mean

Role = Literal["weight", "activation"]
ScaleRounding = Literal["floor", "ceil", "even"]
WHOLE = -1  # a group extent that covers the whole dimension


@dataclass(frozen=True)
class Element:
    """A code: how many bits, the largest magnitude, and the dtype it is stored in (two 4-bit codes share a byte)."""

    name: str
    bits: int
    max: float
    dtype: torch.dtype
    emax: int = 0  # exponent of the largest power of two (float elements)
    mantissa_bits: int = 0  # explicit mantissa bits (float elements)

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        e.name: e
        for e in (
            Element("e4m3", 8, 448.0, torch.float8_e4m3fn, emax=8, mantissa_bits=3),
            Element("e2m1", 4, 6.0, torch.uint8, emax=2, mantissa_bits=1),
            Element("int8", 8, 127.0, torch.int8),
            Element("int4", 4, 7.0, torch.uint8),
        )
    }
)
SCALE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
)
_GLOBALS = ("tensor", "token")


@dataclass(frozen=True)
class QuantKey:
    """What a quantized tensor is made of: element, scale, group, global scale, and when its scales are computed.

    ``group`` is (rows, columns) that share one scale, ``WHOLE`` for a whole dimension. ``global_scale`` is a second,
    f32 scale: one for the whole ``"tensor"`` or one per ``"token"``. ``dynamic``: scales are computed at run time.
    Raises ``ConfigError`` for parts that are not known or do not go together.
    """

    element: str
    scale: str
    group: tuple[int, int]
    global_scale: str | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        for field, value, known in (("element", self.element, ELEMENTS), ("scale", self.scale, SCALE_DTYPES)):
            if value not in known:
                raise ConfigError(f"QuantKey {field} {value!r} is not known; known: {', '.join(known)}")
        if self.global_scale is not None and self.global_scale not in _GLOBALS:
            raise ConfigError(
                f"QuantKey global_scale {self.global_scale!r} is not known; known: None, 'tensor', 'token'"
            )
        group = tuple(self.group)
        if len(group) != 2 or any(type(g) is not int or (g < 1 and g != WHOLE) for g in group):
            raise ConfigError(f"QuantKey group {self.group!r} is not a pair of positive sizes (or {WHOLE} for all)")
        if WHOLE in group and group not in ((1, WHOLE), (WHOLE, WHOLE)):
            raise ConfigError(
                f"QuantKey group {self.group!r} is not known; a row is (1, {WHOLE}), a matrix ({WHOLE}, {WHOLE})"
            )
        if self.element == "e2m1" and self.scale == "f32":
            raise ConfigError("QuantKey e2m1 goes with an e8m0 or e4m3 scale, not f32")
        if self.element.startswith("int") and self.scale != "f32":
            raise ConfigError(f"QuantKey {self.element} goes with an f32 scale, not {self.scale}")
        if self.scale == "e8m0" and (self.global_scale or WHOLE in group):
            raise ConfigError("QuantKey with an e8m0 scale has groups of fixed size and no global scale")
        if self.scale == "e4m3" and (self.element != "e2m1" or self.global_scale is None or WHOLE in group):
            raise ConfigError("QuantKey with an e4m3 scale has e2m1 elements, groups of fixed size and a global scale")
        if self.scale == "f32" and self.global_scale:
            raise ConfigError("QuantKey with an f32 scale has no global scale")
        if self.bits == 4 and (group[1] == WHOLE or group[1] % 2):
            raise ConfigError("QuantKey with 4-bit codes packs pairs: its group has an even number of columns")
        object.__setattr__(self, "group", group)

    @property
    def bits(self) -> int:
        return ELEMENTS[self.element].bits

    @property
    def scale_rounding(self) -> ScaleRounding | None:
        """The default rule for a power-of-two scale, as vLLM computes it; None for the other scales."""
        return None if self.scale != "e8m0" else "even" if self.element == "e2m1" else "ceil"

    @property
    def column_multiple(self) -> int:
        """Stored columns are padded with zeros to a multiple of this: MX and 4-bit groups are kept whole."""
        return self.group[1] if self.bits == 4 or self.scale == "e8m0" else 1

    def as_role(self, role: Role) -> "QuantKey":
        """The same format as a weight (static scales) or as an activation (scales computed at run time)."""
        return replace(self, dynamic=role == "activation")

    def __str__(self) -> str:
        return _NAMES.get(self) or self.spelled_out()

    def spelled_out(self) -> str:
        """The parts, as ``from_name`` reads them: ``e4m3/f32/1x64/dynamic``, ``e2m1/e4m3/1x16/tensor/static``."""
        group = "x".join("*" if g == WHOLE else str(g) for g in self.group)
        parts = [self.element, self.scale, group, self.global_scale, "dynamic" if self.dynamic else "static"]
        return "/".join(p for p in parts if p)

    @classmethod
    def from_name(cls, name: str, role: Role = "weight") -> "QuantKey":
        """Read a key from its name in the role it plays (``mxfp4`` is static as weight, dynamic as activation).

        Also reads the spelled-out form of a key without a name. Raises ``ConfigError``, naming the nearest names.
        """
        if role not in ("weight", "activation"):
            raise ConfigError(f"role {role!r} is not known; say 'weight' or 'activation'")
        if not isinstance(name, str):
            raise ConfigError(f"the {role} key is a name, a QuantKey or null, not {name!r}")
        if "/" in name:
            return _parse_spelled_out(name)
        names = key_names(role)
        if name in names:
            return _KEYS_BY_ROLE[role][name]
        if name in QUANT_KEYS:
            hint = " only as an activation" if role == "weight" else " only as a weight"
            raise ConfigError(f"{name!r} exists{hint}; supported {role} keys: {', '.join(names)}")
        raise ConfigError(
            f"unknown {role} key {name!r}{did_you_mean(name, names)}; supported {role} keys: {', '.join(names)}"
        )


def _parse_spelled_out(text: str) -> QuantKey:
    parts = text.split("/")
    try:
        element, scale, group, *rest = parts
        *global_scale, when = rest
        rows, columns = (WHOLE if g == "*" else int(g) for g in group.split("x"))
        if when not in ("static", "dynamic") or len(global_scale) > 1:
            raise ValueError(when)
    except ValueError:
        raise ConfigError(
            f"quantization key {text!r} can't be read; write element/scale/rowsxcolumns[/global]/static|dynamic, "
            "for example 'e4m3/f32/1x64/dynamic'"
        ) from None
    if when == "dynamic" and rows > 1:
        raise ConfigError(f"quantization key {text!r} shares scales among {rows} tokens; write 1x{columns} or *x*")
    return QuantKey(element, scale, (rows, columns), *(global_scale or [None]), dynamic=when == "dynamic")


# name, element, scale, group, global scale, then what the name means as weight and as activation ("" for nothing)
_TABLE = (
    ("fp8_per_tensor_static", "e4m3", "f32", (WHOLE, WHOLE), None, "static", "static"),
    ("fp8_per_tensor_dynamic", "e4m3", "f32", (WHOLE, WHOLE), None, "", "dynamic"),
    ("fp8_per_token", "e4m3", "f32", (1, WHOLE), None, "", "dynamic"),
    ("fp8_per_channel_static", "e4m3", "f32", (1, WHOLE), None, "static", ""),
    ("fp8_per_block_static", "e4m3", "f32", (128, 128), None, "static", ""),
    ("fp8_per_block_dynamic", "e4m3", "f32", (1, 128), None, "", "dynamic"),
    ("mxfp8", "e4m3", "e8m0", (1, 32), None, "static", "dynamic"),
    ("mxfp4", "e2m1", "e8m0", (1, 32), None, "static", "dynamic"),
    ("nvfp4", "e2m1", "e4m3", (1, 16), "tensor", "static", "dynamic"),
    ("nvfp4_per_token", "e2m1", "e4m3", (1, 16), "token", "", "dynamic"),
    ("int8_per_channel_static", "int8", "f32", (1, WHOLE), None, "static", ""),
    ("int8_per_token", "int8", "f32", (1, WHOLE), None, "", "dynamic"),
    ("int8_per_group_32", "int8", "f32", (1, 32), None, "", "dynamic"),
    ("int4_per_group_32", "int4", "f32", (1, 32), None, "static", ""),
)
_KEYS_BY_ROLE: dict[Role, dict[str, QuantKey]] = {"weight": {}, "activation": {}}
for _name, *_parts, _as_weight, _as_activation in _TABLE:
    for _role, _when in (("weight", _as_weight), ("activation", _as_activation)):
        if _when:
            _KEYS_BY_ROLE[_role][_name] = QuantKey(*_parts, dynamic=_when == "dynamic")

# Every name with its key as a weight, where it can be one, else as an activation.
QUANT_KEYS: Mapping[str, QuantKey] = MappingProxyType(
    {row[0]: next(keys[row[0]] for keys in _KEYS_BY_ROLE.values() if row[0] in keys) for row in _TABLE}
)
_NAMES = {key: name for keys in _KEYS_BY_ROLE.values() for name, key in keys.items()}


# The activation that a weight key takes when the user wrote none; the same for linear layers and experts.
DEFAULT_ACTIVATION: Mapping[QuantKey, QuantKey | None] = MappingProxyType(
    {
        _KEYS_BY_ROLE["weight"][weight]: _KEYS_BY_ROLE["activation"].get(activation)
        for weight, activation in (
            ("fp8_per_tensor_static", "fp8_per_token"),
            ("fp8_per_channel_static", "fp8_per_token"),
            ("fp8_per_block_static", "fp8_per_block_dynamic"),
            ("mxfp8", "mxfp8"),
            ("mxfp4", "mxfp4"),
            ("nvfp4", "nvfp4"),
            ("int8_per_channel_static", "int8_per_token"),
            ("int4_per_group_32", None),
        )
    }
)


def key_names(role: Role) -> tuple[str, ...]:
    """The key names that can play the role, in the table's order."""
    return tuple(_KEYS_BY_ROLE[role])


def stored_shapes(shape: tuple[int, ...], key: QuantKey) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of ``data``, ``scale`` and (where the key has one) ``global_scale`` for a tensor of ``shape``.

    The last dimension is K. A static key takes the dimensions before (N, K) as a batch of matrices (experts), each with
    its own whole-tensor scales; a dynamic key takes all leading dimensions as the rows of one matrix.
    """
    *lead, columns = shape
    batch, rows = ([], lead) if key.dynamic else (lead[:-1], lead[-1:])
    padded = math.ceil(columns / key.column_multiple) * key.column_multiple
    element = ELEMENTS[key.element]
    group_rows, group_columns = key.group
    if group_rows == WHOLE:
        scale_rows, scale_columns = [], []
    else:
        scale_rows = rows if group_rows == 1 else [math.ceil(rows[0] / group_rows)]
        scale_columns = [1] if group_columns == WHOLE else [math.ceil(padded / group_columns)]
    shapes = {
        "data": ((*lead, padded // element.per_byte), element.dtype),
        "scale": ((*batch, *scale_rows, *scale_columns), SCALE_DTYPES[key.scale]),
    }
    if key.global_scale:
        shapes["global_scale"] = ((*lead, 1) if key.global_scale == "token" else tuple(batch), torch.float32)
    return shapes


def stored_nbytes(shape: tuple[int, ...], key: QuantKey) -> int:
    """Bytes of codes and scales together for a tensor of ``shape``."""
    return sum(math.prod(stored) * dtype.itemsize for stored, dtype in stored_shapes(shape, key).values())
