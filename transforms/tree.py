"""Walk a module tree with every name of every module, and swap a module everywhere it is registered."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


@dataclass(eq=False)
class Node:
    """A module with its fully qualified names (several when it is shared) and the slots that hold it."""

    module: nn.Module
    names: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    parent: "Node | None" = None

    @property
    def name(self) -> str:
        return self.names[0]


def walk(root: nn.Module) -> list[Node]:
    """Return one node a module, in the order of ``named_modules``; the root comes first, with the name ``""``."""
    nodes: dict[int, Node] = {}
    for name, module, parent, slot in _paths(root):
        node = nodes.setdefault(id(module), Node(module, parent=nodes.get(id(parent))))
        node.names.append(name)
        if parent is not None and (parent, slot) not in node.slots:
            node.slots.append((parent, slot))
    return list(nodes.values())


def swap(node: Node, replacement: nn.Module) -> None:
    """Put ``replacement`` into every slot of the node, with the old module's hooks and train / eval flag."""
    take_over(replacement, node.module)
    for parent, slot in node.slots:
        parent._modules[slot] = replacement
    node.module = replacement


def take_over(replacement: nn.Module, old: nn.Module) -> None:
    """Give ``replacement`` the hooks and the train / eval flag of ``old``."""
    for name in _HOOKS:
        setattr(replacement, name, getattr(old, name))
    replacement.train(old.training)


def _paths(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None, str]]:
    stack = [("", root, None, "", frozenset())]
    while stack:
        name, module, parent, slot, above = stack.pop()
        yield name, module, parent, slot
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        if not children:
            continue
        above = above | {id(module)}
        for key, child in reversed(children):
            if id(child) not in above:  # else a child that holds its own parent
                stack.append((f"{name}.{key}" if name else key, child, module, key, above))
