"""Work in processes of its own, forked from one that has imported what takes seconds to import. Not a test file."""

import multiprocessing
import os
import sys

from waiting import SOON_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "torch",
    "transformers",
    "chromadb",
    "fastapi",
    "uvicorn",
    "nltk",
    "llama_index.core.node_parser",
    "ragblend.app.cli.main",
    "ragblend.app.serve.application",
    "ragblend.engine.engine",
    "ragblend.integrations.embeddings",
])  # fmt: skip


def _run(environment, folder, work, given):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(work(*given))


def start(work, *given):
    """Call a function of a module in a new process, in this one's folder and environment."""
    process = CONTEXT.Process(target=_run, args=(dict(os.environ), os.getcwd(), work, given))
    process.start()
    return process


def exit_code(work, *given):
    """What that process ends with: the negative number of the signal that ended it, if one did."""
    process = start(work, *given)
    process.join(SOON_S)
    return process.exitcode
