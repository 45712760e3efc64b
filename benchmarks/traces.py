"""Generates request traces: documents with lengths and popularity, and the requests for them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# RAGCache (arXiv 2404.12457) on MMLU's questions over Wikipedia.
HEAD_SHARE, HEAD_REQUESTS = 0.03, 0.60
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RequestTrace:
    """A trace. requests: the documents of each, in prompt order; tokens: of each document."""

    tokens: list[int]
    requests: list[list[int]]


def make_trace(
    exponent: float | None, lengths: str, documents: int, count: int, top_k: int, seed: int
) -> RequestTrace:
    """Generate `count` requests of top_k documents each; the same arguments give the same trace.

    exponent: Zipf's; None: the one that gives HEAD_SHARE of the documents HEAD_REQUESTS of the requests.
    """
    random = np.random.default_rng((seed, top_k))
    tokens = _tokens(lengths, documents, random)
    popularity = np.empty(documents)
    popularity[random.permutation(documents)] = _zipf(
        documents, _exponent_for(documents) if exponent is None else exponent
    )
    return RequestTrace(tokens.tolist(), list(_requests(popularity, top_k, count, random)))


def _zipf(documents: int, exponent: float) -> Floats:
    """The documents' probabilities, the most popular first; they sum to 1."""
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def _exponent_for(documents: int) -> float:
    from scipy.optimize import brentq

    head = max(1, round(HEAD_SHARE * documents))
    found: float = brentq(lambda e: _zipf(documents, e)[:head].sum() - HEAD_REQUESTS, 0.0, 10.0)
    return found


def _tokens(lengths: str, documents: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`documents`: log-normal like articles, median 600 tokens; `passages`: the app's cuts, up to 512."""
    if lengths == "documents":
        return np.clip(random.lognormal(np.log(600), 0.8, documents), 64, 4096).astype(np.int64)
    tokens = random.integers(400, 513, documents)  # cut at the last end of a sentence
    last = random.random(documents) < 0.2  # one in five is its document's last, of any length
    tokens[last] = random.integers(32, 513, int(last.sum()))
    return tokens


def _requests(popularity: Floats, top_k: int, count: int, random: np.random.Generator) -> Iterator[list[int]]:
    """`top_k` different documents for each request, drawn one after the other."""
    drawn = _draws(popularity, random)
    for _ in range(count):
        request: dict[int, None] = {}
        while len(request) < top_k:
            request[next(drawn)] = None
        yield list(request)


def _draws(popularity: Floats, random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from random.choice(len(popularity), size=4096, p=popularity).tolist()
