"""torchao as a rival of the native CPU kernels: how it quantizes and multiplies here, eager, compiled and frozen."""

import copy
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _timing import copies, rotating
from torch import Tensor, nn

from torchq import QuantKey
from torchq.keys import DEFAULT_ACTIVATION


def quantizers() -> dict[str, dict[str, Callable[[Tensor], object]]]:
    """How torchao makes plain codes and scales of each format: a function a rule for scales."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
    from torchao.quantization import Float8Tensor, Int8Tensor, PerBlock, PerRow

    def mx(dtype, rule):
        return lambda w: to_mx(w, dtype, 32, ScaleCalculationMode(rule))

    def parts(make):
        def plain(w):
            made = make(w)
            return [getattr(made, name) for name in made.tensor_data_names]

        return {"": plain}

    return {
        "mxfp4": {f", {rule} scales": mx(torch.float4_e2m1fn_x2, rule) for rule in ("even", "rceil")},
        "mxfp8": {"": mx(torch.float8_e4m3fn, "rceil")},
        "fp8 channel": parts(lambda w: Float8Tensor.from_hp(w, granularity=PerRow())),
        "int8 channel": parts(lambda w: Int8Tensor.from_hp(w, PerRow())),
        "nvfp4": parts(lambda w: NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max()))),
        "int4 group 32": parts(lambda w: Int4OpaqueTensor.from_hp(w, [1, 32])),
        "fp8 block": parts(lambda w: Float8Tensor.from_hp(w, granularity=PerBlock([128, 128]))),
    }


def configurations() -> dict[str, tuple[object, QuantKey, QuantKey | None]]:
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    int8, int4 = QuantKey.from_name("int8_per_channel_static"), QuantKey.from_name("int4_per_group_32")

    def packed(group):
        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)

    return {
        "int8 weight-only": (Int8WeightOnlyConfig(set_inductor_config=False), int8, None),
        "int8 dynamic": (
            Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
            int8,
            DEFAULT_ACTIVATION[int8],
        ),
        "int4 group 32, packed for CPU (prototype)": (packed(32), int4, None),
        "int4 group 128, packed for CPU (prototype)": (packed(128), int4, None),
    }


def refusals() -> tuple[str, ...]:
    """What torchao says of its other int4 configurations here."""
    from torchao.prototype.quantization.int4.inference_workflow import Int8DynamicActivationInt4WeightConfig
    from torchao.quantization import Int4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows.int4.int4_packing_format import Int4PackingFormat

    configs = {
        f"Int4WeightOnlyConfig({f.value})": Int4WeightOnlyConfig(32, int4_packing_format=f) for f in Int4PackingFormat
    }
    configs["Int8DynamicActivationInt4WeightConfig"] = Int8DynamicActivationInt4WeightConfig(32)
    said = []
    for name, config in configs.items():
        try:
            F.linear(
                torch.randn(1, 256, dtype=torch.bfloat16), _weight(torch.randn(256, 256, dtype=torch.bfloat16), config)
            )
        except Exception as error:  # each packing refuses in its own way
            said.append(f"{name} does not run here ({str(error).splitlines()[0].rstrip('.')}).")
        else:
            said.append(f"{name} runs here too, and is not measured.")
    return (" ".join(said),)


def _weight(weight: Tensor, config) -> Tensor:
    from torchao.quantization import quantize_ as torchao_quantize_

    module = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    torchao_quantize_(module, config)
    return module.weight


def linears(weight: Tensor, config, x: Tensor, freeze: bool) -> tuple[dict[str, Callable], int]:
    """The ways to run a configuration, over cold copies; one call of "frozen" runs as many linears as is returned."""
    torch._dynamo.reset()
    one = _weight(weight, config)
    nbytes = sum(getattr(one, name).nbytes for name in one.tensor_data_names)
    count = copies(nbytes, 5)  # freezing packs a second copy
    eager, warm, frozen = ([copy.deepcopy(one) for _ in range(count)] for _ in range(3))
    calls = {"eager": rotating([functools.partial(F.linear, x, w) for w in eager])}
    linear = compiled(lambda x, w: F.linear(x, w), x, one)
    if linear is not None:
        calls["compiled"] = rotating([functools.partial(linear, x, w) for w in warm])
    if freeze and (together := _frozen(frozen, x)) is not None:
        calls["frozen"] = together
    return calls, count


def _frozen(weights: list[Tensor], x: Tensor) -> Callable | None:
    """One compiled graph that multiplies by every weight, each of them a constant that inductor may repack."""
    xs = [x.clone() for _ in weights]  # an input each, so that none of the products are merged
    modules = nn.ModuleList(_Linear(w) for w in weights)
    with torch._inductor.config.patch(freezing=True):
        together = compiled(lambda xs: [module(x) for module, x in zip(modules, xs, strict=True)], xs)
    return None if together is None else functools.partial(together, xs)


class _Linear(nn.Module):
    """A linear layer around a weight of any class."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def compiled(function: Callable, *example) -> Callable | None:
    """The function under torch.compile, or None where that fails."""
    found = torch.compile(function, dynamic=False)
    try:
        found(*example)
    except Exception:  # whatever inductor can't do yet
        torch._dynamo.reset()
        return None
    return found
