"""QuantizedTensor: codes, scales and the key that says what they mean."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq.keys import QuantKey, ScaleRounding


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor of logical ``shape`` (..., N, K) in the format ``key``.

    ``data``, ``scale`` and ``global_scale`` have the shapes and dtypes of ``torchq.keys.stored_shapes``.
    ``scale_rounding`` is the rule the power-of-two scales were made with (None for other scales).
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    key: QuantKey
    shape: torch.Size
    scale_rounding: ScaleRounding | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, code * scale, computed in f32 and rounded once to ``dtype``; shape ``self.shape``."""
        from torchq.kernels.registry import select

        return select("dequantize", self.key, None, self.data.device.type).dequantize(self, dtype)

    def __getitem__(self, index: int) -> "QuantizedTensor":
        """Return one matrix of a batch (an expert): views, nothing is copied."""
        global_scale = None if self.global_scale is None else self.global_scale[index]
        return replace(
            self, data=self.data[index], scale=self.scale[index], global_scale=global_scale, shape=self.shape[1:]
        )

    def rows(self, start: int, stop: int) -> "QuantizedTensor":
        """Return rows ``start:stop`` of a matrix as views: whole groups from a group's edge, or a part of one group."""
        per_group = self.key.group[0]
        aligned = per_group < 0 or start % per_group == 0 or start // per_group == (stop - 1) // per_group
        assert len(self.shape) == 2 and aligned, f"{self.shape=} {start=} {stop=}"
        scale = self.scale if per_group < 0 else self.scale[start // per_group : -(-stop // per_group)]
        per_token = self.global_scale is not None and self.global_scale.dim() == 2
        global_scale = self.global_scale[start:stop] if per_token else self.global_scale
        shape = torch.Size((stop - start, self.shape[1]))
        return replace(self, data=self.data[start:stop], scale=scale, global_scale=global_scale, shape=shape)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scale, self.global_scale) if t is not None)

    @property
    def device(self) -> torch.device:
        return self.data.device
