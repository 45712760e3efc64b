"""Device scheduler: one request at a time, yielding between layers and tokens.

Answers that wait for their next token share one forward pass, run by the request that holds the device.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ragblend.engine.scheduling.helper_threads import end_helper_threads
from ragblend.engine.scheduling.order import Claim, RequestOrder, Ticket
from ragblend.kvstore.errors import Cancelled

log = logging.getLogger("ragblend")
POLL_S = 0.05
SLICE_S = 0.2  # of prefill before each stream gets a token: the longest pause of a stream
PAUSE_S = 0.05  # how long the device is idle before background work: a program's next call often comes sooner
PATIENCE_S = 10.0  # how long background work waits until the device is idle


class Cancel(Protocol):
    """A cancel token, such as `threading.Event`."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class CallbackCancel:
    """A cancel token backed by a callable."""

    is_set: Callable[[], bool]


class BatchedPass(Protocol):
    """A forward pass over several requests. max_together: the number of requests, at most."""

    @property
    def max_together(self) -> int: ...

    def run_together(self, reads: Sequence[Any], /) -> Sequence[Any]: ...


@dataclass(eq=False)
class _PassInput:
    """A request's input to a pass, and its result. is_running: the pass is running, in any request's turn."""

    ticket: Ticket
    batched: BatchedPass
    read: Any
    result: Any = None
    is_running: bool = False


class DeviceTurn:
    """A request's turn on the device."""

    def __init__(self, queue: "DeviceQueue", ticket: Ticket, cancel: Cancel | None) -> None:
        self._queue, self._ticket, self._cancel = queue, ticket, cancel

    def between_layers(self) -> None:
        """Yield to other requests after SLICE_S of prefill. Raises Cancelled if the request was cancelled."""
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("the computation was cancelled")
        self._queue.yield_device(self._ticket, self._cancel, SLICE_S)

    def should_stop(self) -> bool:
        """For background work between two layers: whether it should stop because a request waits."""
        self.between_layers()
        return self._queue.has_waiting

    def between_tokens(self) -> None:
        """Yield after each token of the answer: another prompt may begin, and other requests get a token or a slice."""
        self._ticket.is_prefilling = False
        self._queue.yield_device(self._ticket, self._cancel, 0.0)

    def run_batched(self, batched: BatchedPass, read: Any) -> Any:
        """The result of a pass for `read`, after yielding as `between_tokens` does.

        The request that holds the device runs one pass for all requests that yielded for the same pass, without waiting
        for more. If the pass fails, each is computed alone. Raises Cancelled, but not while `read` is in a pass.
        """
        self._ticket.is_prefilling = False
        return self._queue.run_batched(_PassInput(self._ticket, batched, read), self._cancel)


class DeviceQueue:
    """A mutex whose next holder `RequestOrder` picks; a waiting request can be cancelled. Not reentrant.

    Requests that share it (`Claim.shares`) take turns; all others hold it alone, first come, first served. Background
    work begins after PAUSE_S without a request, and polls `has_waiting` for new ones; it is cancelled if there is no
    such pause before its claim's deadline, or, without a claim, within PATIENCE_S.
    """

    def __init__(self) -> None:
        self.order = RequestOrder()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for background work
        self._conditions: dict[Ticket, threading.Condition] = {}
        self._holder: Ticket | None = None
        self._held_since = 0.0  # when the holder got the device
        self._progress_at: float | None = None  # when the holder last finished a layer, token or batch
        self._ring: deque[Ticket] = deque()  # begun requests that yielded
        self._inputs: dict[Ticket, _PassInput] = {}  # of requests that wait for a pass
        self._idle_since = -PAUSE_S  # when the last request left

    @contextmanager
    def turn(
        self, cancel: Cancel | None = None, background: bool = False, claim: Claim | None = None
    ) -> Iterator[DeviceTurn]:
        """Hold the device, exclusively without a claim.

        Raises Cancelled if the request is cancelled, or its claim's deadline passes, before its turn.
        """
        with self._lock:
            if background:
                self._wait_for_pause(claim.deadline if claim else time.monotonic() + PATIENCE_S, cancel)
            ticket = self.order.add(claim or Claim())
            self._conditions[ticket] = threading.Condition(self._lock)
            try:
                self._assign_next()
                self._wait_for_turn(ticket, cancel, ticket.claim.deadline)
            except BaseException:
                self._remove(ticket)
                raise
        try:
            yield DeviceTurn(self, ticket, cancel)
        finally:
            end_helper_threads()
            with self._lock:
                self._remove(ticket)
                if not background:
                    self._idle_since = time.monotonic()

    def yield_device(self, ticket: Ticket, cancel: Cancel | None, after_s: float) -> None:
        """Let other requests run once, if the holder has had the device for `after_s`.

        Raises Cancelled if the request is cancelled meanwhile. Its deadline no longer counts: it has begun.
        """
        if ticket.claim.shares and self.has_waiting:
            end_helper_threads()
        with self._lock:
            now = time.monotonic()
            if ticket.claim.shares and now >= self._held_since + after_s and self.has_waiting:
                self._release(now)
                self._ring.append(ticket)
                self._assign_next()
                self._wait_for_turn(ticket, cancel)
            self._progress_at = time.monotonic()

    def run_batched(self, mine: _PassInput, cancel: Cancel | None) -> Any:
        """The result of a pass, in this turn or in another's. Raises Cancelled as `yield_device` does."""
        with self._lock:
            self._inputs[mine.ticket] = mine
        try:
            self.yield_device(mine.ticket, cancel, 0.0)
        finally:
            with self._lock:
                while mine.is_running:  # the pass still writes to its tensors, even if cancelled
                    self._conditions[mine.ticket].wait(POLL_S)
                del self._inputs[mine.ticket]
        if mine.result is None:
            self._run_pass(mine)
        return mine.result

    def _run_pass(self, mine: _PassInput) -> None:
        """Run a pass for this input and all that wait for the same pass; each is charged its share of the time."""
        with self._lock:
            waiting = [self._inputs[ticket] for ticket in self._ring if ticket in self._inputs]
            others = [each for each in waiting if each.batched is mine.batched]
            inputs = [mine, *others][: mine.batched.max_together]
            for each in inputs:
                assert each.result is None, "requests with a result stand before all that have none"
                each.is_running = True
        begun, results = time.monotonic(), list[Any]()
        try:
            results = list(mine.batched.run_together([each.read for each in inputs]))
        except Exception:
            if len(inputs) == 1:
                raise
            log.warning("a pass over %d answers failed; each is computed alone", len(inputs), exc_info=True)
        finally:
            with self._lock:
                spent = time.monotonic() - begun
                self._held_since += spent  # this time is charged here, and must not be charged again
                for each in inputs:
                    each.is_running = False
                    self.order.charge(each.ticket, spent / len(inputs))
        for each, result in zip(inputs, results, strict=False):
            each.result = result
        if mine.result is None:
            (mine.result,) = mine.batched.run_together([mine.read])

    @property
    def stalled_s(self) -> float:
        """Seconds since the holder last finished a layer, token or batch; 0 before the first, because loading takes
        long.
        """
        with self._lock:
            at = self._progress_at if self._holder is not None else None
            return 0.0 if at is None else time.monotonic() - at

    @property
    def request_count(self) -> int:
        """Number of waiting and running requests."""
        return len(self._conditions)

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits behind the holder."""
        return len(self._conditions) > 1

    def _wait_for_pause(self, deadline: float, cancel: Cancel | None) -> None:
        while self._conditions or self._idle_since + PAUSE_S > time.monotonic():
            now = time.monotonic()
            if now >= deadline:
                raise Cancelled("the device was never idle")
            until = deadline if self._conditions else min(deadline, self._idle_since + PAUSE_S)
            until = until if cancel is None else min(until, now + POLL_S)
            self._changed.wait(max(0.0, until - now))
            if self._conditions and cancel is not None and cancel.is_set():
                raise Cancelled("the work was cancelled while it waited for a pause")

    def _wait_for_turn(self, ticket: Ticket, cancel: Cancel | None, deadline: float = math.inf) -> None:
        called = self._conditions[ticket]
        polls = cancel is not None or deadline < math.inf
        while self._holder is not ticket:
            if (cancel is not None and cancel.is_set()) or time.monotonic() >= deadline:
                raise Cancelled("the request was cancelled while it waited for the device")
            called.wait(POLL_S if polls else None)

    def _assign_next(self) -> None:
        """If the device is free, give it to a request that may begin, else to the one that yielded first."""
        if self._holder is not None:
            return
        now = time.monotonic()
        self._holder = self.order.begin(now) or (self._ring.popleft() if self._ring else None)
        self._held_since, self._progress_at = now, None
        if self._holder is not None:
            self._conditions[self._holder].notify()

    def _release(self, now: float) -> None:
        assert self._holder is not None
        self.order.charge(self._holder, now - self._held_since)
        self._holder = None

    def _remove(self, ticket: Ticket) -> None:
        if self._holder is ticket:
            self._release(time.monotonic())
        elif ticket in self._ring:
            self._ring.remove(ticket)
        self.order.remove(ticket)
        del self._conditions[ticket]
        self._assign_next()
        self._changed.notify_all()
