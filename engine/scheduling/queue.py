"""The queue before the device: one request has it at a time, and gives way to others; chores when nobody waits.

Answers that wait for their next token have it computed in one pass, by whichever of them has the device first.
"""

import atexit
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from ragblend.engine.scheduling.order import Claim, Order, Ticket
from ragblend.kvstore.errors import Cancelled

log = logging.getLogger("ragblend")
_POLL_S = 0.05
SLICE_S = 0.2  # of reading a prompt, before streams have a token each: that long they may be silent
PAUSE_S = 0.05  # a program's next call often comes within it, and would stop what had just begun
PATIENCE_S = 10.0  # a server that is never idle has no pause: that long one is waited for
LAST_S = 5.0  # that long the end of a process is held up to store what was asked for
MOST_WAITING = 256  # chores that another request would bring again


_running: "weakref.WeakSet[Any]" = weakref.WeakSet()


def end_at_exit(thing: Any) -> None:
    """Have it ended, by its `end()`, before the interpreter is: torch, stopped in the middle, aborts the process."""
    if not _running:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _running.add(thing)


def _end_all() -> None:
    for thing in list(_running):
        thing.end()


class Cancel(Protocol):
    """What is asked whether to go on: a `threading.Event`, say."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Asking:
    """The same by asking."""

    is_set: Callable[[], bool]


class Passes(Protocol):
    """What computes something for several requests at once. together: for how many at most."""

    @property
    def together(self) -> int: ...

    def run_together(self, reads: Sequence[Any], /) -> Sequence[Any]: ...


@dataclass(eq=False)
class _Part:
    """What a request wants of a pass, and what was found. is_taken: it is being computed, in whoever's turn."""

    ticket: Ticket
    passes: Passes
    read: Any
    found: Any = None
    is_taken: bool = False


class Turn:
    """The device in the hands of one request."""

    def __init__(self, queue: "DeviceQueue", ticket: Ticket, cancel: Cancel | None) -> None:
        self._queue, self._ticket, self._cancel = queue, ticket, cancel

    def between_layers(self) -> None:
        """Raises Cancelled if that was asked for; after SLICE_S of reading others have the device in between."""
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("the computing was cancelled")
        self._queue.give_way(self._ticket, self._cancel, SLICE_S)

    def is_wanted(self) -> bool:
        """Between two layers of work in the background: whether somebody waits behind it, and it is to be left."""
        self.between_layers()
        return self._queue.wanted

    def between_tokens(self) -> None:
        """The prompt has been read: the next one may be begun, and the others have a token, or a slice, in between."""
        self._ticket.is_reading = False
        self._queue.give_way(self._ticket, self._cancel, 0.0)

    def share(self, passes: Passes, read: Any) -> Any:
        """What a pass finds for `read`, after giving way as `between_tokens` does.

        Whoever has the device takes in one pass what all want who gave way for the same, and waits for nobody to come.
        Where such a pass fails each is computed alone. Raises Cancelled, but not while `read` is in a pass.
        """
        self._ticket.is_reading = False
        return self._queue.share(_Part(self._ticket, passes, read), self._cancel)


class DeviceQueue:
    """A lock that goes to whom `Order` says; a waiting request can be cancelled. Not reentrant.

    Requests that share it (`Claim.shares`) have it in turn; all others alone, first come, first served. Work in the
    background begins when nobody else has come for PAUSE_S, and asks `wanted` whether somebody did since;
    Cancelled is raised where there is no pause before its claim's deadline.
    """

    def __init__(self) -> None:
        self.order = Order()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for work in the background
        self._calls: dict[Ticket, threading.Condition] = {}
        self._holder: Ticket | None = None
        self._since = 0.0  # since when
        self._moved_at: float | None = (
            None  # when it last came to the end of a layer, token or batch, if it did
        )
        self._ring: deque[Ticket] = deque()  # begun ones that gave way
        self._parts: dict[Ticket, _Part] = {}  # what those of them want that wait for a pass
        self._left_at = -PAUSE_S  # when the last request left

    @contextmanager
    def turn(
        self, cancel: Cancel | None = None, background: bool = False, claim: Claim | None = None
    ) -> Iterator[Turn]:
        """Hold the device, alone without a claim. Raises Cancelled if `cancel` is set, or the deadline of the claim
        past, before the turn comes."""
        with self._lock:
            if background:
                self._await_pause(claim.deadline if claim else math.inf, cancel)
            ticket = self.order.add(claim or Claim())
            self._calls[ticket] = threading.Condition(self._lock)
            try:
                self._pass_on()
                self._await(ticket, cancel, ticket.claim.deadline)
            except BaseException:
                self._leave(ticket)
                raise
        try:
            yield Turn(self, ticket, cancel)
        finally:
            with self._lock:
                self._leave(ticket)
                if not background:
                    self._left_at = time.monotonic()

    def give_way(self, ticket: Ticket, cancel: Cancel | None, after_s: float) -> None:
        """Let others have it once, where the holder has had it for so long. Raises Cancelled if `cancel` is set
        meanwhile; the deadline is of those that have not begun."""
        with self._lock:
            now = time.monotonic()
            if ticket.claim.shares and now >= self._since + after_s and self.wanted:
                self._give_up(now)
                self._ring.append(ticket)
                self._pass_on()
                self._await(ticket, cancel)
            self._moved_at = time.monotonic()

    def share(self, part: _Part, cancel: Cancel | None) -> Any:
        """What a pass finds for it, in this turn or in another's. Raises Cancelled as `give_way` does."""
        with self._lock:
            self._parts[part.ticket] = part
        try:
            self.give_way(part.ticket, cancel, 0.0)
        finally:
            with self._lock:
                while part.is_taken:  # or whoever gives up would use what the pass still writes to
                    self._calls[part.ticket].wait(_POLL_S)
                del self._parts[part.ticket]
        if part.found is None:
            self._compute(part)
        return part.found

    def _compute(self, mine: _Part) -> None:
        """With the device in hand: this part, and those that go with it. Each is charged its share of the time."""
        with self._lock:
            waiting = [self._parts[ticket] for ticket in self._ring if ticket in self._parts]
            others = [part for part in waiting if part.passes is mine.passes]
            parts = [mine, *others][: mine.passes.together]
            for part in parts:
                assert part.found is None, "whoever has a result stands before all who have none"
                part.is_taken = True
        begun, found = time.monotonic(), list[Any]()
        try:
            found = list(mine.passes.run_together([part.read for part in parts]))
        except Exception:
            if len(parts) == 1:
                raise
            log.warning("a pass over %d answers failed; each is computed alone", len(parts), exc_info=True)
        finally:
            with self._lock:
                spent = time.monotonic() - begun
                self._since += spent  # which is charged here
                for part in parts:
                    part.is_taken = False
                    self.order.charge(part.ticket, spent / len(parts))
        for part, each in zip(parts, found, strict=False):
            part.found = each
        if mine.found is None:
            (mine.found,) = mine.passes.run_together([mine.read])

    @property
    def still_s(self) -> float:
        """For how long the holder has come to the end of no layer, token or batch; 0 before its first one, as a model
        that is being loaded takes as long as it takes."""
        with self._lock:
            at = self._moved_at if self._holder is not None else None
            return 0.0 if at is None else time.monotonic() - at

    @property
    def inside(self) -> int:
        """How many wait or have begun."""
        return len(self._calls)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits behind the one whose turn it is."""
        return len(self._calls) > 1

    def _await_pause(self, deadline: float, cancel: Cancel | None) -> None:
        while self._calls or self._left_at + PAUSE_S > time.monotonic():
            now = time.monotonic()
            if now >= deadline:
                raise Cancelled("somebody needed the device all the time")
            until = deadline if self._calls else min(deadline, self._left_at + PAUSE_S)
            until = until if cancel is None else min(until, now + _POLL_S)
            self._changed.wait(None if until == math.inf else max(0.0, until - now))
            if self._calls and cancel is not None and cancel.is_set():
                raise Cancelled("the work was cancelled while it waited for a pause")

    def _await(self, ticket: Ticket, cancel: Cancel | None, deadline: float = math.inf) -> None:
        called = self._calls[ticket]
        polls = cancel is not None or deadline < math.inf
        while self._holder is not ticket:
            if (cancel is not None and cancel.is_set()) or time.monotonic() >= deadline:
                raise Cancelled("the request was cancelled while it waited for the device")
            called.wait(_POLL_S if polls else None)

    def _pass_on(self) -> None:
        """Where nobody has it: who may begin has it next, else who gave way first."""
        if self._holder is not None:
            return
        now = time.monotonic()
        self._holder = self.order.begin(now) or (self._ring.popleft() if self._ring else None)
        self._since, self._moved_at = now, None
        if self._holder is not None:
            self._calls[self._holder].notify()

    def _give_up(self, now: float) -> None:
        assert self._holder is not None
        self.order.charge(self._holder, now - self._since)
        self._holder = None

    def _leave(self, ticket: Ticket) -> None:
        if self._holder is ticket:
            self._give_up(time.monotonic())
        elif ticket in self._ring:
            self._ring.remove(ticket)
        self.order.leave(ticket)
        del self._calls[ticket]
        self._pass_on()
        self._changed.notify_all()


def patient() -> Claim:
    """Of work in the background, which is given up where there is no pause for so long."""
    return Claim(deadline=time.monotonic() + PATIENCE_S)


class Worth(IntEnum):
    """Of work in the background, the most valuable first."""

    STORE = 0  # what was asked for, and is not stored yet
    PREPARE = 1  # what may be asked for
    MEASURE = 2


@dataclass(frozen=True)
class _Chore:
    name: Hashable
    work: Callable[[], None]
    worth: Worth


class Chores:
    """Work for later, in one background thread, by its worth; a chore that fails is logged and forgotten.

    One that ends with Cancelled is begun again where it gave way to a worthier one, and else dropped.

    When the process ends, the chore under way is finished and those that store are done, for LAST_S; the others are
    dropped. left: told the names of what was to be stored and was not. hurried: whether somebody waits for the end of
    it all, so that what can be done another time is given up.
    """

    def __init__(self, left: Callable[[Sequence[Hashable]], None] | None = None) -> None:
        end_at_exit(self)
        self._changed = threading.Condition()
        self._queue: list[_Chore] = []
        self._running = False
        self._left, self._ends_at = left, math.inf
        self.hurried = False

    def add(self, chore: Callable[[], None], name: Hashable = None, worth: Worth = Worth.PREPARE) -> None:
        """Have it done, unless the same waits; name: of what is the same, and left where too much waits."""
        with self._changed:
            waiting = [each.name for each in self._queue]
            if (name or chore) not in waiting and not (name and len(waiting) >= MOST_WAITING):
                self._queue.append(_Chore(name or chore, chore, worth))
            self._begin()

    def drop(self, of: Callable[[Hashable], bool]) -> None:
        """Forget what has not begun and has such a name."""
        with self._changed:
            self._queue = [each for each in self._queue if not of(each.name)]

    def awaits(self, work: Callable[..., None]) -> bool:
        """Whether such a chore, a `partial` of that, has not begun."""
        with self._changed:
            return any(isinstance(each.work, partial) and each.work.func is work for each in self._queue)

    def gives_up(self, worth: Worth) -> bool:
        """Whether a chore of that worth, which can be done another time, is in the way."""
        with self._changed:
            return self.hurried or any(each.worth < worth for each in self._queue)

    def finish(self, timeout_s: float | None = None, hurried: bool = False) -> bool:
        """Wait until nothing is left to do; False if that took too long, or cannot be begun."""
        with self._changed:
            self.hurried = hurried
            self._begin()
            done = self._changed.wait_for(lambda: not self._running, timeout_s)
            self.hurried = False
            return done and not self._queue

    def end(self) -> None:
        """Do what stores, as long as LAST_S allows, and wait for what has begun."""
        with self._changed:
            self._queue = [each for each in self._queue if each.worth is Worth.STORE]
            self._ends_at = time.monotonic() + LAST_S
            alone = bool(self._queue) and not self._running
            self._running = self._running or alone
        if alone:  # no thread can be begun at the end of a process
            self._run()
        self.finish(hurried=True)
        with self._changed:
            names = [each.name for each in self._queue]
            self._queue, self._ends_at = [], math.inf
        if names and self._left is not None:
            self._left(names)

    def _begin(self) -> None:
        """With the lock in hand. Where no thread can be had, what waits does so until this is called again."""
        if self._running or not self._queue or time.monotonic() >= self._ends_at:
            return
        try:
            threading.Thread(target=self._run, name="ragblend-chores", daemon=True).start()
            self._running = True
        except RuntimeError as error:
            log.warning("work in the background waits for a thread: %s", error)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue or time.monotonic() >= self._ends_at:
                    self._running = False
                    self._changed.notify_all()
                    return
                chore = min(self._queue, key=lambda each: each.worth)  # of equals the first
                self._queue.remove(chore)
            try:
                chore.work()
            except Cancelled:
                if not self.hurried and self.gives_up(chore.worth):
                    self.add(chore.work, chore.name, chore.worth)
            except Exception:
                log.warning("work in the background failed and was dropped", exc_info=True)
