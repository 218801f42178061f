"""The planner: what each layer of one model gets under one configuration, and everything that is wrong with it."""

import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq import kernels
from torchq.decisions import Decisions, combined, keys
from torchq.errors import ConfigError, UnsupportedError
from torchq.keys import stored_nbytes
from torchq.nn.expert_lists import ExpertListKind
from torchq.nn.experts import MoeKind
from torchq.nn.linears import LinearKind, left_alone
from torchq.parts import Answer
from torchq.plan import LARGE, QuantizationPlan, Row
from torchq.resolution import Hits, Resolution, Resolver
from torchq.roles import Roles
from torchq.shared_experts import note_fusion
from torchq.ties import tied_names
from torchq.transforms.tree import Node, walk
from torchq.usage import PatternUse

OnUnmatched = Literal["error", "warn", "ignore"]
_KINDS = (LinearKind, MoeKind, ExpertListKind)
# What wrappers add to a name: torch.compile, activation checkpointing, low-rank adapters.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "base_layer")


@dataclass(eq=False)
class Job:
    """A layer to quantize: where it hangs, how its kind is handled, what each of its matrices gets (None: nothing).

    ``shares`` are the jobs whose matrices it shares an NVFP4 global scale with.
    """

    node: Node
    kind: Any
    row: Row
    resolutions: dict[str, Resolution | None]
    shares: list["Job"]


class Planner:
    """Makes the rows of one model, and collects what is wrong with them."""

    def __init__(self, resolver: Resolver, model: nn.Module, backend: str, on_unmatched: OnUnmatched) -> None:
        self.resolver, self.config = resolver, resolver.config
        self.backend, self.on_unmatched = backend, on_unmatched
        self.nodes = walk(model)
        if _kind_of(model, "") is not None:
            raise ConfigError(
                f"the model is itself one {type(model).__name__}, which can't swap itself; wrap it: "
                "model = torch.nn.Sequential(model)"
            )
        self.decisions = Decisions(resolver)
        self.roles = Roles(self.nodes)
        self.ties = tied_names(self.nodes)
        self.jobs: list[Job] = []
        self.problems: list[Exception] = []
        self.use = PatternUse(resolver)
        self.inside: dict[int, str] = {}  # modules that are part of a layer, by id
        self.lists: list[nn.Module] = []  # containers of experts whose linears are layers of their own

    def plan(self) -> QuantizationPlan:
        rows = [row for node in self.nodes[1:] if (row := self._row(node)) is not None]
        self._check_groups()
        self._check_patterns(rows)
        by_name = {row.name: row for row in rows}
        for job in self.jobs if not self.problems else ():
            if job.kind is MoeKind:
                note_fusion(job.node, job.row, by_name)
        if self.problems:
            raise _one_error(self.problems)
        replaced = {id(held) for job in self.jobs for held in job.kind.held(job.node.module)}
        before, after = self._model_bytes(replaced)
        return QuantizationPlan(rows, before, after, self._large_parameters(replaced))

    def check_materialised(self) -> None:
        """Raise ``ConfigError`` naming the layers that have no data to quantize."""
        empty = [job.row.name for job in self.jobs if any(t.is_meta for t in job.node.module.parameters())]
        if empty:
            raise ConfigError(
                f"{len(empty)} layers are on the meta device and have no data ({_some(empty)}); load the weights "
                "first, or call plan(), which needs none"
            )

    def _row(self, node: Node) -> Row | None:
        module, names = node.module, _matched_names(node)
        if (layer := self.inside.get(id(module))) is not None:
            self.use.note(names, f"part of {layer}")
            return None
        kind = _kind_of(module, node.name)
        if kind is ExpertListKind and not self.decisions.takes_list(names):
            self.lists.append(module)
            kind = None
        self.use.note(names, None if kind is not None else type(module).__name__)
        if kind is None:
            return self._row_of_other(node, names)
        held = kind.held(module)
        self.inside.update((id(part), node.name) for part in held if part is not module)
        size = sum(t.nbytes for part in held for t in _own_tensors(part))
        row = Row(node.name, kind.kind, kind.row_shape(module), size, size)
        row.aliases = tuple(node.names[1:])
        answer = self._decide(names, kind, module)
        row.skipped = self._why_skipped(node, row, kind, answer)
        if row.skipped is None:
            self._fill(row, node, kind, answer.resolutions)
        return row

    def _decide(self, names: list[str], kind, module: nn.Module) -> Answer | None:
        try:
            answer = self.decisions.decide(names, kind, module)
        except (ConfigError, UnsupportedError) as problem:
            self.problems.append(problem)
            self.use.count(self.decisions.part_hits(names, kind, module))
            return None
        self.use.count(answer.hits)
        return answer

    def _why_skipped(self, node: Node, row: Row, kind, answer: Answer | None) -> str | None:
        if answer is None:
            return "in conflict"
        resolution = combined(answer.resolutions)
        if resolution is None and answer.ignored:
            return "ignored"
        if resolution is None:
            return "not in targets" if self.config.targets is not None else f"no weight format for {kind.kind}"
        blanket = resolution.source != "targets"
        if kind.is_quantized(node.module):
            now = kind.specs(node.module)
            if all(r is None or now.get(name) == keys(r) for name, r in answer.resolutions.items()):
                return "quantized to this spec already"
            weight, activation, _ = next(iter(now.values()))
            if blanket:
                spec = f"{weight} x {activation or '16-bit'}"
                return f"quantized already ({spec}); name it in targets to quantize it again"
            again = dict.fromkeys(str(now[n][0]) for n, r in answer.resolutions.items() if r and n in now)
            if again:
                row.notes.append(f"{row.name}: quantized again from its {' and '.join(again)} weight")
            return None
        if blanket and (reason := self.roles.reason(node)):
            return f"{reason}; name it in targets to quantize it"
        if reason := kind.problem(node.module):
            if not blanket:
                self.problems.append(UnsupportedError(f"{row.name} can't be quantized: {reason}"))
            return reason
        if any(0 in shape for shape in kind.shapes(node.module).values()):
            return "it has no elements"
        return None

    def _fill(self, row: Row, node: Node, kind, resolutions: dict[str, Resolution | None]) -> None:
        row.resolution = combined(resolutions)
        if len({r and keys(r) for r in resolutions.values()}) > 1:
            row.parts = resolutions
        tensors = [t for held in kind.held(node.module) for t in _own_tensors(held)]
        device = next((t.device.type for t in tensors), "cpu")
        device = torch.get_default_device().type if device == "meta" else device
        row.backend = self._backends(row.name, kind.operation, resolutions, device)
        row.bytes_after = sum(t.nbytes for t in kind.kept(node.module))
        notes = []
        for name, shape in kind.shapes(node.module).items():
            if (resolution := resolutions[name]) is None:
                row.bytes_after += kind.nbytes(node.module, name)
                continue
            self._check_hadamard(row.name, resolution, shape)
            padded = -(-shape[-1] // resolution.weight.column_multiple) * resolution.weight.column_multiple
            if padded != shape[-1]:
                notes.append(f"K = {shape[-1]} is stored with zeros up to {padded} for {resolution.weight}")
            row.bytes_after += stored_nbytes(shape, resolution.weight)
        if (hint := self.resolver.hint(row.name)) is not None:
            notes.append(hint)
        tied = self.ties.get(id(node.module._parameters.get("weight")))
        if tied:
            others = ", ".join(name for name in tied if name != row.name)
            notes.append(f"{row.name} was tied to {others}, which keeps the dense weight")
        row.notes += dict.fromkeys(notes)
        self.jobs.append(Job(node, kind, row, resolutions, []))

    def _backends(self, name: str, operation: str, resolutions: dict, device: str) -> str | None:
        found: dict[str, None] = {}
        for weight, activation in dict.fromkeys((r.weight, r.activation) for r in resolutions.values() if r):
            try:
                found[kernels.select(operation, weight, activation, device, self.backend).name] = None
            except UnsupportedError as problem:
                self.problems.append(UnsupportedError(f"{name}: {problem}"))
        return " + ".join(found) or None

    def _check_hadamard(self, name: str, resolution: Resolution, shape: tuple) -> None:
        size = resolution.hadamard_size
        if size is not None and shape[-1] % size:
            self.problems.append(
                ConfigError(
                    f"{name}: hadamard_size {size} does not divide its in_features {shape[-1]}; "
                    f"the largest power of two that does is {shape[-1] & -shape[-1]}"
                )
            )

    def _row_of_other(self, node: Node, names: list[str]) -> Row | None:
        module = node.module
        cls = type(module).__name__
        targets = self.config.targets or {}
        literal = next((name for name in names if name in targets), None)
        why = left_alone(module)
        if literal is not None and not any(slot in _WRAPPERS for slot in module._modules):
            self.use.count(Hits(frozenset((literal,)), frozenset()))
            inside = f"; to mean the layers inside, type {literal + '.*'!r}" if module._modules else ""
            self.problems.append(
                UnsupportedError(
                    f"{literal} was matched by quantization_config.targets ({literal!r}), but quantization is not "
                    f"supported for {cls}{': ' + why if why else ''}{inside}"
                )
            )
        matched = any(self.resolver.targets.matches(name) for name in names)
        bearing = any(p is not None for p in module._parameters.values())
        if why is None and not (matched and bearing):
            return None
        if matched:
            why = f"matched by targets, but {why or f'quantization is not supported for {cls}'}"
        size = sum(t.nbytes for t in _own_tensors(module))
        return Row(node.name, "other", (), size, size, skipped=why, aliases=tuple(node.names[1:]))

    def _check_groups(self) -> None:
        """Shards of one group: rules on the fused name must agree, and NVFP4 shards share a global scale."""
        groups: dict[str, list[Job]] = defaultdict(list)
        for job in self.jobs:
            for fused in self.resolver.fused_names(job.row.name) if job.kind.kind == "linear" else ():
                groups[fused].append(job)
        for fused, jobs in groups.items():
            try:
                self.resolver.check_group(fused, [job.row.name for job in jobs], "linear")
            except ConfigError as problem:
                self.problems.append(problem)
            _share(jobs)
        of_module = {id(job.node.module): job for job in self.jobs if job.row.resolution.weight.global_scale}
        for experts in self.lists if of_module else ():
            for group in ExpertListKind.shares(experts):
                found = (of_module.get(id(experts.get_submodule(path))) for path in group)
                _share([job for job in found if job is not None])

    def _check_patterns(self, rows: list[Row]) -> None:
        complaints = self.use.unused_targets(row.name for row in rows if row.kind != "other")
        if not complaints and not self.problems and not any(row.skipped is None for row in rows):
            if not any("already" in row.skipped for row in rows):
                complaints.append(f"the config quantizes nothing in this model: {why_nothing(rows)}")
        for complaint in complaints:
            if self.on_unmatched == "error":
                self.problems.append(ConfigError(complaint))
            elif self.on_unmatched == "warn":
                warnings.warn(complaint, stacklevel=5)
        for complaint in self.use.unused_ignores(name for node in self.nodes for name in node.names):
            warnings.warn(complaint, stacklevel=5)

    def _model_bytes(self, replaced: set[int]) -> tuple[int, int]:
        before, after = {}, {}
        for node in self.nodes:
            module = node.module
            for tensor in _own_tensors(module):
                before[id(tensor)] = tensor.nbytes
                if id(module) not in replaced:
                    after[id(tensor)] = tensor.nbytes
        return sum(before.values()), sum(after.values()) + sum(job.row.bytes_after for job in self.jobs)

    def _large_parameters(self, replaced: set[int]) -> list[tuple[str, str, int]]:
        found: dict[int, tuple[str, str, int]] = {}
        for node in self.nodes:
            for name, tensor in node.module._parameters.items() if id(node.module) not in replaced else ():
                if tensor is not None and tensor.nbytes >= LARGE:
                    fqn = f"{node.name}.{name}" if node.name else name
                    found.setdefault(id(tensor), (fqn, type(node.module).__name__, tensor.nbytes))
        return list(found.values())


def _share(jobs: list[Job]) -> None:
    """Let the jobs share an NVFP4 global scale, if they all have one and rotate their weights alike."""
    same = {(job.row.resolution.weight, job.row.resolution.hadamard_size) for job in jobs}
    if len(jobs) > 1 and len(same) == 1 and jobs[0].row.resolution.weight.global_scale:
        for job in jobs:
            job.shares = job.shares or jobs


def _kind_of(module: nn.Module, name: str):
    """How to handle a layer, quantized already or not; None for what is no layer."""
    quantized = (kind for kind in (LinearKind, MoeKind) if kind.is_quantized(module))  # a list is known by its name
    return next(quantized, None) or next((kind for kind in _KINDS if kind.recognises(module, name)), None)


def _matched_names(node: Node) -> list[str]:
    """The names that patterns are tested against: those of the model without its wrappers."""
    if not any(wrapper in name for name in node.names for wrapper in _WRAPPERS):
        return node.names
    names = (".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in node.names)
    return list(dict.fromkeys(names))


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _one_error(problems: list[Exception]) -> Exception:
    texts = list(dict.fromkeys(str(problem) for problem in problems))
    cls = ConfigError if any(isinstance(problem, ConfigError) for problem in problems) else UnsupportedError
    if len(texts) == 1:
        return cls(texts[0])
    return cls(f"{len(texts)} problems, and nothing was changed:\n" + "\n".join(f"  - {text}" for text in texts))


def why_nothing(rows: list[Row]) -> str:
    reasons = dict.fromkeys(f"{row.name}: {row.skipped}" for row in rows)
    return _some(list(reasons)) if reasons else "it has no linear layers and no experts"


def _some(items: list[str], count: int = 5) -> str:
    more = f", and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more
