"""Chooses which waiting request begins next. Uses no clock, lock or device.

RAGCache (arXiv 2404.12457) §5.2: requests are ranked by what is cached of them, and at most a window of later ones may
overtake a request. Its measure, cached length by computed length, prefers long prompts when all of them are stored;
here the request with the least to compute goes first. Fairness between clients and the bonus for common chunks are
ours.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

WINDOW = 32  # how many requests may overtake one: RAGCache §6
MAX_BEGUN = 8  # concurrent answers; more would stream slower than people read
LOAD_COST = 0.05  # the time to load a token as a share of the time to compute one: docs/load.md
LEAD_S = 2.0  # device time that a client may be ahead of a waiting one


@dataclass(frozen=True)
class Claim:
    """The properties of a request before it begins.

    shares: it yields between its tokens, so others may run concurrently; otherwise it is served alone, in order of
    arrival, and is never overtaken. client: its owner; cached: numbers of stored tokens to load, by chunk; new_tokens:
    number of tokens to compute or recompute; nbytes: size of its context on the device; deadline: the time after which
    it does not begin, by the clock of `begin`'s caller.
    """

    shares: bool = False
    client: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    nbytes: int = 0
    deadline: float = math.inf


@dataclass(eq=False)
class Ticket:
    """A request in the queue. overtaken_by: how many overtook it; is_prefilling: it has begun, and has no token yet."""

    claim: Claim
    overtaken_by: int = 0
    is_prefilling: bool = False


class RequestOrder:
    """The waiting and the running requests. budget_bytes: limit of all contexts together; None: no limit.

    A request that does not fit waits until others end; a single request always fits.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        window: int = WINDOW,
        most_begun: int = MAX_BEGUN,
        lead_s: float = LEAD_S,
    ) -> None:
        self.budget_bytes, self._window = budget_bytes, window
        self._most_begun, self._lead_s = most_begun, lead_s
        self.waiting: list[Ticket] = []
        self.begun: list[Ticket] = []
        self._used_s: dict[str, float] = defaultdict(float)  # of the device, by client
        self._already_loaded: Mapping[str, int] = {}  # chunks of the request that began last

    def add(self, claim: Claim) -> Ticket:
        """Queue a request. A client accumulates no credit while it has no request."""
        ticket, clients = Ticket(claim), {each.claim.client for each in (*self.waiting, *self.begun)}
        if claim.client not in clients:
            least = min((self._used_s[client] for client in clients), default=0.0)
            self._used_s = defaultdict(float, {client: self._used_s[client] for client in clients})
            self._used_s[claim.client] = max(self._used_s[claim.client], least)
        self.waiting.append(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """The request has ended or was cancelled."""
        for tickets in (self.waiting, self.begun):
            if ticket in tickets:
                tickets.remove(ticket)

    def charge(self, ticket: Ticket, seconds: float) -> None:
        """Charge device time to the request's client."""
        self._used_s[ticket.claim.client] += seconds

    def begin(self, now: float) -> Ticket | None:
        """The request that may begin now, or None: only one prompt is prefilled at a time."""
        if len(self.begun) >= self._most_begun or any(each.is_prefilling for each in self.begun):
            return None
        chosen = self._choose(now)
        if chosen is None:
            return None
        for each in self.waiting[: self.waiting.index(chosen)]:
            each.overtaken_by += 1
        self.waiting.remove(chosen)
        self.begun.append(chosen)
        chosen.is_prefilling, self._already_loaded = True, chosen.claim.cached
        return chosen

    def _choose(self, now: float) -> Ticket | None:
        if any(not each.claim.shares for each in self.begun):
            return None
        timely = [each for each in self.waiting if each.claim.deadline > now]
        sharing = list(takewhile(lambda each: each.claim.shares, timely))
        if timely and not sharing:
            return None if self.begun else timely[0]
        overtaken = next((each for each in sharing if each.overtaken_by >= self._window), None)
        if overtaken is not None:
            return overtaken if self._fits(overtaken) else None
        least = min((self._used_s[each.claim.client] for each in sharing), default=0.0)
        fair = [
            each
            for each in sharing
            if self._fits(each) and self._used_s[each.claim.client] <= least + self._lead_s
        ]
        return min(fair, key=self.work_tokens, default=None)  # the first of equals

    def work_tokens(self, ticket: Ticket) -> float:
        """The work of a request, in computed tokens; chunks that the last request loaded are not loaded again."""
        cached = ticket.claim.cached.items()
        to_load = sum(tokens for chunk, tokens in cached if chunk not in self._already_loaded)
        return ticket.claim.new_tokens + LOAD_COST * to_load

    def _fits(self, ticket: Ticket) -> bool:
        if self.budget_bytes is None or not self.begun:
            return True
        return sum(each.claim.nbytes for each in self.begun) + ticket.claim.nbytes <= self.budget_bytes
