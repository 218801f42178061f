"""Decisions: what each matrix of one layer gets, whatever its kind and however many names it has."""

from dataclasses import replace

from torch import nn

from torchq.errors import ConfigError
from torchq.nn.expert_lists import ExpertListKind, expert_linears
from torchq.nn.experts import MoeKind
from torchq.parts import Answer, PartRules
from torchq.resolution import Hits, Resolution, Resolver


class Decisions:
    """Answers for the layers of models under one configuration."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver, self._parts = resolver, PartRules(resolver)

    def decide(self, names: list[str], kind, module: nn.Module) -> Answer:
        """What the matrices of a layer get; raises for rules in conflict, also between the layer's several names."""
        if len(names) == 1:
            return self._decide_by_name(names[0], kind, module)
        answers = {name: self._decide_by_name(name, kind, module) for name in names}
        found = {name: a for name, a in answers.items() if any(a.resolutions.values())}
        distinct = {tuple(r and keys(r) for r in a.resolutions.values()) for a in found.values()}
        if len(distinct) > 1 or (found and any(a.ignored for name, a in answers.items() if name not in found)):
            listed = "; ".join(f"{name}: {_told(answer)}" for name, answer in answers.items())
            raise ConfigError(f"one module has several names that get different specs: {listed}")
        first = next(iter((found or answers).values()))
        hits = Hits(*(frozenset().union(*sets) for sets in zip(*(a.hits for a in answers.values()), strict=True)))
        return Answer(first.resolutions, any(a.ignored for a in answers.values()), hits)

    def part_hits(self, names: list[str], kind, module: nn.Module) -> Hits:
        """The patterns that name parts of an experts module."""
        rows = kind.rows(module) if kind is MoeKind else {}
        found = [self._parts.hits(name, rows, kind.num_experts(module)) for name in names if rows]
        targets, ignore = (frozenset().union(*(one[field] for one in found)) for field in (0, 1))
        return Hits(targets, ignore)

    def takes_list(self, names: list[str]) -> bool:
        """Whether a rule treats a container of experts as one layer; else its linears are layers of their own."""
        resolver = self._resolver
        if resolver.config.targets is None and resolver.config.moe is not None:
            return True
        return any(resolver.targets.matches(name) or resolver.ignore.matches(name) for name in names)

    def _decide_by_name(self, name: str, kind, module: nn.Module) -> Answer:
        if kind is ExpertListKind:
            return self._decide_list(name, module)
        if kind is MoeKind and (rows := kind.rows(module)):
            return self._parts.resolve(name, rows, kind.num_experts(module))
        found = self._resolver.resolve(name, kind.kind)
        return Answer({"weight": found}, found is None and self._resolver.is_ignored(name))

    def _decide_list(self, name: str, module: nn.Module) -> Answer:
        whole = self._resolver.resolve(name, "moe")
        linears = list(expert_linears(module))
        ignored = [path for path in linears if self._resolver.is_ignored(f"{name}.{path}")]
        hits = (self._resolver.hits(f"{name}.{path}").ignore for path in ignored)
        if whole is not None and ignored:
            missing = [f"{name}.{path}" for path in linears if path not in ignored]
            if missing:
                more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
                raise ConfigError(
                    f"quantization_config.ignore names some of the experts in {name}, but not "
                    f"{', '.join(missing[:4])}{more}; a rule on {name} takes them as one layer: ignore all of them, or "
                    f"target those that you want one by one"
                )
            if whole.source == "targets":
                raise ConfigError(
                    f"{name} matches quantization_config.targets ({whole.pattern!r}), and all layers inside it match "
                    "quantization_config.ignore; remove it from one of them"
                )
            whole = None
        is_ignored = whole is None and (bool(ignored) or self._resolver.is_ignored(name))
        return Answer(dict.fromkeys(linears, whole), is_ignored, Hits(frozenset(), frozenset().union(*hits)))


def _told(answer: Answer) -> str:
    nothing = "ignored" if answer.ignored else "not matched"
    if len(set(answer.resolutions.values())) > 1:
        return ", ".join(f"{matrix} {resolution or nothing}" for matrix, resolution in answer.resolutions.items())
    return str(combined(answer.resolutions) or nothing)


def keys(resolution: Resolution) -> tuple:
    """What quantization depends on: weight key, activation key and size of the rotation."""
    return resolution.weight, resolution.activation, resolution.hadamard_size


def combined(resolutions: dict[str, Resolution | None]) -> Resolution | None:
    """One resolution to report a layer by: that of all its matrices, or the first with the others' origins added."""
    found = list(dict.fromkeys(r for r in resolutions.values() if r is not None))
    if len(found) < 2:
        return found[0] if found else None
    first = found[0]
    pattern = " + ".join(dict.fromkeys(str(r.pattern) for r in found))
    return replace(first, pattern=pattern, label=" + ".join(dict.fromkeys(r.label for r in found)))
