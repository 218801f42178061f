"""QuantizationConfig, what the user wants of a whole model: parse, validate, merge and serialise."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchq.errors import ConfigError
from torchq.keys import QUANT_KEYS
from torchq.matching import pattern_set
from torchq.spec import KINDS, SHORTHANDS, UNSET, Kind, QuantSpec, check_fields, parse_value, spelled_out

_FIELDS = ("linear", "moe", "targets", "ignore")


@dataclass(frozen=True)
class QuantizationConfig:
    """A spec for all linear layers and all experts, or one for each pattern of names; and the layers to leave alone.

    ``linear`` and ``moe`` are a ``QuantSpec``, dict, ``QuantKey``, name or None; ``targets`` maps patterns to such
    values and excludes both; ``ignore`` lists patterns (a bare string counts as one). Names stay as given, since they
    are labels. Immutable; compares by value, pickles and copies.
    Raises ``ConfigError`` for unknown names and fields, patterns that don't compile, and targets beside linear or moe.
    """

    linear: QuantSpec | str | None = None
    moe: QuantSpec | str | None = None
    targets: Mapping[str, QuantSpec | str] | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        for kind in KINDS:
            if getattr(self, kind) is not None:
                with _inside(f"quantization_config.{kind}"):
                    put(self, kind, parse_value(getattr(self, kind), kind))
        put(self, "targets", _parse_targets(self.targets))
        put(self, "ignore", _parse_ignore(self.ignore))
        if self.targets is not None and (self.linear is not None or self.moe is not None):
            raise ConfigError(
                "quantization_config.targets is mutually exclusive with quantization_config.linear and .moe, got "
                f"{_dump(self.to_dict())}; write the linear and moe specs as targets ('*': ...), or leave targets out"
            )

    def __hash__(self) -> int:
        targets = None if self.targets is None else frozenset(self.targets.items())
        return hash((self.linear, self.moe, targets, self.ignore))

    def __reduce__(self) -> tuple:
        return QuantizationConfig.from_dict, (self.to_dict(),)  # a mappingproxy can't be pickled

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "QuantizationConfig":
        """Read a config from its JSON form. Raises ``ConfigError``; for an unknown field it names the nearest one."""
        check_fields(fields, _FIELDS, "quantization_config")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that ``from_dict`` reads: only what was given, so that unset and null stay apart."""
        fields = {kind: _plain(getattr(self, kind)) for kind in KINDS if getattr(self, kind) is not None}
        if self.targets is not None:
            fields["targets"] = {pattern: _plain(value) for pattern, value in self.targets.items()}
        if self.ignore:
            fields["ignore"] = list(self.ignore)
        return fields


@contextmanager
def _inside(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _plain(value: QuantSpec | str) -> dict[str, Any] | str:
    return value if isinstance(value, str) else value.to_dict()


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _parse_targets(targets: Any) -> Mapping[str, QuantSpec | str] | None:
    if targets is None:
        return None
    if not isinstance(targets, Mapping):
        raise ConfigError(
            f'quantization_config.targets is a dict like {{"*experts*": "mxfp4"}}, not {targets!r}; a spec for all '
            "layers goes to linear and moe"
        )
    with _inside("quantization_config.targets"):
        pattern_set(targets)
    parsed = {}
    for pattern, value in targets.items():
        with _inside(f"quantization_config.targets[{pattern!r}]"):
            if value is None:
                raise ConfigError('null is not a spec; to leave layers alone type ignore, or {"weight": null}')
            parsed[pattern] = parse_value(value)
    return MappingProxyType(parsed)


def _parse_ignore(ignore: Any) -> tuple[str, ...]:
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    if not isinstance(patterns, (list, tuple)):
        raise ConfigError(f'quantization_config.ignore is a list of patterns like ["lm_head"], not {ignore!r}')
    with _inside("quantization_config.ignore"):
        pattern_set(patterns)
    return tuple(patterns)


def as_config(config: Any) -> QuantizationConfig:
    """Read what ``quantize_`` accepts: a shorthand or weight key name, a dict, its JSON, or a ``QuantizationConfig``.

    A name is the spec of linear layers and experts, a shorthand of those kinds that it has a spec for.
    Raises ``ConfigError`` for anything else.
    """
    if isinstance(config, QuantizationConfig):
        return config
    if isinstance(config, Mapping):
        return QuantizationConfig.from_dict(config)
    if not isinstance(config, str):
        raise ConfigError(
            f"config is a name, a dict or a QuantizationConfig, not {config!r}; a spec goes to "
            "QuantizationConfig(linear=..., moe=...)"
        )
    if config.lstrip().startswith("{"):
        return _from_json(config)
    parse_value(config)
    kinds = [k for k in KINDS if config not in SHORTHANDS or getattr(SHORTHANDS[config], k) is not None]
    return QuantizationConfig(**dict.fromkeys(kinds, config))


def _from_json(text: str) -> QuantizationConfig:
    try:
        fields = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        hint = "; a name goes to quantization" if text in SHORTHANDS or text in QUANT_KEYS else ""
        raise ConfigError(f"quantization_config {text!r} is not JSON: {error}{hint}") from None
    return QuantizationConfig.from_dict(fields)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"quantization_config holds {twice!r} twice in one object; keep one of them")
    return fields


def resolve_config(quantization: str | None, quantization_config: Any) -> QuantizationConfig | None:
    """Merge ``--quantization`` (name, "online" or None) with ``--quantization-config`` (config, dict, JSON or None).

    The name is the base, and each spec field that the config gives replaces the name's. A spec given as a name replaces
    the whole spec, and null leaves it. None for both gives None. Raises ``ConfigError`` as ``QuantizationConfig`` does,
    for a name together with targets, and for ``"online"`` without a config.
    """
    config = None
    if quantization_config is not None:
        config = (
            _from_json(quantization_config) if isinstance(quantization_config, str) else as_config(quantization_config)
        )
    if quantization is None:
        return config
    if quantization == "online":
        if config is None:
            raise ConfigError("quantization 'online' reads quantization_config, and there is none; type one, or a name")
        return config
    if not isinstance(quantization, str) or quantization.lstrip().startswith("{"):
        raise ConfigError(
            f"quantization is a name or 'online', not {quantization!r}; a config goes to quantization_config"
        )
    with _inside("quantization"):
        base = as_config(quantization)
    if config is None:
        return base
    if config.targets is not None:
        raise ConfigError(
            f"quantization {quantization!r} sets linear and moe, and quantization_config.targets is mutually exclusive "
            "with them; type 'online' as quantization to use the targets alone"
        )
    return QuantizationConfig(**{kind: _merge(base, config, kind) for kind in KINDS}, ignore=config.ignore)


def _merge(base: QuantizationConfig, config: QuantizationConfig, kind: Kind) -> QuantSpec | str | None:
    name, over = getattr(base, kind), getattr(config, kind)
    if over is None:
        return name
    if name is None or isinstance(over, str):
        return over
    if not over.fields_set:
        return name
    # The activation that a shorthand stands for would be lost with its name, so it is written out.
    spec = spelled_out(name) if name in SHORTHANDS else QuantSpec(weight=name)
    weight = over.weight if "weight" in over.fields_set else spec.weight
    inherited = spec.activation if weight == spec.weight else UNSET
    activation = over.activation if "activation" in over.fields_set else inherited
    return QuantSpec(weight, activation, over.hadamard_size if "hadamard_size" in over.fields_set else UNSET)
