"""Made-up traces for the store: documents with lengths, how popular each is, and who asks for which."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragblend.kvstore.errors import UsageError

# RAGCache (arXiv 2404.12457) on MMLU's questions over Wikipedia.
HEAD_SHARE, HEAD_REQUESTS = 0.03, 0.60
DRIFTS = 4  # how often "drift" deals popularity anew
LENGTHS = ("documents", "passages")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """requests: the documents of each, in prompt order, the first `warm_up` not counted; tokens: of each document.

    popularity (n,): the probability of each document, None if it changes on the way.
    """

    tokens: list[int]
    requests: list[list[int]]
    warm_up: int
    popularity: Floats | None


def make_trace(kind: str, lengths: str, documents: int, retrievals: int, top_k: int, seed: int) -> Trace:
    """A trace of about `retrievals` retrieved documents, top_k a request; a quarter of it is to warm up.

    kind: as `check_kind` has it. The same arguments give the same trace.
    """
    random = np.random.default_rng((seed, top_k))
    tokens = _tokens(lengths, documents, random)
    by_rank = _popularity(kind, documents)
    parts = DRIFTS if kind == "drift" else 1
    requests: list[list[int]] = []
    for part in range(parts):
        popularity = np.empty(documents)
        popularity[random.permutation(documents)] = by_rank
        count = retrievals // top_k * (part + 1) // parts - len(requests)
        requests += _requests(popularity, top_k, count, random)
    return Trace(tokens.tolist(), requests, len(requests) // 4, popularity if parts == 1 else None)


def check_kind(kind: str) -> str:
    """`zipf:EXPONENT`, `mmlu` or `drift`. Raises UsageError."""
    name, _, exponent = kind.partition(":")
    if kind in ("mmlu", "drift"):
        return kind
    try:
        if name == "zipf" and 0 <= float(exponent) <= 5:
            return kind
    except ValueError:
        pass
    raise UsageError(
        f"--traces: {kind!r} is unknown; there are mmlu, drift and zipf:EXPONENT (zipf:0.9, say)"
    )


def _popularity(kind: str, documents: int) -> Floats:
    """The probability of the most popular document, of the next, ...; it sums to 1."""
    if kind.startswith("zipf:"):
        return _zipf(documents, float(kind.partition(":")[2]))
    return _zipf(documents, _exponent_for(documents, HEAD_SHARE, HEAD_REQUESTS))


def _zipf(documents: int, exponent: float) -> Floats:
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def _exponent_for(documents: int, head: float, requests: float) -> float:
    """The exponent that gives the first `head` of the documents that share of the requests."""
    from scipy.optimize import brentq

    count = max(1, round(head * documents))
    found: float = brentq(lambda exponent: _zipf(documents, exponent)[:count].sum() - requests, 0.0, 10.0)
    return found


def _tokens(lengths: str, documents: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`documents`: log-normal like articles, median 600 tokens; `passages`: the app's cuts, up to 512."""
    if lengths == "documents":
        return np.clip(random.lognormal(np.log(600), 0.8, documents), 64, 4096).astype(np.int64)
    tokens = random.integers(400, 513, documents)  # cut at the last end of a sentence
    last = random.random(documents) < 0.2  # one in five is its document's last, of any length
    tokens[last] = random.integers(32, 513, int(last.sum()))
    return tokens


def _requests(popularity: Floats, top_k: int, count: int, random: np.random.Generator) -> list[list[int]]:
    """`top_k` different documents a request, drawn one after the other."""
    drawn = _draws(popularity, random)
    requests = []
    for _ in range(count):
        request: list[int] = []
        while len(request) < top_k:
            document = next(drawn)
            if document not in request:
                request.append(document)
        requests.append(request)
    return requests


def _draws(popularity: Floats, random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from random.choice(len(popularity), size=4096, p=popularity).tolist()
