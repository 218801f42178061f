"""Tied weights: which layers share a parameter, and how a quantized layer leaves the tie."""

from collections import defaultdict

from torch import nn

from torchq.transforms.tree import Node


def tied_names(nodes: list[Node]) -> dict[int, list[str]]:
    """Return, by id of a parameter that several modules hold, the fully qualified names of those modules."""
    holders: dict[int, list[str]] = defaultdict(list)
    for node in nodes:
        for parameter in node.module._parameters.values():
            if parameter is not None:
                holders[id(parameter)].append(node.name)
    return {key: names for key, names in holders.items() if len(names) > 1}


def untie(model: nn.Module, name: str) -> None:
    """Take the layer ``name`` out of a transformers model's ties.

    Without this, ``tie_weights`` adds a dense ``weight`` to the quantized layer, or a reload drops the layer.
    """
    for prefix, module in model.named_modules():
        ties = getattr(module, "all_tied_weights_keys", None)
        if not isinstance(ties, dict) or not name.startswith(prefix):
            continue
        own = name[len(prefix) :].lstrip(".") + "."
        left = {
            target: source for target, source in ties.items() if not (target.startswith(own) or source.startswith(own))
        }
        if len(left) < len(ties):
            module.all_tied_weights_keys = left
            module.config.tie_word_embeddings = False
