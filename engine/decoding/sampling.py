"""Logits processors of an answer: log-probabilities, penalties, biases, grammar, sampling."""

from typing import Any

import torch
from torch import Tensor

from ragblend.engine.config import DecodeOptions
from ragblend.engine.decoding.constrained import Constraint
from ragblend.engine.results import TokenLogprob
from ragblend.kvstore.errors import UsageError

GREEDY_TEMPERATURE = 1e-5  # up to this, decoding is greedy: scores divided by less would overflow


class GumbelNoise:
    """The last logits processor: noise that turns the highest score into a draw from the scores' softmax.

    transformers samples with torch's global generator, which all threads share: a seed would affect other answers, and
    other answers this one. Here greedy search over the noisy scores uses only this generator. Source: Maddison et al.,
    "A* Sampling" (NeurIPS'14), §2.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        exponential = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=self._generator)
        return scores - exponential.clamp_min_(torch.finfo(torch.float32).tiny).log_()


class OccurrencePenalty:
    """Subtracts OpenAI's presence and frequency penalties, over the answer's tokens and not the prompt's.

    transformers has no processor for them. Source: vLLM's sampler, and OpenAI's "Presence and frequency penalties".
    """

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence, self._frequency, self._prompt_tokens = presence, frequency, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts


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
    vocabulary: int,
    device: torch.device,
    constraint: Constraint | None,
    recorder: LogprobRecorder | None,
) -> Any:
    """The processors of an answer; after them the highest score is the chosen token, sampled or not.

    Unlike transformers' own, the repetition penalty ignores the prompt's tokens: answers should use the passages'
    words. vocabulary: the number of token ids. Raises UsageError for a bias of a token that does not exist.
    """
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([recorder] if recorder is not None else [])
    if options.repetition_penalty != 1:
        penalty = float(options.repetition_penalty)
        processors.append(RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=prompt_tokens))
    if options.presence_penalty or options.frequency_penalty:
        penalties = float(options.presence_penalty), float(options.frequency_penalty)
        processors.append(OccurrencePenalty(*penalties, prompt_tokens))
    if options.logit_bias:
        if (unknown := max(options.logit_bias)) >= vocabulary:
            raise UsageError(f"logit_bias names the token {unknown}; the model has {vocabulary} tokens")
        biases: list[list[list[int] | float]] = [
            [[token], bias] for token, bias in options.logit_bias.items()
        ]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if constraint is not None:
        processors.append(constraint.mask)
    if options.temperature > GREEDY_TEMPERATURE:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.min_p > 0:
            processors.append(MinPLogitsWarper(float(options.min_p)))
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
