"""PatternUse: which patterns of a config the modules of one model use, and what to say of the others."""

from collections.abc import Iterable

from torchq.errors import did_you_mean
from torchq.resolution import Hits, Resolver

_HINTS = 5  # patterns that get a "did you mean": finding one among many names takes as long as a plan


class PatternUse:
    """The patterns that no module has used so far."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._targets = dict.fromkeys(resolver.config.targets or ())
        self._ignores = dict.fromkeys(resolver.config.ignore)
        self._only_unsupported: dict[str, str] = {}

    def note(self, names: Iterable[str], unsupported: str | None = None) -> None:
        """Note the patterns that match a module; ``unsupported`` says what it is if it can't be quantized."""
        for name in names:
            targets, ignore = self._resolver.hits(name)
            self.count(Hits(frozenset() if unsupported else targets, ignore))
            for pattern in targets if unsupported else ():
                self._only_unsupported.setdefault(pattern, f"{name} ({unsupported})")

    def count(self, hits: Hits) -> None:
        """Take patterns for used."""
        for patterns, unused in ((hits.targets, self._targets), (hits.ignore, self._ignores)):
            for pattern in patterns:
                unused.pop(pattern, None)

    def unused_targets(self, layers: Iterable[str]) -> list[str]:
        """One complaint for each target that hits none of the model's ``layers``."""
        layers = list(layers) if self._targets else []
        return [self._complaint(pattern, layers, count < _HINTS) for count, pattern in enumerate(self._targets)]

    def unused_ignores(self, modules: Iterable[str]) -> list[str]:
        """One complaint for each ignore that hits none of the ``modules``, layers or not."""
        modules = list(modules) if self._ignores else []
        hints = (did_you_mean(p, modules) if count < _HINTS else "" for count, p in enumerate(self._ignores))
        return [f"ignore {p!r} matches no module{hint}" for p, hint in zip(self._ignores, hints, strict=True)]

    def _complaint(self, pattern: str, layers: list[str], hint: bool) -> str:
        if (where := self._only_unsupported.get(pattern)) is not None:
            return f"target {pattern!r} matches only modules that can't be quantized, such as {where}"
        return f"target {pattern!r} matches no layer{did_you_mean(pattern, layers) if hint else ''}"
