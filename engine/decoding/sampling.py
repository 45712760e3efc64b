"""Logits processors of an answer: log-probabilities, grammar, repetition penalty, sampling."""

from typing import Any

import torch
from torch import Tensor

from ragblend.engine.config import DecodeOptions
from ragblend.engine.decoding.constrained import Constraint
from ragblend.engine.results import TokenLogprob


class GumbelNoise:
    """The last logits processor: noise that turns the highest score into a draw from the scores' softmax.

    transformers samples with torch's global generator, which all threads share: a seed would affect other answers, and
    they this one. Here greedy search over the noisy scores uses only this generator. Source: Maddison et al., "A*
    Sampling" (NeurIPS'14), §2.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        waiting = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=self._generator)
        return scores - waiting.clamp_min_(torch.finfo(torch.float32).tiny).log_()


class LogprobRecorder:
    """The first logits processor: records log-probabilities. tokens: those of the chosen tokens."""

    def __init__(self, count: int) -> None:
        self.tokens: list[TokenLogprob] = []
        self._count, self._row = count, torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._row = scores[0].float().log_softmax(-1)
        return scores

    def record(self, token_id: int) -> None:
        """Record the token that was chosen from the last scores."""
        values, ids = self._row.topk(self._count)
        most_likely = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.tokens.append(TokenLogprob(token_id, float(self._row[token_id]), most_likely))


def logits_processors(
    options: DecodeOptions,
    prompt_tokens: int,
    device: torch.device,
    constraint: Constraint | None,
    recorder: LogprobRecorder | None,
) -> Any:
    """The processors of an answer; after them the highest score is the chosen token, sampled or not.

    Unlike transformers' own, the repetition penalty ignores the prompt's tokens: answers should use the passages'
    words.
    """
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([recorder] if recorder is not None else [])
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
        # Without a seed torch's own generator seeds ours, so that `torch.manual_seed` still makes a program repeatable.
        seed = int(torch.randint(1 << 62, ())) if options.seed is None else options.seed
        processors.append(GumbelNoise(torch.Generator(device).manual_seed(seed)))
    if constraint is not None:
        processors.append(constraint.close)
    return processors
