"""The modules that quantization puts in, and the adapters that recognise what they replace."""

from torchq.nn.linears import register_linear
from torchq.nn.qlinear import QuantLinear

__all__ = ["QuantLinear", "register_linear"]
