"""One answer of a vLLM server: the request's body, its stream of tokens, and the connector's report on it."""

import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ragblend.engine.config import DEFAULT_RATIO, DecodeOptions, Report, Timings, TokenCounts
from ragblend.engine.decoding.loop import AnswerTimer, figures_not_in_prompt
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.decoding.uncertainty import LIKELY_TOKENS, Likely, UncertaintyCheck, View
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
WITHOUT_FUSION = {"off": True}
_UNAVAILABLE = {
    "keep_tokens": "its cache is its own",
    "repetition_penalty": "its penalty counts the passages' words",
}


class Completion:
    """One completion in progress.

    Before an uncertain figure (`UncertaintyCheck`) the stream is closed, and the answer is continued by a request that
    vLLM computes alone. A grammar's state would be lost by that, so with one there is no such check.
    """

    def __init__(
        self,
        runtime: ServerRuntime,
        request: Request,
        options: DecodeOptions,
        on_text: OnText | None,
        cancel: Cancel,
    ) -> None:
        self._runtime, self._request, self._options, self._cancel = runtime, request, options, cancel
        self._on_text: OnText = on_text or (lambda piece: None)
        self._label, self._clock = secrets.token_hex(), AnswerTimer(time.perf_counter())
        self._session = _session_of(request.prompt) or self._label
        self._text = TextStream(runtime.tokenizing.tokenizer, options.stop, options.one_sentence)
        self._ids, self._likely, self._ended = list[int](), list[TokenLogprob](), False
        self._check = self._uncertainty_check()
        self._read_again_at: int | None = None

    def result(self) -> Result:
        """Wait for the end, or for a stop string or sentence end in the text."""
        options, ids = self._options, self._ids
        if not self._read(self._body(self._connector_options())):
            self._check, self._read_again_at = None, len(ids)
            self._read(self._body(WITHOUT_FUSION))
        if piece := self._text.finish():
            self._on_text(piece)
        text = decode_text(self._runtime.tokenizing.tokenizer, ids, options.stop, options.one_sentence)
        likely = tuple(self._likely[: len(ids) - self._ended]) if options.logprobs is not None else None
        prompt = self._request.prompt
        unsupported = figures_not_in_prompt(text, prompt, self._runtime.tokenizing.tokenizer)
        report = replace(self._report(), unsupported_figures=unsupported, read_again_at=self._read_again_at)
        return Result(text, tuple(ids), report, prompt, self._text.stopped or self._ended, likely)

    def _read(self, body: dict[str, Any]) -> bool:
        """Take a stream's tokens until the answer has ended. False: until before an uncertain one. Closing the stream
        stops the server.
        """
        with closing(self._runtime.server.stream(body, self._cancel, self._session)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    if not self._take(choice):
                        return False
                if self._text.stopped:
                    break
        return True

    def _report(self) -> Report:
        report = self._clock.report(_report(self._request, self._told()), len(self._ids))
        timings = report.timings
        read_ms = timings.prefill_ms or timings.ttft_ms
        return replace(report, timings=replace(timings, prefill_ms=read_ms))

    def _told(self) -> dict[str, Any]:
        """The connector's report. Streams do not carry it, so it is requested separately; a failure does not affect the
        answer.
        """
        runtime = self._runtime
        try:
            info = runtime.ensure_connected(self._cancel)
            if info.fingerprint is None:
                return {"warning": info.refusal}
            told = runtime.report_of(info.name, self._label, self._cancel, self._session)
            report: dict[str, Any] | None = (told or {}).get("report")
            return {"warning": f"{UNKNOWN}: the server knows no such answer"} if report is None else report
        except (ModelServerError, UsageError) as error:
            runtime.forget_server()
            return {"warning": f"{UNKNOWN}: {error}"}

    def _take(self, choice: dict[str, Any]) -> bool:
        """Add an event's tokens. False: up to one that a full prefill has to confirm."""
        found = choice.get("token_ids")
        if found is None:
            raise ModelServerError(
                f"the server at {self._runtime.server.url} sends no token ids; it must be a vLLM of 0.10.2 or newer"
            )
        logprobs: Any = choice.get("logprobs")  # None behind a proxy that drops them
        check = None if logprobs is None else self._check
        for number, token_id in enumerate(found):
            likely = partial(_probabilities, logprobs, number)
            if check is not None and check.needs_full_prefill(token_id, likely, self._ids):
                return False
            self._clock.tick()
            self._ids.append(token_id)
            if logprobs is not None and self._options.logprobs is not None:
                self._likely.append(_token_logprob(token_id, logprobs, number, self._options.logprobs))
            if piece := self._text.feed(token_id):
                self._on_text(piece)
            if self._text.stopped:
                return True
        self._ended = choice.get("finish_reason") == "stop"
        return True

    def _uncertainty_check(self) -> UncertaintyCheck | None:
        request, runtime = self._request, self._runtime
        is_approximate = request.prompt.chunks and request.policy.sure and request.ratio != 1
        if not (is_approximate and runtime.info.has_logprobs and self._options.grammar is None):
            return None
        tokenizer = runtime.tokenizing.tokenizer
        return UncertaintyCheck(tokenizer, request.prompt, request.policy.sure, self._view_of)

    def _view_of(self, prompt: Prompt) -> View:
        """The view of a prompt whose passage's stored KV is reused. Each call is a request for one token, whose
        beginning is in vLLM's cache from the second call on.
        """
        (place,), (chunk,) = prompt.places, prompt.chunks
        options = {
            "spans": [list(place)],
            "collection": self._request.collection_of(chunk),
            "method": "reuse",
            "encode": False,
        }
        body = _PLAIN | {
            "model": self._runtime.info.name,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": LIKELY_TOKENS,
            "return_tokens_as_token_ids": True,
            "kv_transfer_params": options,
        }

        def likely(answer: Sequence[int]) -> Likely:
            asked = body | {"prompt": [*prompt.token_ids, *answer]}
            found = self._runtime.server.fetch("/v1/completions", asked, self._cancel, self._session)
            return _probabilities(found["choices"][0]["logprobs"], 0)

        return likely

    def _body(self, connector_options: dict[str, Any]) -> dict[str, Any]:
        options, info = self._options, self._runtime.info
        ids = [*self._request.prompt.token_ids, *self._ids]
        if options.keep_tokens is not None or options.repetition_penalty != 1:
            name = "keep_tokens" if options.keep_tokens is not None else "repetition_penalty"
            raise UsageError(f"{name} cannot be had from vLLM: {_UNAVAILABLE[name]}; leave it out")
        body: dict[str, Any] = _PLAIN | {
            "model": info.name,
            "prompt": ids,
            "max_tokens": min(options.max_new_tokens - len(self._ids), info.window - len(ids)),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in options.logit_bias.items()} or None,
            "seed": options.seed,
            "return_token_ids": True,
        }
        if options.logprobs is not None or self._check is not None:
            count = max(options.logprobs or 0, LIKELY_TOKENS if self._check is not None else 0)
            body |= {"logprobs": count, "return_tokens_as_token_ids": True}
        if options.grammar is not None:
            # A directive that only llguidance knows: xgrammar, which vLLM tries first, would allow endless blanks.
            body["structured_outputs"] = {"grammar": f"%llguidance {{}}\n{options.grammar.text}"}
        if info.fingerprint is not None:
            body["kv_transfer_params"] = connector_options
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


def _top_logprobs(logprobs: dict[str, Any], number: int) -> list[tuple[int, float]]:
    """Likely tokens of one position of an event, with their log-probabilities. vLLM names tokens `token_id:7`."""
    return [(int(name.rpartition(":")[2]), p) for name, p in logprobs["top_logprobs"][number].items()]


def _probabilities(logprobs: dict[str, Any], number: int) -> Likely:
    return [(token_id, math.exp(p)) for token_id, p in _top_logprobs(logprobs, number)]


def _token_logprob(token_id: int, logprobs: dict[str, Any], number: int, count: int | None) -> TokenLogprob:
    """The log-probability of one token of an event. vLLM adds the chosen one to the likely ones."""
    likely = sorted(_top_logprobs(logprobs, number), key=lambda each: -each[1])[:count]
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
