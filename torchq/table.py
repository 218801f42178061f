"""Plans and reports as a text table, as HTML and as a figure; layers of one type, spec and fate share a line."""

import html
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchq.matching import layer_type

if TYPE_CHECKING:
    from torchq.plan import Row

_COLUMNS = ("layer type", "layers", "weight x activation", "backend", "before", "after", "SQNR")
_NUMERIC = {"layers", "before", "after", "SQNR"}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: int) -> str:
    """Print a number of bytes in decimal units: ``269.1 MB``."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def as_text(headline: str, rows: Sequence["Row"], unquantized: Sequence[tuple[str, str, int]]) -> str:
    lines = [f"torchq: {headline}"]
    cells = _quantized_cells(rows)
    if cells:
        shown = [i for i in range(len(_COLUMNS)) if any(line[i] for line in cells)]
        lines += ["", *columns([_COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in cells])]
    for title, items in _sections(rows, unquantized):
        lines += ["", title, *(f"  {item}" for item in items)]
    return "\n".join(lines)


def columns(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a text table; the columns of numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    return [_line(headers, headers, widths), rule, *(_line(line, headers, widths) for line in cells)]


def as_html(headline: str, rows: Sequence["Row"], unquantized: Sequence[tuple[str, str, int]]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    parts = [f"<p><b>torchq</b>: {html.escape(headline)}</p>", "<table>", line(_COLUMNS, "th")]
    parts += [line(cells, "td") for cells in _quantized_cells(rows)]
    parts.append("</table>")
    for title, items in _sections(rows, unquantized):
        listed = "".join(f"<li>{html.escape(item)}</li>" for item in items)
        parts.append(f"<p>{html.escape(title)}</p><ul>{listed}</ul>")
    return "\n".join(parts)


def as_figure(headline: str, rows: Sequence["Row"]):
    from matplotlib.figure import Figure

    by_type: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_type[layer_type(row.name)].append(row)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    noise, weight = figure.subplots(1, 2)
    for name, group in by_type.items():
        noise.plot([row.sqnr for row in group], marker=".", label=name)
    noise.set(xlabel="layer of the type", ylabel="SQNR of the weight, dB")
    noise.legend(fontsize="small")
    names = list(by_type)
    for offset, attribute, label in ((-0.2, "bytes_before", "before"), (0.2, "bytes_after", "after")):
        megabytes = [sum(getattr(row, attribute) for row in by_type[name]) / 1e6 for name in names]
        weight.barh([i + offset for i in range(len(names))], megabytes, height=0.4, label=label)
    weight.set_yticks(range(len(names)), names, fontsize="small")
    weight.set(xlabel="MB")
    weight.invert_yaxis()
    weight.legend()
    figure.suptitle(headline)
    return figure


def _quantized_cells(rows: Sequence["Row"]) -> list[list[str]]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.skipped is None:
            groups[layer_type(row.name), row.spec, row.backend].append(row)
    lines = [[name, *_sums(group, spec, backend)] for (name, spec, backend), group in groups.items()]
    if len(lines) > 1:
        lines.append(["total", *_sums([row for group in groups.values() for row in group], "", "")])
    return lines


def _sums(rows: Sequence["Row"], spec: str, backend: str) -> list[str]:
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    return [str(len(rows)), spec, backend, size(before), size(after), _decibels([row.sqnr for row in rows])]


def _decibels(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    if any(math.isnan(v) for v in known):
        return "not finite"
    median, low = statistics.median(known), min(known)
    return f"{median:.1f} dB" if f"{low:.1f}" == f"{median:.1f}" else f"{median:.1f} dB (min {low:.1f})"


def _sections(rows: Sequence["Row"], unquantized: Sequence[tuple[str, str, int]]):
    left: dict[tuple, list[str]] = defaultdict(list)
    for row in rows:
        if row.skipped is not None:
            left[layer_type(row.name), row.skipped].append(row.name)
    large: dict[tuple, list[tuple[str, int]]] = defaultdict(list)
    for name, cls, count in unquantized:
        large[layer_type(name), cls].append((name, count))
    notes = Counter(note for row in rows for note in row.notes)
    sections = (
        ("left alone:", [f"{_named(kind, names)}: {why}" for (kind, why), names in left.items()]),
        (
            "large and not quantized:",
            [
                f"{_named(kind, [name for name, _ in found])} ({cls}): {size(sum(count for _, count in found))}"
                for (kind, cls), found in large.items()
            ],
        ),
        ("notes:", [note if count == 1 else f"{note} ({count} layers)" for note, count in notes.items()]),
    )
    return [(title, items) for title, items in sections if items]


def _named(kind: str, names: Sequence[str]) -> str:
    """One layer by its full name, several by their type."""
    return names[0] if len(names) == 1 else f"{kind} ({len(names)} layers)"


def _line(cells: Sequence[str], headers: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.rjust(width) if header in _NUMERIC else cell.ljust(width)
        for cell, header, width in zip(cells, headers, widths, strict=True)
    )
    return "  ".join(aligned).rstrip()
