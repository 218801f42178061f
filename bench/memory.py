"""Memory of ``quantize_`` on a model of many equal layers: the peak beyond the model itself, and how it falls.

    python bench/memory.py

Each format runs in a process of its own, since a process's peak never falls. Linux only: it reads /proc/self.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

LAYERS, SIZE = 16, 4096
FORMATS = ("mxfp4", "mxfp8", "nvfp4", "fp8_per_channel", "fp8_per_tensor", "int8_per_channel")
ALLOWED_BEYOND_A_LAYER = 64e6


def resident(field: str = "VmRSS") -> int:
    """Return the process's resident memory in bytes: now (VmRSS) or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(name: str, layers: int = LAYERS, size: int = SIZE) -> tuple[int, int, list[int]]:
    """Return bytes of a layer, the peak beyond the model, and the resident memory at every tenth of the time."""
    from torchq import quantize_

    quantize_(nn.Sequential(nn.Linear(256, 256)).bfloat16(), name)  # what loads or builds on first use
    model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    before, samples, done = resident(), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            samples.append(resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    watcher.start()
    quantize_(model, name)
    done.set()
    watcher.join()
    curve = [samples[len(samples) * i // 10] - before for i in range(10)] + [resident() - before]
    return size * size * 2, resident("VmHWM") - before, curve


def main() -> None:
    if len(sys.argv) == 2:
        layer, peak, curve = measure(sys.argv[1])
        verdict = "ok" if peak <= layer + ALLOWED_BEYOND_A_LAYER else "ABOVE one layer + 64 MB"
        falling = " ".join(f"{point / 1e6:.0f}" for point in curve)
        print(
            f"{sys.argv[1]:18s} peak extra {peak / 1e6:6.1f} MB (layer {layer / 1e6:.1f} MB: {verdict}); MB: {falling}"
        )
        return
    print(f"{LAYERS} layers of {SIZE} x {SIZE} bf16; resident MB beyond the start at each tenth of the time")
    for name in FORMATS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        print(done.stdout, end="", flush=True)


if __name__ == "__main__":
    main()
