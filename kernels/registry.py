"""The backend registry: who can compute an operation for a (weight key, activation key) pair on a device.

Backends differ in speed only: each agrees with the torch twin. They are tried in the order of ``BACKENDS``; a requested
one that can't run raises with the reason of each candidate.
"""

import functools
import logging
from importlib import import_module
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchq.errors import ConfigError, UnsupportedError, did_you_mean
from torchq.kernels.qtensor import QuantizedTensor
from torchq.keys import QuantKey, ScaleRounding

logger = logging.getLogger("torchq")
Operation = Literal["quantize", "dequantize", "linear", "moe"]


class Backend(Protocol):
    """What a backend offers. ``unusable`` says why it can't serve an operation, or None when it can."""

    name: str

    def unusable(self, op: Operation, weight: QuantKey, activation: QuantKey | None, device: str) -> str | None: ...

    def quantize(
        self,
        x: Tensor,
        key: QuantKey,
        rounding: ScaleRounding | None,
        global_scale: Tensor | None,
        error: Tensor | None,
    ) -> QuantizedTensor: ...

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor: ...

    def linear(
        self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, activation: QuantKey | None
    ) -> Tensor: ...

    def grouped_linear(
        self, x: Tensor, offsets: Tensor, weight: QuantizedTensor, bias: Tensor | None, activation: QuantKey | None
    ) -> Tensor: ...


# Fastest first; the twin, which can do everything, last. Each module has a class `Kernels`, loaded when first tried.
BACKENDS = {
    "cpu": "torchq.kernels.cpu_backend",
    "torchao": "torchq.kernels.torchao_backend",
    "torch": "torchq.kernels.torch_backend",
}


@functools.cache
def load(name: str) -> Backend:
    """Return the backend of that name; ``ConfigError`` for an unknown one."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}{did_you_mean(name, BACKENDS)}; known: auto, {', '.join(BACKENDS)}")
    return import_module(BACKENDS[name]).Kernels()


@functools.cache
def select(op: Operation, weight: QuantKey, activation: QuantKey | None, device: str, backend: str = "auto") -> Backend:
    """Return the backend that computes ``op`` for the pair on a device type; ``backend`` asks for one by name.

    Raises ``UnsupportedError`` with the reason of each candidate when none, or not the one asked for, can run.
    """
    names = list(BACKENDS) if backend == "auto" else [load(backend).name]
    reasons = {}
    for name in names:
        reason = load(name).unusable(op, weight, activation, device)
        if reason is None:
            for other, why in reasons.items():
                logger.debug("backend %s turned down for %s of %s: %s", other, op, _pair(weight, activation), why)
            return load(name)
        reasons[name] = reason
    usable = [n for n in BACKENDS if n not in reasons and load(n).unusable(op, weight, activation, device) is None]
    hint = f"; usable here: {', '.join(['auto', *usable])}" if usable else ""
    listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise UnsupportedError(f"no backend for {op} of {_pair(weight, activation)} on {device}: {listed}{hint}")


@functools.cache
def announce(backend: str, kind: str, weight: QuantKey, activation: QuantKey | None) -> None:
    """Log the choice of a backend, once per (kind, pair)."""
    family = str(weight).split("_")[0].split("/")[0].capitalize()
    logger.info("Using '%s' %s %s backend.", backend, family, "MoE" if kind == "moe" else kind)


def _pair(weight: QuantKey, activation: QuantKey | None) -> str:
    return f"weight {weight} with activation {activation}"
