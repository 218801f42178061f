"""What can run here: one row a (kind, weight key, activation key), with the backends and why the others can't."""

from dataclasses import dataclass

import torch

from torchq.kernels.registry import BACKENDS, load
from torchq.keys import DEFAULT_ACTIVATION, QuantKey, key_names


@dataclass(frozen=True)
class Support:
    """``backends`` can compute the pair on ``device``, the preferred one first; ``unusable`` says why others can't."""

    kind: str
    weight: QuantKey
    activation: QuantKey | None
    default: bool
    device: str
    backends: tuple[str, ...]
    unusable: dict[str, str]


def supported(device: str | None = None) -> list[Support]:
    """Return every pair of the table of formats for linear layers and experts, as it runs on ``device``.

    ``device`` is a torch device type; the default is cuda where there is one, else cpu.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dynamic = [k for k in (QuantKey.from_name(n, "activation") for n in key_names("activation")) if k.dynamic]
    return [
        _support(kind, weight, activation, default, device)
        for kind in ("linear", "moe")
        for weight, default in DEFAULT_ACTIVATION.items()
        for activation in (None, *dynamic)
    ]


def _support(kind, weight, activation, default, device) -> Support:
    reasons = {name: load(name).unusable(kind, weight, activation, device) for name in BACKENDS}
    usable = tuple(name for name, reason in reasons.items() if reason is None)
    unusable = {name: reason for name, reason in reasons.items() if reason is not None}
    return Support(kind, weight, activation, activation == default, device, usable, unusable)
