"""QuantSpec, what the user asks of one layer, and the tables that fill it in: shorthands and default activations."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from torchq.errors import ConfigError, did_you_mean
from torchq.keys import DEFAULT_ACTIVATION, QUANT_KEYS, QuantKey, Role, key_names

Kind = Literal["linear", "moe"]
KINDS: tuple[Kind, ...] = ("linear", "moe")


class Unset:
    """The type of ``UNSET``: a field that the user did not write. Unlike null, it leaves the choice to the format."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # pickle and copy look the name up here, so there is only ever one


UNSET: Final = Unset()


@dataclass(frozen=True, repr=False)
class QuantSpec:
    """What the user asks of one layer: a weight key, an activation key and a Hadamard block size.

    ``weight`` and ``activation`` are a name, a ``QuantKey`` or None; ``hadamard_size`` is an int or None.
    ``fields_set`` holds the names that were given: without ``activation`` the weight key's default applies, while an
    explicit None means 16-bit activations; the two are not equal. ``str(spec)`` is compact JSON of the fields given.
    Raises ``ConfigError`` for unknown names, a name in the wrong role, and a size that is no power of two.
    """

    # An absent weight or hadamard_size reads as None: only a merge has to know it from null, by fields_set.
    weight: QuantKey | str | Unset | None = UNSET
    activation: QuantKey | str | Unset | None = UNSET
    hadamard_size: int | Unset | None = UNSET
    fields_set: frozenset[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        written = {name: value for name in _FIELDS if (value := getattr(self, name)) is not UNSET}
        put = object.__setattr__
        put(self, "fields_set", frozenset(written))
        put(self, "weight", _parse_key(written.get("weight"), "weight"))
        if "activation" in written:
            put(self, "activation", _parse_key(self.activation, "activation"))
        put(self, "hadamard_size", _check_hadamard_size(written.get("hadamard_size")))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "QuantSpec":
        """Read a spec from its JSON form. Raises ``ConfigError``, naming the nearest field for one that is unknown."""
        check_fields(fields, _FIELDS, "QuantSpec")
        return cls(**fields)

    def to_dict(self) -> dict[str, str | int | None]:
        """The fields that were given, keys by name: the form that ``from_dict`` reads."""
        written = {name: getattr(self, name) for name in _FIELDS if name in self.fields_set}
        return {name: str(value) if isinstance(value, QuantKey) else value for name, value in written.items()}

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def __repr__(self) -> str:
        return f"QuantSpec({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


_FIELDS = ("weight", "activation", "hadamard_size")


def check_fields(fields: Any, known: Iterable[str], owner: str) -> None:
    """Raise ``ConfigError`` unless ``fields`` is a mapping with no keys but the ``known`` fields of ``owner``."""
    listed = ", ".join(known)
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{owner} is a dict with the fields {listed}, not {fields!r}")
    for name in fields:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ConfigError(f"{owner} has no field {name!r}{hint}; its fields are {listed}")


def _parse_key(value: Any, role: Role) -> QuantKey | None:
    if value is None:
        return None
    names = key_names(role)
    if isinstance(value, str) and value not in names and (value in SHORTHANDS or value in QUANT_KEYS):
        raise _wrong_role(value, role)
    key = value if isinstance(value, QuantKey) else QuantKey.from_name(value, role)
    # A name that plays both roles (mxfp4) means the role's key, also where it comes as an object out of QUANT_KEYS.
    if str(key) not in names and str(key) in QUANT_KEYS:
        raise _wrong_role(str(key), role)
    return QuantKey.from_name(str(key), role)


def _wrong_role(name: str, role: Role) -> ConfigError:
    text = f"{role} {name!r} is not supported; supported {role} keys: {', '.join(key_names(role))}"
    if name in SHORTHANDS:
        text += f"; the shorthand {name!r}, spelled out, is {spelled_out(name)}"
    elif (other := str(QUANT_KEYS[name].as_role(role))) in key_names(role):
        text += f"; the {role} key nearest to it is {other!r}"
    else:
        text += did_you_mean(name, key_names(role), count=1)
    return ConfigError(text)


def _check_hadamard_size(size: Any) -> int | None:
    if size is not None and (type(size) is not int or size < 2 or size & (size - 1)):
        raise ConfigError(f"hadamard_size {size!r} is not a power of two (2, 4, 8, ...); null turns the rotation off")
    return size


class Shorthand(NamedTuple):
    """A name for a pair of specs, one for each kind of layer; None where the shorthand leaves that kind alone.

    ``activation`` is the default activation that the name stands for, ``UNSET`` where it is the weight key's own.
    """

    linear: QuantSpec | None
    moe: QuantSpec | None
    activation: QuantKey | Unset | None = UNSET


SHORTHANDS: Mapping[str, Shorthand] = MappingProxyType(
    {
        **{
            name: Shorthand(QuantSpec(weight=weight), QuantSpec(weight=weight))
            for name, weight in (
                ("fp8_per_tensor", "fp8_per_tensor_static"),
                ("fp8_per_block", "fp8_per_block_static"),
                ("fp8_per_channel", "fp8_per_channel_static"),
                ("mxfp8", "mxfp8"),
                ("mxfp4", "mxfp4"),
                ("nvfp4", "nvfp4"),
                ("int8_per_channel", "int8_per_channel_static"),
                ("int4_per_group_32", "int4_per_group_32"),
            )
        },
        "int8_per_channel_weight_only": Shorthand(None, QuantSpec(weight="int8_per_channel_static"), None),
        "nvfp4_per_token": Shorthand(
            None, QuantSpec(weight="nvfp4"), QuantKey.from_name("nvfp4_per_token", "activation")
        ),
    }
)


def spelled_out(shorthand: str) -> QuantSpec:
    """The spec that a shorthand stands for, its own default activation written out."""
    linear, moe, activation = SHORTHANDS[shorthand]
    return QuantSpec(weight=(linear or moe).weight, activation=activation)


def parse_value(value: Any, kind: Kind | None = None) -> str | QuantSpec:
    """Read the value of ``linear`` or ``moe`` (``kind``) or of a target (no kind): a name or a ``QuantSpec``.

    A name is a shorthand, else a weight key, and stays a name, since that is its label. Raises ``ConfigError`` for
    unknown names and fields, for a shorthand without a spec for ``kind``, and for values of another type.
    """
    if isinstance(value, QuantSpec):
        return value
    if isinstance(value, QuantKey):
        return QuantSpec(weight=value)
    if isinstance(value, Mapping):
        return QuantSpec.from_dict(value)
    if not isinstance(value, str):
        raise ConfigError(f'{value!r} is neither a name nor a spec; type a name or {{"weight": "mxfp4"}}')
    if value in SHORTHANDS:
        if kind and getattr(SHORTHANDS[value], kind) is None:
            raise ConfigError(f"shorthand {value!r} does not define a {kind} spec; type {spelled_out(value)}")
    elif value in QUANT_KEYS or "/" in value:
        QuantSpec(weight=value)
    else:
        raise unknown_name(value)
    return value


def unknown_name(name: str) -> ConfigError:
    """The error for a name that is neither a shorthand nor a weight key; it lists those that are."""
    if name == "online":
        return ConfigError("'online' is only a value of --quantization: it means that quantization_config says it all")
    keys = [key for key in key_names("weight") if key not in SHORTHANDS]
    return ConfigError(
        f"unknown quantization name {name!r}{did_you_mean(name, [*SHORTHANDS, *keys])}; "
        f"shorthands: {', '.join(SHORTHANDS)}; weight keys: {', '.join(keys)}"
    )


class Meaning(NamedTuple):
    """What a value asks of a layer, defaults filled in: values with the same meaning quantize a layer the same way."""

    weight: QuantKey | None
    activation: QuantKey | None
    activation_explicit: bool
    hadamard_size: int | None


@cache
def meaning(value: str | QuantSpec, kind: Kind) -> Meaning | None:
    """The meaning of a parsed value for one kind of layer; None for a shorthand that has no spec for that kind."""
    default: QuantKey | Unset | None = UNSET
    if isinstance(value, QuantSpec):
        spec: QuantSpec | None = value
    elif value in SHORTHANDS:
        spec, default = getattr(SHORTHANDS[value], kind), SHORTHANDS[value].activation
    else:
        spec = QuantSpec(weight=value)
    if spec is None:
        return None
    explicit = spec.activation is not UNSET
    if explicit:
        default = spec.activation
    elif default is UNSET:
        default = DEFAULT_ACTIVATION.get(spec.weight)
    return Meaning(spec.weight, default, explicit, spec.hadamard_size)


def meanings(value: str | QuantSpec) -> tuple[Meaning, Meaning]:
    """The meaning for linear layers and for experts; a shorthand with a spec for one of them counts for both."""
    linear, moe = (meaning(value, kind) for kind in KINDS)
    return (linear or moe, moe or linear)
