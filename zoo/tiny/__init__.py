"""Tiny random models of the architectures the quantizer must handle: hidden size 64, two layers or so, milliseconds.

`TINY` maps a name to a `Tiny`:

    for name, entry in TINY.items():
        model = entry.build()
        logits = entry.output(model(**entry.inputs()))
"""

from torchq.zoo.tiny.dense import AWKWARD, DENSE
from torchq.zoo.tiny.entry import Tiny
from torchq.zoo.tiny.moe import MOE

TINY: dict[str, Tiny] = DENSE | AWKWARD | MOE

__all__ = ["AWKWARD", "DENSE", "MOE", "TINY", "Tiny"]
