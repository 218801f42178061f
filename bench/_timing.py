"""What the CPU bench measures with: interleaved medians, cold weights, this machine's limits, tables that show bars."""

import datetime
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

Call = Callable[[], object]
MEMORY = 2 << 30  # bytes that the copies of one comparison may take together


@dataclass(frozen=True)
class Timer:
    """How long to measure: ``rounds`` rounds, in each of which every rival runs for ``run`` seconds or one call."""

    rounds: int = 7
    run: float = 0.02
    most: float = 4.0  # seconds after which a slow rival rests, once it has run three times

    def medians(self, calls: dict[str, Call]) -> dict[str, float]:
        """Return each rival's median seconds a call; the order of the rivals turns around every round."""
        repeats = {name: self._repeats(call) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(self.rounds):
            for name in list(calls)[:: -1 if i % 2 else 1]:
                if len(found[name]) < 3 or sum(found[name]) * repeats[name] < self.most:
                    found[name].append(seconds(calls[name], repeats[name]))
        return {name: statistics.median(times) for name, times in found.items()}

    def _repeats(self, call: Call) -> int:
        first = seconds(call)  # with what it builds and touches for the first time
        return 1 if first > 50 * self.run else max(1, math.ceil(self.run / seconds(call)))


def seconds(call: Call, repeats: int = 1) -> float:
    """Return the mean seconds of ``repeats`` calls in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def busy_cores(call: Call) -> float:
    """Return the CPU seconds of one call, of all threads, over its wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def rotating(calls: list[Call]) -> Call:
    """Return a call that runs the next of ``calls`` each time."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def copies(nbytes: int, rivals: int) -> int:
    """Return how many tensors of ``nbytes`` to rotate over so that each is cold: more than 4x the last-level cache.

    A model's step reads every weight once, so none is in the cache when its turn comes. ``rivals`` share ``MEMORY``.
    """
    return max(1, min(4 * cache_bytes() // nbytes + 1, MEMORY // rivals // nbytes))


def cache_bytes() -> int:
    """Return the size of the last-level cache, 32 MiB where the system does not tell."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 32 << 20
    return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]


@dataclass(frozen=True)
class Machine:
    """The limits of this machine as measured: bytes a second that it reads, operations a second that it multiplies."""

    read: float
    read_by: str
    rates: dict[str, float]

    @classmethod
    def measured(cls, timer: Timer) -> "Machine":
        """Measure the fastest of a few ways to read memory, and of a large product in each dtype."""
        nbytes = min(max(8 * cache_bytes(), 1 << 28), MEMORY)
        reads = timer.medians(_reads(nbytes))
        best = min(reads, key=reads.get)
        operations = 2 * 1024 * 4096 * 4096
        rates = {name: operations / found for name, found in timer.medians(_products()).items()}
        return cls(nbytes / reads[best], best, rates)

    def reading(self, nbytes: float) -> "Limit":
        """The least time to read so many bytes."""
        return Limit(nbytes / self.read, f"{nbytes / 1e6:.1f} MB at {self.read / 1e9:.1f} GB/s")

    def multiplying(self, operations: float, integer: bool) -> "Limit":
        """The least time for so many multiplications and additions; ``integer``: int8 products may serve."""
        name = max((n for n in self.rates if integer or n != "int8"), key=self.rates.get)
        rate = f"{operations / 1e9:.3g} Gop at {self.rates[name] / 1e9:.0f} Gop/s ({name})"
        return Limit(operations / self.rates[name], rate)

    def limit(self, nbytes: float, operations: float, integer: bool) -> "Limit":
        """The longer of the two: to read so many bytes, or to do so many operations."""
        return max(self.reading(nbytes), self.multiplying(operations, integer), key=lambda limit: limit.seconds)

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.rates.items())
        return (
            f"Reads memory at {self.read / 1e9:.1f} GB/s (the ceiling: {self.read_by}); multiplies 1024x4096x4096 "
            f"at Gop/s: {rates}. Last-level cache {cache_bytes() >> 20} MB."
        )


@dataclass(frozen=True)
class Limit:
    """The least seconds that something can take here, and what they are made of."""

    seconds: float
    why: str


def _reads(nbytes: int) -> dict[str, Call]:
    buffer = torch.ones(nbytes // 4)
    doubles, integers, halves = (buffer.view(d) for d in (torch.float64, torch.int64, torch.bfloat16))
    rows, x = halves.view(-1, 4096), torch.ones(4096, dtype=torch.bfloat16)
    return {
        "f32 sum": lambda: buffer.sum(),
        "f64 max": lambda: doubles.max(),
        "int64 sum": lambda: integers.sum(),
        "f32 norm": lambda: torch.linalg.vector_norm(buffer),
        "bf16 mv": lambda: torch.mv(rows, x),
    }


def _products() -> dict[str, Call]:
    x, w = torch.randn(1024, 4096), torch.randn(4096, 4096)
    x16, w16 = x.bfloat16(), w.bfloat16()
    signed = torch.randint(-127, 128, (4096, 4096), dtype=torch.int8)
    unsigned = torch.randint(0, 255, (1024, 4096), dtype=torch.uint8)
    calls = {
        "bf16": lambda: F.linear(x16, w16),
        "f32": lambda: F.linear(x, w),
        "int8": lambda: torch._int_mm(unsigned, signed.T),
    }
    try:
        calls["int8"]()
    except RuntimeError:  # u8 by s8 came with torch 2.12
        del calls["int8"]
    return calls


@dataclass(frozen=True)
class Check:
    """One measured ratio beside its bar, and what the machine's limit would make of it."""

    name: str
    ratio: float
    bar: float | None
    limit: float
    why: str
    at_most: bool = False

    @property
    def missed(self) -> bool:
        return self.bar is not None and (self.ratio > self.bar if self.at_most else self.ratio < self.bar)

    @property
    def cells(self) -> list[str]:
        """Ratio (bold where it misses the bar), bar and limit."""
        bar = "" if self.bar is None else f"{'<=' if self.at_most else '>='} {self.bar:g}x"
        return [self.cell, bar, times(self.limit)]

    @property
    def cell(self) -> str:
        return f"**{times(self.ratio)}**" if self.missed else times(self.ratio)

    def __str__(self) -> str:
        share = self.limit / self.ratio if self.at_most else self.ratio / self.limit
        return f"{self.name}: {times(self.ratio)}, {100 * share:.0f} % of the limit {times(self.limit)} ({self.why})"


def times(ratio: float) -> str:
    """Write a ratio with three digits: 0.918x, 6.71x, 53.1x, 141x."""
    return f"{ratio:.{max(0, 2 - math.floor(math.log10(ratio)))}f}x"


def show(
    title: str, header: list[str], rows: list[list[str]], checks: list[Check], notes: tuple[str, ...] = ()
) -> None:
    """Print a Markdown section: the table, its notes, and for each missed bar the limit and what it comes from."""
    print(f"\n## {title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    for note in notes:
        print(f"\n{note}")
    missed = [check for check in checks if check.missed]
    if missed:
        print("\nMissed bars (bold above), with what this machine allows:\n")
    for check in missed:
        print(f"- {check}")
    print(end="", flush=True)


def processor() -> str:
    """Return the CPU's name, its cores and the threads that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"


def heading(machine: Machine, level: str) -> str:
    """Return the first lines of the report: what was measured where, and when."""
    today = datetime.date.today().isoformat()
    return f"# Native CPU kernels\n\n{processor()}; torch {torch.__version__}; level {level}; {today}.\n{machine}"
