"""Questions, changes and kills while KV is encoded: the real command line on a model of four layers."""

import json

import pytest
from app_fakes import answer_of, write_files
from forked import start
from waiting import until

from ragblend.app.cli.main import main
from ragblend.app.library.maintenance import check
from ragblend.app.library.removal import remove_document
from ragblend.app.workspace import Workspace

FILES, SENTENCES = 16, 40


@pytest.fixture
def folder(tmp_path):
    line = "Ship {0} carries {1} barrels of herring to quay {1}{0}."
    ships = [" ".join(line.format(ship, n) for n in range(SENTENCES)) for ship in range(FILES)]
    return write_files(tmp_path / "harbour", ships)


@pytest.fixture
def opened(home, tiny_folder):
    """The home as another process has it, with the real engine and embedder."""
    workspace = Workspace.open(home, model=str(tiny_folder), chunk_tokens=64, max_new_tokens=4)
    yield workspace
    workspace.close()
    workspace.engine.close()


def values(home):
    return list((home / "kv").rglob("*.kv"))


def await_values(running, home, count):
    until(lambda: len(values(home)) >= count or not running.is_alive())
    assert running.is_alive()


def assert_nothing_is_left_over(workspace):
    """What is in the index, the nodes and the store is of the registry's passages, and no more."""
    passages = set(workspace.library.nodes("default"))
    resources = workspace.engine.runtime
    assert workspace.index.node_ids() == passages
    assert set(resources.nodes.node_ids(resources.scope("default"))) == passages
    assert set(workspace.engine.store.keys()) <= resources.nodes.keys("default"), "KV of what was deleted"
    assert check(workspace) == []


def test_questions_deletions_and_kills_during_encoding(
    home, tiny_folder, folder, opened, monkeypatch, capsys
):
    command = ["ingest", str(folder), "--json", "--home", str(home), "--model", str(tiny_folder)]
    monkeypatch.setenv("RAGBLEND_CHUNK_TOKENS", "64")
    opened.embedder.load()
    # Loaded by now, because the following must happen while the other process encodes.
    assert opened.engine.gate.passed
    running = start(main, command)
    await_values(running, home, 3)
    documents = opened.library.documents("default")
    assert {document.state for document in documents} == {"done"} and len(documents) == FILES
    answer = answer_of(opened, "How many barrels does ship 7 carry?")
    assert answer.sources and opened.engine.finish_background(60)
    for gone in (documents[0], documents[-1], documents[FILES // 2]):
        (folder / gone.name).unlink()
        with opened.workspaces.writing():
            remove_document(opened, gone)
    assert running.is_alive(), "it still encodes"
    running.kill()
    running.join()
    assert_nothing_is_left_over(opened)

    before = {path.name for path in values(home)}
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["unchanged"]) == FILES - 3 and report["gone"] == []
    assert report["kv"]["with_kv"] == report["kv"]["passages"] == opened.library.count_passages("default")
    assert before <= {path.name for path in values(home)}, "what was encoded is not encoded again"
    assert_nothing_is_left_over(opened)
