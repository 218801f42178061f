"""What importing torchq costs and drags in, and that arrows between the packages point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"torchq.keys", "torchq.errors"}  # the vocabulary of every room
MAY_IMPORT = {"kernels": {"torchq.kernels"}, "transforms": {"torchq.transforms", "torchq.kernels"}}


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd="/")


def test_import_prints_nothing_and_loads_no_heavy_package():
    heavy = ["torchao", "triton", "transformers", "matplotlib", "safetensors", "tutorials"]
    code = "import sys, torch\nbefore = set(sys.modules)\nimport torchq\nnew = set(sys.modules) - before\n"
    code += f"bad = [m for m in {heavy} if m in new]\nassert not bad, bad\n"
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_top_level_package_leaks():
    done = run(
        "import importlib.util as u\nassert [n for n in ('kernels', 'transforms', 'zoo') if u.find_spec(n)] == []"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_point_one_way(room):
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in filter(None, names):
                if name.startswith("torchq") and name not in SHARED:
                    assert any(name.startswith(ok) for ok in MAY_IMPORT[room]), f"{path.name} imports {name}"
