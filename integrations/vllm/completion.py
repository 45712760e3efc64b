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

_UNKNOWN_REUSE = "the answer is complete, but which passages were reused is unknown, and counted as none"
# vLLM takes these from a checkpoint's generation config unless the request sets them.
_NEUTRAL_SAMPLING = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
WITHOUT_FUSION = {"off": True}
_UNAVAILABLE = {
    "keep_tokens": "its cache is its own",
    "repetition_penalty": "its penalty counts the passages' words",
}


class Completion:
    """One completion in progress.

    Before an uncertain figure (`UncertaintyCheck`) the stream is closed, and the answer is continued by a second
    request, which vLLM computes alone. That would lose a grammar's state, so with a grammar figures are not checked.
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
        self._label, self._timer = secrets.token_hex(), AnswerTimer(time.perf_counter())
        self._session = _session_of(request.prompt) or self._label
        self._text = TextStream(runtime.tokenizing.tokenizer, options.stop, options.one_sentence)
        self._ids, self._logprobs, self._ended = list[int](), list[TokenLogprob](), False
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
        has_logprobs = options.logprobs is not None
        logprobs = tuple(self._logprobs[: len(ids) - self._ended]) if has_logprobs else None
        prompt = self._request.prompt
        unsupported = figures_not_in_prompt(text, prompt, self._runtime.tokenizing.tokenizer)
        report = replace(self._report(), unsupported_figures=unsupported, read_again_at=self._read_again_at)
        return Result(text, tuple(ids), report, prompt, self._text.stopped or self._ended, logprobs)

    def _read(self, body: dict[str, Any]) -> bool:
        """Read a stream's tokens until the answer has ended; False if it was closed before an uncertain token.

        Closing the stream stops the request at the server.
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
        report = self._timer.report(_report(self._request, self._fetch_report()), len(self._ids))
        timings = report.timings
        prefill_ms = timings.prefill_ms or timings.ttft_ms
        return replace(report, timings=replace(timings, prefill_ms=prefill_ms))

    def _fetch_report(self) -> dict[str, Any]:
        """The connector's report. It is requested separately, so that a failure does not affect the answer."""
        runtime = self._runtime
        try:
            info = runtime.ensure_connected(self._cancel)
            if info.fingerprint is None:
                return {"warning": info.refusal}
            found = runtime.report_of(info.name, self._label, self._cancel, self._session)
            report: dict[str, Any] | None = (found or {}).get("report")
            if report is None:
                return {"warning": f"{_UNKNOWN_REUSE}: the server has no report on the answer"}
            return report
        except (ModelServerError, UsageError) as error:
            runtime.forget_server()
            return {"warning": f"{_UNKNOWN_REUSE}: {error}"}

    def _take(self, choice: dict[str, Any]) -> bool:
        """Add an event's tokens; False if it stopped before one that a full prefill has to confirm."""
        found = choice.get("token_ids")
        if found is None:
            raise ModelServerError(
                f"the server at {self._runtime.server.url} sends no token ids; it must be a vLLM of 0.10.2 or newer"
            )
        logprobs: Any = choice.get("logprobs")  # None behind a proxy that drops them
        check = None if logprobs is None else self._check
        for number, token_id in enumerate(found):
            probabilities = partial(_probabilities, logprobs, number)
            if check is not None and check.needs_full_prefill(token_id, probabilities, self._ids):
                return False
            self._timer.tick()
            self._ids.append(token_id)
            if logprobs is not None and self._options.logprobs is not None:
                self._logprobs.append(_token_logprob(token_id, logprobs, number, self._options.logprobs))
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
        """The view of a prompt whose passage's stored KV is reused.

        Each call of it is a request for one token; from the second on, vLLM's cache has the beginning.
        """
        (place,), (chunk,) = prompt.places, prompt.chunks
        options = {
            "spans": [list(place)],
            "collection": self._request.collection_of(chunk),
            "method": "reuse",
            "encode": False,
        }
        body = _NEUTRAL_SAMPLING | {
            "model": self._runtime.info.name,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": LIKELY_TOKENS,
            "return_tokens_as_token_ids": True,
            "kv_transfer_params": options,
        }

        def probabilities_after(answer: Sequence[int]) -> Likely:
            continued = body | {"prompt": [*prompt.token_ids, *answer]}
            found = self._runtime.server.fetch("/v1/completions", continued, self._cancel, self._session)
            return _probabilities(found["choices"][0]["logprobs"], 0)

        return probabilities_after

    def _body(self, connector_options: dict[str, Any]) -> dict[str, Any]:
        options, info = self._options, self._runtime.info
        ids = [*self._request.prompt.token_ids, *self._ids]
        if options.keep_tokens is not None or options.repetition_penalty != 1:
            name = "keep_tokens" if options.keep_tokens is not None else "repetition_penalty"
            raise UsageError(f"vLLM does not support {name}: {_UNAVAILABLE[name]}; leave it out")
        body: dict[str, Any] = _NEUTRAL_SAMPLING | {
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
            # Only llguidance knows this directive: xgrammar, which vLLM tries first, would allow endless blanks.
            body["structured_outputs"] = {"grammar": f"%llguidance {{}}\n{options.grammar.text}"}
        if info.fingerprint is not None:
            body["kv_transfer_params"] = connector_options
        return body

    def _connector_options(self) -> dict[str, Any]:
        """Options for the connector: spans and collection of the passages, and differences from the server's defaults.

        A request has one collection: the one with the most tokens. Passages of the other collections are computed.
        """
        request, info = self._request, self._runtime.info
        policy, ratio = request.policy, DEFAULT_RATIO if request.ratio is None else request.ratio
        pairs = zip(request.prompt.chunks, request.prompt.places, strict=True)
        spans = [(request.collection_of(chunk), list(span)) for chunk, span in pairs if chunk.token_ids]
        sizes = Counter[str]()
        for collection, (start, stop) in spans:
            sizes[collection] += stop - start
        options: dict[str, Any] = {"label": self._label, "encode": False}
        if policy.name == "full" or not spans:
            return options | {"off": True}
        ((largest, _),) = sizes.most_common(1)
        options |= {
            "collection": largest,
            "spans": [span for collection, span in spans if collection == largest],
        }
        if (policy.name, ratio) != (
            info.method,
            info.ratio,
        ):  # a named method is used even if it saves nothing
            options |= {"method": policy.name, "ratio": ratio}
        return options


def _session_of(prompt: Prompt) -> str | None:
    """The session for a router, which sends a prompt to the server that has used its passages; None without passages.

    MinHash (Broder 1997) of the adjacent first passages: prompts that share a fraction s of them go to the same server
    with probability s, and so do all prompts of a conversation, whose beginning is the same.
    """
    passages = list[TokenIds]()
    for segment in prompt.segments:
        if isinstance(segment, Chunk):
            passages.append(segment.encoded_ids)
        elif passages and segment.text.strip():
            break
    return session_of_passages(passages) if passages else None


def session_of_passages(passages: Sequence[TokenIds]) -> str:
    """The session of these passages: the smallest of their digests."""
    return min(hashlib.sha256(pack_tokens(ids)).hexdigest() for ids in passages)[:32]


def _top_logprobs(logprobs: dict[str, Any], number: int) -> list[tuple[int, float]]:
    """Likely tokens of one position of an event, with their log-probabilities. vLLM names tokens `token_id:7`."""
    return [(int(name.rpartition(":")[2]), p) for name, p in logprobs["top_logprobs"][number].items()]


def _probabilities(logprobs: dict[str, Any], number: int) -> Likely:
    return [(token_id, math.exp(p)) for token_id, p in _top_logprobs(logprobs, number)]


def _token_logprob(token_id: int, logprobs: dict[str, Any], number: int, count: int | None) -> TokenLogprob:
    """The log-probability of one token of an event, and of `count` likely ones; vLLM adds the chosen token to these."""
    likely = sorted(_top_logprobs(logprobs, number), key=lambda each: -each[1])[:count]
    return TokenLogprob(token_id, logprobs["token_logprobs"][number], tuple(likely))


def _report(request: Request, reported: dict[str, Any]) -> Report:
    """Convert the connector's report into the engine's.

    If nothing was fused, tokens in vLLM's own cache count as reused, and a passage that begins in them as a hit.
    """
    tokens = len(request.prompt.token_ids)
    if "reused_tokens" not in reported:
        cached = int(reported.get("cached_tokens", 0))
        hits = sum(start < cached for start, _ in request.prompt.places)
        return Report(
            reported.get("method", "full"),
            reported.get("ratio"),
            TokenCounts(tokens, reused=cached, fresh=tokens - cached),
            hits=hits,
            misses=int(reported.get("misses", 0)),
            warning=reported.get("warning") or reported.get("error"),
            served="r" * cached + "f" * (tokens - cached),
            computed_fraction=1 - cached / tokens,
        )
    reused, recomputed, missing = (reported[f"{name}_tokens"] for name in ("reused", "recomputed", "missing"))
    counts = TokenCounts(tokens, reused, recomputed, tokens - reused - recomputed - missing, missing)
    return Report(
        reported["method"],
        reported["ratio"],
        counts,
        reported["recomputed_fraction"],
        Timings(load_ms=reported["load_ms"], stall_ms=reported["stall_ms"], prefill_ms=reported["fused_ms"]),
        hits=reported["hits"],
        misses=reported["misses"],
        served="".join(letter * count for letter, count in reported["served"]),
        computed_fraction=reported["computed_fraction"],
    )
