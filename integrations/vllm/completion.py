"""One answer of a vLLM server: the request's body, its stream of tokens, and the connector's report on it."""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ragblend.engine.config import DEFAULT_RATIO, DecodeOptions, Report, Timings, TokenCounts
from ragblend.engine.decoding.loop import AnswerTimer, figures_not_in_prompt
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.nodes import TokenIds
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.request import Request
from ragblend.engine.results import OnText, Result, TokenLogprob
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.vllm.server import ServerRuntime
from ragblend.kvstore.errors import ModelServerError, UsageError
from ragblend.kvstore.keys import pack_tokens

UNKNOWN = "the answer is whole, but which of its passages were reused is unknown and counted as none"
# vLLM takes these from a checkpoint's generation config unless the request sets them.
_PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_UNAVAILABLE = {
    "keep_tokens": "its cache is its own",
    "repetition_penalty": "its penalty counts the passages' words",
}


class Completion:
    """One completion in progress."""

    def __init__(
        self, runtime: ServerRuntime, request: Request, options: DecodeOptions, on_text: OnText | None
    ) -> None:
        self._runtime, self._request, self._options = runtime, request, options
        self._on_text: OnText = on_text or (lambda piece: None)
        self._label, self._clock = secrets.token_hex(), AnswerTimer(time.perf_counter())
        self._session = _session_of(request.prompt) or self._label
        self._text = TextStream(runtime.tokenizing.tokenizer, options.stop, options.one_sentence)
        self._ids, self._likely, self._ended = list[int](), list[TokenLogprob](), False

    def result(self, cancel: Cancel) -> Result:
        """Wait for the end, or for a stop string or sentence end in the text; closing the stream stops the server."""
        options, ids = self._options, self._ids
        with closing(self._runtime.server.stream(self._body(), cancel, self._session)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    self._take(choice)
                if self._text.stopped:
                    break
        if piece := self._text.finish():
            self._on_text(piece)
        text = decode_text(self._runtime.tokenizing.tokenizer, ids, options.stop, options.one_sentence)
        likely = tuple(self._likely[: len(ids) - self._ended]) if options.logprobs is not None else None
        prompt = self._request.prompt
        unsupported = figures_not_in_prompt(text, prompt, self._runtime.tokenizing.tokenizer)
        report = replace(self._report(cancel), unsupported_figures=unsupported)
        return Result(text, tuple(ids), report, prompt, self._text.stopped or self._ended, likely)

    def _report(self, cancel: Cancel) -> Report:
        report = self._clock.report(_report(self._request, self._told(cancel)), len(self._ids))
        timings = report.timings
        read_ms = timings.prefill_ms or timings.ttft_ms
        return replace(report, timings=replace(timings, prefill_ms=read_ms))

    def _told(self, cancel: Cancel) -> dict[str, Any]:
        """The connector's report. Streams do not carry it, so it is requested separately; a failure does not affect the
        answer.
        """
        runtime = self._runtime
        try:
            info = runtime.ensure_connected(cancel)
            if info.fingerprint is None:
                return {"warning": info.refusal}
            told = runtime.report_of(info.name, self._label, cancel, self._session)
            report: dict[str, Any] | None = (told or {}).get("report")
            return {"warning": f"{UNKNOWN}: the server knows no such answer"} if report is None else report
        except (ModelServerError, UsageError) as error:
            runtime.forget_server()
            return {"warning": f"{UNKNOWN}: {error}"}

    def _take(self, choice: dict[str, Any]) -> None:
        found = choice.get("token_ids")
        if found is None:
            raise ModelServerError(
                f"the server at {self._runtime.server.url} sends no token ids; it must be a vLLM of 0.10.2 or newer"
            )
        logprobs = choice.get("logprobs")
        for number, token_id in enumerate(found):
            self._clock.tick()
            self._ids.append(token_id)
            if logprobs is not None:
                self._likely.append(_token_logprob(token_id, logprobs, number, self._options.logprobs))
            if piece := self._text.feed(token_id):
                self._on_text(piece)
            if self._text.stopped:
                return
        self._ended = choice.get("finish_reason") == "stop"

    def _body(self) -> dict[str, Any]:
        options, ids, info = self._options, self._request.prompt.token_ids, self._runtime.info
        if options.keep_tokens is not None or options.repetition_penalty != 1:
            name = "keep_tokens" if options.keep_tokens is not None else "repetition_penalty"
            raise UsageError(f"{name} cannot be had from vLLM: {_UNAVAILABLE[name]}; leave it out")
        body: dict[str, Any] = _PLAIN | {
            "model": info.name,
            "prompt": list(ids),
            "max_tokens": min(options.max_new_tokens, info.window - len(ids)),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed,
            "return_token_ids": True,
        }
        if options.logprobs is not None:
            body |= {"logprobs": options.logprobs, "return_tokens_as_token_ids": True}
        if options.grammar is not None:
            # A directive that only llguidance knows: xgrammar, which vLLM tries first, would allow endless blanks.
            body["structured_outputs"] = {"grammar": f"%llguidance {{}}\n{options.grammar.text}"}
        if info.fingerprint is not None:
            body["kv_transfer_params"] = self._connector_options()
        return body

    def _connector_options(self) -> dict[str, Any]:
        """Options for the connector: spans and collection of the passages, and differences from the server's defaults.

        A request has one collection, the one with the most tokens; passages of others are computed.
        """
        request, info = self._request, self._runtime.info
        policy, ratio = request.policy, DEFAULT_RATIO if request.ratio is None else request.ratio
        placed = zip(request.prompt.chunks, request.prompt.places, strict=True)
        spans = [(request.collection_of(chunk), list(place)) for chunk, place in placed if chunk.token_ids]
        sizes = Counter[str]()
        for collection, (start, stop) in spans:
            sizes[collection] += stop - start
        wanted: dict[str, Any] = {"label": self._label, "encode": False}
        if policy.name == "full" or not spans:
            return wanted | {"off": True}
        ((largest, _),) = sizes.most_common(1)
        wanted |= {
            "collection": largest,
            "spans": [place for collection, place in spans if collection == largest],
        }
        if (policy.name, ratio) != (info.method, info.ratio):  # used even if it saves nothing
            wanted |= {"method": policy.name, "ratio": ratio}
        return wanted


def _session_of(prompt: Prompt) -> str | None:
    """A router's session, so that a prompt goes to the server that has used its passages; None without passages.

    MinHash (Broder 1997) of the adjacent first passages: prompts that share a fraction s of them go to the same server
    with probability s, and so do all prompts of a conversation, whose beginning is the same.
    """
    together = list[TokenIds]()
    for segment in prompt.segments:
        if isinstance(segment, Chunk):
            together.append(segment.encoded_ids)
        elif together and segment.text.strip():
            break
    return session_of_passages(together) if together else None


def session_of_passages(passages: Sequence[TokenIds]) -> str:
    """The session of these passages: the smallest of their digests."""
    return min(hashlib.sha256(pack_tokens(ids)).hexdigest() for ids in passages)[:32]


def _token_logprob(token_id: int, logprobs: dict[str, Any], number: int, count: int | None) -> TokenLogprob:
    """The log-probability of one token of an event. vLLM names tokens `token_id:7`, and adds the chosen one to the
    likely ones.
    """
    top = ((int(name.rpartition(":")[2]), p) for name, p in logprobs["top_logprobs"][number].items())
    likely = sorted(top, key=lambda each: -each[1])[:count]
    return TokenLogprob(token_id, logprobs["token_logprobs"][number], tuple(likely))


def _report(request: Request, told: dict[str, Any]) -> Report:
    """The engine's report from the connector's (`told`). If nothing was fused, tokens in vLLM's own cache count as
    reused, and a passage that begins in them as a hit.
    """
    tokens = len(request.prompt.token_ids)
    if "reused_tokens" not in told:
        cached = int(told.get("cached_tokens", 0))
        hits = sum(start < cached for start, _ in request.prompt.places)
        return Report(
            told.get("method", "full"),
            told.get("ratio"),
            TokenCounts(tokens, reused=cached, fresh=tokens - cached),
            hits=hits,
            misses=int(told.get("misses", 0)),
            warning=told.get("warning") or told.get("error"),
            served="r" * cached + "f" * (tokens - cached),
            computed_fraction=1 - cached / tokens,
        )
    reused, recomputed, missing = (told[f"{name}_tokens"] for name in ("reused", "recomputed", "missing"))
    counts = TokenCounts(tokens, reused, recomputed, tokens - reused - recomputed - missing, missing)
    return Report(
        told["method"],
        told["ratio"],
        counts,
        told["recomputed_fraction"],
        Timings(load_ms=told["load_ms"], stall_ms=told["stall_ms"], prefill_ms=told["fused_ms"]),
        hits=told["hits"],
        misses=told["misses"],
        served="".join(letter * count for letter, count in told["served"]),
        computed_fraction=told["computed_fraction"],
    )
