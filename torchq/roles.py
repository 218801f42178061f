"""Roles: which linear layers a blanket ``linear`` leaves alone, and why. A target that names them is obeyed."""

import re
from collections.abc import Iterator

from torch import nn

from torchq.nn.linears import is_linear, linear_weight
from torchq.transforms.tree import Node

_KEEP_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_HEAD_NAMES = ("lm_head", "embed_out")
# Small projections whose outputs are gates or per-head weights, kept in 16 bits by the models' own authors.
_DELICATE = (
    (re.compile(r"(.*\.)?linear_attn\.in_proj_[ab]"), "per-head decay and gate of linear attention"),
    (re.compile(r"(.*\.)?indexer\.weights_proj"), "per-head weights of the attention indexer"),
)
_ROUTER_PARTS = ("router", "gate")
_ADAPTER_PARTS = re.compile(r"(.*\.)?lora_(A|B|embedding_A|embedding_B)(\..*)?")


class Roles:
    """The protected layers of one model: its output embedding, routers, adapters, and what it keeps in fp32."""

    def __init__(self, nodes: list[Node]) -> None:
        self._by_id: dict[int, str] = {}
        self._keep_patterns: list[tuple[str, re.Pattern]] = []
        embeddings = {id(n.module.weight) for n in nodes if isinstance(n.module, nn.Embedding)}
        for node in nodes:
            self._find_output_embedding(node, embeddings)
            self._find_kept_in_fp32(node)
            if _number_of_experts(node) is not None and node.parent is not None:
                for router in _routers_beside(node):
                    self._by_id.setdefault(id(router), "router of a mixture of experts")

    def reason(self, node: Node) -> str | None:
        """Say why a blanket rule leaves the layer alone, or None if it takes it."""
        if id(node.module) in self._by_id:
            return self._by_id[id(node.module)]
        for name in node.names:
            for prefix, pattern in self._keep_patterns:
                if name.startswith(prefix) and pattern.search(name[len(prefix) :]):
                    return "listed in the model's _keep_in_fp32_modules"
            for pattern, why in _DELICATE:
                if pattern.fullmatch(name):
                    return why
            if _ADAPTER_PARTS.fullmatch(name):
                return "low-rank adapter, which is trained on top"
        return None

    def _find_output_embedding(self, node: Node, embeddings: set[int]) -> None:
        module = node.module
        if hasattr(type(module), "get_output_embeddings"):  # of the class: a module's own lookup is slow to say no
            head = module.get_output_embeddings()
            if head is not None:
                self._by_id.setdefault(id(head), "output embedding of the model")
        if not is_linear(module):
            return
        if id(module._parameters.get("weight")) in embeddings:
            self._by_id[id(module)] = "output embedding of the model, tied to its input embedding"
        elif node.name.rpartition(".")[2] in _HEAD_NAMES:
            self._by_id.setdefault(id(module), "output embedding of the model")

    def _find_kept_in_fp32(self, node: Node) -> None:
        own, cls = node.module.__dict__, type(node.module)  # not through the module, which is slow to say no
        listed = {name for key in _KEEP_IN_FP32 for name in own.get(key, getattr(cls, key, None)) or ()}
        if listed:
            pattern = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(listed)))
            self._keep_patterns += [(f"{name}." if name else "", pattern) for name in node.names]


def _number_of_experts(node: Node) -> int | None:
    """The number of experts if the module holds experts: 3-D parameters, or a container of alike modules, so named."""
    names = [type(node.module).__name__, *(slot for _, slot in node.slots)]
    if not any("expert" in name.lower() for name in names):
        return None
    stacked = [p.shape[0] for p in node.module._parameters.values() if p is not None and p.dim() == 3]
    if stacked:
        return stacked[0]
    counted = getattr(node.module, "num_experts", None) or getattr(node.module, "moe_num_experts", None)
    if isinstance(counted, int):
        return counted
    is_list = isinstance(node.module, nn.ModuleList | nn.ModuleDict)
    return len(node.module) if is_list else None


def _routers_beside(experts: Node) -> Iterator[nn.Module]:
    block, count = experts.parent.module, _number_of_experts(experts)
    for slot, child in block._modules.items():
        if child is None or child is experts.module:
            continue
        named_router = any(part in slot for part in _ROUTER_PARTS)
        for module in child.modules() if named_router else (child,):
            if is_linear(module) and (slot == "router" or _is_router_shaped(module, count)):
                yield module


def _is_router_shaped(module: nn.Module, experts: int) -> bool:
    return linear_weight(module).shape[0] in (1, experts)
