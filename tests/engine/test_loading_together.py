"""Models that are loaded at the same time: transformers patches itself for the whole process meanwhile."""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path

import tiny_models
import torch

from ragblend.engine.model import load
from ragblend.integrations.embeddings import MiniLMEmbedder


def test_a_model_with_a_tied_head_is_whole_beside_others_that_load(tmp_path) -> None:
    """`lacks 1 weights (lm_head.weight, ...); fetch it again`, and 503, when the embedder was loaded beside it."""
    folder = tiny_models.save_model("llama", tmp_path / "llama", tie_word_embeddings=True)
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def work(one) -> None:
        try:
            together.wait()
            for _ in range(6):
                one()
        except BaseException as error:
            failures.append(error)

    def model() -> None:
        loaded = load(folder, torch.device("cpu"), "float32").model
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()

    loads = [model, lambda: MiniLMEmbedder("float32").load()] * 2
    threads = [threading.Thread(target=work, args=(one,)) for one in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
