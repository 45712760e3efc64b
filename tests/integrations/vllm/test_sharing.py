"""vLLM with a shared store: passages that are entered here, and were encoded by another machine."""

import math
import random
import time

import pytest
import tiny_models
from shared_servers import RedisNames, proxy_to, redis_server  # noqa: F401
from vllm_helpers import QUESTION, SHAPE, passage, report_of, serve, until

from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Chunk

TEXTS = [passage(number) for number in range(4)]


@pytest.mark.parametrize("named", [False, True])
def test_passages_of_another_machine_are_fused_and_stored_until_they_are_deleted(
    redis_server,  # noqa: F811
    serving,
    tmp_path,
    named,
):
    folder = tiny_models.save_model("llama", tmp_path / "llama", is_endless=True, **SHAPE)
    redis = redis_server()
    url = f"{redis.url()}?timeout_s=60"
    other = Engine.open(str(folder), tmp_path / "other", device="cpu", dtype="float32", remote=url)
    other.encode(TEXTS)
    prompt = other.tokenize(other.chat_prompt(None, [Chunk(text) for text in TEXTS], QUESTION))
    expected = other.prefill(prompt).logits.softmax(-1).tolist()
    other.close()  # after all is shared
    server = serving(folder, tmp_path / "home", {"remote": url, "encode_missing": False})
    server.engine.close()
    server.engine = Engine.open(str(folder), tmp_path / "home", device="cpu", dtype="float32", remote=url)
    server.engine.enter(TEXTS, [f"p{number}" for number in range(4)])
    spans = [list(place) for place in prompt.places] if named else None
    [output] = server.ask([list(prompt.token_ids)], [{"spans": spans}])
    report = report_of(output)
    assert report["missing_tokens"] == 0 and report["reused_tokens"] > 0
    found = {i: math.exp(each.logprob) for i, each in output.outputs[0].logprobs[0].items()}
    assert all(abs(p - expected[i]) < 1e-4 for i, p in found.items())
    until(lambda: server.engine.runtime.store.stats().entries == 4)  # stored in the background
    assert server.engine.forget([f"p{number}" for number in range(4)]) > 0
    assert not server.engine.runtime.store.stats().entries and not RedisNames(redis).names()


def test_answers_are_right_whatever_the_shared_store_does(has_vllm, redis_server, tmp_path):  # noqa: F811
    """It sends garbage, is dead, works again, sends 2 kB a second, and never answers."""
    folder = tiny_models.save_model("llama", tmp_path / "llama", is_endless=True, **SHAPE)
    redis, faults = redis_server(), ("garbage", "dead", "none", "slow", "silent")
    texts = {fault: [passage(10 * at + n) for n in range(3)] for at, fault in enumerate(faults, 1)}
    other = Engine.open(str(folder), tmp_path / "other", device="cpu", dtype="float32", remote=redis.url())
    other.encode(texts["garbage"])
    assert other.store.remote.flush()
    names = RedisNames(redis)
    for name in names.names():
        names.set(name, random.Random(name).randbytes(len(names.get(name))))
    for fault in faults[1:]:
        other.encode(texts[fault])
    other.close()
    with proxy_to(redis.port) as proxy:
        where = {"remote": f"{redis.url(proxy.port)}?timeout_s=1&retry_s=0.1", "encode_missing": False}
        server = serve(folder, tmp_path / "home", where)
        try:
            for fault in faults:
                server.engine.enter(texts[fault], [f"{fault}{n}" for n in range(3)])
                ids = server.ids(texts[fault])
                proxy.bytes_per_s = 2000 if fault == "slow" else None
                if fault == "dead":
                    proxy.cut()
                elif fault == "silent":
                    proxy.most = proxy.passed
                [output] = server.ask([ids])
                [own] = server.ask([ids], [{"off": True}])
                report = (output.kv_transfer_params or {}).get("ragblend", {})
                if fault == "none":
                    assert report["hits"] == 3 and report["missing_tokens"] == 0
                else:
                    assert report.get("reused_tokens", 0) == 0 and "error" not in report
                    assert output.outputs[0].token_ids == own.outputs[0].token_ids, fault
                proxy.bytes_per_s = None
                proxy.mend()
                time.sleep(0.5)
        finally:
            server.close()
