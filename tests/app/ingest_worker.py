"""Runs `ragblend ingest` on the fakes and dies at a given point: argv is HOME SIGNAL POINT PATH. Not a test file."""

import os
import signal
import sys

from app_fakes import FakeEmbedder, FakeEngine

from ragblend.app.cli.main import main
from ragblend.app.library.registry import Library
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


if __name__ == "__main__":
    home, number, point, path = sys.argv[1:]
    Workspace.engine, Workspace.embedder = FakeEngine(home), FakeEmbedder()
    os.environ["RAGBLEND_CHUNK_TOKENS"] = "16"
    die_at(point, getattr(signal, number))
    sys.exit(main(["ingest", path, "--home", home, "--json"]))
