"""A workspace with the fakes of app_fakes.py, and makers of documents."""

import json
from functools import cached_property

import pytest
from app_fakes import SECRET, FakeEmbedder, FakeEngine
from document_files import write_docx, write_epub, write_pdf
from shared_servers import redis_server  # noqa: F401

from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.registry import Library, UnrelatedSimilarity
from ragblend.app.workspace import Workspace, Workspaces


@pytest.fixture
def fakes(home, monkeypatch):
    """Every workspace has an engine of its own, and every home an embedder."""
    engine, fakes = cached_property(lambda _: FakeEngine(home)), dict[Workspaces, FakeEmbedder]()
    engine.__set_name__(Workspace, "engine")
    monkeypatch.setattr(Workspace, "engine", engine)
    monkeypatch.setattr(Workspaces, "embedder", lambda self, _: fakes.setdefault(self, FakeEmbedder()))


@pytest.fixture
def open_workspace(home, fakes):
    """Opens the home as a new process would: nothing is shared with earlier workspaces but the files."""
    opened = []

    def open_(**overrides):
        opened.append(Workspace.open(home, **{"chunk_tokens": 16, "max_new_tokens": 32} | overrides))
        return opened[-1]

    yield open_
    for workspace in opened:
        workspace.close()


@pytest.fixture
def workspace(open_workspace):
    return open_workspace()


@pytest.fixture
def workspaces(home, fakes):
    """All collections of a home."""
    with Workspaces.open(home, chunk_tokens=16, max_new_tokens=32) as opened:
        yield opened


@pytest.fixture
def engine(workspaces):
    return workspaces.first.engine


@pytest.fixture
def embedder(workspaces):
    return workspaces.first.embedder


@pytest.fixture
def jobs(workspaces):
    queue = JobQueue(workspaces)
    yield queue
    queue.end()


@pytest.fixture
def unrelated(monkeypatch):
    """The fake embedder's similarity of unrelated texts is known."""
    known = UnrelatedSimilarity(0.0, 0.2)
    monkeypatch.setattr("ragblend.app.answering.retrieval.recorded_similarity", lambda name: known)


@pytest.fixture
def library(tmp_path):
    with Library(tmp_path / "library.sqlite") as opened:
        yield opened


@pytest.fixture
def cli(home, monkeypatch):
    """Runs the command line on the fakes; gives the exit code. The engine is `cli.engine`."""
    from ragblend.app.cli.main import main

    engine, embedder = FakeEngine(home), FakeEmbedder()
    monkeypatch.setenv("RAGBLEND_CHUNK_TOKENS", "16")
    monkeypatch.setattr(Workspace, "engine", engine)
    monkeypatch.setattr(Workspace, "embedder", embedder)

    def run(*arguments):
        return main([*map(str, arguments), "--home", str(home)])

    run.engine, run.embedder = engine, embedder
    return run


@pytest.fixture
def told(cli, capfd):
    """What a command says with --json: one object on stdout."""

    def run(*arguments, code=0):
        capfd.readouterr()
        assert cli(*arguments, "--json") == code
        (line,) = capfd.readouterr().out.splitlines()
        return json.loads(line)

    return run


@pytest.fixture
def documents(tmp_path):
    """Three small documents about different things."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "sky.txt").write_text("The sky over the harbour is blue in the morning.")
    (folder / "bread.md").write_text(
        "# Bread\n\nThe baker needs rye flour and salt, and every morning at four he kneads the dough by hand.\n\n"
        "# Ovens\n\nOvens are hot."
    )
    (folder / "boats.txt").write_text("Three boats lie at the quay. The red boat belongs to Ada. It is old.")
    return folder


@pytest.fixture
def make():
    """The makers of documents, by suffix."""
    return {"pdf": write_pdf, "docx": write_docx, "epub": write_epub}


@pytest.fixture
def secret(documents):
    """A document among the others that tests delete."""
    path = documents / "secret.txt"
    path.write_text(SECRET)
    return path
