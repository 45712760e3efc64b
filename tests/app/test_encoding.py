"""Questions, changes and kills while KV is encoded: the real command line on a model of four layers."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from app_fakes import answer_of

from ragblend.app.library.maintenance import check
from ragblend.app.library.removal import remove_document
from ragblend.app.workspace import Workspace

FILES, SENTENCES, SOON_S = 16, 40, 300.0


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "harbour"
    folder.mkdir()
    for ship in range(FILES):
        lines = (f"Ship {ship} carries {n} barrels of herring to quay {n + ship}." for n in range(SENTENCES))
        (folder / f"ship{ship:02}.txt").write_text(" ".join(lines))
    return folder


@pytest.fixture
def opened(home, tiny_folder):
    """The home as another process has it, with the real engine and embedder."""
    workspace = Workspace.open(home, model=str(tiny_folder), chunk_tokens=64, max_new_tokens=4)
    yield workspace
    workspace.close()
    workspace.engine.close()


def start(home, tiny_folder, folder, *options):
    command = [sys.executable, "-m", "ragblend.app.cli.main", "ingest", folder, "--json", "--home", home]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"RAGBLEND_CHUNK_TOKENS": "64"}
    return subprocess.Popen([*command, "--model", tiny_folder, *options], env=environment, **pipes)


def values(home):
    return list((home / "kv").rglob("*.kv"))


def await_values(running, home, count):
    limit = time.monotonic() + SOON_S
    while len(values(home)) < count:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < limit, "nothing was encoded"
        time.sleep(0.01)


def assert_nothing_is_left_over(workspace):
    """What is in the index, the nodes and the store is of the registry's passages, and no more."""
    passages = set(workspace.library.nodes("default"))
    resources = workspace.engine.runtime
    assert workspace.index.node_ids() == passages
    assert set(resources.nodes.node_ids(resources.scope("default"))) == passages
    assert set(workspace.engine.store.keys()) <= resources.nodes.keys("default"), "KV of what was deleted"
    assert check(workspace) == []


def test_questions_deletions_and_kills_during_encoding(home, tiny_folder, folder, opened):
    opened.embedder.load()
    # Loaded by now, because the following must happen while the other process encodes.
    assert opened.engine.gate.passed
    running = start(home, tiny_folder, folder)
    await_values(running, home, 3)
    documents = opened.library.documents("default")
    assert {document.state for document in documents} == {"done"} and len(documents) == FILES
    answer = answer_of(opened, "How many barrels does ship 7 carry?")
    assert answer.sources and opened.engine.finish_background(60)
    for gone in (documents[0], documents[-1], documents[FILES // 2]):
        (folder / gone.name).unlink()
        with opened.workspaces.writing():
            remove_document(opened, gone)
    assert running.poll() is None, "it still encodes"
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert_nothing_is_left_over(opened)

    before = {path.name for path in values(home)}
    done = start(home, tiny_folder, folder)
    out, err = done.communicate(timeout=SOON_S)
    report = json.loads(out)
    assert done.returncode == 0, err
    assert len(report["unchanged"]) == FILES - 3 and report["gone"] == []
    assert report["kv"]["with_kv"] == report["kv"]["passages"] == opened.library.count_passages("default")
    assert before <= {path.name for path in values(home)}, "what was encoded is not encoded again"
    assert_nothing_is_left_over(opened)
