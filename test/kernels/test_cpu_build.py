"""The native library is built once, by whoever comes first; where it can't be, the twin works and the log says why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchq.kernels import cpu

SCRIPT = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
import torchq.kernels as k
x = torch.arange(256.0).view(4, 64)
q = [k.quantize(x, "mxfp4") for _ in range(2)][0]
out = k.linear(x, q)
backend = k.select("linear", q.key, None, "cpu").name
print(backend, q.data.sum().item(), out.double().sum().item())
"""


def start(folder, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("TORCHQ_CPU_ISA", "CXX")}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**clean, "TORCHQ_CACHE": str(folder), "TORCHQ_CPU_ISA": "scalar", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    backend, codes, total = out.split()
    assert (codes, float(total)) == ("12642", 17098304.0), out  # the same numbers whoever computes
    return backend, [line for line in log.splitlines() if line.startswith("WARNING")]


needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@needs_compiler
def test_two_processes_build_at_once_and_a_damaged_file_is_built_again(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    assert [finish(p) for p in both] == [("cpu", [])] * 2
    (library,) = tmp_path.glob("*.so")
    assert not list(tmp_path.glob("*.tmp"))
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "left_by_a_killed_build.tmp").write_bytes(b"half")
    assert finish(start(tmp_path)) == ("cpu", [])
    assert library.stat().st_size == len(whole)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"CXX": "/nonexistent/c++"}, "no C++ compiler (/nonexistent/c++ not found)"),
        ({"CXX": "false"}, "does not run"),
        ({"CXX": "true"}, "does not load"),
        ({"TORCHQ_CACHE": "/dev/null/folder"}, "set TORCHQ_CACHE"),
        ({"TORCHQ_CPU_ISA": "mmx"}, "known: scalar, avx2, avx512"),
    ],
    ids=lambda v: next(iter(v.items())) if isinstance(v, dict) else "",
)
def test_without_a_library_the_twin_works_and_says_so_once(tmp_path, env, reason):
    backend, warnings = finish(start(tmp_path, **env))
    assert backend == "torch"
    (line,) = warnings
    assert "native CPU kernels are off" in line and reason in line


def test_a_compile_error_is_the_reason(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\necho "ops.cpp:1: error: no such header" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    backend, (line,) = finish(start(tmp_path, CXX=str(compiler)))
    assert backend == "torch" and line.endswith("error: no such header")


def test_importing_builds_nothing(tmp_path):
    code = "import torchq, torchq.kernels"
    env = {**os.environ, "TORCHQ_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
    assert not (tmp_path / "cache").exists()


def test_levels_and_flags():
    assert cpu.best_level() in cpu.LEVELS
    assert isinstance(cpu.cpu_flags(), frozenset)


@pytest.mark.slow
@pytest.mark.parametrize("extras", ((), ("avx512_vnni",), ("avx512_vnni", "avx512vbmi")), ids=str)
def test_kernels_of_older_avx512_cpus(extras):
    if not cpu.cpu_flags().issuperset((*cpu._NEEDS["avx512"], *extras)):
        pytest.skip("this CPU lacks AVX-512, or that part of it")
    program = (
        "import sys, pytest, torchq.kernels.cpu as cpu\n"
        f"cpu._EXTRAS['avx512'] = {extras!r}\n"
        f"sys.exit(pytest.main([{str(Path(__file__).with_name('test_cpu.py'))!r}, '-p', 'no:cacheprovider']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout[-2000:]
