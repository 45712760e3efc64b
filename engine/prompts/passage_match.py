"""Finds the passage that matches a prompt's question best, and makes the prompt with that passage alone."""

import math
from collections import Counter
from collections.abc import Sequence

from ragblend.engine.prompts.segments import Chunk, Prompt

# BM25 (Robertson and Zaragoza, 2009, §3.2). Passages are about equally long, so their length says little.
SATURATION, LENGTH_WEIGHT = 1.2, 0.4
SEPARATOR_TOKENS = 16  # a literal of at most this many tokens between two passages is a separator


def matching_passage(prompt: Prompt) -> int | None:
    """The number of the passage that matches the question best, by BM25 over token ids, for any language.

    None if no passage has a word of the question.
    """
    question = prompt.token_ids[prompt.places[-1][1] :] if prompt.chunks else ()
    scores = _bm25(question, [chunk.token_ids or () for chunk in prompt.chunks])
    best = max(range(len(scores)), key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] else None


def with_passage_alone(prompt: Prompt, number: int) -> Prompt:
    """The prompt without the other passages and the separators."""
    places = [at for at, segment in enumerate(prompt.segments) if isinstance(segment, Chunk)]
    first, kept, last = places[0], places[number], places[-1]

    def stays(at: int) -> bool:
        segment = prompt.segments[at]
        if isinstance(segment, Chunk):
            return at == kept
        return not first < at < last or len(segment.token_ids or ()) > SEPARATOR_TOKENS

    return Prompt(segment for at, segment in enumerate(prompt.segments) if stays(at))


def _bm25(query: Sequence[int], passages: Sequence[Sequence[int]]) -> list[float]:
    """Each passage's score for the query, all as token ids."""
    counts = [Counter(passage) for passage in passages]
    having = Counter(token for count in counts for token in count)
    mean = sum(map(len, passages)) / max(1, len(passages))
    weights = {
        token: math.log(1 + (len(passages) - having[token] + 0.5) / (having[token] + 0.5))
        for token in set(query)
        if having[token]
    }

    def score(count: Counter[int], length: int) -> float:
        norm = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / mean)
        return sum(
            weight * count[token] * (SATURATION + 1) / (count[token] + norm)
            for token, weight in weights.items()
        )

    return [score(count, len(passage)) for count, passage in zip(counts, passages, strict=True)]
