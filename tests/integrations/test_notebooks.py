"""The notebooks of docs/ run from top to bottom."""

import ast
import asyncio
import inspect
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def run_cells(cells, name) -> dict[str, object]:
    """As a kernel runs them: one namespace, one loop, and `await` at the top level."""
    namespace: dict[str, object] = {"__name__": "notebook"}
    with asyncio.Runner() as runner:
        for number, cell in enumerate(cells):
            code = compile(
                "".join(cell["source"]), f"{name} {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            awaited = eval(code, namespace)
            if inspect.iscoroutine(awaited):
                runner.run(awaited)
    return namespace


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "says"), [("langchain", "log 0"), ("llama-index", "full:")])
def test_the_notebook_runs(tmp_path, monkeypatch, capsys, with_smollm2, name, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGBLEND_HOME", str(with_smollm2(tmp_path / "home")))
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells), "clear the outputs before committing"
    namespace = run_cells([cell for cell in cells if cell["cell_type"] == "code"], name)
    namespace["llm"].backend.engine.close()
    said = capsys.readouterr().out
    assert "probe-shift:" in said
    assert says in said
