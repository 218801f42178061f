"""ExpertsLayout: where an experts module keeps its matrices, and how to read them as (N, K) and put them back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError


@dataclass(frozen=True)
class Projection:
    """Where one matrix of each expert lies in an experts module, and in which order.

    ``weights`` names a parameter (E, N, K), or two that together make N: the gate's and the up projection's; a dot
    reaches into a child module. ``bias`` names a parameter (E, N). ``transposed``: the weight is (E, K, N), as in
    ``x @ w``. ``interleaved``: rows go gate, up, gate, up, ... instead of gates first. ``flat``: the experts follow one
    another along the first of two dimensions.
    """

    weights: str | tuple[str, str]
    bias: str | None = None
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights."""
        return (self.weights,) if isinstance(self.weights, str) else tuple(self.weights)

    def shape(self, module: nn.Module, experts: int) -> tuple[int, int, int]:
        """The canonical (E, N, K)."""
        rows, columns = zip(*(self._one(module, name, experts, 0).shape for name in self.names), strict=True)
        return experts, sum(rows), columns[0]

    def expert(self, module: nn.Module, experts: int, index: int) -> Tensor:
        """One expert's matrix (N, K), gate rows first: a view where the order allows one, else a copy."""
        parts = [self._one(module, name, experts, index) for name in self.names]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _gates_first(matrix, 0) if self.interleaved else matrix

    def swizzle_bias(self, module: nn.Module) -> nn.Parameter | None:
        """The bias (E, N) in the order of the canonical rows: the parameter itself where that is its order."""
        if self.bias is None:
            return None
        bias = module.get_parameter(self.bias)
        return nn.Parameter(_gates_first(bias.detach(), 1), bias.requires_grad) if self.interleaved else bias

    def unswizzle(self, matrices: Tensor) -> dict[str, Tensor]:
        """Turn canonical matrices (E, N, K) back into what the module keeps, by parameter name."""
        matrices = _alternating(matrices, 1) if self.interleaved else matrices
        parts = matrices.chunk(len(self.names), 1)
        parts = [part.transpose(1, 2) if self.transposed else part for part in parts]
        parts = [part.flatten(0, 1) if self.flat else part for part in parts]
        return dict(zip(self.names, parts, strict=True))

    def unswizzle_bias(self, bias: Tensor) -> dict[str, Tensor]:
        """Turn a bias (E, N) of canonical order back into what the module keeps, by parameter name."""
        return {self.bias: _alternating(bias, 1) if self.interleaved else bias}

    def restored_order(self, output: Tensor) -> Tensor:
        """The projection's output (T, N), canonical, in the order that the module's own gate function reads."""
        return _alternating(output, 1) if self.interleaved else output

    def _one(self, module: nn.Module, name: str, experts: int, index: int) -> Tensor:
        weight = module.get_parameter(name).detach()
        matrix = (weight.unflatten(0, (experts, -1)) if self.flat else weight)[index]
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True)
class ExpertsLayout:
    """How an experts module is built: what ``torchq.nn.register_experts`` needs to know of a class.

    ``gate_up`` is the projection into the expert (``gated``: N holds the gate and the up rows), ``down`` the one out of
    it. Between them goes the module's method ``gate`` (its output has half the columns if ``gated``), else
    ``act(gate) * up`` with the module's attribute ``act``, or ``act(up)``. ``post_norm`` names a module for the output
    of each expert. ``routing``: "top_k" is ``forward(hidden_states, top_k_index, top_k_weights)``; "blocks" is
    ``forward(x)`` of E equal blocks of rows, one an expert. ``identity``: indices from E on give the token itself.
    """

    gate_up: Projection
    down: Projection
    gated: bool = True
    gate: str | None = None
    act: str = "act_fn"
    post_norm: str | None = None
    routing: Literal["top_k", "blocks"] = "top_k"
    identity: bool = False

    def __post_init__(self) -> None:
        if self.routing not in ("top_k", "blocks"):
            raise ConfigError(f"routing is 'top_k' or 'blocks', not {self.routing!r}")

    @property
    def projections(self) -> dict[str, Projection]:
        """The two projections, by the name that they have in a QuantMoE."""
        return {"gate_up": self.gate_up, "down": self.down}

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that the projections take."""
        return [n for p in self.projections.values() for n in (*p.names, *([p.bias] if p.bias else ()))]

    def num_experts(self, module: nn.Module) -> int:
        """How many experts the module holds; 0 if nothing tells."""
        return (
            getattr(module, "num_experts", 0) if self.down.flat else module.get_parameter(self.down.names[0]).shape[0]
        )

    def stacks(self, module: nn.Module) -> dict[str, "ExpertStack"]:
        """The canonical matrices of the module, read one expert at a time."""
        experts = self.num_experts(module)
        return {name: ExpertStack(module, projection, experts) for name, projection in self.projections.items()}


class ExpertStack:
    """The matrices of all experts of one projection: a ``shape`` (E, N, K), and (N, K) tensors made when asked for."""

    def __init__(self, module: nn.Module, projection: Projection, experts: int) -> None:
        self._module, self._projection = module, projection
        self.shape = projection.shape(module, experts)

    def __getitem__(self, index: int) -> Tensor:
        return self._projection.expert(self._module, self.shape[0], index)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def _gates_first(t: Tensor, dim: int) -> Tensor:
    return t.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _alternating(t: Tensor, dim: int) -> Tensor:
    return t.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
