"""QuantizationPlan, what each layer would get, and QuantizationReport, what it got."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchq import table
from torchq.keys import QuantKey
from torchq.resolution import Resolution, summary_line

LARGE = 1 << 20  # bytes from which an unquantized parameter is worth a line


@dataclass
class Row:
    """One layer. ``skipped`` says why it is left alone (None for a layer that is quantized); sizes are bytes.

    ``shape`` is (N, K), or one shape (E, N, K) a matrix for experts; ``parts`` is what each matrix gets where they
    differ. ``sqnr`` (dB) and ``seconds`` are filled in by quantizing.
    """

    name: str
    kind: str
    shape: tuple
    bytes_before: int
    bytes_after: int
    resolution: Resolution | None = None
    backend: str | None = None
    skipped: str | None = None
    aliases: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    parts: dict[str, Resolution | None] = field(default_factory=dict)
    sqnr: float | None = None
    seconds: float | None = None

    @property
    def spec(self) -> str:
        """Weight and activation key, for example ``mxfp4 x mxfp8``; ``16-bit`` for an activation that is left alone."""
        if self.parts:
            return "; ".join(f"{name}: {_spec(resolution) or 'dense'}" for name, resolution in self.parts.items())
        return _spec(self.resolution)


def _spec(to: Resolution | None) -> str:
    return "" if to is None else spec_text(to.weight, to.activation, to.hadamard_size)


def spec_text(weight: QuantKey, activation: QuantKey | None, hadamard_size: int | None) -> str:
    """What a layer is quantized to, as tables print it."""
    text = f"{weight} x {activation or '16-bit'}"
    return text if hadamard_size is None else f"{text}, hadamard {hadamard_size}"


@dataclass
class QuantizationPlan:
    """What ``quantize_`` would do: ``rows``, one a layer, in the model's order; nothing is changed.

    ``bytes_before`` and ``bytes_after`` are those of the whole model's parameters and buffers. ``unquantized`` lists
    large parameters outside of layers that could be quantized, as (name, class, bytes).
    """

    rows: list[Row]
    bytes_before: int
    bytes_after: int
    unquantized: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def quantized(self) -> list[Row]:
        """The rows of the layers that get a spec."""
        return [row for row in self.rows if row.skipped is None]

    @property
    def skipped(self) -> list[Row]:
        """The rows of the layers that are left alone; ``row.skipped`` says why."""
        return [row for row in self.rows if row.skipped is not None]

    def summary(self) -> str:
        """The log line: ``Quantized 2 layers of types: o_proj: 2 (from linear: mxfp8)``."""
        return summary_line((row.name, row.resolution) for row in self.quantized)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return table.as_text(self._headline(), self.rows, self.unquantized)

    def _repr_html_(self) -> str:
        return table.as_html(self._headline(), self.rows, self.unquantized)

    def _headline(self) -> str:
        return f"{_layers(self.quantized)} to quantize, model {_change(self.bytes_before, self.bytes_after)}"


@dataclass
class QuantizationReport(QuantizationPlan):
    """What ``quantize_`` did: the plan's rows with SQNR and seconds, the time in all, and the memory peak.

    ``peak_bytes`` is the process's peak resident memory on the CPU, the allocator's peak on CUDA.
    """

    seconds: float = 0.0
    peak_bytes: int = 0

    def plot(self):
        """Return a matplotlib figure: each layer's SQNR in the model's order, and the bytes of each layer type."""
        return table.as_figure(self._headline(), self.quantized)

    def _headline(self) -> str:
        change = _change(self.bytes_before, self.bytes_after)
        return f"{_layers(self.quantized)} quantized in {self.seconds:.1f} s, model {change}"


def _layers(rows: list[Row]) -> str:
    return f"{len(rows)} layer" if len(rows) == 1 else f"{len(rows)} layers"


def _change(before: int, after: int) -> str:
    ratio = before / after if after else math.inf
    return f"{table.size(before)} -> {table.size(after)} ({ratio:.2f}x smaller)"
