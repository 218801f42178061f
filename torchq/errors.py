"""The errors that torchq raises on purpose, and the "did you mean" that goes with them."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The configuration is wrong: an unknown name, a conflict, a pattern that hits nothing, an impossible shape."""


class UnsupportedError(NotImplementedError):
    """The request is understood, but nothing here can do it: no method, no backend, an unknown module class."""


class CheckpointError(RuntimeError):
    """A file on disk is damaged, incomplete, or not what it says it is."""


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return ``' (did you mean "a" or "b"?)'`` for the known names nearest to ``name``, or ``''`` when none is near."""
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
