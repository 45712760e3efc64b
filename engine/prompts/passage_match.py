"""Finds the passage that matches a prompt's question best, and builds the prompt with that passage alone."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from ragblend.engine.prompts.segments import Chunk, Prompt

# BM25 (Robertson and Zaragoza, 2009, §3.2). Passages are about equally long, so their length says little.
SATURATION, LENGTH_WEIGHT = 1.2, 0.4
SEPARATOR_TOKENS = 16  # a literal of at most this many tokens between two passages is a separator


def matching_passage(prompt: Prompt) -> int | None:
    """The index of the passage that matches the question best, by BM25 over token ids, for any language.

    Pairs of tokens are terms, too: tokenizers split an invoice's number into digits, which every passage has. None if
    no passage has a term of the question.
    """
    question = prompt.token_ids[prompt.places[-1][1] :] if prompt.chunks else ()
    scores = _bm25(question, [chunk.token_ids or () for chunk in prompt.chunks])
    best = max(range(len(scores)), key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] else None


def with_passage_alone(prompt: Prompt, index: int) -> Prompt:
    """The prompt with the passage of this index alone: without the other passages, and without separators."""
    places = [at for at, segment in enumerate(prompt.segments) if isinstance(segment, Chunk)]
    first, kept, last = places[0], places[index], places[-1]

    def stays(at: int) -> bool:
        segment = prompt.segments[at]
        if isinstance(segment, Chunk):
            return at == kept
        return not first < at < last or len(segment.token_ids or ()) > SEPARATOR_TOKENS

    return Prompt(segment for at, segment in enumerate(prompt.segments) if stays(at))


def _terms(tokens: Sequence[int]) -> Iterator[int | tuple[int, int]]:
    """All tokens and pairs of tokens."""
    return chain(tokens, pairwise(tokens))


def _bm25(query: Sequence[int], passages: Sequence[Sequence[int]]) -> list[float]:
    """Each passage's score for the query, all as token ids."""
    asked = set(_terms(query))
    counts = [Counter(term for term in _terms(passage) if term in asked) for passage in passages]
    passage_counts = Counter(term for count in counts for term in count)
    mean_length = max(1, sum(map(len, passages))) / max(1, len(passages))
    weights = {
        term: math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
        for term, having in passage_counts.items()
    }

    def score(count: Counter[int | tuple[int, int]], length: int) -> float:
        norm = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / mean_length)
        return sum(
            weights[term] * frequency * (SATURATION + 1) / (frequency + norm)
            for term, frequency in count.items()
        )

    return [score(count, len(passage)) for count, passage in zip(counts, passages, strict=True)]
