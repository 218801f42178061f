"""Walking and swapping modules: shared ones, cycles, empty slots, hooks."""

import pytest
import torch
from torch import nn

from torchq.transforms.tree import swap, walk


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), None
        self.register_module("empty", None)

    def forward(self, x):
        return self.down(self.up(x))


def tied():
    model = nn.Sequential(Block(), nn.ReLU(), Block())
    model[2].up = model[0].up
    return model


def names_of(model):
    return {node.name: node.names for node in walk(model)}


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(Block(), Block()), tied(), nn.TransformerDecoderLayer(8, 2, 8)]
)
def test_one_node_a_module_in_the_order_of_named_modules(model):
    nodes = walk(model)
    assert [(n.name, n.module) for n in nodes] == list(model.named_modules())
    assert nodes[0].module is model and nodes[0].name == "" and not nodes[0].slots and nodes[0].parent is None
    every = {(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)}
    assert {(name, id(n.module)) for n in nodes for name in n.names} == every


def test_a_shared_module_has_all_its_names_and_slots():
    model = tied()
    node = next(n for n in walk(model) if n.name == "0.up")
    assert node.names == ["0.up", "2.up"] and node.slots == [(model[0], "up"), (model[2], "up")]
    assert node.parent.module is model[0]


def test_a_shared_parent_gives_its_children_every_name_but_one_slot():
    block = Block()
    model = nn.ModuleDict({"a": block, "b": block})
    node = next(n for n in walk(model) if n.name == "a.up")
    assert node.names == ["a.up", "b.up"] and node.slots == [(block, "up")]


def test_parents_are_nodes():
    nodes = {n.name: n for n in walk(nn.Sequential(Block()))}
    assert nodes["0.up"].parent is nodes["0"] and nodes["0"].parent is nodes[""]


def test_a_child_that_holds_its_parent_does_not_loop():
    model = nn.Sequential(Block())
    model[0].register_module("owner", model)
    assert list(names_of(model)) == ["", "0", "0.up", "0.down"]


def test_a_long_chain_of_shared_modules_is_named_once_each_way():
    a = nn.Linear(1, 1)
    model = nn.Sequential(a, a, nn.Sequential(a))
    assert names_of(model) == {"": [""], "0": ["0", "1", "2.0"], "2": ["2"]}


def test_swap_fills_every_slot():
    model = tied()
    node, new = next(n for n in walk(model) if n.name == "0.up"), nn.Linear(4, 8)
    old = model[2].down
    swap(node, new)
    assert model[0].up is new and model[2].up is new and node.module is new and model[2].down is old
    assert list(model[0]._modules) == ["up", "down", "empty"]  # in place: the order of children is kept
    assert names_of(model)["0.up"] == ["0.up", "2.up"]
    assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("training", [True, False])
def test_swap_keeps_the_mode(training):
    model = Block().train(training)
    for node in walk(model)[1:]:
        swap(node, nn.Sequential(nn.Linear(4, 8), nn.Dropout()).train(not training))
    assert {m.training for m in model.modules()} == {training}


def test_hooks_move_and_their_handles_still_work():
    model, calls = Block(), []
    handles = [
        model.up.register_forward_pre_hook(lambda m, a: calls.append("pre")),
        model.up.register_forward_hook(lambda m, a, kw, out: calls.append("kwargs"), with_kwargs=True),
        model.up.register_forward_hook(lambda m, a, out: calls.append("always"), always_call=True),
        model.up.register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
        model.up.register_full_backward_pre_hook(lambda m, go: calls.append("backward pre")),
    ]
    x = torch.ones(1, 4, requires_grad=True)
    model(x).sum().backward()
    before, calls[:] = list(calls), []
    swap(next(n for n in walk(model) if n.name == "up"), nn.Linear(4, 8))
    model(x).sum().backward()
    assert calls == before and set(calls) == {"pre", "kwargs", "always", "backward", "backward pre"}
    calls.clear()
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert not calls


def test_a_hook_for_failures_is_called_when_the_new_module_fails():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model, calls = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda m, a, out: calls.append(out), always_call=True)
    swap(walk(model)[1], Broken())
    with pytest.raises(RuntimeError, match="broken"):
        model(torch.ones(1, 4))
    assert calls == [None]
