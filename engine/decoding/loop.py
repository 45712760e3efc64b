"""Tokens after the prompt, carrying on from the fused cache, as text, timed."""

import threading
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
from ragblend.engine.decoding.prompt_lookup import PromptLookup
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.decoding.uncertainty import UncertaintyCheck
from ragblend.engine.model.decoder import constant_rope_tokens
from ragblend.engine.model.load import end_ids
from ragblend.engine.prompts.figures import figures_in, unsupported_figures
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.results import Prefilled, Result, TokenLogprob
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Turn, Worth
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError

OnToken = Callable[[int], None]
OnText = Callable[[str], None]


def decode_answer(
    runtime: Runtime,
    prefilled: Prefilled,
    options: DecodeOptions,
    turn: Turn,
    on_text: OnText | None = None,
    cancel: threading.Event | None = None,
    begun: float | None = None,
) -> Result:
    """Decode from a prefilled prompt. turn: gives way to others between two tokens; begun: of which ttft_ms is counted.

    Raises Cancelled if that was asked for.
    """
    model, tokenizer = runtime.loaded.model, runtime.tokenizing.tokenizer
    prompt, cache = prefilled.prompt, prefilled.cache
    room = max(1, runtime.context_window - len(prompt.token_ids))
    options = replace(options, max_new_tokens=min(options.max_new_tokens, room))
    clock = AnswerTimer(time.perf_counter() if begun is None else begun)
    stream = TextStream(tokenizer, options.stop, options.one_sentence)
    constraint, likely = None, None if options.logprobs is None else _Likely(options.logprobs)
    if options.grammar is not None:
        tokens = runtime.token_grammars
        constraint = Constraint(options.grammar, tokens, len(prompt.token_ids), options.max_new_tokens)
    reads_text = on_text is not None or options.stop or options.one_sentence

    def on_token(token_id: int) -> None:
        first = clock.first is None
        clock.tick()
        if likely is not None:
            likely.chose(token_id)
        if reads_text and (piece := stream.feed(token_id)) and on_text is not None:
            on_text(piece)
        if first and options.keep_tokens is not None and options.max_new_tokens > 1:
            if cache is None:  # the model was run by its own means
                raise UnsupportedModelError(
                    "keep_tokens needs fused KV, which this model has not; leave it out"
                )
            evict(runtime.decoder, prompt, cache, options.keep_tokens)

    def halted() -> bool:
        return stream.stopped or (cancel is not None and cancel.is_set())

    if options.keep_tokens is not None:  # the other cache would not be thinned
        prefilled = replace(prefilled, sure=0.0)
    processors = _processors(options, len(prompt.token_ids), model.device, constraint, likely)
    given = prefilled, options.max_new_tokens, processors, on_token, halted, turn
    read_again_at = None
    if cache is not None:
        ids, read_again_at = _decoded(runtime, *given)
    else:
        ids = _generated(model, tokenizer, *given)
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"the answer was cancelled after {len(ids)} tokens")
    if on_text is not None and (piece := stream.finish()):
        on_text(piece)
    report = clock.report(prefilled.report, len(ids))
    if cache is not None:
        report = replace(report, evicted_tokens=cache.evicted_tokens, read_again_at=read_again_at)
        if runtime.choice.needs_measurement:
            runtime.chores.add(runtime.choose_steps, worth=Worth.MEASURE)
    # An answer ends early for no other reasons than its end token and our own criterion.
    ended = ids[-1] in end_ids(model)
    stopped = stream.stopped or len(ids) < options.max_new_tokens or ended
    if constraint is not None and constraint.was_closed:  # the model had not ended it yet
        stopped = False
    text = decode_text(tokenizer, ids, options.stop, options.one_sentence)
    told = None if likely is None else tuple(likely.tokens[: len(ids) - ended])
    report = replace(report, unsupported_figures=figures_not_in_prompt(text, prompt, tokenizer))
    return Result(text, tuple(ids), report, prompt, stopped, told)


def _decoded(
    runtime: Runtime,
    prefilled: Prefilled,
    max_new_tokens: int,
    processors: Any,
    on_token: OnToken,
    halted: Callable[[], bool],
    turn: Turn,
) -> tuple[list[int], int | None]:
    """Ids of the generated tokens, the end token included if it came; and behind how many the prompt was read again.

    The cache grows by what was read of them. Where a figure is not sure (`UncertaintyCheck`) all is read in full, once, into
    another cache, from which the answer goes on. So it is where the next token stands beyond the length up to which the
    RoPE's frequencies are constant, as in transformers' own `generate`: old keys are rotated by other frequencies than
    new queries.
    """
    prompt, cache, ends = prefilled.prompt.token_ids, prefilled.cache, set(end_ids(runtime.loaded.model))
    regime = constant_rope_tokens(runtime.model_config)
    sequence = torch.tensor([[*prompt, *[0] * max_new_tokens]], device=prefilled.logits.device)
    ids, steps = list[int](), None
    lookup, guesses, rows = PromptLookup(0, ()), list[int](), prefilled.logits[None]
    look = (
        UncertaintyCheck(runtime.tokenizing.tokenizer, prefilled.prompt, prefilled.sure)
        if prefilled.sure
        else None
    )
    read_again_at: int | None = None
    cache.truncate()
    while True:
        for number, logits in enumerate(rows):  # behind the last token, and behind each guess
            end = len(prompt) + len(ids)
            token = int(processors(sequence[:, :end], logits[None]).argmax())
            if look is not None and look.needs_full_prefill(token, logits, ids):
                cache.truncate(len(ids))  # a session keeps it, without the guesses that are none any more
                (cache, again), look, read_again_at = _read_anew(runtime, prompt, ids, turn), None, len(ids)
                guesses = guesses[:number]
                token = int(processors(sequence[:, :end], again).argmax())
            sequence[0, end] = token
            ids.append(token)
            lookup.add(token)
            on_token(token)
            is_last = token in ends or len(ids) == max_new_tokens or halted()
            if is_last or guesses[number : number + 1] != [token]:
                break
        if guesses:
            lookup.record_accepted(number)
            cache.truncate(len(ids) - 1)
        if is_last:
            return ids, read_again_at
        if steps is None:  # the first token is out, and did not wait for packed weights
            steps = runtime.choice.current  # one for all of an answer
            lookup = PromptLookup(steps.guessed_tokens, (*prompt, token))
        guesses = lookup.propose()[: max_new_tokens - len(ids) - 1]
        held = cache.get_seq_length()
        if regime is not None and held <= regime < held + 1 + len(guesses):
            (cache, rows), guesses = _read_anew(runtime, prompt, ids, turn), []
        else:
            rows = turn.share(steps, (cache, [token, *guesses]))


def _read_anew(
    runtime: Runtime, prompt: Sequence[int], answer: Sequence[int], turn: Turn
) -> tuple[FusedCache, Tensor]:
    """All of it by the model's own forward, in a cache of its own; the logits behind it, (1, vocab) float32.

    What was evicted is there again. Raises Cancelled between layers.
    """

    def leave() -> bool:
        turn.between_layers()
        return False

    decoder = runtime.decoder
    cache = FusedCache(decoder.geometry, len(prompt), len(answer) + ROOM_STEP, decoder.device)
    cache.step = Append(leave)
    ids = torch.tensor([[*prompt, *answer]], device=decoder.device)
    with torch.inference_mode():
        logits = decoder.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.step = Append()
    return cache, logits[0].float()


def _generated(
    model: Any,
    tokenizer: Any,
    prefilled: Prefilled,
    max_new_tokens: int,
    processors: Any,
    on_token: OnToken,
    halted: Callable[[], bool],
    turn: Turn,
) -> list[int]:
    """The same for a model that is not fused, by transformers' `generate`, which reads the prompt too."""
    from transformers import StoppingCriteriaList

    # transformers' own `stop_strings` compares with the vocabulary's entries: it misses parts of characters.
    def stops(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not (is_halted := halted()):
            turn.between_tokens()
        return torch.full((input_ids.shape[0],), is_halted, dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor([prefilled.prompt.token_ids], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Streamer(on_token),
            stopping_criteria=StoppingCriteriaList([stops]),
            logits_processor=processors,
            **_settings(model, tokenizer, max_new_tokens),
        )
    return [int(i) for i in out[0, ids.shape[1] :]]


def figures_not_in_prompt(answer: str, prompt: Prompt, tokenizer: Any) -> tuple[str, ...]:
    """The answer's figures that stand nowhere in a prompt with passages; nothing where it has none to check by."""
    if not prompt.chunks or not figures_in(answer):
        return ()
    return unsupported_figures(answer, tokenizer.decode(prompt.token_ids))


def continue_logits(runtime: Runtime, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
    """(n, vocab) float32: the logits that predict each of the n tokens, when the ones before it are given.

    The cache is as before afterwards.
    """
    model, cache, begin = runtime.loaded.model, prefilled.cache, len(prefilled.prompt.token_ids)
    ids = torch.tensor([[*prefilled.prompt.token_ids, *token_ids[:-1]]], device=model.device)
    if cache is None:
        with torch.inference_mode():
            whole: Tensor = model(ids, use_cache=False).logits[0].float()
        return whole[begin - 1 :]
    end, regime = ids.shape[1], constant_rope_tokens(runtime.model_config)
    # Behind it all is read anew, as in an answer.
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


class GumbelNoise:
    """Noise (Gumbel's) that turns the highest score into a draw from the scores' softmax: the last logits processor.

    transformers draws from torch's global generator, which is everybody's: a seed would reseed other threads, and
    other threads would disturb the seeded answer. Greedy search over these scores asks nobody but our generator.
    Source: Maddison et al., "A* Sampling" (NeurIPS'14), §2.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        waiting = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=self._generator)
        return scores - waiting.clamp_min_(torch.finfo(torch.float32).tiny).log_()


class _Likely:
    """Log-probabilities, as the first logits processor sees them; tokens: of those that were chosen from them."""

    def __init__(self, count: int) -> None:
        self.tokens: list[TokenLogprob] = []
        self._count, self._row = count, torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._row = scores[0].float().log_softmax(-1)
        return scores

    def chose(self, token_id: int) -> None:
        values, ids = self._row.topk(self._count)
        most_likely = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.tokens.append(TokenLogprob(token_id, float(self._row[token_id]), most_likely))


def _processors(
    options: DecodeOptions,
    prompt_tokens: int,
    device: torch.device,
    constraint: Constraint | None,
    likely: _Likely | None,
) -> Any:
    """The logits processors that keep to a grammar, penalise repetition, and make greedy search sample.

    The prompt's own tokens are not penalised, as transformers would do by itself: an answer from passages is made of
    their words.
    """
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([likely] if likely is not None else [])
    if options.repetition_penalty != 1:
        penalty = float(options.repetition_penalty)
        processors.append(RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=prompt_tokens))
    if constraint is not None:
        processors.append(constraint.mask)
    if options.temperature > 0:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k > 0:
            processors.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            processors.append(TopPLogitsWarper(options.top_p))
        # Without a seed torch's own is followed, so that `torch.manual_seed` still makes a program repeatable.
        seed = int(torch.randint(1 << 62, ())) if options.seed is None else options.seed
        processors.append(GumbelNoise(torch.Generator(device).manual_seed(seed)))
    if constraint is not None:
        processors.append(constraint.close)
    return processors


def _settings(model: Any, tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    # A checkpoint's own generation config may name the Nones; they mean nothing to greedy search and would warn.
    unused = dict.fromkeys(("temperature", "top_p", "top_k"))
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, *end_ids(model), 0)
    pad_id = next(int(found) for found in known if found is not None)
    lengths = {"max_new_tokens": max_new_tokens, "pad_token_id": pad_id}
    return {"do_sample": False, "repetition_penalty": 1.0, **unused, **lengths}


class _Streamer:
    """What `generate` calls with the prompt first, and then with every token."""

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
        timings = replace(
            prefill.timings,
            first_token_ms=(first - self.decoding) * 1e3,
            ttft_ms=(first - self.begun) * 1e3,
            total_ms=(time.perf_counter() - self.begun) * 1e3,
            tokens_per_s=(generated - 1) / decoding_s if generated > 1 and decoding_s > 0 else 0.0,
        )
        return replace(prefill, tokens=replace(prefill.tokens, generated=generated), timings=timings)
