"""Experts as lists or dicts of modules with linear layers of their own: one layer to ``moe`` and to a target."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from torchq.kernels import QuantizedTensor
from torchq.nn.linears import LinearKind, is_linear
from torchq.nn.qlinear import QuantLinear
from torchq.transforms.tree import take_over

# The gate and the up projection of one expert, which readers fuse into one matrix.
_FUSED = (("gate_proj", "up_proj"), ("w1", "w3"))


def expert_linears(module: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a container of experts, quantized ones included, by their path in it."""
    return {name: m for name, m in module.named_modules() if is_linear(m) or isinstance(m, QuantLinear)}


class ExpertListKind:
    """How the quantizer treats a ModuleList or ModuleDict of experts: as one layer with every linear inside it."""

    kind, operation = "moe", "linear"

    @staticmethod
    def recognises(module: nn.Module, name: str) -> bool:
        """Whether it is a list or a dict of experts, by its class's name or its own, that hold the same linears."""
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            return False
        own_name = name.rpartition(".")[2].lower()
        if "shared" in own_name or ("expert" not in own_name and "expert" not in type(module).__name__.lower()):
            return False
        inside: dict[str, set[str]] = {}
        for path in expert_linears(module):
            expert, _, rest = path.partition(".")
            inside.setdefault(expert, set()).add(rest)
        return bool(inside) and all(paths == next(iter(inside.values())) for paths in inside.values())

    @staticmethod
    def is_quantized(module: nn.Module) -> bool:
        """Whether every linear inside is quantized, and so has something to be quantized again from."""
        linears = expert_linears(module).values() if isinstance(module, nn.ModuleList | nn.ModuleDict) else ()
        return bool(linears) and all(isinstance(m, QuantLinear) for m in linears)

    @staticmethod
    def problem(module: nn.Module) -> str | None:
        """Say why the container can't be quantized as it stands, or None if it can."""
        for path, linear in expert_linears(module).items():
            if isinstance(linear, QuantLinear):
                return f"its {path} is quantized already; name the others in targets one by one"
            if (reason := LinearKind.problem(linear)) is not None:
                return f"its {path}: {reason}"
        return None

    @staticmethod
    def held(module: nn.Module) -> list[nn.Module]:
        """The modules whose parameters and buffers are those of the layer."""
        return list(expert_linears(module).values())

    @staticmethod
    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        """The (N, K) of each matrix by path."""
        return {path: LinearKind.shapes(linear)["weight"] for path, linear in expert_linears(module).items()}

    @staticmethod
    def row_shape(module: nn.Module) -> tuple[tuple[int, ...], ...]:
        """The shapes to report the layer by: (E, N, K) of each linear of an expert."""
        stacks: dict[str, list[tuple[int, ...]]] = {}
        for path, shape in ExpertListKind.shapes(module).items():
            stacks.setdefault(path.partition(".")[2], []).append(shape)
        return tuple((len(shapes), *shapes[0]) for shapes in stacks.values())

    @staticmethod
    def matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The dense matrices (N, K) by path, one at a time."""
        return ((path, ExpertListKind.matrix(module, path)) for path in expert_linears(module))

    @staticmethod
    def matrix(module: nn.Module, path: str) -> Tensor:
        """One dense matrix (N, K)."""
        return next(matrix for _, matrix in LinearKind.matrices(module.get_submodule(path)))

    @staticmethod
    def specs(module: nn.Module) -> dict[str, tuple]:
        """What each matrix of a quantized layer is quantized to, as (weight, activation, hadamard_size)."""
        return {path: linear.spec for path, linear in expert_linears(module).items()}

    @staticmethod
    def kept(module: nn.Module) -> list[Tensor]:
        """The tensors that the layer keeps as they are: its biases."""
        return [t for linear in expert_linears(module).values() for t in LinearKind.kept(linear)]

    @staticmethod
    def shares(module: nn.Module) -> list[list[str]]:
        """Groups of matrices that share an NVFP4 global scale: the gate's and the up projection's of each expert."""
        paths = expert_linears(module)
        groups = (
            [f"{path.removesuffix(first)}{name}" for name in (first, second)]
            for path in paths
            for first, second in _FUSED
            if path.rpartition(".")[2] == first
        )
        return [group for group in groups if all(path in paths for path in group)]

    @staticmethod
    def build(module: nn.Module, matrices: Mapping[str, QuantizedTensor], resolutions: Mapping, backend: str):
        """The container itself, with quantized linears in it."""
        for path, linear in expert_linears(module).items():
            parts = {"weight": matrices[path]}, {"weight": resolutions[path]}
            replacement = LinearKind.build(linear, *parts, backend)
            take_over(replacement, linear)
            module.set_submodule(path, replacement)
        return module
