"""Which modules are linear layers, and how their weight reads as (out_features, in_features)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.kernels import QuantizedTensor
from torchq.nn.qlinear import QuantLinear

# Exact types, and whether the weight is stored (in, out). Subclasses are left alone: they may mean something else.
_REGISTERED: dict[type, bool] = {nn.Linear: False}
_TRANSPOSED_BY_NAME = {("transformers.pytorch_utils", "Conv1D")}


def register_linear(cls: type[nn.Module], *, transposed: bool = False) -> None:
    """Tell torchq that ``cls`` computes ``x @ weight.T + bias`` (``x @ weight + bias`` with ``transposed``).

    The class has a 2-D parameter ``weight`` and a ``bias`` that may be None, and nothing else that its forward reads.
    Raises ``ConfigError`` for anything but a subclass of ``nn.Module``.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"register_linear takes a class of modules, not {cls!r}")
    _REGISTERED[cls] = transposed


def is_linear(module: nn.Module) -> bool:
    """Whether the module's exact class is a linear layer: nn.Linear, transformers' Conv1D, or one registered."""
    return _is_transposed(module) is not None


def linear_weight(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer as an (out_features, in_features) view."""
    return module.weight.detach().T if _is_transposed(module) else module.weight.detach()


def why_not_replaceable(module: nn.Module) -> str | None:
    """Say why a linear layer can't be swapped for a quantized one as it stands, or None if it can."""
    if "forward" in module.__dict__:
        return "its forward is patched on the instance (dispatch hooks?); remove the patch first"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (weight_norm, pruning); make it permanent first, e.g. with remove_weight_norm"
    if weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}, not two dimensions"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its weight is {weight.dtype}; convert it to bfloat16, float16 or float32 first"
    extra = [n for n in (*module._parameters, *module._buffers, *module._modules) if n not in ("weight", "bias")]
    return f"it holds {', '.join(extra)} beside weight and bias" if extra else None


def left_alone(module: nn.Module) -> str | None:
    """Say why a module that resembles a linear layer is not taken for one, or None if it does not resemble one."""
    cls = type(module)
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if isinstance(module, nn.Linear) or cls.__name__.endswith("Linear") or cls.__name__.startswith("Linear"):
        return (
            f"{cls.__name__} is not nn.Linear itself; torchq.nn.register_linear({cls.__name__}) if it computes the same"
        )
    return None


def _is_transposed(module: nn.Module) -> bool | None:
    cls = type(module)
    if (cls.__module__, cls.__name__) in _TRANSPOSED_BY_NAME:
        return True
    return _REGISTERED.get(cls)


class LinearKind:
    """How the quantizer treats the layers of kind ``linear``: one matrix, ``weight``."""

    kind = operation = "linear"
    problem = staticmethod(why_not_replaceable)

    @staticmethod
    def recognises(module: nn.Module, name: str) -> bool:
        """Whether the module is a layer of this kind, not quantized yet."""
        return is_linear(module)

    @staticmethod
    def is_quantized(module: nn.Module) -> bool:
        """Whether the module is a layer of this kind that is quantized already."""
        return isinstance(module, QuantLinear)

    @staticmethod
    def held(module: nn.Module) -> list[nn.Module]:
        """The modules whose parameters and buffers are those of the layer."""
        return [module]

    @staticmethod
    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        """The (N, K) of each matrix by name."""
        return {"weight": tuple(module.shape if isinstance(module, QuantLinear) else linear_weight(module).shape)}

    @staticmethod
    def row_shape(module: nn.Module) -> tuple[int, ...]:
        """The shape to report the layer by."""
        return LinearKind.shapes(module)["weight"]

    @staticmethod
    def matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The dense matrices (N, K) by name, one at a time: views, or what a quantized layer dequantizes to."""
        quantized = isinstance(module, QuantLinear)
        yield "weight", module.dequantize(torch.float32) if quantized else linear_weight(module)

    @staticmethod
    def specs(module: QuantLinear) -> dict[str, tuple]:
        """What each matrix of a quantized layer is quantized to, as (weight, activation, hadamard_size)."""
        return {"weight": module.spec}

    @staticmethod
    def kept(module: nn.Module) -> list[Tensor]:
        """The tensors that the layer keeps as they are: its bias."""
        return [] if module.bias is None else [module.bias]

    @staticmethod
    def shares(module: nn.Module) -> list[list[str]]:
        """Groups of the layer's matrices that share an NVFP4 global scale."""
        return []

    @staticmethod
    def build(module: nn.Module, matrices: Mapping[str, QuantizedTensor], resolutions: Mapping, backend: str):
        """The quantized layer that takes the place of ``module``."""
        to = resolutions["weight"]
        return QuantLinear(
            matrices["weight"],
            module.bias,
            activation=to.activation,
            hadamard_size=to.hadamard_size,
            dtype=module.weight_dtype if isinstance(module, QuantLinear) else module.weight.dtype,
            backend=backend,
        )
