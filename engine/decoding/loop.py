"""The decode loop: generates an answer's tokens after a prefilled prompt, as text, and times them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import ROOM_STEP, Append, FusedCache
from ragblend.engine.config import DecodeOptions, Report
from ragblend.engine.decoding.constrained import Constraint
from ragblend.engine.decoding.eviction import evict
from ragblend.engine.decoding.passage_view import PassageView
from ragblend.engine.decoding.prompt_lookup import PromptLookup
from ragblend.engine.decoding.sampling import LogprobRecorder, logits_processors
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.decoding.uncertainty import UncertaintyCheck, View
from ragblend.engine.model.decoder import constant_rope_tokens
from ragblend.engine.model.load import end_ids
from ragblend.engine.prompts.figures import figures_in, unsupported_figures
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.results import OnText, Prefilled, Result
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import CallbackCancel, Cancel, DeviceTurn
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError

OnToken = Callable[[int], None]


def decode_answer(
    runtime: Runtime,
    prefilled: Prefilled,
    options: DecodeOptions,
    turn: DeviceTurn,
    on_text: OnText | None = None,
    cancel: Cancel | None = None,
    begun: float | None = None,
) -> Result:
    """Decode from a prefilled prompt, yielding the device between tokens. begun: when ttft_ms starts, now by default.

    Raises Cancelled if `cancel` is set.
    """
    model, tokenizer = runtime.loaded.model, runtime.tokenizing.tokenizer
    prompt, cache = prefilled.prompt, prefilled.cache
    room = max(1, runtime.context_window - len(prompt.token_ids))
    options = replace(options, max_new_tokens=min(options.max_new_tokens, room))
    clock = AnswerTimer(time.perf_counter() if begun is None else begun)
    stream = TextStream(tokenizer, options.stop, options.one_sentence)
    recorder = None if options.logprobs is None else LogprobRecorder(options.logprobs)
    constraint = None
    if options.grammar is not None:
        tokens = runtime.token_grammars
        constraint = Constraint(options.grammar, tokens, len(prompt.token_ids), options.max_new_tokens)
    reads_text = on_text is not None or options.stop or options.one_sentence

    def on_token(token_id: int) -> None:
        is_first = clock.first is None
        clock.tick()
        if recorder is not None:
            recorder.record(token_id)
        if reads_text and (piece := stream.feed(token_id)) and on_text is not None:
            on_text(piece)
        if is_first and options.keep_tokens is not None and options.max_new_tokens > 1:
            if cache is None:
                raise UnsupportedModelError(
                    "keep_tokens needs fused KV, which this model does not have; leave it out"
                )
            evict(runtime.decoder, prompt, cache, options.keep_tokens)

    def should_stop() -> bool:
        return stream.stopped or (cancel is not None and cancel.is_set())

    if options.keep_tokens is not None:  # nothing would be evicted from a full prefill's cache
        prefilled = replace(prefilled, sure=0.0)
    processors = logits_processors(options, len(prompt.token_ids), model.device, constraint, recorder)
    given = prefilled, options.max_new_tokens, processors, on_token, should_stop, turn
    read_again_at = None
    if cache is not None:
        ids, read_again_at = _decode_fused(runtime, *given)
    else:
        ids = _decode_by_transformers(model, tokenizer, *given)
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"the answer was cancelled after {len(ids)} tokens")
    if on_text is not None and (piece := stream.finish()):
        on_text(piece)
    report = clock.report(prefilled.report, len(ids))
    if cache is not None:
        report = replace(report, evicted_tokens=cache.evicted_tokens, read_again_at=read_again_at)
        if runtime.choice.needs_measurement:
            runtime.background.add(runtime.choose_steps, priority=Priority.MEASURE)
    # An answer ends early only by its end token or our own criterion.
    ended = ids[-1] in end_ids(model)
    stopped = stream.stopped or len(ids) < options.max_new_tokens or ended
    if constraint is not None and constraint.was_closed:  # the grammar ended it, not the model
        stopped = False
    text = decode_text(tokenizer, ids, options.stop, options.one_sentence)
    logprobs = None if recorder is None else tuple(recorder.tokens[: len(ids) - ended])
    report = replace(report, unsupported_figures=figures_not_in_prompt(text, prompt, tokenizer))
    return Result(text, tuple(ids), report, prompt, stopped, logprobs)


def _decode_fused(
    runtime: Runtime,
    prefilled: Prefilled,
    max_new_tokens: int,
    processors: Any,
    on_token: OnToken,
    should_stop: Callable[[], bool],
    turn: DeviceTurn,
) -> tuple[list[int], int | None]:
    """Ids of the generated tokens, with the end token; and after how many of them all was prefilled in full, if it was.

    The cache grows by the tokens that are fed back. An uncertain figure (`UncertaintyCheck`) causes a full prefill of
    prompt and answer, once, into another cache, from which the answer continues. So does a token beyond the length up
    to which RoPE's frequencies are constant, as in transformers' own `generate`: old keys were rotated by others.
    """
    prompt, cache, ends = prefilled.prompt.token_ids, prefilled.cache, set(end_ids(runtime.loaded.model))
    regime = constant_rope_tokens(runtime.model_config)
    sequence = torch.tensor([[*prompt, *[0] * max_new_tokens]], device=prefilled.logits.device)
    ids, implementation = list[int](), None
    lookup, guesses, rows = PromptLookup(0, ()), list[int](), prefilled.logits[None]
    uncertainty = _uncertainty_check(runtime, prefilled, turn) if prefilled.sure else None
    read_again_at: int | None = None
    cache.truncate()
    while True:
        for number, logits in enumerate(rows):  # after the last token, and after each guess
            end = len(prompt) + len(ids)
            token = int(processors(sequence[:, :end], logits[None]).argmax())
            if uncertainty is not None and uncertainty.needs_full_prefill(token, logits, ids):
                cache.truncate(len(ids))  # a session keeps it, without the rejected guesses
                cache, again = _full_prefill(runtime, prompt, ids, turn)
                uncertainty, read_again_at = None, len(ids)
                guesses = guesses[:number]
                token = int(processors(sequence[:, :end], again).argmax())
            sequence[0, end] = token
            ids.append(token)
            lookup.add(token)
            on_token(token)
            is_last = token in ends or len(ids) == max_new_tokens or should_stop()
            if is_last or guesses[number : number + 1] != [token]:
                break
        if guesses:
            lookup.record_accepted(number)
            cache.truncate(len(ids) - 1)
        if is_last:
            return ids, read_again_at
        if implementation is None:  # the first token is out, and did not wait for packed weights
            implementation = runtime.choice.current  # the same for the whole answer
            lookup = PromptLookup(implementation.guessed_tokens, (*prompt, token))
        guesses = lookup.propose()[: max_new_tokens - len(ids) - 1]
        held = cache.get_seq_length()
        if regime is not None and held <= regime < held + 1 + len(guesses):
            (cache, rows), guesses = _full_prefill(runtime, prompt, ids, turn), []
        else:
            rows = turn.share(implementation, (cache, [token, *guesses]))


def _uncertainty_check(runtime: Runtime, prefilled: Prefilled, turn: DeviceTurn) -> UncertaintyCheck:
    def view_of(prompt: Prompt) -> View:
        assert prefilled.read_alone is not None
        return PassageView(runtime, prefilled.read_alone(prompt, turn)).logits

    given = runtime.tokenizing.tokenizer, prefilled.prompt, prefilled.sure
    return UncertaintyCheck(*given, None if prefilled.read_alone is None else view_of)


def _full_prefill(
    runtime: Runtime, prompt: Sequence[int], answer: Sequence[int], turn: DeviceTurn
) -> tuple[FusedCache, Tensor]:
    """Prompt and answer through the model's own forward, into a new cache; that, and the logits (1, vocab) float32.

    Raises Cancelled between layers.
    """

    def between_layers() -> bool:
        turn.between_layers()
        return False

    decoder = runtime.decoder
    cache = FusedCache(decoder.geometry, len(prompt), len(answer) + ROOM_STEP, decoder.device)
    cache.step = Append(CallbackCancel(between_layers))
    ids = torch.tensor([[*prompt, *answer]], device=decoder.device)
    with torch.inference_mode():
        logits = decoder.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.step = Append()
    return cache, logits[0].float()


def _decode_by_transformers(
    model: Any,
    tokenizer: Any,
    prefilled: Prefilled,
    max_new_tokens: int,
    processors: Any,
    on_token: OnToken,
    should_stop: Callable[[], bool],
    turn: DeviceTurn,
) -> list[int]:
    """Ids of the generated tokens of a model that is not fused, by transformers' `generate`, which prefills too."""
    from transformers import StoppingCriteriaList

    # transformers' own `stop_strings` compares vocabulary entries, and misses parts of characters.
    def stops(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not (is_over := should_stop()):
            turn.between_tokens()
        return torch.full((input_ids.shape[0],), is_over, dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor([prefilled.prompt.token_ids], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Streamer(on_token),
            stopping_criteria=StoppingCriteriaList([stops]),
            logits_processor=processors,
            **_generate_arguments(model, tokenizer, max_new_tokens),
        )
    return [int(i) for i in out[0, ids.shape[1] :]]


def figures_not_in_prompt(answer: str, prompt: Prompt, tokenizer: Any) -> tuple[str, ...]:
    """The answer's figures that do not occur in the prompt; none if the prompt has no passages."""
    if not prompt.chunks or not figures_in(answer):
        return ()
    return unsupported_figures(answer, tokenizer.decode(prompt.token_ids))


def continue_logits(runtime: Runtime, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
    """Teacher-forced logits (n, vocab) float32 that predict each of the n tokens. Leaves the cache as it was."""
    model, cache, begin = runtime.loaded.model, prefilled.cache, len(prefilled.prompt.token_ids)
    ids = torch.tensor([[*prefilled.prompt.token_ids, *token_ids[:-1]]], device=model.device)
    if cache is None:
        with torch.inference_mode():
            whole: Tensor = model(ids, use_cache=False).logits[0].float()
        return whole[begin - 1 :]
    end, regime = ids.shape[1], constant_rope_tokens(runtime.model_config)
    # Beyond that length all is prefilled again, as in an answer.
    stop = end if regime is None else min(end, max(begin, regime))
    rows = [prefilled.logits[None].float()]
    cache.truncate()
    with torch.inference_mode():
        if begin < stop:
            rows.append(model(ids[:, begin:stop], past_key_values=cache, use_cache=True).logits[0].float())
        if stop < end:
            rows.append(model(ids, use_cache=False, logits_to_keep=end - stop).logits[0].float())
    cache.truncate()
    return torch.cat(rows)


def _generate_arguments(model: Any, tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    # A checkpoint's generation config may set the Nones, which greedy search would warn about.
    unused = dict.fromkeys(("temperature", "top_p", "top_k"))
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, *end_ids(model), 0)
    pad_id = next(int(found) for found in known if found is not None)
    lengths = {"max_new_tokens": max_new_tokens, "pad_token_id": pad_id}
    return {"do_sample": False, "repetition_penalty": 1.0, **unused, **lengths}


class _Streamer:
    """The streamer that `generate` calls with the prompt first, then with each token."""

    def __init__(self, on_token: OnToken) -> None:
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
    """Times an answer's first and last token."""

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
        timings = replace(
            prefill.timings,
            first_token_ms=(first - self.decoding) * 1e3,
            ttft_ms=(first - self.begun) * 1e3,
            total_ms=(time.perf_counter() - self.begun) * 1e3,
            tokens_per_s=(generated - 1) / decoding_s if generated > 1 and decoding_s > 0 else 0.0,
        )
        return replace(prefill, tokens=replace(prefill.tokens, generated=generated), timings=timings)
