"""The decode loop: generates the tokens of an answer after a prefilled prompt, and streams their text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import Append, FusedCache
from ragblend.engine.config import DecodeOptions, Report
from ragblend.engine.decoding.constrained import Constraint
from ragblend.engine.decoding.eviction import evict
from ragblend.engine.decoding.passage_view import PassageView
from ragblend.engine.decoding.prompt_lookup import PromptLookup
from ragblend.engine.decoding.sampling import LogprobRecorder, logits_processors
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.decoding.uncertainty import UncertaintyCheck, View, likely_tokens
from ragblend.engine.model.attention import CAPACITY_STEP
from ragblend.engine.model.decoder import constant_rope_tokens
from ragblend.engine.prompts.figures import figures_in, unsupported_figures
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.results import OnText, Prefilled, Result
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import CallbackCancel, Cancel, DeviceTurn
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError, UsageError


def decode_answer(
    runtime: Runtime,
    prefilled: Prefilled,
    options: DecodeOptions,
    turn: DeviceTurn,
    on_text: OnText | None = None,
    cancel: Cancel | None = None,
    begun: float | None = None,
) -> Result:
    """Decode from a prefilled prompt, yielding the device between tokens.

    Raises Cancelled if `cancel` is set, UsageError if an earlier answer evicted KV that this one would need.

    on_text: called with each piece of text. begun: when the request began, by `time.perf_counter`, for ttft_ms; None:
    now.
    """
    room_tokens = max(1, runtime.context_window - len(prefilled.prompt.token_ids))
    options = replace(options, max_new_tokens=min(options.max_new_tokens, room_tokens))
    if options.keep_tokens is not None:  # no full prefill, which would restore the evicted KV
        prefilled = replace(prefilled, sure=0.0)
    elif prefilled.cache is not None and prefilled.cache.evicted_tokens:
        raise UsageError(
            "decoding all of a prompt's KV: an earlier answer to it, with keep_tokens, evicted "
            f"{prefilled.cache.evicted_tokens} tokens a head. Prefill the prompt again, or pass keep_tokens again."
        )
    clock = AnswerTimer(time.perf_counter() if begun is None else begun)
    answer = _Answer(runtime, prefilled, options, turn, on_text, cancel, clock)
    if prefilled.cache is None:
        return answer.result(_decode_by_transformers(answer))
    ids, read_again_at = _decode_fused(answer)
    if runtime.decode_selector.needs_measurement:
        runtime.background.add(runtime.measure_decoding, priority=Priority.MEASURE)
    return answer.result(ids, evicted_tokens=prefilled.cache.evicted_tokens, read_again_at=read_again_at)


class _Answer:
    """An answer in progress: records and streams each token, says when to stop, and builds the result."""

    def __init__(
        self,
        runtime: Runtime,
        prefilled: Prefilled,
        options: DecodeOptions,
        turn: DeviceTurn,
        on_text: OnText | None,
        cancel: Cancel | None,
        clock: "AnswerTimer",
    ) -> None:
        self.runtime, self.prefilled, self.options, self.turn = runtime, prefilled, options, turn
        self.model, self.tokenizer = runtime.loaded.model, runtime.tokenizing.tokenizer
        self._on_text, self._cancel, self._clock = on_text, cancel, clock
        self._stream = TextStream(self.tokenizer, options.stop, options.one_sentence)
        self._needs_text = on_text is not None or options.stop or options.one_sentence
        self._recorder = None if options.logprobs is None else LogprobRecorder(options.logprobs)
        tokens = len(prefilled.prompt.token_ids)
        self._constraint: Constraint | None = None
        if options.grammar is not None:
            grammars = runtime.token_grammars
            self._constraint = Constraint(options.grammar, grammars, tokens, options.max_new_tokens)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        self.processors = logits_processors(
            options, tokens, vocabulary, self.model.device, self._constraint, self._recorder
        )

    def add(self, token_id: int) -> None:
        """Add the next token."""
        is_first = self._clock.first is None
        self._clock.tick()
        if self._recorder is not None:
            self._recorder.record(token_id)
        if self._needs_text and (piece := self._stream.feed(token_id)) and self._on_text is not None:
            self._on_text(piece)
        if is_first and self.options.max_new_tokens > 1:  # after it was streamed, so that nobody waits
            self._evict()

    def _evict(self) -> None:
        """Evict KV of passages, if the options limit how much is kept while decoding."""
        keep_tokens, cache = self.options.keep_tokens, self.prefilled.cache
        if keep_tokens is None:
            return
        if cache is None:
            raise UnsupportedModelError(
                "keep_tokens needs fused KV, which this model does not have; leave it out"
            )
        evict(self.runtime.decoder, self.prefilled.prompt, cache, keep_tokens)

    def should_stop(self) -> bool:
        return self._stream.stopped or (self._cancel is not None and self._cancel.is_set())

    def result(self, ids: Sequence[int], **reported: Any) -> Result:
        """The result for these tokens. reported: further fields of the report. Raises Cancelled."""
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled(f"the answer was cancelled after {len(ids)} tokens")
        if self._on_text is not None and (piece := self._stream.finish()):
            self._on_text(piece)
        report, prompt = self._clock.report(self.prefilled.report, len(ids)), self.prefilled.prompt
        text = decode_text(self.tokenizer, ids, self.options.stop, self.options.one_sentence)
        unsupported = figures_not_in_prompt(text, prompt, self.tokenizer)
        has_end_token = ids[-1] in self.runtime.end_ids
        count = len(ids) - has_end_token
        logprobs = None if self._recorder is None else tuple(self._recorder.tokens[:count])
        report = replace(report, unsupported_figures=unsupported, **reported)
        return Result(text, tuple(ids), report, prompt, self._is_whole(ids, has_end_token), logprobs)

    def _is_whole(self, ids: Sequence[int], has_end_token: bool) -> bool:
        """Whether the answer ended by itself (an end token, a stop string, its first sentence), and not at the token
        limit, where the grammar may have closed it.
        """
        if self._constraint is not None and self._constraint.was_closed:
            return False
        return self._stream.stopped or len(ids) < self.options.max_new_tokens or has_end_token


def _decode_fused(answer: _Answer) -> tuple[list[int], int | None]:
    """Ids of the generated tokens, the end token included; and after how many of them an uncertain figure caused a full
    prefill, None if none did.

    Each pass computes the last token and guesses for the next ones; `all_logits` has a row for each. Guesses are kept
    up to the first that differs from the chosen token.

    An uncertain figure (`UncertaintyCheck`) causes a full prefill of prompt and answer, once, into another cache, from
    which the answer continues. So does a token beyond the length up to which RoPE's frequencies are constant, as in
    transformers' own `generate`, because the keys before it were rotated with other frequencies.
    """
    runtime, prefilled, turn, processors = answer.runtime, answer.prefilled, answer.turn, answer.processors
    max_new_tokens = answer.options.max_new_tokens
    prompt, cache, ends = prefilled.prompt.token_ids, prefilled.cache, set(runtime.end_ids)
    rope_limit = constant_rope_tokens(runtime.model_config)
    sequence = torch.tensor([[*prompt, *[0] * max_new_tokens]], device=prefilled.logits.device)
    ids, implementation = list[int](), None
    lookup, guesses, all_logits = PromptLookup(0, ()), list[int](), prefilled.logits[None]
    uncertainty = _uncertainty_check(runtime, prefilled, turn) if prefilled.sure else None
    read_again_at: int | None = None
    cache.truncate()
    while True:
        for number, logits in enumerate(all_logits):  # after the last token, and after each guess
            end = len(prompt) + len(ids)
            token = int(processors(sequence[:, :end], logits[None]).argmax())
            if uncertainty is not None and uncertainty.needs_full_prefill(
                token, partial(likely_tokens, logits), ids
            ):
                cache.truncate(len(ids))  # a session keeps the cache, without the rejected guesses
                cache, exact_logits = _full_prefill(runtime, prompt, ids, turn)
                uncertainty, read_again_at = None, len(ids)
                guesses = guesses[:number]
                token = int(processors(sequence[:, :end], exact_logits).argmax())
            sequence[0, end] = token
            ids.append(token)
            lookup.add(token)
            answer.add(token)
            is_last = token in ends or len(ids) == max_new_tokens or answer.should_stop()
            if is_last or guesses[number : number + 1] != [token]:
                break
        if guesses:
            lookup.record_accepted(number)
            cache.truncate(len(ids) - 1)
        if is_last:
            return ids, read_again_at
        if implementation is None:  # after the first token, so that it does not wait for packed weights
            implementation = runtime.decode_selector.current  # the same for the whole answer
            lookup = PromptLookup(implementation.guessed_tokens, (*prompt, token))
        guesses = lookup.propose()[: max_new_tokens - len(ids) - 1]
        cached = cache.get_seq_length()
        if rope_limit is not None and cached <= rope_limit < cached + 1 + len(guesses):
            (cache, all_logits), guesses = _full_prefill(runtime, prompt, ids, turn), []
        else:
            all_logits = turn.run_batched(implementation, (cache, [token, *guesses]))


def _uncertainty_check(runtime: Runtime, prefilled: Prefilled, turn: DeviceTurn) -> UncertaintyCheck:
    prefill_other = prefilled.prefill_other

    def view_of(prompt: Prompt) -> View:
        assert prefill_other is not None
        view = PassageView(runtime.decoder, prefill_other(prompt, turn))
        return lambda answer: likely_tokens(view.logits(answer))

    tokenizer = runtime.tokenizing.tokenizer
    return UncertaintyCheck(
        tokenizer, prefilled.prompt, prefilled.sure, None if prefill_other is None else view_of
    )


def _full_prefill(
    runtime: Runtime, prompt: Sequence[int], answer: Sequence[int], turn: DeviceTurn
) -> tuple[FusedCache, Tensor]:
    """Compute prompt and answer by the model's own forward into a new cache; returns it and the logits (1, vocab)
    float32 of the last token. Raises Cancelled between layers.
    """

    def between_layers() -> bool:
        turn.between_layers()
        return False

    decoder = runtime.decoder
    cache = FusedCache(decoder.geometry, len(prompt), len(answer) + CAPACITY_STEP, decoder.device)
    cache.step = Append(CallbackCancel(between_layers))
    ids = torch.tensor([[*prompt, *answer]], device=decoder.device)
    with torch.inference_mode():
        logits = decoder.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.step = Append()
    return cache, logits[0].float()


def _decode_by_transformers(answer: _Answer) -> list[int]:
    """Ids of the generated tokens of a model that cannot be fused: transformers' `generate` prefills and decodes."""
    from transformers import StoppingCriteriaList

    # transformers' own `stop_strings` compares vocabulary entries, and misses parts of characters.
    def stops(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not (is_over := answer.should_stop()):
            answer.turn.between_tokens()
        return torch.full((input_ids.shape[0],), is_over, dtype=torch.bool, device=input_ids.device)

    model = answer.model
    ids = torch.tensor([answer.prefilled.prompt.token_ids], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Streamer(answer.add),
            stopping_criteria=StoppingCriteriaList([stops]),
            logits_processor=answer.processors,
            **_generate_arguments(answer.runtime, answer.options.max_new_tokens),
        )
    return [int(i) for i in out[0, ids.shape[1] :]]


def figures_not_in_prompt(answer: str, prompt: Prompt, tokenizer: Any) -> tuple[str, ...]:
    """The answer's figures that do not occur in the prompt; none if the prompt has no passages."""
    if not prompt.chunks or not figures_in(answer):
        return ()
    return unsupported_figures(answer, tokenizer.decode(prompt.token_ids))


def continue_logits(runtime: Runtime, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
    """Logits (n, vocab) float32 from which each of the n tokens would be chosen, if those before it were the answer so
    far (teacher forcing). Leaves the cache as it was.
    """
    model, cache, begin = runtime.loaded.model, prefilled.cache, len(prefilled.prompt.token_ids)
    ids = torch.tensor([[*prefilled.prompt.token_ids, *token_ids[:-1]]], device=model.device)
    if cache is None:
        with torch.inference_mode():
            whole: Tensor = model(ids, use_cache=False).logits[0].float()
        return whole[begin - 1 :]
    end, rope_limit = ids.shape[1], constant_rope_tokens(runtime.model_config)
    # Beyond the limit, all is computed by the model's own forward, as while decoding an answer.
    stop = end if rope_limit is None else min(end, max(begin, rope_limit))
    parts = [prefilled.logits[None].float()]
    cache.truncate()
    with torch.inference_mode():
        if begin < stop:
            parts.append(model(ids[:, begin:stop], past_key_values=cache, use_cache=True).logits[0].float())
        if stop < end:
            parts.append(model(ids, use_cache=False, logits_to_keep=end - stop).logits[0].float())
    cache.truncate()
    return torch.cat(parts)


def _generate_arguments(runtime: Runtime, max_new_tokens: int) -> dict[str, Any]:
    # None overrides values of the checkpoint's generation config, about which greedy search would warn.
    unused = dict.fromkeys(("temperature", "top_p", "top_k"))
    pad_id, ends = runtime.tokenizing.tokenizer.pad_token_id, runtime.end_ids
    ids = {"eos_token_id": ends or None, "pad_token_id": [*ends, 0][0] if pad_id is None else pad_id}
    return {"do_sample": False, "repetition_penalty": 1.0, **unused, **ids, "max_new_tokens": max_new_tokens}


class _Streamer:
    """The streamer that `generate` calls with the prompt first, then with each token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self._on_token(int(token))

    def end(self) -> None:
        pass


class AnswerTimer:
    """Times an answer's first and last token, by `time.perf_counter`.

    begun: when the request began.
    """

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.decoding_begun = time.perf_counter()
        self.first: float | None = None
        self.last = self.decoding_begun

    def tick(self) -> None:
        """A token was generated."""
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def report(self, prefill: Report, generated: int) -> Report:
        """The prefill's report with the answer's times. generated: number of tokens."""
        first = self.first or self.last
        decoding_s = self.last - first
        timings = replace(
            prefill.timings,
            first_token_ms=(first - self.decoding_begun) * 1e3,
            ttft_ms=(first - self.begun) * 1e3,
            total_ms=(time.perf_counter() - self.begun) * 1e3,
            tokens_per_s=(generated - 1) / decoding_s if generated > 1 and decoding_s > 0 else 0.0,
        )
        return replace(prefill, tokens=replace(prefill.tokens, generated=generated), timings=timings)
