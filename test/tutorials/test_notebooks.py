"""Every tutorial's notebook is its script, cell by cell, and runs from top to bottom."""

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_has_the_cells_of_the_script(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    converted = jupytext.read(script)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in converted.cells], (
        f"write it anew: jupytext --to ipynb tutorials/{script.name}"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_runs(script, tmp_path):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    assert "Quantized " in printed and "perplexity" in printed
