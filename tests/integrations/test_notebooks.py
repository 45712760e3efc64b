"""The notebooks of docs/ run from top to bottom."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient (the dev extra) is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat (the dev extra) is not installed")
pytest.importorskip("ipykernel", reason="ipykernel (the dev extra) is not installed")

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "says"), [("langchain", "log 0"), ("llama-index", "full:")])
def test_the_notebook_runs(tmp_path, monkeypatch, with_smollm2, name, says):
    monkeypatch.setenv("RAGBLEND_HOME", str(with_smollm2(tmp_path / "home")))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    nbclient.NotebookClient(
        notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "probe-shift:" in said
    assert says in said
