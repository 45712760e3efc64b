"""vLLM over a store that machines share: passages that it knows by name, and another machine has encoded."""

import math
import time

import tiny_models
from shared_servers import redis_server  # noqa: F401
from vllm_helpers import QUESTION, SHAPE, passage, serve

from ragblend.engine.engine import Engine
from ragblend.engine.prompt import Chunk

TEXTS = [passage(number) for number in range(4)]


def test_passages_that_another_machine_encoded_are_fused_and_kept(has_vllm, redis_server, tmp_path):  # noqa: F811
    folder = tiny_models.save_model("llama", tmp_path / "llama", is_endless=True, **SHAPE)
    url = f"{redis_server().url()}?timeout_s=60"
    other = Engine.open(str(folder), tmp_path / "other", device="cpu", dtype="float32", remote=url)
    other.encode(TEXTS)
    prompt = other.tokenize(other.chat_prompt(None, [Chunk(text) for text in TEXTS], QUESTION))
    expected = other.prefill(prompt).logits.softmax(-1).tolist()
    other.close()  # behind what waits to be shared
    server = serve(folder, tmp_path / "home", {"remote": url, "encode_missing": False})
    try:
        server.engine.enter(TEXTS, [f"p{number}" for number in range(4)])
        [output] = server.ask([list(prompt.token_ids)])
        report = output.kv_transfer_params["ragblend"]
        assert report["missing_tokens"] == 0 and report["reused_tokens"] > 0
        found = {i: math.exp(each.logprob) for i, each in output.outputs[0].logprobs[0].items()}
        assert all(abs(p - expected[i]) < 1e-4 for i, p in found.items())
        give_up = time.monotonic() + 60
        while server.engine.runtime.store.stats().entries < 4:  # in the background of the server's worker
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        server.close()
