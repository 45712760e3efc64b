"""`vllm serve` with the connector, asked over HTTP by ordinary clients."""

import json
import re
import urllib.error
import urllib.request

import pytest
from vllm_helpers import QUESTION, STORED, chat, counted

TEXTS = STORED


def ask(url: str, texts: list[str], **more) -> dict:
    return chat(url, "Passages:\n\n" + "\n\n".join(texts) + "\n\n" + QUESTION, **more)


def test_prompts_of_ordinary_clients_are_fused_and_reported(listening):
    url, log = listening.url, listening.log
    answer = ask(url, TEXTS[::-1])
    assert len(answer["choices"]) == 1 and answer["usage"]["completion_tokens"] == 4
    report = answer["kv_transfer_params"]["ragblend"]
    assert report["missing_tokens"] == 0 and report["reused_tokens"] > 100
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
    found = counted(url)
    assert found["requests"] >= 1 and found["tokens_reused"] >= report["reused_tokens"]
    said = log.read_text()
    assert "gate: KV written into blocks equals vLLM's own" in said
    assert re.search(r"tokens from the store, \d+ recomputed, probe-shift 0.25", said)


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_last_piece_of_a_stream_has_the_report(listening, route, usage):
    """vLLM has it in whole answers only."""
    text = "\n\n".join(TEXTS[1:]) + f"\n\n{route} {len(usage)}?"
    asked = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "tiny", "max_tokens": 3, "stream": True, **asked, **usage}
    request = urllib.request.Request(
        f"{listening.url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = [line for line in stream.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert pieces[-1]["kv_transfer_params"]["ragblend"]["reused_tokens"] > 50
    assert not any("kv_transfer_params" in piece for piece in pieces[:-1])
    assert sum(bool(each["finish_reason"]) for piece in pieces for each in piece["choices"]) == 1


def test_invalid_options_are_computed_by_vllm(listening):
    url = listening.url
    with pytest.raises(urllib.error.HTTPError, match=r"400|422"):
        ask(url, TEXTS, kv_transfer_params="reuse")
    invalid = (
        {"spans": [[[]]] * 1000},
        {"do_remote_prefill": True, "remote_block_ids": [1]},
        {"ratio": {"a": [None, 1e308]}},
    )
    for options in invalid:
        answer = ask(url, TEXTS[1:3], kv_transfer_params=options)
        assert len(answer["choices"]) == 1 and answer["kv_transfer_params"] is None, "computed by vLLM"
    assert ask(url, TEXTS[3:0:-1])["kv_transfer_params"]["ragblend"]["reused_tokens"] > 50


BAD = "\ud800"


def test_lone_surrogates_in_a_prompt_are_a_400(listening):
    for content in (f"a {BAD} b", [{"type": "text", "text": "\udfff"}]):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            chat(listening.url, content)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "options",
    [
        {"stop": [BAD]},
        {"request_id": BAD},
        {"kv_transfer_params": {"report": BAD}},
        {"kv_transfer_params": {"spans": [BAD]}},
        {"vllm_xargs": {"a": BAD}},
        {"vllm_xargs": {"kv_transfer_params": "reuse"}},
        {"vllm_xargs": {"kv_transfer_params": 7}},
        {"vllm_xargs": {"kv_transfer_params": ["reuse"]}},
    ],
    ids=ascii,
)
def test_what_vllm_cannot_send_on_is_a_400(listening, route, options):
    """vLLM finds it out after its checks, as an error 500 of its own."""
    asked = {"messages": [{"role": "user", "content": "Hi."}]} if "chat" in route else {"prompt": "Hi."}
    body = json.dumps({"model": "tiny", "max_tokens": 1, **asked, **options}).encode()
    sent = urllib.request.Request(f"{listening.url}/v1/{route}", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(sent, timeout=60)
    assert chat(listening.url, "Hi.")["choices"], "it goes on"
