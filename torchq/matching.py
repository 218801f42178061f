"""Which patterns match which layer: one pattern, many, and the shards of a fused layer. Names are matched only here."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import regex

from torchq.errors import ConfigError
from torchq.spec import QuantSpec, meanings, parse_value

# Fused layers and their shards, as vLLM's models pack them.
FUSED_MAPPING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)
_NO_FUSION: Mapping[str, Sequence[str]] = MappingProxyType({})
_NOTHING: frozenset[str] = frozenset()
_MAGIC = re.compile(r"[*?\[]")
_NOT_JOINABLE = re.compile(r"\\[\dgGKkLpPNxuU]|\(\?(?!:)|\(\*")  # what could mean something else inside an alternation

Found = list[tuple[str, frozenset[str]]]  # the layer, or each of its shards, with the patterns that match it


class PatternSet:
    """Patterns compiled once, to be tested against many names.

    ``re:x`` is a regular expression of the ``regex`` package, anchored at the start only. Anything else matches the
    name that equals it, and the names that ``fnmatch.fnmatchcase`` accepts. Raises ``ConfigError`` for a pattern that
    is not a string or does not compile.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns: tuple[str, ...] = tuple(dict.fromkeys(map(_check_is_string, patterns)))
        self._literals: set[str] = set()
        self._ends: dict[str, str] = {}
        self._starts: dict[str, str] = {}
        self._inside: dict[str, str] = {}
        self._compiled: list[tuple[str, Callable[[str], object]]] = []
        self._joined: list[tuple[str, Callable[[str], object]]] = []
        for pattern in self.patterns:
            self._add(pattern)
        # One test rules out all plain regexes for most names.
        self._any_joined = regex.compile("|".join(f"(?:{pattern[3:]})" for pattern, _ in self._joined)).match
        self._any_end, self._any_start = tuple(self._ends.values()), tuple(self._starts.values())

    def _add(self, pattern: str) -> None:
        if pattern.startswith("re:"):
            plain = _NOT_JOINABLE.search(pattern) is None
            (self._joined if plain else self._compiled).append((pattern, _compile_regex(pattern)))
            return
        self._literals.add(pattern)
        if not _MAGIC.search(pattern):
            return
        text = pattern.strip("*")
        if _MAGIC.search(text):
            self._compiled.append((pattern, re.compile(fnmatch.translate(pattern)).match))
        elif pattern[0] != "*":
            self._starts[pattern] = text
        elif pattern[-1] != "*":
            self._ends[pattern] = text
        else:
            self._inside[pattern] = text

    def matches(self, name: str) -> frozenset[str]:
        """The patterns that match ``name``."""
        hits = [pattern for pattern, text in self._inside.items() if text in name]
        if name in self._literals:
            hits.append(name)
        if name.endswith(self._any_end):
            hits += [pattern for pattern, text in self._ends.items() if name.endswith(text)]
        if name.startswith(self._any_start):
            hits += [pattern for pattern, text in self._starts.items() if name.startswith(text)]
        if self._joined and self._any_joined(name) is not None:
            hits += [pattern for pattern, match in self._joined if match(name) is not None]
        hits += [pattern for pattern, match in self._compiled if match(name) is not None]
        return frozenset(hits) if hits else _NOTHING


def _check_is_string(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise ConfigError(f"pattern {pattern!r} is not a string; type a layer name, a glob or 're:' and a regex")
    return pattern


def _compile_regex(pattern: str) -> Callable[[str], object]:
    try:
        return regex.compile(pattern[len("re:") :]).match
    except (regex.error, ValueError, RecursionError) as error:  # the last two for flags at odds and deep nesting
        raise ConfigError(
            f"pattern {pattern!r} does not compile: {error}; correct the regex, or leave 're:' out for a name or a glob"
        ) from None


@lru_cache(maxsize=64)
def _cached_pattern_set(patterns: tuple[str, ...]) -> PatternSet:
    return PatternSet(patterns)


def pattern_set(patterns: Iterable[str] | str) -> PatternSet:
    """The patterns, compiled at most once for the same ones; a bare string counts as one pattern."""
    return _cached_pattern_set((patterns,) if isinstance(patterns, str) else tuple(map(_check_is_string, patterns)))


class Fusion:
    """Names of fused layers and of their shards, from ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}``.

    A layer is fused by the first key that is its name or the end of it after a dot; only that end is replaced. Of
    several mappings the first that has a key decides. Raises ``ConfigError`` for a mapping of another form.
    """

    def __init__(self, *mappings: Mapping[str, Sequence[str]]) -> None:
        self._shards: dict[str, tuple[str, ...]] = {}
        self._fused: dict[str, list[str]] = {}  # shard suffix -> suffixes of the fused layers that it is part of
        for fused, shards in (item for mapping in mappings for item in _fused_items(mapping)):
            if fused not in self._shards:
                self._shards[fused] = shards
                for shard in shards:
                    self._fused.setdefault(shard, []).append(fused)
        self._ends = tuple(self._shards)
        self._fused_by_last: dict[str, list[str]] = {}  # the last component of a shard's suffix -> those suffixes
        for end in self._fused:
            self._fused_by_last.setdefault(end.rpartition(".")[2], []).append(end)

    def shards(self, name: str) -> list[str]:
        """The names of the shards of a fused layer, in mapping order; none for a layer that is not fused."""
        dotted = "." + name
        if not dotted.endswith(self._ends):
            return []
        end = next(end for end in self._ends if dotted.endswith(end))
        return [(dotted[: -len(end)] + shard)[1:] for shard in self._shards[end]]

    def fused(self, name: str) -> list[str]:
        """The names of the fused layers that a shard is part of in models that fuse it."""
        ends = self._fused_by_last.get(name.rpartition(".")[2])
        if ends is None:
            return []
        dotted = "." + name
        return [(dotted[: -len(end)] + fused)[1:] for end in ends if dotted.endswith(end) for fused in self._fused[end]]


def _fused_items(mapping: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f'fused_mapping is a dict like {{"qkv_proj": ["q_proj", ...]}}, not {mapping!r}')
    for fused, shards in mapping.items():
        is_list = isinstance(shards, Sequence) and not isinstance(shards, str)
        if not is_list or not all(isinstance(text, str) for text in (fused, *shards)):
            raise ConfigError(f"fused_mapping[{fused!r}] is a list of shard names, not {shards!r}")
        yield "." + fused, tuple("." + shard for shard in shards)


def find(name: str, patterns: PatternSet, fusion: Fusion) -> Found:
    """The layer with the patterns that match its own name; if none do and it is fused, each shard with its own."""
    direct = patterns.matches(name)
    shards = [] if direct else fusion.shards(name)
    return [(shard, patterns.matches(shard)) for shard in shards] or [(name, direct)]


def all_ignored(name: str, found: Found) -> bool:
    """Whether every shard is ignored. Raises ``ConfigError`` when only some are."""
    ignored = [bool(patterns) for _, patterns in found]
    if any(ignored) and not all(ignored):
        raise ConfigError(
            f"Found different quantization schemes for the shards of {name}: quantization_config.ignore matches some "
            f"of them: {_listed(found)}; ignore all of its shards, or the layer itself: {name!r}"
        )
    return all(ignored)


def one_target(name: str, found: Found, targets: Mapping[str, str | QuantSpec]) -> str | None:
    """The pattern that all shards agree on: the first shard's. Raises ``ConfigError`` when they don't agree."""
    if not any(patterns for _, patterns in found):
        return None
    of = name if len(found) == 1 else f"the shards of {name}"
    if not all(patterns for _, patterns in found):
        raise ConfigError(
            f"Found unmatched shards for {name}: {_listed(found)}; target all of its shards, or the layer itself: "
            f"{name!r}"
        )
    if any(len(patterns) > 1 for _, patterns in found):
        raise ConfigError(
            f"Found multiple quantization_config.targets matches for {of}: {_listed(found)}; narrow the patterns until "
            "each has one"
        )
    chosen = [pattern for _, patterns in found for pattern in patterns]
    if len({meanings(targets[pattern]) for pattern in chosen}) > 1:
        values = ", ".join(
            f"{shard} ({pattern!r} = {targets[pattern]})" for (shard, _), pattern in zip(found, chosen, strict=True)
        )
        raise ConfigError(
            f"Found different quantization_config.targets values for {of}: {values}; give the patterns the same value"
        )
    return chosen[0]


def _listed(found: Found) -> str:
    listed = {name: ", ".join(map(repr, sorted(patterns))) or "none" for name, patterns in found}
    return ", ".join(f"{name} ({patterns})" for name, patterns in listed.items())


def find_matching_patterns(
    name: str, patterns: Iterable[str], fused_mapping: Mapping[str, Sequence[str]] = _NO_FUSION
) -> list[set[str]]:
    """The patterns that match a layer: one set for its own name, or, if none does and it is fused, one for each shard.

    Raises ``ConfigError`` for a pattern that does not compile.
    """
    return [set(hits) for _, hits in find(name, pattern_set(patterns), Fusion(fused_mapping))]


def is_ignored(name: str, ignore: Iterable[str], fused_mapping: Mapping[str, Sequence[str]] = _NO_FUSION) -> bool:
    """Whether ``ignore`` covers the layer or each of its shards. Raises ``ConfigError`` when it covers only some."""
    return all_ignored(name, find(name, pattern_set(ignore), Fusion(fused_mapping)))


def find_matching_target(
    name: str, targets: Mapping[str, Any], fused_mapping: Mapping[str, Sequence[str]] = _NO_FUSION
) -> str | None:
    """The pattern of ``targets`` (pattern to name, dict or ``QuantSpec``) that decides for a layer; None if none does.

    Raises ``ConfigError`` when a shard has no target or several, and when the shards' targets have different values.
    """
    found = find(name, pattern_set(targets), Fusion(fused_mapping))
    return one_target(name, found, {pattern: parse_value(targets[pattern]) for _, hits in found for pattern in hits})


def layer_type(name: str) -> str:
    """What a layer is called in every block: its name after the last component of ASCII digits.

    The whole name if there is no such component; the parent's component too if the name ends in one (``experts.7``).
    """
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbered:
        return name
    return ".".join(parts[numbered[-1] + 1 :] or parts[-2:])
