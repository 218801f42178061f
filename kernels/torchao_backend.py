"""The torchao backend: its int8 matmul on CPU and CUDA, its rowwise fp8 matmul on CUDA devices that have one.

The codes and scales come from the twin, so that only the matmul differs.
"""

import contextlib
import functools
import importlib.util
import logging

import torch

from torchq.kernels import twin
from torchq.keys import QuantKey

_INT8 = (QuantKey.from_name("int8_per_channel_static"), QuantKey.from_name("int8_per_token", "activation"))
_FP8 = (QuantKey.from_name("fp8_per_channel_static"), QuantKey.from_name("fp8_per_token", "activation"))


class Kernels:
    name = "torchao"

    def unusable(self, op, weight, activation, device):
        if op != "linear":
            return f"it serves linear only, not {op}"
        if (weight, activation) not in (_INT8, _FP8):
            return (
                "it serves int8_per_channel_static with int8_per_token, and fp8_per_channel_static with fp8_per_token"
            )
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed (pip install torchao)"
        if device not in ("cpu", "cuda"):
            return f"its kernels run on cpu and cuda, not {device}"
        if (weight, activation) == _FP8:
            return _no_rowwise_fp8(device)
        return None

    def linear(self, x, weight, bias, activation):
        rows = x.reshape(-1, x.shape[-1])  # [M, K]
        if rows.shape[0] == 0:
            return twin.linear(x, weight, bias, activation)
        quantized = twin.quantize(rows, activation)
        if activation == _INT8[1]:
            out = _load_int8()(quantized.data, weight.data.T, quantized.scale) * weight.scale.T  # [M, N]
        else:
            out = torch._scaled_mm(
                quantized.data, weight.data.T, scale_a=quantized.scale, scale_b=weight.scale.T, out_dtype=torch.bfloat16
            ).float()
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _no_rowwise_fp8(device: str) -> str | None:
    if device != "cuda":
        return f"its fp8 matmul runs on cuda, not {device}"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"its fp8 matmul needs compute capability 8.9, this device has {torch.cuda.get_device_capability()}"
    return None


@functools.cache
def _load_int8():
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.kernel.intmm import int_scaled_matmul
    return int_scaled_matmul


@contextlib.contextmanager
def _quiet(*names: str):
    # torchao warns, while it is imported, of extensions built for other devices.
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for log, _ in levels:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in levels:
            log.setLevel(level)
