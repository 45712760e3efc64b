"""`vllm serve` with the connector, asked over HTTP by clients that know nothing of it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import tiny_models
from vllm_helpers import QUESTION, SHAPE, passage

from ragblend.engine.engine import Engine

TEXTS = [passage(number) for number in range(5)]


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def address(has_vllm, tmp_path_factory):
    """Of a server whose store was filled by the built-in engine, in another process."""
    base = tmp_path_factory.mktemp("served")
    folder = tiny_models.save_model("llama", base / "model", is_endless=True, **SHAPE)
    engine = Engine.open(str(folder), base / "home", device="cpu", dtype="float32")
    engine.encode(TEXTS, [f"p{n}" for n in range(len(TEXTS))])
    engine.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = {"home": str(base / "home"), "minimum_tokens": 32}
    transfer = {"kv_connector": "RAGBlendConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--dtype",
            "float32",
        ),
        *("--port", str(port), "--served-model-name", "tiny", "--enforce-eager", "--block-size", "32"),
        *(
            "--max-model-len",
            "2048",
            "--enable-prompt-tokens-details",
            "--kv-transfer-config",
            json.dumps(transfer),
        ),
    ]
    log = base / "log"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url, log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ask(url: str, texts: list[str], **more) -> dict:
    content = "Passages:\n\n" + "\n\n".join(texts) + "\n\n" + QUESTION
    message = {"role": "user", "content": content}
    return post(
        f"{url}/v1/chat/completions",
        {"model": "tiny", "messages": [message], "max_tokens": 4, "temperature": 0} | more,
    )


def test_plain_clients_are_served_from_the_store_and_see_it(address):
    url, log = address
    answer = ask(url, TEXTS[::-1])
    assert len(answer["choices"]) == 1 and answer["usage"]["completion_tokens"] == 4
    report = answer["kv_transfer_params"]["ragblend"]
    assert report["missing_tokens"] == 0 and report["reused_tokens"] > 100
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as metrics:
        counted = dict(re.findall(r"^vllm:ragblend_(\w+)_total\{.*\} (\S+)$", metrics.read().decode(), re.M))
    assert float(counted["requests"]) >= 1
    assert float(counted["tokens_reused"]) >= report["reused_tokens"]
    said = log.read_text()
    assert "gate: KV written into blocks equals vLLM's own" in said
    assert re.search(r"tokens from the store at new places, \d+ computed again, probe-shift 0.15", said)


def test_streams_and_refused_wishes(address):
    url, _ = address
    body = {"model": "tiny", "prompt": "\n\n".join(TEXTS[1:]), "max_tokens": 3, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = stream.read().decode().strip().splitlines()
    assert lines[-1] == "data: [DONE]"
    with pytest.raises(urllib.error.HTTPError, match=r"400|422"):
        ask(url, TEXTS, kv_transfer_params="reuse")
    wishes = (
        {"collection": "theirs"},
        {"off": "no"},
        {"spans": [[4, 1 << 40]]},
        {"spans": [[[]]] * 1000},
        {"method": "reuse" * 1000},
        {"do_remote_prefill": True, "remote_block_ids": [1]},
        {"ratio": {"a": [None, 1e308]}},
    )
    for wish in wishes:
        answer = ask(url, TEXTS[1:3], kv_transfer_params=wish)
        assert len(answer["choices"]) == 1 and answer["kv_transfer_params"] is None, "computed by vLLM"
    assert ask(url, TEXTS[3:0:-1])["kv_transfer_params"]["ragblend"]["reused_tokens"] > 50
