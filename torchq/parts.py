"""Rules on parts of experts that a module keeps stacked: names for one expert or one projection, which are no modules.

Expert 7 of ``mlp.experts`` has the names ``mlp.experts.7.gate_proj``, ``.up_proj`` and ``.down_proj``, or ``.w1``,
``.w3`` and ``.w2``; ``mlp.experts.down_proj`` is that of all of them. Rules on the module's own name come first; only
without one do rules on its parts count.
"""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import regex

from torchq.errors import ConfigError
from torchq.matching import pattern_set
from torchq.resolution import Hits, Resolution, Resolver
from torchq.spec import meanings

# The rows of each projection, with the names of one expert's: a checkpoint's and Mixtral's.
_ROWS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
_MAGIC = re.compile(r"[*?\[]")

Part = tuple[int, str]  # an expert and which of its rows
Hit = dict[str, frozenset[Part]]  # the parts that each pattern names


class Answer(NamedTuple):
    """What each projection gets (None: nothing), whether an ignore is why, and the patterns that name parts of it."""

    resolutions: dict[str, Resolution | None]
    ignored: bool
    hits: Hits = Hits(frozenset(), frozenset())


class PartRules:
    """The rules of one config on the parts of experts."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._targets = _PartPatterns(resolver.config.targets or ())
        self._ignore = _PartPatterns(resolver.config.ignore)

    def resolve(self, name: str, projections: Mapping[str, tuple[str, ...]], experts: int) -> Answer:
        """What the experts module gets; ``projections`` names the rows of each: gate and up, or down.

        Raises ``ConfigError`` where rules give the experts, or the gate and the up projection, different specs.
        """
        resolver = self._resolver
        targeted, ignored = self._find(name, projections, experts)
        if not targeted and not ignored:
            whole = resolver.resolve(name, "moe")
            return Answer(dict.fromkeys(projections, whole), whole is None and resolver.is_ignored(name))
        answers: dict[str, Resolution | None] = {}
        some_ignored = False
        for projection, rows in projections.items():
            pattern = self._target(name, experts, rows, targeted) if targeted else resolver.target_of(name)
            nothing = pattern is None and resolver.config.targets is not None
            answers[projection] = None if nothing else resolver.resolution(name, "moe", pattern)
            if answers[projection] is None:
                continue
            if resolver.is_ignored(name) or self._all_ignored(name, experts, rows, ignored):
                some_ignored, answers[projection] = True, None
                if pattern is not None:
                    raise ConfigError(
                        f"the {projection} projection of {name} matches both quantization_config.ignore and "
                        f"quantization_config.targets ({pattern!r}); remove it from one of them"
                    )
        return Answer(answers, some_ignored, Hits(frozenset(targeted), frozenset(ignored)))

    def hits(self, name: str, projections: Mapping[str, tuple[str, ...]], experts: int) -> Hits:
        """The patterns that name parts of the module."""
        return Hits(*(frozenset(found) for found in self._find(name, projections, experts)))

    def _find(self, name: str, projections: Mapping[str, tuple[str, ...]], experts: int) -> tuple[Hit, Hit]:
        resolver, rows = self._resolver, tuple(row for rows in projections.values() for row in rows)
        targeted = {} if resolver.targets.matches(name) else self._targets.find(name, experts, rows)
        ignored = {} if resolver.ignore.matches(name) else self._ignore.find(name, experts, rows)
        return targeted, ignored

    def _all_ignored(self, name: str, experts: int, rows: tuple[str, ...], hits: Hit) -> bool:
        covered = frozenset().union(*hits.values())
        missing = [part for part in _parts(experts, rows) if part not in covered]
        if not missing:
            return True
        if len(missing) < experts * len(rows):
            raise ConfigError(
                f"quantization_config.ignore names some parts of the experts {name}, but not {_listed(name, missing)}; "
                f"they are quantized as one layer: ignore all of them, or the layer itself: {name!r}"
            )
        return False

    def _target(self, name: str, experts: int, rows: tuple[str, ...], hits: Hit) -> str | None:
        found: dict[Part, list[str]] = defaultdict(list)
        for pattern, parts in hits.items():
            for part in parts:
                if part[1] in rows:
                    found[part].append(pattern)
        if not found:
            return None
        if missing := [part for part in _parts(experts, rows) if part not in found]:
            raise ConfigError(
                f"quantization_config.targets names some parts of the experts {name}, but not "
                f"{_listed(name, missing)}; they are quantized as one layer: target all of them, or the layer itself: "
                f"{name!r}"
            )
        if several := min((part for part, patterns in found.items() if len(patterns) > 1), default=None):
            raise ConfigError(
                f"Found multiple quantization_config.targets matches for {_name(name, several)}: "
                f"{', '.join(map(repr, sorted(found[several])))}; narrow the patterns until each part has one"
            )
        targets = self._resolver.config.targets
        by_value: dict[object, Part] = {}
        for part in sorted(found):
            by_value.setdefault(meanings(targets[found[part][0]]), part)
        if len(by_value) > 1:
            listed = ", ".join(
                f"{_name(name, part)} ({found[part][0]!r} = {targets[found[part][0]]})" for part in by_value.values()
            )
            raise ConfigError(
                f"Found different quantization_config.targets values for the experts {name}: {listed}; they are "
                "quantized as one layer, in which only the down projection may differ from gate and up"
            )
        return found[min(found)][0]


class _PartPatterns:
    """The patterns of one field, sorted by how they can be tested below a module's name without testing every part."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._literals: dict[str, list[tuple[str, str]]] = defaultdict(list)  # module name -> (tail, pattern)
        self._globs: list[str] = []
        self._others: list[str] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self._others.append(pattern)
                continue
            for dots in (1, 2):
                module, *tail = pattern.rsplit(".", dots)
                self._literals[module].append((".".join(tail), pattern))
            if _MAGIC.search(pattern):
                (self._others if "[" in pattern else self._globs).append(pattern)

    def find(self, name: str, experts: int, rows: tuple[str, ...]) -> Hit:
        tails = _tails(experts, rows)
        hits: dict[str, set[Part]] = defaultdict(set)
        for tail, pattern in self._literals.get(name, ()):
            hits[pattern].update(tails.get(tail, ()))
        for pattern in self._globs:
            rests = _rests(pattern, f"{name}.")
            if rests:
                hits[pattern].update(_matching_parts(rests, experts, rows))
        others = pattern_set(pattern for pattern in self._others if _may_match_below(pattern, name))
        for tail, parts in tails.items() if others.patterns else ():
            for pattern in others.matches(f"{name}.{tail}"):
                hits[pattern].update(parts)
        return {pattern: frozenset(parts) for pattern, parts in hits.items() if parts}


def _parts(experts: int, rows: tuple[str, ...]) -> Iterator[Part]:
    return ((expert, row) for expert in range(experts) for row in rows)


@lru_cache(maxsize=64)
def _tails(experts: int, rows: tuple[str, ...]) -> Mapping[str, tuple[Part, ...]]:
    """Every name below the module's that stands for some of its parts, with those parts."""
    tails: dict[str, list[Part]] = defaultdict(list)
    for expert, row in _parts(experts, rows):
        tails[f"{expert}"].append((expert, row))
        for own in _ROWS.get(row, ()):
            tails[f"{expert}.{own}"].append((expert, row))
            tails[own].append((expert, row))
        if "gate" in rows and row != "down":
            tails[f"{expert}.gate_up_proj"].append((expert, row))
            tails["gate_up_proj"].append((expert, row))
    return {tail: tuple(parts) for tail, parts in tails.items()}


def _rests(pattern: str, prefix: str) -> frozenset[str]:
    """What remains of a glob once it has matched ``prefix``: the globs that the rest of a name may match."""
    at = _beyond_stars(pattern, {0})
    for char in prefix:
        after = {i for i in at if i < len(pattern) and pattern[i] == "*"}
        after |= {i + 1 for i in at if i < len(pattern) and pattern[i] in (char, "?") and pattern[i] != "*"}
        at = _beyond_stars(pattern, after)
        if not at:
            break
    return frozenset(pattern[i:] for i in at)


def _beyond_stars(pattern: str, at: set[int]) -> set[int]:
    at = set(at)
    for i in sorted(at):
        while i < len(pattern) and pattern[i] == "*":
            i += 1
            at.add(i)
    return at


@lru_cache(maxsize=4096)
def _matching_parts(rests: frozenset[str], experts: int, rows: tuple[str, ...]) -> frozenset[Part]:
    # The rests are the same in every block of a model, so this runs for each pattern once or twice.
    matches = [re.compile(fnmatch.translate(rest)).match for rest in rests]
    tails = _tails(experts, rows)
    return frozenset(part for tail, parts in tails.items() if any(m(tail) for m in matches) for part in parts)


def _may_match_below(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return True
    return _compiled(pattern).match(f"{name}.", partial=True) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> regex.Pattern:
    return regex.compile(pattern.removeprefix("re:"))


def _name(name: str, part: Part) -> str:
    expert, row = part
    return f"{name}.{expert}" + (f".{_ROWS[row][0]}" if row in _ROWS else "")


def _listed(name: str, parts: list[Part], count: int = 4) -> str:
    more = f" and {len(parts) - count} more" if len(parts) > count else ""
    return ", ".join(_name(name, part) for part in parts[:count]) + more
