"""Runs functions in separate processes, forked from one with the slow imports done. Not a test file."""

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
    """The exit code of that process; if a signal ended it, the negative number of that."""
    process = start(work, *given)
    process.join(SOON_S)
    return process.exitcode
