"""From a prefilled prompt to an answer: decoding, text, and the clock."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ragblend.engine.config import DecodeOptions, Report
from ragblend.engine.decode import decode
from ragblend.engine.eviction import evict
from ragblend.engine.resources import Resources
from ragblend.engine.results import Prefilled, Result
from ragblend.engine.text import TextStream, text_of
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError

OnText = Callable[[str], None]


def run(
    resources: Resources,
    prefill: Callable[[], Prefilled],
    options: DecodeOptions,
    on_text: OnText | None,
    cancel: threading.Event | None,
) -> Result:
    """Prefill, then decode; ttft_ms is from here to the first token."""
    begun = time.perf_counter()
    return finish(resources, prefill(), options, on_text, cancel, begun)


def finish(
    resources: Resources,
    prefilled: Prefilled,
    options: DecodeOptions,
    on_text: OnText | None = None,
    cancel: threading.Event | None = None,
    begun: float | None = None,
) -> Result:
    """Decode from a prefilled prompt. Raises Cancelled if that was asked for on the way."""
    prompt_tokens = len(prefilled.prompt.token_ids)
    room = max(1, resources.context_window - prompt_tokens)
    options = replace(options, max_new_tokens=min(options.max_new_tokens, room))
    clock = _Clock(time.perf_counter() if begun is None else begun)
    stream = TextStream(resources.tokenizing.tokenizer, options.stop)

    def on_token(token_id: int) -> None:
        first = clock.first is None
        clock.tick()
        if (on_text is not None or options.stop) and (piece := stream.feed(token_id)) and on_text is not None:
            on_text(piece)
        if first and options.keep_tokens is not None and options.max_new_tokens > 1:
            _evict(resources, prefilled, options.keep_tokens)

    def halted() -> bool:
        return stream.stopped or (cancel is not None and cancel.is_set())

    model, tokenizer = resources.loaded.model, resources.tokenizing.tokenizer
    if prefilled.cache is not None:
        prefilled.cache.truncate()
    ids = decode(
        model,
        tokenizer,
        prefilled.prompt.token_ids,
        prefilled.logits,
        prefilled.cache,
        options,
        on_token,
        halted,
    )
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"the answer was cancelled after {len(ids)} tokens")
    if on_text is not None and (piece := stream.finish()):
        on_text(piece)
    report = clock.report(prefilled.report, len(ids))
    if prefilled.cache is not None:
        report = replace(report, evicted_tokens=prefilled.cache.evicted_tokens)
    # `generate` ends an answer early for no other reasons than its end token and our own criterion.
    stopped = stream.stopped or len(ids) < options.max_new_tokens or ids[-1] in _end_ids(model)
    return Result(text_of(tokenizer, ids, options.stop), tuple(ids), report, prefilled.prompt, stopped)


def _evict(resources: Resources, prefilled: Prefilled, keep_tokens: int) -> None:
    if prefilled.cache is None:  # the model was run by its own means
        raise UnsupportedModelError("keep_tokens needs fused KV, which this model cannot have; leave it out")
    evict(resources.decoder, prefilled.prompt, prefilled.cache, keep_tokens)


def _end_ids(model: Any) -> set[int]:
    found = model.generation_config.eos_token_id
    return set(found) if isinstance(found, list) else {found}


class _Clock:
    """When the tokens came."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.decoding = time.perf_counter()
        self.first: float | None = None
        self.last = self.decoding

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def report(self, prefill: Report, generated: int) -> Report:
        first = self.first or self.last
        decoding_s = self.last - first
        timings: dict[str, Any] = {
            "first_token_ms": (first - self.decoding) * 1e3,
            "ttft_ms": (first - self.begun) * 1e3,
            "total_ms": (time.perf_counter() - self.begun) * 1e3,
            "tokens_per_s": (generated - 1) / decoding_s if generated > 1 and decoding_s > 0 else 0.0,
        }
        return replace(
            prefill,
            tokens=replace(prefill.tokens, generated=generated),
            timings=replace(prefill.timings, **timings),
        )
