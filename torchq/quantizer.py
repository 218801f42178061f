"""quantize_ and the Quantizer: resolve names, plan a model, swap its layers. The one place that swaps."""

import contextlib
import gc
import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchq import kernels
from torchq.config import QuantizationConfig, as_config
from torchq.errors import ConfigError
from torchq.kernels import QuantizedTensor
from torchq.plan import QuantizationPlan, QuantizationReport
from torchq.planner import Job, OnUnmatched, Planner, why_nothing
from torchq.resolution import Resolution, Resolver
from torchq.ties import untie
from torchq.transforms.hadamard import hadamard
from torchq.transforms.tree import swap

logger = logging.getLogger("torchq")


def quantize_(
    model: nn.Module,
    config: str | dict | QuantizationConfig,
    *,
    fused_mapping: Mapping[str, Sequence[str]] | None = None,
    backend: str = "auto",
    on_unmatched: OnUnmatched = "error",
    progress: bool = False,
    sqnr: bool = True,
) -> QuantizationReport:
    """Quantize the layers of ``model`` that ``config`` names, in place, and return the report.

    ``config`` is a shorthand (``"mxfp4"``), a dict as in ``--quantization-config``, or a QuantizationConfig.
    ``fused_mapping`` (fused name to shard names) defaults to the model's ``packed_modules_mapping``. ``on_unmatched``
    says what a target that hits nothing does. ``sqnr=False`` skips measuring each weight's error. Raises
    ``ConfigError`` or ``UnsupportedError`` naming every layer that is wrong, before anything changes.
    """
    quantizer = Quantizer(config, fused_mapping=fused_mapping, backend=backend, on_unmatched=on_unmatched)
    return quantizer.quantize_(model, progress=progress, sqnr=sqnr)


class Quantizer:
    """One configuration, applied to names (``resolve``), to a model on paper (``plan``) or for real (``quantize_``)."""

    def __init__(
        self,
        config: str | dict | QuantizationConfig,
        fused_mapping: Mapping[str, Sequence[str]] | None = None,
        backend: str = "auto",
        on_unmatched: OnUnmatched = "error",
    ) -> None:
        self.config = as_config(config)
        if on_unmatched not in ("error", "warn", "ignore"):
            raise ConfigError(f"on_unmatched is 'error', 'warn' or 'ignore', not {on_unmatched!r}")
        if backend != "auto":
            kernels.load(backend)
        self.fused_mapping = fused_mapping
        self.backend = backend
        self.on_unmatched = on_unmatched
        self._resolver = Resolver(self.config, fused_mapping)

    def resolve(self, name: str, kind: Literal["linear", "moe"]) -> Resolution | None:
        """What a layer of that name and kind gets, or None if it is left alone; needs no model."""
        return self._resolver.resolve(name, kind)

    def plan(self, model: nn.Module) -> QuantizationPlan:
        """Return one row a layer, changing nothing; works on meta tensors.

        Raises one error that lists every layer that is wrong.
        """
        return self._planned(model)[1]

    def quantize_(self, model: nn.Module, *, progress: bool = False, sqnr: bool = True) -> QuantizationReport:
        """Carry out the plan in place, layer by layer, freeing each dense weight as it goes."""
        planner, plan = self._planned(model)
        planner.check_materialised()
        report = QuantizationReport(plan.rows, plan.bytes_before, plan.bytes_after, plan.unquantized)
        _carry_out(model, report, planner.jobs, self.backend, progress, sqnr)
        if report.quantized:
            logger.info(report.summary())
        else:
            logger.info("nothing to quantize: %s", why_nothing(plan.rows))
        return report

    def _planned(self, model: nn.Module) -> tuple[Planner, QuantizationPlan]:
        mapping = self.fused_mapping or getattr(model, "packed_modules_mapping", None)
        resolver = self._resolver if mapping is self.fused_mapping else Resolver(self.config, mapping)
        with _collector_paused():
            planner = Planner(resolver, model, self.backend, self.on_unmatched)
            return planner, planner.plan()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    # A plan is all objects that stay; looking for garbage among them and the model's own takes a third of its time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _carry_out(
    model: nn.Module, report: QuantizationReport, jobs: list[Job], backend: str, progress: bool, sqnr: bool
) -> None:
    start = time.perf_counter()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    shared: dict[int, Tensor] = {}
    done = 0
    try:
        for job in tqdm(jobs, desc="quantizing", unit="layer", disable=not progress):
            began = time.perf_counter()
            _quantize_layer(model, job, shared, backend, sqnr)
            job.row.seconds = time.perf_counter() - began
            done += 1
    except BaseException as error:
        if done:
            error.add_note(f"torchq: {done} of {len(jobs)} layers were quantized before this; the model works as it is")
        raise
    report.seconds = time.perf_counter() - start
    report.peak_bytes = torch.cuda.max_memory_allocated() if cuda else _peak_resident_bytes()


def _quantize_layer(model: nn.Module, job: Job, shared: dict[int, Tensor], backend: str, sqnr: bool) -> None:
    row, module = job.row, job.node.module
    if job.shares and id(job) not in shared:
        scale = kernels.shared_global_scale(
            _rotated(matrix, other.row.resolution.hadamard_size)
            for other in job.shares
            for _, matrix in other.kind.matrices(other.node.module)
        )
        shared.update({id(other): scale for other in job.shares})
    scales = dict.fromkeys(job.resolutions, shared.get(id(job))) | _scales_within(job)
    quantized, energy = {}, [0.0, 0.0]
    for name, matrix in job.kind.matrices(module):
        if (resolution := job.resolutions[name]) is None:
            continue
        one = _quantize_stack if len(matrix.shape) == 3 else _quantize_matrix
        quantized[name], (signal, noise) = one(matrix, resolution, scales[name], sqnr)
        energy = [energy[0] + signal, energy[1] + noise]
    row.sqnr = kernels.decibels(*energy) if sqnr else None
    replacement = job.kind.build(module, quantized, job.resolutions, backend)
    for resolution in filter(None, job.resolutions.values()):
        device = next(iter(quantized.values())).device.type
        chosen = kernels.select(job.kind.operation, resolution.weight, resolution.activation, device, backend)
        kernels.announce(chosen.name, row.kind, resolution.weight, resolution.activation)
    swap(job.node, replacement)
    for name in job.node.names:
        untie(model, name)


def _scales_within(job: Job) -> dict[str, Tensor]:
    """NVFP4 global scales that matrices of one layer share, by name."""
    scales, module = {}, job.node.module
    for group in job.kind.shares(module):
        if (resolution := job.resolutions[group[0]]) is not None and resolution.weight.global_scale:
            matrices = (job.kind.matrix(module, name) for name in group)
            scale = kernels.shared_global_scale(_rotated(m, resolution.hadamard_size) for m in matrices)
            scales.update(dict.fromkeys(group, scale))
    return scales


def _quantize_matrix(matrix: Tensor, resolution: Resolution, global_scale: Tensor | None, sqnr: bool):
    matrix = _rotated(matrix, resolution.hadamard_size)
    return kernels.quantize_measured(matrix, resolution.weight, global_scale=global_scale, measure=sqnr)


def _quantize_stack(stack, resolution: Resolution, global_scale: Tensor | None, sqnr: bool):
    """Quantize the matrices (N, K) of a stack of shape (E, N, K) one at a time, into one QuantizedTensor."""
    stored, energy = {}, [0.0, 0.0]
    for index in range(stack.shape[0]):
        one, (signal, noise) = _quantize_matrix(stack[index], resolution, global_scale, sqnr)
        for name in ("data", "scale", "global_scale"):
            if (part := getattr(one, name)) is not None:
                stored.setdefault(name, part.new_empty(stack.shape[0], *part.shape))[index] = part
        energy = [energy[0] + signal, energy[1] + noise]
    shape = torch.Size(stack.shape)
    codes = stored["data"], stored["scale"], stored.get("global_scale")
    return QuantizedTensor(*codes, resolution.weight, shape, one.scale_rounding), tuple(energy)


def _rotated(matrix: Tensor, size: int | None) -> Tensor:
    return matrix if size is None else hadamard(matrix.float(), size)


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
