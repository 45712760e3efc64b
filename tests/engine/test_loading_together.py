"""Models that are loaded at the same time: transformers patches itself for the whole process meanwhile."""

import subprocess
import sys
from functools import partial

import pytest
import tiny_models
import torch
from waiting import at_once

from ragblend.engine.model.load import load
from ragblend.integrations.embeddings import Embedder


def test_a_model_with_a_tied_head_is_whole_beside_others_that_load(tmp_path) -> None:
    """`lacks 1 weights (lm_head.weight, ...); fetch it again`, and 503, when the embedder was loaded beside it."""
    folder = tiny_models.save_model("llama", tmp_path / "llama", tie_word_embeddings=True)

    def work(one) -> None:
        for _ in range(6):
            one()

    def model() -> None:
        loaded = load(folder, torch.device("cpu"), "float32").model
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()

    loads = [model, lambda: Embedder(dtype="float32").load()] * 2
    at_once(*(partial(work, one) for one in loads))


IMPORTS = """
import sys, threading, time
from ragblend.engine.model.device import exclusive_model_loading

begun = threading.Event()

class Slow:
    def find_spec(self, name, *_):
        if name == "transformers.dependency_versions_check":  # the first part that the whole imports
            begun.set()
            time.sleep(0.2)

def load():
    with exclusive_model_loading():
        pass

def engine():
    from ragblend.engine.engine import Engine

sys.meta_path.insert(0, Slow())
assert "transformers" not in sys.modules
first, second = [load, engine][::int(sys.argv[1])]
thread = threading.Thread(target=first)
thread.start()
begun.wait()
second()
thread.join()
"""


@pytest.mark.parametrize("order", ["1", "-1"], ids=["embedder first", "engine first"])
def test_the_embedder_may_be_loaded_while_the_engine_is_imported(order) -> None:
    """A server that began over a home with work to do lost its model: `cannot import name 'DynamicCache'`."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, order], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
