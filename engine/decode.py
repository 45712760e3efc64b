"""Tokens after the prompt: transformers' own `generate`, carrying on from the fused cache."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.config import DecodeOptions
from ragblend.engine.results import Prefilled

OnToken = Callable[[int], None]


def decode(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    logits: Tensor,
    cache: FusedCache | None,
    options: DecodeOptions,
    on_token: OnToken,
    halted: Callable[[], bool],
) -> list[int]:
    """Ids of the generated tokens, the end token included if it came.

    logits (vocab,): those of the prompt's last row, as the prefill gave them; cache: None has the model read the prompt
    itself, by its own means; on_token is called with each id as it comes, and then halted, which may end it there. The
    cache grows by the generated tokens; `cache.truncate()` takes it back to the prompt.
    """
    from transformers import StoppingCriteriaList

    ids = torch.tensor([list(prompt_ids)], device=model.device)
    with torch.inference_mode():
        out = (model if cache is None else _resumed(model, logits, cache)).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **({} if cache is None else {"past_key_values": cache}),
            streamer=_Streamer(on_token),
            stopping_criteria=StoppingCriteriaList([_Halted(halted)]),
            logits_processor=_processors(options, ids),
            **_settings(model, tokenizer, options.max_new_tokens),
        )
    return [int(i) for i in out[0, ids.shape[1] :]]


def continue_logits(model: Any, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
    """(n, vocab) float32: the logits that predict each of the n tokens, when the ones before it are given.

    The cache is as before afterwards.
    """
    logits, cache = prefilled.logits, prefilled.cache
    if cache is None:
        ids = torch.tensor([[*prefilled.prompt.token_ids, *token_ids[:-1]]], device=model.device)
        with torch.inference_mode():
            whole: Tensor = model(ids, use_cache=False).logits[0].float()
        return whole[len(prefilled.prompt.token_ids) - 1 :]
    cache.truncate()
    rows = [logits[None].float()]
    if len(token_ids) > 1:
        given = torch.tensor([list(token_ids[:-1])], device=model.device)
        with torch.inference_mode():
            rows.append(model(given, past_key_values=cache, use_cache=True).logits[0].float())
    cache.truncate()
    return torch.cat(rows)


def _resumed(model: Any, logits: Tensor, cache: FusedCache) -> Any:
    """The model, with the prefill done: a shallow twin whose first step returns what is known and computes nothing.

    The twin shares all weights; the model itself is not touched, so nothing has to be undone.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    twin, forward = copy.copy(model), model.forward
    first = [CausalLMOutputWithPast(logits=logits[None, None], past_key_values=cache)]

    def resumed(*args: Any, **kwargs: Any) -> Any:
        return first.pop() if first else forward(*args, **kwargs)

    resumed.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # `generate` reads the arguments' names
    twin.forward = resumed
    return twin


class Draw:
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


def _processors(options: DecodeOptions, prompt_ids: Tensor) -> Any:
    """The logits processors that penalise repetition, and make greedy search sample above temperature 0.

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

    processors = LogitsProcessorList()
    if options.repetition_penalty != 1:
        penalty, behind = float(options.repetition_penalty), prompt_ids.shape[1]
        processors.append(RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=behind))
    if options.temperature > 0:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k > 0:
            processors.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            processors.append(TopPLogitsWarper(options.top_p))
        # Without a seed torch's own is followed, so that `torch.manual_seed` still makes a program repeatable.
        seed = int(torch.randint(1 << 62, ())) if options.seed is None else options.seed
        processors.append(Draw(torch.Generator(prompt_ids.device).manual_seed(seed)))
    return processors


def _settings(model: Any, tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    # A checkpoint's own generation config may name the Nones; they mean nothing to greedy search and would warn.
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "repetition_penalty": 1.0,
        "pad_token_id": _pad_id(model, tokenizer),
    }


def _pad_id(model: Any, tokenizer: Any) -> int:
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id):
        if isinstance(found, list):
            found = found[0] if found else None
        if found is not None:
            return int(found)
    return 0


class _Halted:
    """A stopping criterion of ours: cancelled, or a stop string seen in the text.

    transformers' own `stop_strings` compares with the vocabulary's entries, and misses what spans parts of characters.
    """

    def __init__(self, halted: Callable[[], bool]) -> None:
        self._halted = halted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._halted(), dtype=torch.bool, device=input_ids.device)


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
