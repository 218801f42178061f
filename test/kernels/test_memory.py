"""Quantizing and dequantizing use little memory beside what goes in and comes out, whatever the tensor's size."""

import subprocess
import sys

import pytest
import torch

from torchq.kernels import twin
from torchq.keys import QUANT_KEYS, QuantKey, stored_nbytes
from torchq.zoo.measure import allocated_peak

MB = 1 << 20
SHAPE = (4096, 16384)  # 64M values, 128 MB in bf16, 256 MB in f32
KEYS = ["fp8_per_tensor_static", "fp8_per_channel_static", "fp8_per_block_static", "mxfp8", "mxfp4", "nvfp4"]
BLOCKS = "fp8_per_block_static"
KEYS += ["int8_per_channel_static", "int4_per_group_32"]


@pytest.mark.parametrize(
    "name, rows, columns",
    [*((name, 512, 16384) for name in KEYS), ("mxfp4", 1 << 18, 32), ("mxfp4", 4, 1 << 21), (BLOCKS, 32, 1 << 18)],
)
def test_transient_memory_is_a_few_tiles(name, rows, columns):
    key = QUANT_KEYS[name]
    x = torch.ones(1, columns, dtype=torch.bfloat16).expand(rows, columns).contiguous()  # 8M values
    q, peak = allocated_peak(lambda: twin.quantize(x, key, error=torch.zeros(2, dtype=torch.float64)))
    assert peak - stored_nbytes((rows, columns), key) <= 64 * MB
    y, peak = allocated_peak(lambda: twin.dequantize(q, torch.bfloat16))
    assert peak - y.nbytes <= 64 * MB


def test_a_single_row_of_blocks():
    x = torch.ones(1, 4 * MB, dtype=torch.bfloat16)
    q, peak = allocated_peak(lambda: twin.quantize(x, QUANT_KEYS["fp8_per_block_static"]))
    assert peak - q.nbytes <= 64 * MB


@pytest.mark.parametrize("key", ["fp8_per_token", "nvfp4_per_token"])
def test_activations_too(key):
    x = torch.ones(1, 16384, 512, dtype=torch.bfloat16)
    q, peak = allocated_peak(lambda: twin.quantize(x, QuantKey.from_name(key, "activation")))
    assert peak - q.nbytes <= 64 * MB


@pytest.mark.parametrize("name", ["mxfp4", BLOCKS])
def test_linear_never_holds_the_whole_weight(name):
    q = twin.quantize(torch.ones(1, 4096).expand(4096, 4096).bfloat16(), QUANT_KEYS[name])  # 16M values: 64 MB in f32
    _, peak = allocated_peak(lambda: twin.linear(torch.ones(4, 4096), q, None, None))
    assert peak <= 24 * MB


_SCRIPT = """
import resource, sys, torch
from torchq.kernels import twin
from torchq.keys import QUANT_KEYS

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

key = QUANT_KEYS[sys.argv[1]]
small = torch.ones(256, 1024, dtype=torch.bfloat16)
twin.dequantize(twin.quantize(small, key), torch.bfloat16)  # what is loaded on the first call is no transient
x = torch.empty({shape}, dtype=torch.bfloat16).fill_(1.5)
before = peak()
q = twin.quantize(x, key)
quantized = peak()
y = twin.dequantize(q, torch.bfloat16)
# The peak only grows: what dequantize needed shows above what was already reached.
print(quantized - before - q.nbytes, max(0, peak() - max(quantized, before + q.nbytes) - y.nbytes), y.sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
@pytest.mark.parametrize("name", ["mxfp4", "fp8_per_channel_static"])
def test_the_process_grows_by_64_mb_at_most(name):
    script = _SCRIPT.format(shape=SHAPE)
    run = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
    quantize, dequantize, _ = map(float, run.stdout.split())
    assert quantize <= 64 * MB and dequantize <= 64 * MB, run.stdout
