"""quantize_ and the Quantizer: resolve names, plan a model, swap its layers. The one place that swaps."""

import logging
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchq import kernels
from torchq.config import QuantizationConfig, as_config
from torchq.errors import ConfigError
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
        return self._planner(model).plan()

    def quantize_(self, model: nn.Module, *, progress: bool = False, sqnr: bool = True) -> QuantizationReport:
        """Carry out the plan in place, layer by layer, freeing each dense weight as it goes."""
        planner = self._planner(model)
        plan = planner.plan()
        planner.check_materialised()
        report = QuantizationReport(plan.rows, plan.bytes_before, plan.bytes_after, plan.unquantized)
        _carry_out(model, report, planner.jobs, self.backend, progress, sqnr)
        if report.quantized:
            logger.info(report.summary())
        else:
            logger.info("nothing to quantize: %s", why_nothing(plan.rows))
        return report

    def _planner(self, model: nn.Module) -> Planner:
        mapping = self.fused_mapping or getattr(model, "packed_modules_mapping", None)
        resolver = self._resolver if mapping is self.fused_mapping else Resolver(self.config, mapping)
        return Planner(resolver, model, self.backend, self.on_unmatched)


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
    resolution, row = job.row.resolution, job.row
    if job.shares and id(job) not in shared:
        scale = kernels.shared_global_scale(
            _rotated(matrix, resolution.hadamard_size) for other in job.shares for matrix in other.matrices().values()
        )
        shared.update({id(other): scale for other in job.shares})
    quantized, energy = {}, [0.0, 0.0]
    for name, matrix in job.matrices().items():
        matrix = _rotated(matrix, resolution.hadamard_size)
        quantized[name], (signal, noise) = kernels.quantize_measured(
            matrix, resolution.weight, global_scale=shared.get(id(job)), measure=sqnr
        )
        energy = [energy[0] + signal, energy[1] + noise]
    row.sqnr = kernels.decibels(*energy) if sqnr else None
    replacement = job.kind.build(job.node.module, quantized, resolution, backend)
    kernels.announce(row.backend, row.kind, resolution.weight, resolution.activation)
    swap(job.node, replacement)
    for name in job.node.names:
        untie(model, name)


def _rotated(matrix: Tensor, size: int | None) -> Tensor:
    return matrix if size is None else hadamard(matrix.float(), size)


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
