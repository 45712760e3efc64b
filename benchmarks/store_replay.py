"""One trace, one policy, one budget: what the store's own eviction code keeps, and what a request then costs."""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress

import numpy as np

from benchmarks.store_traces import Trace
from ragblend.kvstore import policy as kvstore_policy
from ragblend.kvstore.policy import (
    Entry,
    Policy,
    PrefillProfile,
    clock_after,
    computed,
    ranked,
    used,
)
from ragblend.kvstore.uses import REMEMBERED

# What times come from when no measured profile is given.
ABOUT = (
    "an estimate, not a measurement: 0.774 ms a token and 0.00026 ms a pair of tokens, through the README's two full "
    "prefills of SmolLM2-135M (bfloat16, 2 cores of an AMD EPYC with AVX-512 BF16): 2,076 tokens in 2,728 ms, about "
    "3,145 in 5,006 ms"
)
TOKEN_MS, PAIR_MS = 0.774, 0.00026
CACHED = (0, 512, 1024, 2048, 4096, 8192, 16384)
NEW = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUESTION_TOKENS = 64  # computed in every request: the question and the words around it
# The store's, and the one that it is compared with: cost equal to the size, RAGCache's example of GDSF's costs. That is
# LFU with dynamic aging.
POLICIES = kvstore_policy.POLICIES | {
    "gdsf-size": Policy("gdsf-size", lambda entry, clock: clock + entry.frequency)
}


Ranking = tuple[float, float, str]


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
    """A tier under one policy, by the functions that the store runs; values are named by the documents in their path.

    A policy whose counts fade keeps them of values that left, the longest unused of them going first.
    """

    def __init__(self, policy: Policy, budget_bytes: int, bytes_per_token: int, half_life: float) -> None:
        self.policy, self.half_life = policy, half_life
        self.budget_bytes, self.bytes_per_token = budget_bytes, bytes_per_token
        self.stored: dict[str, Entry] = {}
        self.nbytes = 0
        self._gone: OrderedDict[str, Entry] = OrderedDict()
        self._uses = self._clock = 0.0
        self._heap: list[Ranking] = []  # of a value only the last one counts

    def find(self, name: str) -> bool:
        """Count a retrieval; whether the value is there."""
        self._uses += 1.0
        entry = self.stored.get(name) or self._gone.pop(name, Entry(name, 0))
        entry = used(entry, self._uses, self.half_life if self.policy.fades else None)
        if name in self.stored:
            self._rank(entry)
        else:
            self._remember(entry)
        return name in self.stored

    def put(self, name: str, tokens: int, cost: float) -> None:
        """Store a value that had to be computed, at `cost` ms a token, and evict what it displaces."""
        nbytes = tokens * self.bytes_per_token
        if nbytes > self.budget_bytes:
            return
        entry = self._gone.pop(name, Entry(name, 0))._replace(nbytes=nbytes, tokens=tokens)
        entry = computed(entry, cost)
        if not entry.frequency:  # storing it is its first use, or all that one ingests would go first
            self._uses += 1.0
            entry = entry._replace(used_at=self._uses, frequency=1.0)
        self._rank(entry)
        self.evict(name)

    def evict(self, spare: str) -> None:
        while self.nbytes > self.budget_bytes and self.take({spare}):
            pass

    def take(self, spare: Container[str]) -> str | None:
        """Take the lowest value out that is not to be spared, and move the clock on; None if there is none."""
        spared, victim = [], None
        while self._heap and victim is None:
            item = heappop(self._heap)
            entry = self.stored.get(item[2])
            if entry is None or (entry.priority, entry.used_at) != item[:2]:
                continue  # it is gone, or was ranked anew
            if entry.digest in spare:
                spared.append(item)
            else:
                victim = entry
        for item in spared:
            heappush(self._heap, item)
        if victim is None:
            return None
        self.nbytes -= self.stored.pop(victim.digest).nbytes
        self._clock = clock_after(self._clock, [victim])
        self._remember(victim)
        return victim.digest

    def _rank(self, entry: Entry) -> None:
        entry = ranked(entry, self.policy, self._clock)
        before = self.stored.get(entry.digest)
        self.nbytes += entry.nbytes - (before.nbytes if before else 0)
        self.stored[entry.digest] = entry
        heappush(self._heap, (entry.priority, entry.used_at, entry.digest))

    def _remember(self, entry: Entry) -> None:
        if self.policy.fades:
            self._gone[entry.digest] = entry
            self._gone.move_to_end(entry.digest)
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)


class TreeCache(PolicyCache):
    """RAGCache's knowledge tree: a value belongs to the path before it, and only leaves are evicted."""

    def __init__(self, policy: Policy, budget_bytes: int, bytes_per_token: int, half_life: float) -> None:
        super().__init__(policy, budget_bytes, bytes_per_token, half_life)
        self._children: dict[str, int] = {}

    def put(self, name: str, tokens: int, cost: float) -> None:
        parent = name.rpartition("/")[0]
        if not parent or parent in self.stored:
            self._children[parent] = self._children.get(parent, 0) + 1
            super().put(name, tokens, cost)
            if name not in self.stored:
                self._lose_child(parent)

    def evict(self, spare: str) -> None:
        """One at a time, because an evicted leaf can make its parent one; what has just come counts as a parent."""
        self._children[spare] = self._children.get(spare, 0) + 1
        while self.nbytes > self.budget_bytes and (victim := self.take(self._children)):
            self._lose_child(victim.rpartition("/")[0])
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
    return Policy("oracle", lambda entry, clock: worth[int(entry.digest)])


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


def default_profile() -> PrefillProfile:
    """The estimate as a grid, so that the default goes the same way as a measured one."""
    return PrefillProfile.of(ABOUT, CACHED, NEW, _ms)


def _ms(cached: int, new: int) -> float:
    pairs = new * (2 * cached + new)  # twice the scores: against all before them, and half of themselves
    return TOKEN_MS * new + PAIR_MS * pairs
