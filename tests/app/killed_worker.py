"""Commands on the fakes that kill their process at a given point; run by `forked`. Not a test file."""

import os
import sys

from app_fakes import FakeEmbedder, FakeEngine

from ragblend.app.cli.main import main
from ragblend.app.library.registry import Library
from ragblend.app.services import AppServices
from ragblend.app.workspace import Workspace
from ragblend.integrations.chroma import VectorIndex

POINTS = {
    "before-passages": (Library, "replace_passages"),
    "before-index": (VectorIndex, "upsert"),
    "before-entering": (FakeEngine, "enter"),
    "before-done": (Library, "finish"),
}
CALL = 2  # die in the second document, so that the first one is done


def die_at(point, number):
    owner, name = POINTS[point]
    original, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        calls.append(name)
        if len(calls) == CALL:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def fake(home):
    Workspace.engine, Workspace.embedder = FakeEngine(home), FakeEmbedder()
    os.environ["RAGBLEND_CHUNK_TOKENS"] = "16"


def ingest(home, number, point, path):
    """`ragblend ingest`, which gets the signal at that point; what it prints is in HOME.out and HOME.err."""
    for stream, name in ((1, "out"), (2, "err")):
        with open(f"{home}.{name}", "w") as file:
            os.dup2(file.fileno(), stream)
    fake(home)
    die_at(point, number)
    sys.exit(main(["ingest", str(path), "--home", str(home), "--json"]))


def delete(home, document):
    """Delete it as the page does, and exit before the deletion is completed."""
    fake(home)
    assert AppServices.open(home).deletions.delete([document], "default") == 1
    os._exit(9)
