"""QuantMoE: an experts module whose matrices are codes and scales, called as the module that it replaces."""

import copy
from itertools import accumulate

import torch
from torch import Tensor, nn

from torchq import kernels
from torchq.kernels import QuantizedTensor
from torchq.keys import QuantKey
from torchq.nn.layout import ExpertsLayout
from torchq.nn.quantized import QuantizedWeight


class QuantProjection(QuantizedWeight):
    """One matrix of each expert: rows of x (T, K), sorted by expert, times that expert's weight (N, K).

    Buffers as in QuantLinear, with the experts in front: ``codes`` (E, ...). ``bias`` is (E, N) or None.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: nn.Parameter | None = None,
        *,
        activation: QuantKey | None = None,
        hadamard_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
    ) -> None:
        super().__init__(weight, activation, hadamard_size, dtype, backend)
        self.register_parameter("bias", bias)

    def expert(self, index: int) -> Tensor:
        """The f32 matrix (N, K) that one expert multiplies by."""
        return self._dequantized(self.quantized[index], torch.float32)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return kernels.grouped_linear(
            self._prepared(x), offsets, self.quantized, self.bias, self.activation, self.backend
        )

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.shape))}, bias={self.bias is not None}, {super().extra_repr()}"


class DenseProjection(nn.Module):
    """The projection of a QuantMoE that no rule quantizes: ``weight`` (E, N, K) and ``bias`` (E, N) as they were."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, requires_grad: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad)
        self.register_parameter("bias", bias)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight, as a QuantProjection gives it."""
        return self.weight.detach().to(dtype or self.weight.dtype)

    def expert(self, index: int) -> Tensor:
        """The f32 matrix (N, K) that one expert multiplies by."""
        return self.weight.detach()[index].float()

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        experts, rows, columns = self.weight.shape
        weight, x = self.weight, x.to(self.weight.dtype)
        unit = 16 // weight.element_size()  # grouped_mm wants strides of 16 bytes
        if rows % unit or columns % unit:
            weight = nn.functional.pad(weight, (0, -columns % unit, 0, -rows % unit))
            x = nn.functional.pad(x, (0, -columns % unit))
        # The last expert takes the rows of no expert too: grouped_mm leaves their gradients uninitialized otherwise.
        ends = torch.cat([offsets[1:-1], offsets.new_full((1,), x.shape[0])]).to(torch.int32)
        y = kernels.grouped_mm(x, weight.transpose(1, 2), ends)[:, :rows]
        owner = torch.searchsorted(offsets, torch.arange(x.shape[0], device=x.device), right=True) - 1
        y = y if self.bias is None else y + self.bias[owner.clamp(0, experts - 1)]
        return torch.where(((owner >= 0) & (owner < experts))[:, None], y, 0)

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.shape))}, bias={self.bias is not None}, {self.weight.dtype}"


class QuantMoE(nn.Module):
    """Routed experts with quantized ``gate_up`` (E, 2I, H) and ``down`` (E, H, I), gate rows first.

    Called as the module that it replaces: hidden_states (T, H), top_k_index int64 (T, k) and top_k_weights (T, k) give
    (T, H) in the dtype of hidden_states, the weights applied in f32. An index of E or more is skipped, unless the
    layout says that it gives the token itself. Where the layout routes by blocks, hidden_states (E * T, H) alone.
    ``layout`` tells how the matrices lay before, for writers that put them back.
    """

    def __init__(
        self,
        source: nn.Module,
        layout: ExpertsLayout,
        gate_up: QuantProjection | DenseProjection,
        down: QuantProjection | DenseProjection,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.num_experts = gate_up.shape[0]
        self.gate_up, self.down = gate_up, down
        # The module without its weights, for its gate function and what that reads. Not a child itself, or a walk over
        # the model would find an experts module in here; the children that it keeps (activation, norm) are.
        shell = source._shell if isinstance(source, QuantMoE) else _weightless(source, layout.parameters)
        object.__setattr__(self, "_shell", shell)
        for name, child in shell._modules.items():
            self.add_module(name, child)

    def dequantize(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the matrices ``gate_up`` (E, N, K) and ``down`` (E, H, I) that tokens are multiplied by."""
        return {name: getattr(self, name).dequantize(dtype) for name in self.layout.projections}

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        if self.layout.routing == "blocks":
            return self._blocks(hidden_states)
        index = top_k_index if top_k_index is not None else router_indices  # [T, k]
        weights = top_k_weights if top_k_weights is not None else routing_weights
        x, k = hidden_states.reshape(-1, hidden_states.shape[-1]), index.shape[-1]
        expert, order = index.reshape(-1).sort(stable=True)  # [T * k]
        offsets = torch.searchsorted(expert, torch.arange(self.num_experts + 1, device=expert.device))
        rows = x[order // k]
        y = self._experts(rows, offsets).float()
        beyond, weights = expert >= self.num_experts, weights.reshape(-1)[order].float()
        if self.layout.identity:
            y = torch.where(beyond[:, None], rows.float(), y)
        else:
            weights = weights.masked_fill(beyond, 0)
        y = y * weights[:, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        y = y[back].view(x.shape[0], k, y.shape[-1]).sum(1)  # [T, H]
        return y.to(hidden_states.dtype).view(*hidden_states.shape[:-1], y.shape[-1])

    def _blocks(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [E * T, H]
        offsets = torch.arange(self.num_experts + 1, device=x.device) * (rows.shape[0] // self.num_experts)
        return self._experts(rows, offsets).to(x.dtype)

    def _experts(self, x: Tensor, offsets: Tensor) -> Tensor:
        y = self.down(self._gated(self.gate_up(x, offsets)), offsets)
        norm = self.layout.post_norm
        return y if norm is None else self._shell.get_submodule(norm)(y)

    def _gated(self, y: Tensor) -> Tensor:
        layout, shell = self.layout, self._shell
        if layout.gate is not None:
            return getattr(shell, layout.gate)(layout.gate_up.restored_order(y))
        act = attribute(shell, layout.act)
        if not layout.gated:
            return act(y)
        gate, up = y.chunk(2, dim=-1)
        return act(gate) * up


class QuantParallelExperts(QuantProjection):
    """One quantized matrix of each expert, called with rows sorted by expert and the number of rows of each.

    ``forward(inputs, expert_size)``: inputs (T, K) and E sizes, a list or a tensor, give (T, N).
    """

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self.shape[0]

    def forward(self, inputs: Tensor, expert_size: list[int] | Tensor) -> Tensor:
        if isinstance(expert_size, Tensor):
            offsets = nn.functional.pad(expert_size.cumsum(0), (1, 0))
        else:
            offsets = torch.tensor([0, *accumulate(expert_size)], device=inputs.device)
        return super().forward(inputs, offsets)


def attribute(module: nn.Module, path: str):
    """The attribute of a module at a dotted path."""
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)


def _weightless(module: nn.Module, taken: list[str]) -> nn.Module:
    """A shallow copy without the parameters ``taken``, nor those of its children; other children are shared."""
    shell = copy.copy(module)
    shell._parameters = {n: p for n, p in module._parameters.items() if n not in taken}
    shell._buffers, shell._modules = dict(module._buffers), dict(module._modules)
    for name, child in module._modules.items():
        below = [path.removeprefix(f"{name}.") for path in taken if path.startswith(f"{name}.")]
        if below:
            shell._modules[name] = _weightless(child, below)
    return shell
