"""torchq: quantize PyTorch models by layer name.

``quantize_(model, config)`` matches fully qualified names to weight and activation formats and swaps the layers.
"""

from torchq import kernels, matching, nn
from torchq.config import QuantizationConfig, resolve_config
from torchq.errors import CheckpointError, ConfigError, UnsupportedError
from torchq.keys import QUANT_KEYS, QuantKey
from torchq.plan import QuantizationPlan, QuantizationReport
from torchq.quantizer import Quantizer, quantize_
from torchq.resolution import Resolution
from torchq.spec import SHORTHANDS, UNSET, QuantSpec

__all__ = [
    "QUANT_KEYS",
    "SHORTHANDS",
    "UNSET",
    "CheckpointError",
    "ConfigError",
    "QuantKey",
    "QuantSpec",
    "QuantizationConfig",
    "QuantizationPlan",
    "QuantizationReport",
    "Quantizer",
    "Resolution",
    "UnsupportedError",
    "kernels",
    "matching",
    "nn",
    "quantize_",
    "resolve_config",
]
