"""Runs `ragblend ingest` on the fakes, and dies at a given point: for each line HOME SIGNAL POINT PATH in a fork.

All is imported once. Prints each exit code; what the command printed is in HOME.out and HOME.err. Not a test file.
"""

import os
import signal
import sys

# The command imports these late.
import chromadb  # noqa: F401
import llama_index.core.node_parser  # noqa: F401
import nltk  # noqa: F401
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


def ingest(home, number, point, path):
    for stream, name in ((1, "out"), (2, "err")):
        with open(f"{home}.{name}", "w") as file:
            os.dup2(file.fileno(), stream)
    Workspace.engine, Workspace.embedder = FakeEngine(home), FakeEmbedder()
    os.environ["RAGBLEND_CHUNK_TOKENS"] = "16"
    die_at(point, getattr(signal, number))
    sys.exit(main(["ingest", path, "--home", home, "--json"]))


if __name__ == "__main__":
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            ingest(*line.split())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
