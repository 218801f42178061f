"""The modules that quantization puts in, and the adapters that recognise what they replace."""

from torchq.nn.experts import register_experts
from torchq.nn.layout import ExpertsLayout, Projection
from torchq.nn.linears import register_linear
from torchq.nn.qlinear import QuantLinear
from torchq.nn.qmoe import QuantMoE

__all__ = ["ExpertsLayout", "Projection", "QuantLinear", "QuantMoE", "register_experts", "register_linear"]
