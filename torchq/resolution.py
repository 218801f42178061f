"""Resolver: from a layer's name and kind to the keys that it gets, and where they come from. Needs no model."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchq.config import QuantizationConfig
from torchq.errors import ConfigError, UnsupportedError
from torchq.keys import DEFAULT_ACTIVATION, QuantKey, key_names
from torchq.matching import (
    FUSED_MAPPING,
    Found,
    Fusion,
    PatternSet,
    all_ignored,
    find,
    layer_type,
    one_target,
    pattern_set,
)
from torchq.spec import KINDS, Kind, QuantSpec, meaning, spelled_out

_KIND_NAMES = {"linear": "linear layers", "moe": "experts"}


@dataclass(frozen=True)
class Resolution:
    """What one layer gets: the field and pattern that decided, the value's label, and the keys, defaults filled in.

    ``activation`` None means 16-bit activations; ``activation_explicit`` tells whether the user wrote it.
    ``str(resolution)`` is the part of a log line in parentheses: ``targets: *experts*, mxfp4``.
    """

    source: Literal["linear", "moe", "targets"]
    pattern: str | None
    label: str
    weight: QuantKey
    activation: QuantKey | None
    activation_explicit: bool
    hadamard_size: int | None

    def __str__(self) -> str:
        return f"{self.source}: {'' if self.pattern is None else f'{self.pattern}, '}{self.label}"


class Hits(NamedTuple):
    """The patterns of each field that match a layer, its shards or the fused layer that it is part of."""

    targets: frozenset[str]
    ignore: frozenset[str]


class Resolver:
    """Answers for any name what one config gives it; asking changes nothing.

    ``fused_mapping`` (fused name to shard names) goes before the built-in ``FUSED_MAPPING``. ``targets`` and ``ignore``
    are the config's patterns, compiled; ``hits`` tells which of them a layer uses.
    """

    def __init__(self, config: QuantizationConfig, fused_mapping: Mapping[str, Sequence[str]] | None = None) -> None:
        self._fusion = Fusion({} if fused_mapping is None else fused_mapping, FUSED_MAPPING)
        self.config = config
        self.targets = pattern_set(config.targets or ())
        self.ignore = pattern_set(config.ignore)
        self._in_targets = _Lookup(self.targets, self._fusion)
        self._in_ignore = _Lookup(self.ignore, self._fusion)
        self._resolutions: dict[tuple[str | None, Kind], Resolution | None] = {}

    def resolve(self, name: str, kind: Kind) -> Resolution | None:
        """What the layer gets, or None if it is left alone.

        Raises ``ConfigError`` when rules are in conflict or a shorthand has no spec for ``kind``, ``UnsupportedError``
        for a weight key that has no method and an activation key that needs calibration.
        """
        if kind not in KINDS:
            raise ConfigError(f"{name}: kind {kind!r} is not known; type 'linear' or 'moe'")
        ignored = self.is_ignored(name)
        if self.config.targets is None:
            return None if ignored else self.resolution(name, kind, None)
        pattern = self.target_of(name)
        if pattern is None:
            return None
        if ignored:
            raise ConfigError(
                f"Layer {name} matches both quantization_config.ignore ({_quoted(self.hits(name).ignore)}) and "
                f"quantization_config.targets ({pattern!r}); remove it from one of them"
            )
        return self.resolution(name, kind, pattern)

    def is_ignored(self, name: str) -> bool:
        """Whether ``ignore`` covers the layer. Raises ``ConfigError`` when it covers only some of its shards."""
        return all_ignored(name, self._in_ignore.find(name))

    def target_of(self, name: str) -> str | None:
        """The pattern of ``targets`` that decides for the layer. Raises ``ConfigError`` when several or none could."""
        return one_target(name, self._in_targets.find(name), self.config.targets or {})

    def hits(self, name: str) -> Hits:
        """The patterns that the layer uses; those that no layer of a model uses hit nothing."""
        return Hits(_together(self._in_targets.find(name)), _together(self._in_ignore.find(name)))

    def check_group(self, fused_name: str, shard_names: Iterable[str], kind: Kind) -> None:
        """Raise ``ConfigError`` if a rule on the fused name gives a shard another spec than its siblings have.

        For models that keep the shards apart; ``shard_names`` are those that exist. Without a rule on the fused name
        the shards may differ.
        """
        shards = list(shard_names)
        answers = {shard: self.resolve(shard, kind) for shard in shards}
        through = [
            s for s in shards if any(fused_name in lookup.through(s) for lookup in (self._in_targets, self._in_ignore))
        ]
        if through and len({answer and _keys(answer) for answer in answers.values()}) > 1:
            listed = ", ".join(f"{shard} ({answer or 'not quantized'})" for shard, answer in answers.items())
            raise ConfigError(
                f"Found different quantization schemes for the shards of {fused_name}: {listed}; a rule on the fused "
                f"name decides for {', '.join(through)}; give all shards one spec, or each shard a rule of its own"
            )

    def fused_names(self, name: str) -> list[str]:
        """The fully qualified names of the fused layers that the layer could be a shard of."""
        return self._fusion.fused(name)

    def hint(self, name: str) -> str | None:
        """A note where a pattern that names one shard takes the whole fused layer (``re:.*v_proj`` on ``qkv_proj``)."""
        shards = self._fusion.shards(name)
        for patterns in (self.targets, self.ignore) if shards else ():
            for pattern in sorted(patterns.matches(name)):
                named = [shard for shard in shards if pattern in patterns.matches(shard)]
                if named and len(named) < len(shards):
                    return (
                        f"{pattern!r} matches the shard {named[0]}, but takes all of the fused layer {name}; type "
                        f"{'*.' + name.rpartition('.')[2]!r} if that is meant"
                    )
        return None

    def resolution(self, name: str, kind: Kind, pattern: str | None) -> Resolution | None:
        """What the value of one pattern of ``targets``, or else the field of that kind, means for the layer."""
        key = (pattern, kind)
        if key not in self._resolutions:
            value = getattr(self.config, kind) if pattern is None else self.config.targets[pattern]
            self._resolutions[key] = None if value is None else _resolve_value(name, kind, pattern, value)
        return self._resolutions[key]


class _Lookup:
    """The patterns of one field with what they match, remembered: every name is tested once."""

    def __init__(self, patterns: PatternSet, fusion: Fusion) -> None:
        self._patterns, self._fusion = patterns, fusion
        self._found: dict[str, Found] = {}
        self._naming_fused: dict[str, frozenset[str]] = {}

    def find(self, name: str) -> Found:
        if not self._patterns.patterns:
            return [(name, frozenset())]
        found = self._found.get(name)
        if found is None:
            found = find(name, self._patterns, self._fusion)
            if not _together(found) and (through := self._through(name)):
                found = [(name, frozenset().union(*through.values()))]
            self._found[name] = found
        return found

    def through(self, name: str) -> dict[str, frozenset[str]]:
        """The fused names by which a shard is found, with the patterns; empty if it is found by its own name."""
        return {} if _together(find(name, self._patterns, self._fusion)) else self._through(name)

    def _through(self, name: str) -> dict[str, frozenset[str]]:
        return {fused: hits for fused in self._fusion.fused(name) if (hits := self._naming(fused))}

    def _naming(self, fused: str) -> frozenset[str]:
        # Of "*v_proj", which matches "qkv_proj" by accident, the user of a model with a v_proj means that shard alone.
        if fused not in self._naming_fused:
            hits = self._patterns.matches(fused)
            for shard in self._fusion.shards(fused) if hits else ():
                hits -= self._patterns.matches(shard)
            self._naming_fused[fused] = hits
        return self._naming_fused[fused]


def _together(found: Found) -> frozenset[str]:
    return found[0][1] if len(found) == 1 else frozenset().union(*(patterns for _, patterns in found))


def _resolve_value(name: str, kind: Kind, pattern: str | None, value: str | QuantSpec) -> Resolution | None:
    where = f"quantization_config.{kind}" if pattern is None else f"targets pattern {pattern!r}"
    found = meaning(value, kind)
    if found is None:
        raise ConfigError(
            f"{where} = {value} does not define a QuantSpec for {_KIND_NAMES[kind]} (matched at {name}); narrow the "
            f"pattern, or type {spelled_out(value)}"
        )
    if found.weight is None:
        return None
    if found.weight not in DEFAULT_ACTIVATION:
        raise UnsupportedError(
            f"{name}: {where}: quantization of {_KIND_NAMES[kind]} with weight {found.weight} is not supported; "
            f"supported weight keys: {', '.join(key_names('weight'))}"
        )
    if found.activation is not None and not found.activation.dynamic:
        raise UnsupportedError(
            f"{name}: {where}: activation {str(found.activation)!r} needs a calibrated scale, which torchq does not "
            f"make; type {str(found.activation.as_role('activation'))!r} (or 'fp8_per_token') instead"
        )
    return Resolution("targets" if pattern is not None else kind, pattern, str(value), *found)


def _keys(resolution: Resolution) -> tuple:
    return resolution.weight, resolution.activation, resolution.activation_explicit, resolution.hadamard_size


def _quoted(patterns: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(patterns)))


def summary_line(items: Iterable[tuple[str, Resolution]]) -> str:
    """The log line for layers that were quantized: ``Quantized 2 layers of types: o_proj: 2 (from linear: mxfp8)``."""
    counts = Counter((layer_type(name), r.source, r.pattern or "", str(r)) for name, r in items)
    parts = (f"{kind}: {count} (from {origin})" for (kind, *_, origin), count in sorted(counts.items()))
    return f"Quantized {counts.total()} layers of types: {'; '.join(parts)}"
