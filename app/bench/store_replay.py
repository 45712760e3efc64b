"""One trace, one policy, one budget: what the store's own eviction code keeps, and what a request then costs."""

from dataclasses import dataclass
from itertools import compress

import numpy as np

from ragblend.app.bench.store_traces import Trace
from ragblend.kvstore.policy import Policy
from ragblend.kvstore.profile import PrefillProfile
from ragblend.kvstore.ranking import History, Ranking

QUESTION_TOKENS = 64  # computed in every request: the question and the words around it


@dataclass(frozen=True)
class Machine:
    """What times come from: a prefill profile, the bytes of a token's KV, and how fast they are loaded."""

    profile: PrefillProfile
    bytes_per_token: int
    bytes_per_ms: float

    def ttft_ms(self, cached: int, new: int) -> float:
        """Loading runs beside the compute, layer by layer, so the longer of the two is what a request waits for."""
        load_ms = cached * self.bytes_per_token / self.bytes_per_ms
        return max(load_ms, self.profile.ms(cached, new))


@dataclass(frozen=True)
class Outcome:
    """hit_rate: found documents of those retrieved; byte_hit_rate: the same in bytes; ttft_ms: mean of a request."""

    hit_rate: float
    byte_hit_rate: float
    ttft_ms: float


class PolicyCache:
    """A tier under one policy, by the code that the store runs; values are named by the documents in their path."""

    def __init__(self, policy: Policy, budget_bytes: int, bytes_per_token: int, half_life: float) -> None:
        self.budget_bytes, self.bytes_per_token = budget_bytes, bytes_per_token
        self.history = History(policy, half_life)
        self.ranking = Ranking(policy, half_life)

    def find(self, name: str) -> bool:
        """Count a retrieval; whether the value is there."""
        entry = self.history.used(name)
        if name not in self.ranking:
            return False
        self.ranking.rank(entry)
        return True

    def put(self, name: str, tokens: int, cost: float) -> None:
        """Store a value that had to be computed, and evict what it displaces."""
        nbytes = tokens * self.bytes_per_token
        if nbytes <= self.budget_bytes:
            self.ranking.rank(self.history.computed(name, nbytes, tokens, cost))
            self.evict(name)

    def evict(self, spare: str) -> None:
        for victim in self.ranking.take(self.ranking.nbytes - self.budget_bytes, {spare}):
            self.history.gone(victim.digest)


class TreeCache(PolicyCache):
    """RAGCache's knowledge tree: a value belongs to the path before it, and only leaves are evicted."""

    def __init__(self, policy: Policy, budget_bytes: int, bytes_per_token: int, half_life: float) -> None:
        super().__init__(policy, budget_bytes, bytes_per_token, half_life)
        self._children: dict[str, int] = {}

    def put(self, name: str, tokens: int, cost: float) -> None:
        parent = name.rpartition("/")[0]
        if not parent or parent in self.ranking:
            self._children[parent] = self._children.get(parent, 0) + 1
            super().put(name, tokens, cost)
            if name not in self.ranking:
                self._lose_child(parent)

    def evict(self, spare: str) -> None:
        """One at a time, because an evicted leaf can make its parent one; what has just come counts as a parent."""
        self._children[spare] = self._children.get(spare, 0) + 1
        while self.ranking.nbytes > self.budget_bytes:
            victims = self.ranking.take(1, self._children)
            if not victims:
                break
            self.history.gone(victims[0].digest)
            self._lose_child(victims[0].digest.rpartition("/")[0])
        self._lose_child(spare)

    def _lose_child(self, parent: str) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]


def oracle(trace: Trace) -> Policy:
    """The policy for the best hit rate when everyone's popularity is known from the start.

    Requests are drawn independently, so nothing that a policy could learn on the way beats this, but for what one
    document more or less in the budget makes. It too has to compute each document once.
    """
    assert trace.popularity is not None
    worth = (trace.popularity / np.asarray(trace.tokens)).tolist()
    return Policy("oracle", lambda entry, clock, half_life: worth[int(entry.digest)])


def replay(trace: Trace, cache: PolicyCache, machine: Machine, prefix: bool = False) -> Outcome:
    """Run the trace through the cache.

    prefix: a value serves only behind the same documents as before (prefix caching, as in RAGCache); else anywhere in
    a prompt, as RAGBlend's do. A request that lacks documents pays T(cached, new)/new for each of its new tokens
    (RAGCache's Algorithm 1), and the store is told that cost with each of them.
    """
    documents = hits = tokens = hit_tokens = 0
    total_ms = 0.0
    for number, request in enumerate(trace.requests):
        names = _names(request, prefix)
        found = [cache.find(name) for name in names]
        lengths = [trace.tokens[document] for document in request]
        cached = sum(compress(lengths, found))
        wanted = sum(lengths)
        new = wanted - cached + QUESTION_TOKENS
        if number >= trace.warm_up:
            documents, hits = documents + len(request), hits + sum(found)
            tokens, hit_tokens = tokens + wanted, hit_tokens + cached
            total_ms += machine.ttft_ms(cached, new)
        if not all(found):
            cost = machine.profile.ms_per_token(cached, new)
            for name, length, here in zip(names, lengths, found, strict=True):
                if not here:
                    cache.put(name, length, cost)
    return Outcome(hits / documents, hit_tokens / tokens, total_ms / (len(trace.requests) - trace.warm_up))


def _names(request: list[int], prefix: bool) -> list[str]:
    if not prefix:
        return [str(document) for document in request]
    return ["/".join(map(str, request[: place + 1])) for place in range(len(request))]
