"""Shared experts: whether a reader may fuse them with the routed ones, which takes the same spec for both."""

from torch import nn

from torchq.decisions import keys
from torchq.nn.linears import LinearKind
from torchq.plan import Row, spec_text
from torchq.transforms.tree import Node


def note_fusion(experts: Node, row: Row, rows: dict[str, Row]) -> None:
    """Note on the row of routed experts whether the shared experts beside them got the same spec.

    ``rows`` are those of the model by name. A model without shared experts gets no note.
    """
    for slot, sibling in experts.parent.module._modules.items() if experts.parent is not None else ():
        if sibling is None or "shared_expert" not in slot or _is_linear(sibling):
            continue
        prefix = experts.parent.name and f"{experts.parent.name}."
        specs = {
            _spec_of(rows.get(f"{prefix}{slot}.{path}"), module): None
            for path, module in sibling.named_modules()
            if _is_linear(module)
        }
        if list(specs) == [keys(row.resolution)] and not row.parts:
            row.notes.append(f"{slot}: same spec as the routed experts, so fusing the two is legal")
        elif specs:
            theirs = ", ".join("16-bit" if spec is None else spec_text(*spec) for spec in specs)
            row.notes.append(f"{slot}: {theirs}, unlike the routed experts, so fusing the two is not legal")


def _is_linear(module: nn.Module) -> bool:
    return LinearKind.recognises(module, "") or LinearKind.is_quantized(module)


def _spec_of(row: Row | None, module: nn.Module) -> tuple | None:
    if row is not None and row.resolution is not None:
        return keys(row.resolution)
    return module.spec if LinearKind.is_quantized(module) else None
