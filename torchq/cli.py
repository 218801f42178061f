"""The command line: ``torchq formats``."""

import argparse
from collections import defaultdict
from collections.abc import Sequence

from torchq import kernels
from torchq.table import columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="torchq", description="Quantize PyTorch models by layer name.")
    commands = parser.add_subparsers(dest="command", required=True)
    formats = commands.add_parser("formats", help="list the formats and the backends that run them here")
    formats.add_argument("--device", help="torch device type to ask about (default: cuda where there is one, else cpu)")
    options = parser.parse_args(arguments)
    print(formats_table(options.device))
    return 0


def formats_table(device: str | None = None) -> str:
    """Return ``kernels.supported`` as text: activations that run alike share a line, * marks the default."""
    groups: dict[tuple, list[str]] = defaultdict(list)
    footnotes: dict[str, int] = {}
    rows = kernels.supported(device)
    for row in rows:
        for backend, reason in row.unusable.items():
            footnotes.setdefault(f"{backend}: {reason}", len(footnotes) + 1)
        marks = " ".join(f"[{footnotes[f'{b}: {r}']}]" for b, r in row.unusable.items())
        name = f"{row.activation or 'null (16-bit)'}{'*' if row.default else ''}"
        groups[row.kind, str(row.weight), ", ".join(row.backends), marks].append(name)
    lines = []
    for (kind, weight, backends, marks), activations in groups.items():
        lines += [(kind, weight, a, backends, marks) for a in _wrapped(activations)]
    shown = columns(("kind", "weight", "activation (* default)", "backends", "not usable"), _blank_repeats(lines))
    notes = [f"[{number}] {text}" for text, number in footnotes.items()]
    return "\n".join([f"on {rows[0].device}:", "", *shown, *([""] if notes else []), *notes])


def _wrapped(names: list[str], width: int = 60) -> list[str]:
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += f", {name}" if lines[-1] else name
    return lines


def _blank_repeats(lines: list[tuple[str, ...]]) -> list[list[str]]:
    """Leave out what the line above says already: the kind, then the weight, then the backends."""
    shown = []
    for above, line in zip([("",) * 5, *lines], lines, strict=False):
        kind, weight, activations, *backends = line
        same_weight = line[:2] == above[:2]
        repeated = same_weight and tuple(backends) == above[3:]
        cells = ["" if kind == above[0] else kind, "" if same_weight else weight, activations]
        shown.append(cells + ["" if repeated else cell for cell in backends])
    return shown
