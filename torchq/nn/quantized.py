"""QuantizedWeight: what the quantized modules share, codes and scales in buffers that no cast changes."""

import torch
from torch import Tensor, nn

from torchq.kernels import QuantizedTensor
from torchq.keys import QuantKey, stored_shapes
from torchq.transforms.hadamard import hadamard

# The buffer that holds each part of a QuantizedTensor.
STORED = {"data": "codes", "scale": "scale", "global_scale": "global_scale"}


class QuantizedWeight(nn.Module):
    """A weight (..., N, K) as codes and scales, with the activation key and the rotation that go with it.

    Buffers: ``codes``, ``scale`` and, for NVFP4, ``global_scale``, whose dtypes no cast of the module changes. With
    ``hadamard_size`` the stored weight is rotated, and so is each input. ``dtype`` is what ``weight`` reads as, and
    follows casts.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        activation: QuantKey | None,
        hadamard_size: int | None,
        dtype: torch.dtype,
        backend: str,
    ) -> None:
        super().__init__()
        self.shape = weight.shape
        self.weight_key = weight.key
        self.scale_rounding = weight.scale_rounding
        self.activation = activation
        self.hadamard_size = hadamard_size
        self.backend = backend
        self.register_buffer("codes", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("global_scale", weight.global_scale)
        # An empty tensor that casts like any other weight: it remembers the dtype that ``weight`` reads as.
        self.register_buffer("_reads_as", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as stored: codes, scales, key; rotated if ``hadamard_size`` is set."""
        return QuantizedTensor(
            self.codes, self.scale, self.global_scale, self.weight_key, self.shape, self.scale_rounding
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (..., N, K) that is multiplied by, any rotation undone; default dtype: the module's."""
        return self._dequantized(self.quantized, dtype)

    @property
    def spec(self) -> tuple[QuantKey, QuantKey | None, int | None]:
        """The weight key, the activation key and the size of the rotation."""
        return self.weight_key, self.activation, self.hadamard_size

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype that ``weight`` reads as."""
        return self._reads_as.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for model code that reads ``.weight``. A copy: writing to it has no effect."""
        return self.dequantize()

    def extra_repr(self) -> str:
        parts = [f"weight={self.weight_key}, activation={self.activation}"]
        if self.hadamard_size is not None:
            parts.append(f"hadamard_size={self.hadamard_size}")
        return ", ".join(parts)

    def _dequantized(self, quantized: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or self._reads_as.dtype
        if self.hadamard_size is None:
            return quantized.dequantize(dtype)
        return hadamard(quantized.dequantize(), self.hadamard_size).to(dtype)

    def _prepared(self, x: Tensor) -> Tensor:
        """The input as the stored weight takes it: in autocast's dtype, rotated."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x if self.hadamard_size is None else hadamard(x, self.hadamard_size)

    def _apply(self, fn, recurse=True):
        kept = {name: self._buffers[name] for name in STORED.values() if self._buffers[name] is not None}
        self._buffers.update(dict.fromkeys(kept))
        try:
            super()._apply(fn, recurse)
            kept = {name: _apply_keeping_dtype(fn, tensor) for name, tensor in kept.items()}
        finally:  # as it was where fn raises: out of memory, no such device
            self._buffers.update(kept)
        return self

    def __getstate__(self) -> dict:
        # A float8 tensor pickled by itself can't be read back (torch 2.13); its bytes can.
        buffers = {name: _as_bytes(tensor) for name, tensor in self._buffers.items()}
        return {**self.__dict__, "_buffers": buffers}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for name, (_, dtype) in stored_shapes(tuple(self.shape), self.weight_key).items():
            self._buffers[STORED[name]] = self._buffers[STORED[name]].view(dtype)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        for name in STORED.values():
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


def _as_bytes(tensor: Tensor | None) -> Tensor | None:
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.float8_e4m3fn else tensor
