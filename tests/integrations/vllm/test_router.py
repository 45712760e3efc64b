"""Two vLLM servers with one Redis, behind vLLM's router, as in `deploy/`."""

import itertools
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny_models
from shared_servers import free_port, redis_server  # noqa: F401
from vllm_helpers import QUESTION, SHAPE, STORED, chat, is_healthy, listening_on, metrics, until

from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt


def answered(url: str) -> float:
    """The number of requests that a server has answered."""
    return sum(map(float, metrics(url, r"^vllm:request_success_total\{.*\} (\S+)$")))


@pytest.fixture
def router_of(tmp_path):
    beside = Path(sys.executable).parent  # an environment that is not activated
    command = shutil.which("vllm-router") or shutil.which("vllm-router", path=beside)
    if command is None:
        pytest.skip("no vllm-router: pip install vllm-router==0.1.17")
    with ExitStack() as stack:

        def start(*workers: str) -> str:
            port, log = free_port(), stack.enter_context((tmp_path / "router.log").open("wb"))
            line = [command, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash"]
            line += ["--prometheus-port", str(free_port()), "--worker-urls", *workers]
            process = subprocess.Popen(line, stdout=log, stderr=log)
            stack.callback(process.wait, 60)
            stack.callback(process.kill)

            url = f"http://127.0.0.1:{port}"
            until(lambda: is_healthy(url, process, tmp_path / "router.log"))
            return url

        yield start


def ask(url: str, session: str, content: str) -> dict:
    return chat(url, content, {"X-Session-ID": session})


def who_answers(urls: list[str], router: str, session: str) -> str:
    before = {url: answered(url) for url in urls}
    ask(router, session, "Where?")
    [where] = until(lambda: [url for url, count in before.items() if answered(url) > count])
    return where


def test_a_passage_that_one_server_encoded_is_reused_by_the_other(
    has_vllm,
    redis_server,  # noqa: F811
    router_of,
    tmp_path,
):
    folder = tiny_models.save_model("llama", tmp_path / "model", is_endless=True, **SHAPE)
    store, names = f"{redis_server().url()}?timeout_s=60", [f"p{n}" for n in range(len(STORED))]
    homes = [tmp_path / name / "home" for name in ("first", "second")]
    for home in homes:  # both know the passages, none has KV
        engine = Engine.open(str(folder), home, device="cpu", dtype="float32")
        engine.enter(STORED, names)
        engine.close()
    options = ("--served-model-name", "tiny", "--block-size", "32")
    with ExitStack() as stack:
        urls = list[str]()
        for home, encodes in zip(homes, (True, False), strict=True):
            more = {"minimum_tokens": 32, "remote": store, "encode_missing": encodes}
            urls.append(stack.enter_context(listening_on(folder, home, "float32", *options, **more)).url)
        router = router_of(*urls)
        at = dict[str, str]()  # a session for each server
        for number in range(64):
            at.setdefault(who_answers(urls, router, f"session-{number}"), f"session-{number}")
            if len(at) == len(urls):
                break
        assert set(at) == set(urls), "sessions go to both"
        content = "Passages:\n\n" + "\n\n".join(STORED) + "\n\n" + QUESTION
        first, second = urls
        assert not ask(router, at[first], content).get("kv_transfer_params"), "nothing is stored anywhere yet"

        numbers = itertools.count()

        def fused(url: str, session: str) -> dict:
            """The report of a prompt with a new beginning: vLLM has a repeated one in its blocks."""
            told = ask(url, session, f"{next(numbers)}. {content}").get("kv_transfer_params") or {}
            report = told.get("ragblend", {})
            return report if report.get("missing_tokens") == 0 else {}

        until(lambda: fused(first, ""))  # encoded in its idle steps
        report = until(lambda: fused(router, at[second]))  # written to the shared store behind that
        assert report["reused_tokens"] > 100
        engine = Engine.open(str(folder), homes[0], dtype="float32", backend="vllm", url=router)
        stack.callback(engine.close)
        engine.generate(Prompt([Literal(QUESTION)]))  # it knows then what the servers are
        for texts in itertools.combinations(STORED, 3):
            where = set[str]()
            for order in texts, texts[::-1]:
                before = {url: answered(url) for url in urls}
                prompt = engine.chat_prompt(None, [Chunk(text) for text in order], QUESTION)
                found = engine.generate(prompt, method="probe-shift:sure=0", max_new_tokens=4).report
                assert found.hits == 3, "the server that answered is asked how"
                until(lambda: sum(map(answered, urls)) >= sum(before.values()) + 2)  # noqa: B023
                where |= {url for url, count in before.items() if answered(url) > count}
            assert len(where) == 1, "where its passages are warm"
