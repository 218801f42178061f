"""QuantLinear: a linear layer whose weight is codes and scales in plain buffers."""

import torch
from torch import Tensor, nn

from torchq import kernels
from torchq.kernels import QuantizedTensor
from torchq.keys import QuantKey
from torchq.nn.quantized import QuantizedWeight


class QuantLinear(QuantizedWeight):
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
        super().__init__(weight, activation, hadamard_size, dtype, backend)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(self._prepared(x), self.quantized, self.bias, self.activation, self.backend)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {super().extra_repr()}"
