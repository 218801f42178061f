"""QuantLinear: a linear layer whose weight is codes and scales in plain buffers."""

import torch
from torch import Tensor, nn

from torchq import kernels
from torchq.kernels import QuantizedTensor
from torchq.keys import QuantKey
from torchq.transforms.hadamard import hadamard

_QUANTIZED = ("codes", "scale", "global_scale")


class QuantLinear(nn.Module):
    """``y = x @ weight.T + bias`` with a quantized weight (N, K) and, unless ``activation`` is None, a quantized x.

    Buffers: ``codes``, ``scale`` and, for NVFP4, ``global_scale``, whose dtypes no cast of the module changes. With
    ``hadamard_size`` the stored weight is rotated, and so is each input. ``dtype`` is what ``weight`` reads as, and
    follows casts. x (..., K) of any float dtype gives (..., N) in that dtype; gradients flow to x and the bias.
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
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_key = weight.key
        self.scale_rounding = weight.scale_rounding
        self.activation = activation
        self.hadamard_size = hadamard_size
        self.backend = backend
        self.register_buffer("codes", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("global_scale", weight.global_scale)
        self.register_parameter("bias", bias)
        # An empty tensor that casts like any other weight: it remembers the dtype that ``weight`` reads as.
        self.register_buffer("_reads_as", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as stored: codes, scales, key; rotated if ``hadamard_size`` is set."""
        shape = torch.Size((self.out_features, self.in_features))
        return QuantizedTensor(self.codes, self.scale, self.global_scale, self.weight_key, shape, self.scale_rounding)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (N, K) that this layer multiplies by, any rotation undone; default dtype: the module's."""
        dtype = dtype or self._reads_as.dtype
        if self.hadamard_size is None:
            return self.quantized.dequantize(dtype)
        return hadamard(self.quantized.dequantize(), self.hadamard_size).to(dtype)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for model code that reads ``.weight``. A copy: writing to it has no effect."""
        return self.dequantize()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.hadamard_size is not None:
            x = hadamard(x, self.hadamard_size)
        return kernels.linear(x, self.quantized, self.bias, self.activation, self.backend)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        parts.append(f"weight={self.weight_key}, activation={self.activation}")
        if self.hadamard_size is not None:
            parts.append(f"hadamard_size={self.hadamard_size}")
        return ", ".join(parts)

    def _apply(self, fn, recurse=True):
        kept = {name: self._buffers[name] for name in _QUANTIZED if self._buffers[name] is not None}
        self._buffers.update(dict.fromkeys(kept))
        super()._apply(fn, recurse)
        self._buffers.update({name: _apply_keeping_dtype(fn, tensor) for name, tensor in kept.items()})
        return self

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        for name in _QUANTIZED:
            given, own = state_dict.get(prefix + name), self._buffers[name]
            if given is not None and own is not None and given.dtype != own.dtype:
                errors.append(
                    f"{prefix}{name} is {given.dtype} in the state dict, but {own.dtype} in a {self.weight_key} layer"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def _apply_keeping_dtype(fn, tensor: Tensor) -> Tensor:
    applied = fn(tensor)
    return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)
