"""Builds the native CPU library on first use and loads it: one shared object per source, torch, compiler and CPU level.

The library uses LibTorch's stable ABI only. A build goes to a temporary file that is renamed when whole, under a file
lock, and a digest beside it tells a damaged file: any number of processes may start, or be killed, at any moment.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

_OPERATORS = ("quantize", "dequantize", "linear", "grouped_linear")
LEVELS = ("scalar", "avx2", "avx512")
_SOURCES = Path(__file__).parent
_FLAGS = (
    *("-O3", "-shared", "-fPIC", "-std=c++20", "-w", "-fvisibility=hidden"),
    "-ffp-contract=off",  # quantization must round twice where the twin does
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # the stable ABI of torch 2.10
)
# CPU flags that a level needs, as /proc/cpuinfo spells them, and those it uses where the CPU has them.
_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", *("avx2", "fma", "f16c")),
    "avx2": ("avx2", "fma", "f16c"),
    "scalar": (),
}
_EXTRAS = {"avx512": ("avx512_vnni", "avx512vbmi", "avx512_bf16"), "avx2": (), "scalar": ()}


class BuildError(RuntimeError):
    """The native library can't be had here; the message says why and what would help."""


@functools.cache
def load(level: str | None = None):
    """Return the library's operators (``torch.ops.<name>``) for ``level``, by default the best this CPU has.

    ``TORCHQ_CPU_ISA`` forces a level. Builds the library where the cache (``$TORCHQ_CACHE``, else ``~/.cache/torchq``)
    has none. Raises ``BuildError``.
    """
    level = level or os.environ.get("TORCHQ_CPU_ISA") or best_level()
    if level not in LEVELS:
        raise BuildError(f"TORCHQ_CPU_ISA={level!r} is not known; known: {', '.join(LEVELS)}")
    lacking = [flag for flag in _NEEDS[level] if flag not in cpu_flags()]
    if lacking:
        raise BuildError(f"this CPU can't run level {level}: it lacks {', '.join(lacking)}")
    name = f"torchq_cpu_{level}"
    extras = [flag for flag in _EXTRAS[level] if flag in cpu_flags()]
    machine = ["-m" + flag.replace("avx512_", "avx512") for flag in (*_NEEDS[level], *extras)]
    path = _built([*_FLAGS, *machine, f"-DTORCHQ_LIBRARY={name}"], name)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error
    operators = getattr(torch.ops, name)
    for op in _OPERATORS:  # they write into their arguments: a fake has nothing to return
        torch.library.register_fake(f"{name}::{op}", lambda *args: None)
    return operators


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The features of this CPU as Linux names them; none known on other systems, which get the portable level."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def best_level() -> str:
    return next(level for level in reversed(LEVELS) if cpu_flags().issuperset(_NEEDS[level]))


def _built(flags: list[str], name: str) -> Path:
    compiler = _compiler()
    sources = [*sorted(_SOURCES.glob("*.h")), _SOURCES / "ops.cpp"]
    identity = [torch.__version__, *compiler, *flags, *(s.name + s.read_text() for s in sources)]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:20]
    folder = Path(os.environ.get("TORCHQ_CACHE") or Path.home() / ".cache" / "torchq")
    path = folder / f"{name}_{key}.so"
    if _whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{name}.lock"):
            if not _whole(path):
                _compile(compiler[0], flags, path)
    except OSError as error:
        raise BuildError(
            f"the build folder {folder} can't be used ({error.strerror or error}); set TORCHQ_CACHE to one that can"
        ) from error
    return path


def _compiler() -> tuple[str, str]:
    """The compiler's path and version line; ``$CXX``, else the usual names."""
    wanted = os.environ.get("CXX")
    candidates = [wanted] if wanted else ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        raise BuildError(f"no C++ compiler ({', '.join(candidates)} not found); install g++ or clang, or set CXX")
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {path} does not run: {error}") from error
    return path, version.partition("\n")[0]


def _compile(compiler: str, flags: list[str], path: Path) -> None:
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    paths = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}", "-ltorch_cpu", "-lc10"]
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(descriptor)
    try:
        command = [compiler, *flags, str(_SOURCES / "ops.cpp"), "-o", temporary, *paths]
        status, said = _run(command)
        if status:
            errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:]
            raise BuildError(f"{compiler} failed: {errors[0].strip() if errors else status}")
        digest = _digest(Path(temporary))
        os.replace(temporary, path)
        _digest_file(path).write_text(digest)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> tuple[int, str]:
    """Run the compiler; return its status and what it wrote to stderr. On a terminal, say what takes so long."""
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
        tqdm(desc="building the native CPU kernels, once", bar_format="{desc}: {elapsed}", disable=None) as clock,
    ):
        while True:
            try:
                said = process.communicate(timeout=0.5)[1]
                return process.returncode, said
            except subprocess.TimeoutExpired:
                clock.refresh()


def _whole(path: Path) -> bool:
    # Loading a file that was cut short kills the process, so nothing unchecked is loaded.
    try:
        return _digest_file(path).read_text() == _digest(path)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


class _lock:
    """An exclusive lock between processes for the length of a with block; a process that dies lets go of it."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self):
        try:
            import fcntl
        except ImportError as error:
            raise BuildError("native CPU kernels need a POSIX system") from error
        self._file = open(self._path, "w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self._file.close()
