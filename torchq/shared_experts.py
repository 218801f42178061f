"""Shared experts: whether a reader may fuse them with the routed ones, which takes the same spec for both."""

from torch import nn

from torchq.decisions import keys
from torchq.nn.linears import LinearKind
from torchq.plan import Row
from torchq.transforms.tree import Node


def note_fusion(experts: Node, row: Row, rows: dict[str, Row]) -> None:
    """Note on the row of routed experts whether the shared experts beside them got the same spec.

    ``rows`` are those of the model by name. A model without shared experts gets no note.
    """
    for slot, sibling in experts.parent.module._modules.items() if experts.parent is not None else ():
        if sibling is None or "shared_expert" not in slot or LinearKind.recognises(sibling, slot):
            continue
        prefix = experts.parent.name and f"{experts.parent.name}."
        linears = [rows.get(f"{prefix}{slot}.{path}") for path, module in sibling.named_modules() if _is_layer(module)]
        specs = {None if one is None or one.resolution is None else keys(one.resolution) for one in linears}
        if specs == {keys(row.resolution)} and not row.parts:
            row.notes.append(f"{slot}: same spec as the routed experts, so fusing the two is legal")
        elif specs:
            theirs = ", ".join(dict.fromkeys(one.spec or "16-bit" for one in linears if one is not None))
            row.notes.append(f"{slot}: {theirs or '16-bit'}, unlike the routed experts, so fusing the two is not legal")


def _is_layer(module: nn.Module) -> bool:
    return LinearKind.recognises(module, "") or LinearKind.is_quantized(module)
