"""Seconds to plan a model of many experts against many patterns: 1x, 2x and 4x the layers.

    python bench/plan.py

The tree is 15, 30 and 60 layers of 256 experts of 3 linears (46,080 at 4x), on the meta device; the config has 50
target patterns (literal, glob, regex) and 5,000 exact ignore names.
"""

import time

import torch
from torch import nn

from torchq import QuantizationConfig, Quantizer

EXPERTS, PATTERNS, IGNORED = 256, 50, 5000
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tree(layers: int) -> nn.Module:
    """A model with the names of a mixture of experts that is stored as one linear a projection and expert."""
    with torch.device("meta"):
        return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(_layer() for _ in range(layers))})})


def config(layers: int) -> QuantizationConfig:
    """Mixed target patterns that never overlap, and ignore names spread over the tree."""
    targets = {}
    for i in range(PATTERNS):
        first = EXPERTS // 2 + i * 2  # two experts a pattern, from the upper half; the lower half is left alone
        literal = f"model.layers.0.mlp.experts.{first}.{PROJECTIONS[i % 3]}"
        glob = f"*.experts.{first}.{PROJECTIONS[i % 3]}"
        regex = rf"re:.*\.experts\.({first}|{first + 1})\.(gate|up|down)_proj$"
        targets[(literal, glob, regex)[i % 3]] = ("mxfp4", "mxfp8", "fp8_per_channel")[i % 3]
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
        for expert in range(EXPERTS // 2)
        for layer in range(layers)
        for projection in PROJECTIONS
    )
    return QuantizationConfig(targets=targets, ignore=[name for name, _ in zip(names, range(IGNORED), strict=False)])


def seconds(layers: int, runs: int = 3) -> tuple[int, float]:
    """Return the number of linears and the median time of a whole plan, Quantizer construction included."""
    model, rules = tree(layers), config(layers)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        plan = Quantizer(rules).plan(model)
        times.append(time.perf_counter() - start)
    return len(plan.rows), sorted(times)[runs // 2]


def _layer() -> nn.Module:
    expert = lambda: nn.ModuleDict({p: nn.Linear(64, 64, bias=False) for p in PROJECTIONS})
    return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList(expert() for _ in range(EXPERTS))})})


if __name__ == "__main__":
    print(f"{PATTERNS} patterns, {IGNORED} ignored names")
    for scale, layers in ((1, 15), (2, 30), (4, 60)):
        rows, elapsed = seconds(layers)
        print(f"{scale}x  {rows:6d} linears  {elapsed:6.2f} s  {elapsed / rows * 1e6:5.1f} us a linear", flush=True)
