"""Simulates requests under load, with the product's queue, store, knowledge tree and eviction, but without a model.

`RequestOrder` is the product's scheduler; `KVStore` and `tree.match` are its store, on files of a few bytes per token.
`Costs` gives the time of a prompt, fitted to times of the real engine (`measure_serve.py`). The loop follows
`engine/scheduling/queue.py`, with a simulated clock; here each token of an answer is a separate pass.
"""

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

from ragblend.engine.config import DEFAULT_RATIO
from ragblend.engine.prompts.paths import ASKED_AGAIN
from ragblend.engine.scheduling.order import WINDOW, Claim, RequestOrder, Ticket
from ragblend.engine.scheduling.queue import PAUSE_S, SLICE_S
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW
from ragblend.kvstore.errors import StoreFullError
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key, node_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore
from ragblend.kvstore.tree import Node, match

SHAPE = Geometry(layers=1, kv_heads=1, key_size=4, value_size=4, dtype="bfloat16")
MODEL = ModelFingerprint("0" * 64, "0" * 64, SHAPE, "{}")
PREFIX, QUESTION_TOKENS = (1,) * 32, 64


@dataclass(frozen=True)
class System:
    """A system to compare. paths, fuses: what it reuses; window: 0 is first come, first served."""

    name: str
    method: str
    policy: str = "pgdsf"
    window: int = WINDOW

    @property
    def paths(self) -> bool:
        return self.method in ("exact", "auto")

    @property
    def fuses(self) -> bool:
        return self.method in ("probe-shift", "auto")


SYSTEMS = (
    System("full", "full", window=0),
    System("prefix LRU", "exact", "lru", window=0),
    System("exact tree", "exact"),
    System("blend", "probe-shift"),
    System("auto", "auto"),
)


@dataclass(frozen=True)
class PromptTokens:
    """Tokens of a prompt: computed (`new`, in `pieces` passes), read from paths, and fused."""

    new: int
    path: int = 0
    fused: int = 0
    pieces: int = 1

    def features(self) -> list[float]:
        total = (self.new + self.path + self.fused) / 1e3
        new, path, fused = (count / 1e3 for count in (self.new, self.path, self.fused))
        return [1.0, self.pieces, new, new * total, path + fused, fused, fused * total]


@dataclass(frozen=True)
class Costs:
    """The fitted cost of a prompt in seconds. token_s: per answer token; error: the fit's median relative error.

    Coefficients: constant, per piece, per 1,000 tokens computed, per million pairs, per 1,000 tokens loaded, fused, and
    per million pairs of those.
    """

    weights: tuple[float, ...]
    token_s: float
    error: float

    @classmethod
    def fitted(cls, measured: Sequence[tuple[PromptTokens, float]], token_s: float) -> "Costs":
        from scipy.optimize import nnls

        seconds = np.array([each for _, each in measured])
        rows = np.array([found.features() for found, _ in measured])
        weights, _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
        error = float(np.median(np.abs(rows @ weights / seconds - 1)))
        return cls(tuple(map(float, weights)), token_s, error)

    def seconds(self, found: PromptTokens) -> float:
        return sum(weight * each for weight, each in zip(self.weights, found.features(), strict=True))


@dataclass(frozen=True)
class SimulatedRequest:
    """A request. passages: (number, tokens) of each; at: arrival time; answer_tokens: only the first is timed."""

    at: float
    passages: tuple[tuple[int, int], ...]
    answer_tokens: int = 1


@dataclass(eq=False)
class Job:
    """A request that is being processed."""

    request: SimulatedRequest
    left_s: float = 0.0
    tokens: int = 0


@dataclass
class SimulationResult:
    """Seconds to the first token by request; how often one was overtaken at most; reused tokens of all."""

    ttft_s: list[float] = field(default_factory=list)
    passed: int = 0
    path_tokens: int = 0
    tokens: int = 0

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.ttft_s))

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.ttft_s, 0.99))


class Simulator:
    """One system with its store, which is kept from one `run` to the next."""

    def __init__(self, system: System, store: KVStore, costs: Costs) -> None:
        self.system, self.store, self.costs = system, store, costs
        self._chores = deque[partial[float]]()

    def ingest(self, passages: Sequence[tuple[int, int]]) -> None:
        for number, tokens in passages if self.system.fuses else ():
            self._put(Node(self._alone(number, tokens), _ids(number, tokens), len(PREFIX), None))

    def run(self, requests: Sequence[SimulatedRequest]) -> SimulationResult:
        """Process all requests."""
        order, outcome, now = RequestOrder(window=self.system.window), SimulationResult(), 0.0
        coming, ring = deque(requests), deque[Ticket]()
        jobs: dict[Ticket, Job] = {}
        while coming or jobs:
            while coming and coming[0].at <= now:
                request = coming.popleft()
                jobs[order.add(self._claim(request))] = Job(request)
            ticket = order.begin(now)
            if ticket is not None:
                outcome.passed = max(outcome.passed, ticket.passed)
                jobs[ticket].left_s = self._begun(jobs[ticket].request, outcome)
            elif ring:
                ticket = ring.popleft()
            else:
                now = self._idle(now, coming[0].at)
                continue
            job = jobs[ticket]
            spent = min(job.left_s, SLICE_S) if ticket.is_reading else self.costs.token_s
            now += spent
            order.charge(ticket, spent)
            job.left_s -= spent
            if ticket.is_reading and job.left_s <= 0:
                ticket.is_reading = False
                outcome.ttft_s.append(now - job.request.at)
            if not ticket.is_reading:
                job.tokens += 1
            if job.tokens < job.request.answer_tokens:
                ring.append(ticket)
            else:
                order.remove(ticket)
                self._follow_up(jobs.pop(ticket).request)
        return outcome

    def _idle(self, now: float, until: float) -> float:
        """Run background tasks while there are no requests; what is not done when one arrives is dropped."""
        now += PAUSE_S
        while self._chores and now < until:
            now += self._chores.popleft()()
        return until

    # --- what the engine does with store and tree

    def _alone(self, number: int, tokens: int) -> ChunkKey:
        return chunk_key(MODEL, PREFIX, "", _ids(number, tokens))

    def _path(self, request: SimulatedRequest) -> list[Node]:
        path, start = list[Node](), len(PREFIX)
        for number, tokens in request.passages if self.system.paths else ():
            ids, parent = _ids(number, tokens), path[-1].key if path else None
            key = self._alone(number, tokens) if parent is None else node_key(parent, "", ids)
            path.append(Node(key, ids, start, parent))
            start += tokens
        return path

    def _claim(self, request: SimulatedRequest) -> Claim:
        cached = {}
        for node in takewhile(lambda node: self.store.contains(node.key), self._path(request)):
            cached[node.key.digest] = len(node.token_ids)
        exact = sum(cached.values())
        for number, tokens in request.passages[len(cached) :] if self.system.fuses else ():
            if self.store.contains(key := self._alone(number, tokens)):
                cached[key.digest] = tokens
        fused = sum(cached.values()) - exact
        return Claim(True, "", cached, round(_tokens(request) - exact - (1 - DEFAULT_RATIO) * fused))

    def _begun(self, request: SimulatedRequest, outcome: SimulationResult) -> float:
        """The time of a request, by what is found in the store and what must be computed."""
        sources = match(self.store.open_chunk, self._path(request), SHAPE)
        path = sum(len(source.token_ids) for source in sources)
        fused = 0
        for place, (number, tokens) in enumerate(request.passages) if self.system.fuses else ():
            if place < len(sources):
                continue
            if source := self.store.open_chunk(
                self._alone(number, tokens), _ids(number, tokens), SHAPE, len(PREFIX)
            ):
                sources.append(source)
                if place == 0:  # directly after its prefix it is exact
                    path = tokens
                else:
                    fused += tokens
        for source in sources:
            source.close()
        total = _tokens(request)
        outcome.path_tokens, outcome.tokens = outcome.path_tokens + path, outcome.tokens + total
        pieces = 1 + (len(request.passages) - len(sources) if self.system.method == "exact" else 0)
        return self.costs.seconds(PromptTokens(total - path - fused, path, fused, pieces))

    def _follow_up(self, request: SimulatedRequest) -> None:
        """As `queue_background_work`: computed passages are stored at once, the rest is background work."""
        if self.system.method == "exact":
            self._grow(request)
        elif self.system.paths and self._learn not in [chore.func for chore in self._chores]:
            self._chores.append(partial(self._learn, request))
        for passage in request.passages if self.system.fuses else ():
            self._chores.append(partial(self._encode, *passage))

    def _grow(self, request: SimulatedRequest) -> None:
        for node in self._path(request):
            if not self.store.contains(node.key):
                has_room = file_nbytes(SHAPE, len(node.token_ids), RAW) <= self.store.room_bytes
                if not (has_room or self.store.request_count(node.key) >= ASKED_AGAIN) or not self._put(node):
                    break

    def _learn(self, request: SimulatedRequest) -> float:
        path = self._path(request)
        stored = list(takewhile(lambda node: self.store.contains(node.key), path))
        if stored and len(stored) < len(path):
            node = path[len(stored)]
            if self.store.request_count(node.key) >= ASKED_AGAIN and self._put(node):
                return self.costs.seconds(PromptTokens(len(node.token_ids), node.start))
        return 0.0

    def _encode(self, number: int, tokens: int) -> float:
        key = self._alone(number, tokens)
        if self.store.contains(key) or not self._put(Node(key, _ids(number, tokens), len(PREFIX), None)):
            return 0.0
        return self.costs.seconds(PromptTokens(tokens))

    def _put(self, node: Node) -> bool:
        zeros = [torch.zeros((1, len(node.token_ids), SHAPE.key_size), dtype=SHAPE.torch_dtype)]
        try:
            return self.store.put(
                node.key, ChunkKV(node.token_ids, node.start, SHAPE, zeros, zeros, node.parent)
            )
        except StoreFullError:
            return False


def _ids(number: int, tokens: int) -> tuple[int, ...]:
    return number, *range(1, tokens)


def _tokens(request: SimulatedRequest) -> int:
    return len(PREFIX) + sum(tokens for _, tokens in request.passages) + QUESTION_TOKENS


@contextmanager
def simulator(system: System, costs: Costs, passages: Sequence[int], share: float) -> Iterator[Simulator]:
    """A simulator whose store has room for that share of all passages (given by their tokens), and is filled."""
    budget = int(share * sum(file_nbytes(SHAPE, tokens, RAW) for tokens in passages))

    def cost(cached: int, new: int) -> float:
        return costs.seconds(PromptTokens(new, cached)) / new

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        store = KVStore.open(Path(folder) / "kv", budget, policy=system.policy, cost=cost)
        with store:
            made = Simulator(system, store, costs)
            made.ingest(list(enumerate(passages)))
            yield made
