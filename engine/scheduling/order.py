"""Whose turn it is: which of the waiting requests is begun next. Pure: no clock, no lock and no device.

RAGCache (arXiv 2404.12457) §5.2: what is cached of a request says which goes first, and nobody is passed by more than a
window of others. Its measure, cached length by computed length, puts long prompts first where all of them are stored;
here the least to compute goes first. Fairness between clients, and chunks in common, are ours.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

WINDOW = 32  # a request is passed by no more than so many: RAGCache §6
MOST_BEGUN = 8  # answers on the device in turn; of more none would come at reading speed
LOADED = 0.05  # of what computing a token takes, loading one does: docs/load.md
LEAD_S = 2.0  # of the device's time that a client may be ahead of one who waits


@dataclass(frozen=True)
class Claim:
    """What is known of a request before it is begun.

    shares: it gives way between its tokens, so others may be begun beside it; without, it is served alone and in the
    order of coming, and nobody passes it. client: whose it is; cached: tokens of its chunks that are loaded, by chunk;
    new_tokens: to compute, again or for the first time; nbytes: of its context on the device; deadline: by the clock of
    who asks `begin`.
    """

    shares: bool = False
    client: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    nbytes: int = 0
    deadline: float = math.inf


@dataclass(eq=False)
class Ticket:
    """A request in the queue. passed: by how many; is_reading: begun, and without its first token yet."""

    claim: Claim
    passed: int = 0
    is_reading: bool = False


class Order:
    """Requests that wait and those that are begun. budget_bytes: of all contexts together; None: as much as they take.

    What does not fit waits until others end; alone everything fits.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        window: int = WINDOW,
        most_begun: int = MOST_BEGUN,
        lead_s: float = LEAD_S,
    ) -> None:
        self.budget_bytes, self._window, self._most_begun, self._lead_s = (
            budget_bytes,
            window,
            most_begun,
            lead_s,
        )
        self.waiting: list[Ticket] = []
        self.begun: list[Ticket] = []
        self._used_s: dict[str, float] = defaultdict(float)  # of the device, by client
        self._warm: Mapping[
            str, int
        ] = {}  # the chunks of the request that was begun last: loading them is free

    def add(self, claim: Claim) -> Ticket:
        """Let it wait. A client who was away has no time saved up."""
        ticket, here = Ticket(claim), {each.claim.client for each in (*self.waiting, *self.begun)}
        if claim.client not in here:
            least = min((self._used_s[client] for client in here), default=0.0)
            self._used_s = defaultdict(float, {client: self._used_s[client] for client in here})
            self._used_s[claim.client] = max(self._used_s[claim.client], least)
        self.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """It has ended, or was given up."""
        for tickets in (self.waiting, self.begun):
            if ticket in tickets:
                tickets.remove(ticket)

    def charge(self, ticket: Ticket, seconds: float) -> None:
        """It had the device for so long."""
        self._used_s[ticket.claim.client] += seconds

    def begin(self, now: float) -> Ticket | None:
        """Who is begun now; None while nobody may be: one request is read at a time."""
        if len(self.begun) >= self._most_begun or any(each.is_reading for each in self.begun):
            return None
        chosen = self._chosen(now)
        if chosen is None:
            return None
        for each in self.waiting[: self.waiting.index(chosen)]:
            each.passed += 1
        self.waiting.remove(chosen)
        self.begun.append(chosen)
        chosen.is_reading, self._warm = True, chosen.claim.cached
        return chosen

    def _chosen(self, now: float) -> Ticket | None:
        if any(not each.claim.shares for each in self.begun):
            return None
        timely = [each for each in self.waiting if each.claim.deadline > now]
        open_ = list(takewhile(lambda each: each.claim.shares, timely))
        if timely and not open_:
            return None if self.begun else timely[0]
        late = next((each for each in open_ if each.passed >= self._window), None)
        if late is not None:
            return late if self._fits(late) else None
        fitting = [each for each in open_ if self._fits(each)]
        least = min((self._used_s[each.claim.client] for each in open_), default=0.0)
        fair = [each for each in fitting if self._used_s[each.claim.client] <= least + self._lead_s]
        return min(fair, key=self.length, default=None)  # of equals the first

    def length(self, ticket: Ticket) -> float:
        """What it takes, in computed tokens; what the last one had loaded is not loaded again."""
        cached = ticket.claim.cached.items()
        return ticket.claim.new_tokens + LOADED * sum(
            tokens for chunk, tokens in cached if chunk not in self._warm
        )

    def _fits(self, ticket: Ticket) -> bool:
        if self.budget_bytes is None or not self.begun:
            return True
        return sum(each.claim.nbytes for each in self.begun) + ticket.claim.nbytes <= self.budget_bytes
