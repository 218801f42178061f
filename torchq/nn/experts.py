"""Which modules are routed experts, and how their matrices lie: by flags on the module, by class, or as registered.

Nothing here imports a model library: a module is known by its own attributes and parameters, or by its class's name.
"""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.kernels import QuantizedTensor
from torchq.nn.layout import ExpertsLayout, ExpertStack, Projection
from torchq.nn.qmoe import DenseProjection, QuantMoE, QuantParallelExperts, QuantProjection, attribute

_REGISTERED: dict[type, ExpertsLayout] = {}
# What transformers' use_experts_implementation writes on an instance.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_HALVES = ExpertsLayout(Projection("gate_up_proj"), Projection("down_proj"))
# Classes without those flags, by name.
_BY_NAME = {
    "Llama4TextExperts": ExpertsLayout(
        Projection("gate_up_proj", transposed=True), Projection("down_proj", transposed=True), routing="blocks"
    ),
    "DbrxExperts": ExpertsLayout(
        Projection(("mlp.w1", "mlp.v1"), flat=True),
        Projection("mlp.w2", flat=True, transposed=True),
        act="mlp.activation_fn",
    ),
    # Its gate_up_proj has rows for the identity experts too, which nothing reads.
    "LongcatFlashExperts": ExpertsLayout(_HALVES.gate_up, _HALVES.down, identity=True),
    "Step3p7Experts": ExpertsLayout(_HALVES.gate_up, _HALVES.down, gate="_apply_gate"),
}
_ONE_MATRIX = Projection("weight")


def register_experts(cls: type[nn.Module], layout: ExpertsLayout) -> None:
    """Tell torchq that modules of exactly this class are routed experts, and how they are built.

    The class keeps every expert's matrices in the parameters that ``layout`` names, and no others. Raises
    ``ConfigError`` for anything but a subclass of ``nn.Module`` and an ``ExpertsLayout``.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"register_experts takes a class of modules, not {cls!r}")
    if not isinstance(layout, ExpertsLayout):
        raise ConfigError(f"register_experts({cls.__name__}, ...) takes a torchq.nn.ExpertsLayout, not {layout!r}")
    _REGISTERED[cls] = layout


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """The layout of an experts module, None for any other module and for experts that are not known."""
    cls = type(module)
    if cls in _REGISTERED:
        return _REGISTERED[cls]
    if cls.__name__ in _BY_NAME:
        return _BY_NAME[cls.__name__]
    return _layout_by_flags(module) if all(hasattr(module, flag) for flag in _FLAGS) else None


def _layout_by_flags(module: nn.Module) -> ExpertsLayout:
    def projection(name: str, interleaved: bool = False) -> Projection:
        bias = f"{name}_bias" if module.has_bias else None
        return Projection(name, bias, transposed=module.is_transposed, interleaved=interleaved)

    gated = module.has_gate
    return ExpertsLayout(
        projection("gate_up_proj", not module.is_concatenated) if gated else projection("up_proj"),
        projection("down_proj"),
        gated=gated,
        gate="_apply_gate" if gated else None,
        post_norm="post_expert_norm" if getattr(module, "has_post_expert_norm", False) else None,
    )


def _resembles_experts(module: nn.Module) -> bool:
    """Whether it keeps stacked matrices, one for each expert by its class's name or by its own count."""
    stacked = [p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3]
    name = type(module).__name__.lower()
    counts = (getattr(module, attribute, None) for attribute in ("num_experts", "n_experts", "num_local_experts"))
    return bool(stacked) and ("expert" in name or "moe" in name or any(count in stacked for count in counts))


def _is_one_matrix(module: nn.Module) -> bool:
    """Whether it is one projection of sorted rows, ``forward(inputs, expert_size)``, as JetMoE has it."""
    weight = module._parameters.get("weight")
    sizes = [getattr(module, name, None) for name in ("num_experts", "output_size", "input_size")]
    return type(module).__name__.endswith("ParallelExperts") and weight is not None and list(weight.shape) == sizes


def _why_not(module: nn.Module) -> str | None:
    """Say why an experts module can't be quantized as it stands, or None if it can."""
    if "forward" in module.__dict__:
        return "its forward is patched on the instance (dispatch hooks?); remove the patch first"
    cls = type(module).__name__
    if _is_one_matrix(module):
        layout, names, kept = None, ["weight"], ()
    elif (layout := experts_layout(module)) is None:
        return (
            f"{cls} resembles experts, but how its matrices lie is not known; type "
            f"torchq.nn.register_experts({cls}, torchq.nn.ExpertsLayout(...)) first"
        )
    else:
        names, kept = layout.parameters, tuple(f"{child}." for child in (layout.act, layout.post_norm) if child)
    held = dict(module.named_parameters())
    if missing := [name for name in names if name not in held]:
        return f"it has no parameter {' or '.join(missing)}, which the layout of {cls} names"
    if odd := [f"{n} is {held[n].dtype}" for n in names if not _is_plain_float(held[n])]:
        return f"{odd[0]}; convert it to bfloat16, float16 or float32 first"
    everything = (*held, *dict(module.named_buffers()))
    if extra := [name for name in everything if name not in names and not name.startswith(kept)]:
        return f"it holds {', '.join(extra)} beside the matrices of its experts"
    return None if layout is None else _why_layout_does_not_fit(module, layout)


def _why_layout_does_not_fit(module: nn.Module, layout: ExpertsLayout) -> str | None:
    shapes = {name: tuple(module.get_parameter(name).shape) for name in layout.parameters}
    weights = [(name, 3 - p.flat, p.flat) for p in layout.projections.values() for name in p.names]
    for name, dims, _ in weights:
        if len(shapes[name]) != dims:
            return f"its {name} has shape {shapes[name]}, not {dims} dimensions"
    if not (experts := layout.num_experts(module)):
        return "it has no experts, or no num_experts that counts them"
    for name, _, flat in weights:
        more = shapes[name][0] % experts if flat else shapes[name][0] - experts
        if more < 0 or (more and not layout.identity):
            return f"its {name} has shape {shapes[name]}, which does not go with {experts} experts"
    for projection in layout.projections.values():
        expected = projection.shape(module, experts)[:2]
        if projection.bias is not None and shapes[projection.bias] != expected:
            return f"its {projection.bias} has shape {shapes[projection.bias]}, not {expected}"
    (_, inner, _), (_, _, width) = (stack.shape for stack in layout.stacks(module).values())
    if inner != width * (1 + layout.gated):
        return (
            f"gate_up gives {inner} columns, which {'gated ' if layout.gated else ''}experts with {width} inner "
            "neurons don't have; is it transposed?"
        )
    for name in filter(None, (layout.gate or layout.act, layout.post_norm)):
        try:
            usable = callable(attribute(module, name))
        except AttributeError:
            usable = False
        if not usable:
            return f"it has no function or module {name}, which the ExpertsLayout names or leaves at its default"
    return None


def _is_plain_float(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() >= 2


class _DequantizedStack:
    """The matrices of a projection that is quantized already, dequantized one expert at a time."""

    def __init__(self, projection: QuantProjection | DenseProjection) -> None:
        self._projection, self.shape = projection, projection.shape

    def __getitem__(self, index: int) -> Tensor:
        return self._projection.expert(index)


class MoeKind:
    """How the quantizer treats experts that keep their matrices stacked: ``gate_up`` and ``down``, or ``weight``."""

    kind = operation = "moe"
    problem = staticmethod(_why_not)

    @staticmethod
    def recognises(module: nn.Module, name: str) -> bool:
        """Whether the module is experts, or resembles them so much that leaving them out must be said."""
        return _is_one_matrix(module) or experts_layout(module) is not None or _resembles_experts(module)

    @staticmethod
    def is_quantized(module: nn.Module) -> bool:
        """Whether the module is a layer of this kind that is quantized already."""
        return isinstance(module, QuantMoE | QuantParallelExperts)

    @staticmethod
    def rows(module: nn.Module) -> dict[str, tuple[str, ...]]:
        """The rows of each stack's matrices (gate, up, down); none for experts that can't be quantized."""
        layout = module.layout if isinstance(module, QuantMoE) else experts_layout(module)
        shapes = MoeKind.shapes(module)
        if layout is None or not shapes:
            return {name: ("weight",) for name in shapes}
        return {"gate_up": ("gate", "up") if layout.gated else ("up",), "down": ("down",)}

    @staticmethod
    def num_experts(module: nn.Module) -> int:
        """How many experts a module that can be quantized holds."""
        return next(iter(MoeKind.shapes(module).values()))[0]

    @staticmethod
    def held(module: nn.Module) -> list[nn.Module]:
        """The modules whose parameters and buffers are those of the layer."""
        if isinstance(module, QuantMoE):
            return [module.gate_up, module.down]
        layout, modules = experts_layout(module), dict(module.named_modules())
        owners = [name.rpartition(".")[0] for name in layout.parameters] if layout is not None else [""]
        return [modules[name] for name in dict.fromkeys(owners) if name in modules]

    @staticmethod
    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        """The (E, N, K) of each stack of matrices by name; none for experts that can't be quantized."""
        return {name: tuple(stack.shape) for name, stack in MoeKind.matrices(module)}

    @staticmethod
    def row_shape(module: nn.Module) -> tuple:
        """The shape to report the layer by: (E, N, K), or one for each stack."""
        shapes = tuple(MoeKind.shapes(module).values())
        return shapes[0] if len(shapes) == 1 else shapes

    @staticmethod
    def matrices(module: nn.Module) -> Iterator[tuple[str, ExpertStack | _DequantizedStack]]:
        """The stacks of dense matrices by name: each has a ``shape`` (E, N, K) and gives (N, K) by index."""
        if isinstance(module, QuantMoE):
            yield from ((name, _DequantizedStack(getattr(module, name))) for name in module.layout.projections)
        elif isinstance(module, QuantParallelExperts):
            yield "weight", _DequantizedStack(module)
        elif _why_not(module) is None:
            one = {"weight": ExpertStack(module, _ONE_MATRIX, module.num_experts)} if _is_one_matrix(module) else None
            yield from (one or experts_layout(module).stacks(module)).items()

    @staticmethod
    def specs(module: nn.Module) -> dict[str, tuple]:
        """What each matrix of a quantized layer is quantized to, as (weight, activation, hadamard_size)."""
        if isinstance(module, QuantParallelExperts):
            return {"weight": module.spec}
        pairs = {name: getattr(module, name) for name in module.layout.projections}
        return {name: p.spec for name, p in pairs.items() if isinstance(p, QuantProjection)}

    @staticmethod
    def kept(module: nn.Module) -> list[Tensor]:
        """The tensors that the layer keeps as they are: its biases."""
        if isinstance(module, QuantMoE):
            return [p.bias for p in (module.gate_up, module.down) if p.bias is not None]
        layout = experts_layout(module)
        names = [p.bias for p in layout.projections.values() if p.bias] if layout is not None else []
        return [module.get_parameter(name) for name in names]

    @staticmethod
    def nbytes(module: nn.Module, name: str) -> int:
        """The bytes of a projection that stays as it is, without its bias."""
        if isinstance(module, QuantMoE):
            projection = getattr(module, name)
            tensors = (*projection.parameters(), *projection.buffers())
            return sum(t.nbytes for t in tensors if t is not projection.bias)
        dtype = module.get_parameter(experts_layout(module).projections[name].names[0]).dtype
        return math.prod(MoeKind.shapes(module)[name]) * dtype.itemsize

    @staticmethod
    def shares(module: nn.Module) -> list[list[str]]:
        """Groups of matrices that share an NVFP4 global scale: none, as gate and up are one matrix."""
        return []

    @staticmethod
    def build(module: nn.Module, matrices: Mapping[str, QuantizedTensor], resolutions: Mapping, backend: str):
        """The quantized layer that takes the place of ``module``; a projection without a resolution stays as it is."""

        def projection(cls: type[QuantProjection], name: str, bias: nn.Parameter | None, dtype) -> QuantProjection:
            to = resolutions[name]
            options = {"activation": to.activation, "hadamard_size": to.hadamard_size, "dtype": dtype}
            return cls(matrices[name], bias, **options, backend=backend)

        if isinstance(module, QuantParallelExperts):
            return projection(QuantParallelExperts, "weight", None, module._reads_as.dtype)
        if _is_one_matrix(module):
            return projection(QuantParallelExperts, "weight", None, module.weight.dtype)
        if isinstance(module, QuantMoE):
            own = {name: getattr(module, name) for name in module.layout.projections}
            new = {
                name: projection(QuantProjection, name, p.bias, p.weight_dtype) if name in matrices else p
                for name, p in own.items()
            }
            return QuantMoE(module, module.layout, **new)
        layout, new = experts_layout(module), {}
        for name, source in layout.projections.items():
            weight, bias = module.get_parameter(source.names[0]), source.swizzle_bias(module)
            if name in matrices:
                new[name] = projection(QuantProjection, name, bias, weight.dtype)
            else:
                stack = layout.stacks(module)[name]
                dense = weight.new_empty(stack.shape)
                for index, matrix in enumerate(stack):
                    dense[index] = matrix
                new[name] = DenseProjection(dense, bias, weight.requires_grad)
        return QuantMoE(module, layout, **new)
