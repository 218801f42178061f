"""What quantization did to a model: perplexity, the SQNR of its logits; and the memory that a call takes."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor, window: int = 512, windows: int = 4) -> float:
    """exp of the mean negative log-likelihood, in nats, over the first `windows` windows of `window` tokens.

    ids: int64 (1, T) or (T,). The windows do not overlap, nothing is put in front of them, and the first token of
    each is not predicted, so `windows * (window - 1)` tokens count. Raises ValueError if ids are too few.
    """
    ids = ids.reshape(-1)
    if ids.numel() < window * windows:
        raise ValueError(f"{windows} windows of {window} tokens need {window * windows} ids, got {ids.numel()}")
    total = 0.0
    for chunk in ids[: window * windows].view(windows, 1, window):
        logits = model(chunk).logits[0, :-1].float()  # [window - 1, V]
        total += F.cross_entropy(logits, chunk[0, 1:], reduction="sum").item()
    return math.exp(total / (windows * (window - 1)))


def logits_sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB: 10 log10(|reference|^2 / |reference - value|^2); inf if equal."""
    reference, value = reference.double(), value.double()
    noise = (reference - value).square().sum().item()
    return 10 * math.log10(reference.square().sum().item() / noise) if noise else math.inf


def allocated_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call returns, and the most bytes that torch's CPU allocator held at once above what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    held = peak = 0
    memory = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak
