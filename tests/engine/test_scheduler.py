"""The queue for the device, and background tasks."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
from waiting import SOON_S, started, until

from ragblend.engine.scheduling.background import BackgroundTasks, Priority
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import CallbackCancel, DeviceQueue
from ragblend.kvstore.errors import Cancelled


def test_first_come_first_served_and_one_at_a_time():
    queue, order, inside = DeviceQueue(), [], []

    def work(number):
        with queue.turn():
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            time.sleep(0)  # lets the other threads run
            inside.remove(number)

    threads = []
    with queue.turn():
        for number in range(8):
            threads.append(started(work, number))
            until(lambda n=number: queue.request_count == n + 2)
        assert order == []
    for thread in threads:
        thread.join(SOON_S)
    assert order == list(range(8))


def test_a_cancelled_request_does_not_block_others():
    queue, cancel, outcome = DeviceQueue(), threading.Event(), []

    def gives_up():
        with pytest.raises(Cancelled), queue.turn(cancel):
            outcome.append("never")
        outcome.append("gave up")

    def waits():
        with queue.turn():
            outcome.append("served")

    with queue.turn():
        one = started(gives_up)
        until(lambda: queue.request_count == 2)
        two = started(waits)
        until(lambda: queue.request_count == 3)
        cancel.set()
        one.join(SOON_S)
        assert outcome == ["gave up"]
    two.join(SOON_S)
    assert outcome == ["gave up", "served"]


def test_a_request_that_has_begun_goes_on_after_its_deadline(clock):
    """Alone and beside others: a deadline is for requests that wait to begin."""
    queue, claim, polls = DeviceQueue(), Claim(shares=True, deadline=1.0), []

    def other():
        with queue.turn(claim=Claim(shares=True)):
            clock.now, polled = 2.0, len(polls)
            until(lambda: len(polls) > polled + 1)

    thread = threading.Thread(target=other)
    with queue.turn(CallbackCancel(lambda: polls.append(1)), claim=claim) as turn:
        thread.start()
        until(lambda: queue.request_count == 2)
        turn.between_tokens()
        assert clock.now > claim.deadline
    thread.join(SOON_S)
    with pytest.raises(Cancelled), queue.turn(claim=claim):
        pass


def test_background_work_begins_after_a_pause(clock):
    """Between two calls of one program it would be stopped again, and would take the cores from retrieval."""
    queue, order = DeviceQueue(), []

    def works():
        with queue.turn(background=True):
            order.append("background")

    thread = threading.Thread(target=works)
    for number in range(3):
        with queue.turn():
            order.append(number)
            if not number:
                thread.start()
        read = clock.reads
        until(lambda read=read: clock.reads > read + 2)  # it looks whether the pause is over
    clock.now = 1.0
    thread.join(SOON_S)
    assert order == [0, 1, 2, "background"]


class BusyTasks(BackgroundTasks):
    """Background tasks of which one is running, until `go` is set; done: what the others did."""

    def __init__(self, *given):
        super().__init__(*given)
        self.done, self.go, begun = [], threading.Event(), threading.Event()
        self.add(lambda: (begun.set(), self.go.wait(60)))
        assert begun.wait(SOON_S)

    def note(self, what, name=None, priority=Priority.PREPARE):
        self.add(partial(self.done.append, what), name, priority)

    def run(self):
        """What the others did, in order."""
        self.go.set()
        assert self.finish(10)
        return self.done


def test_tasks_run_in_order_and_survive_a_failing_one(caplog):
    tasks = BusyTasks()
    tasks.note(1)
    tasks.add(lambda: 1 / 0)
    tasks.note(2)
    assert tasks.run() == [1, 2] and "failed" in caplog.text


def test_a_waiting_task_is_not_added_again_and_there_is_a_limit(monkeypatch):
    monkeypatch.setattr("ragblend.engine.scheduling.background.MAX_WAITING", 3)
    tasks = BusyTasks()
    for number in (1, 2, 1, 2, 3, 4):
        tasks.note(number, ("passage", number))
    for _ in range(2):
        tasks.add(tasks.done.clear)  # without a name: no later request would add it again
    tasks.note("last")
    assert tasks.run() == ["last"]


@contextmanager
def without_threads(monkeypatch):
    """No thread can be started for background tasks."""
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "ragblend-background":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        yield


def test_tasks_wait_until_a_thread_can_be_started(monkeypatch, caplog):
    """The thread counted as running for ever, and `finish` waited for ever."""
    tasks, done = BackgroundTasks(), []
    with without_threads(monkeypatch):
        tasks.add(partial(done.append, 1), "one")
        assert "can't start new thread" in caplog.text
        assert not tasks.finish(10), "a task is left"
    tasks.add(partial(done.append, 1), "one")  # the same waits already
    assert tasks.finish(10)
    with without_threads(monkeypatch):
        tasks.add(partial(done.append, 2))
    assert tasks.finish(10) and done == [1, 2]
    with without_threads(monkeypatch):
        tasks.add(partial(done.append, 3))
        tasks.add(partial(done.append, 4), priority=Priority.STORE)
        tasks.end()
    assert tasks.finish(10) and done == [1, 2, 4]


def test_what_adds_tasks_ends_before_what_runs_them():
    """An answer that ended after its engine started a thread, in which torch ran while the process exited."""
    code = """
from ragblend.engine.scheduling.background import end_at_exit
class Thing:
    def __init__(self, name):
        self.name = name
        end_at_exit(self, ends_first=name == "stream")
    def end(self):
        print(self.name)
things = [Thing(name) for name in ["engine", "stream"] * 8]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["stream"] * 8 + ["engine"] * 8


def test_tasks_that_store_run_first_and_those_that_measure_last():
    tasks = BusyTasks()
    for priority in (Priority.MEASURE, Priority.PREPARE, Priority.STORE):
        for number in (1, 2):
            tasks.note((priority, number), priority=priority)
    assert not tasks.should_stop(Priority.STORE) and tasks.should_stop(Priority.PREPARE)
    assert tasks.run() == [(priority, number) for priority in sorted(Priority) for number in (1, 2)]
    assert not tasks.should_stop(Priority.MEASURE)


def test_a_task_that_made_way_runs_again_and_another_cancelled_one_is_dropped():
    tasks, done, begun, go = BackgroundTasks(), [], threading.Event(), threading.Event()

    def prepare():
        begun.set()
        assert go.wait(60)
        if tasks.should_stop(Priority.PREPARE) or not done:
            done.append("cancelled")
            raise Cancelled("for what stores")
        done.append("prepared")

    tasks.add(prepare)
    assert begun.wait(SOON_S)
    tasks.add(partial(done.append, "stored"), priority=Priority.STORE)
    go.set()
    assert tasks.finish(10) and done == ["cancelled", "stored", "prepared"]
    done.clear()
    tasks.add(prepare)
    assert tasks.finish(10) and done == ["cancelled"]


@pytest.mark.parametrize(("time_s", "done", "unfinished"), [(60.0, ["stored"], []), (0.0, [], [["one"]])])
def test_at_the_end_of_a_process_tasks_that_store_run_as_long_as_there_is_time(
    monkeypatch, time_s, done, unfinished
):
    monkeypatch.setattr("ragblend.engine.scheduling.background.EXIT_S", time_s)
    told = []
    tasks = BusyTasks(told.append)
    tasks.note("prepared")
    tasks.note("stored", "one", Priority.STORE)
    tasks.go.set()
    tasks.end()
    assert (tasks.done, told) == (done, unfinished)


def test_only_tasks_that_store_are_told_of_as_unfinished(monkeypatch):
    """`close` failed if another task was added while it waited: its name has no three parts."""
    monkeypatch.setattr("ragblend.engine.scheduling.background.EXIT_S", 0.0)
    told, begun = [], threading.Event()
    tasks = BackgroundTasks(told.append)

    def adds_another():
        begun.set()
        until(lambda: tasks.stopping)
        tasks.add(lambda: None, ("prefetch", "chunk"))

    tasks.add(adds_another)
    assert begun.wait(SOON_S)
    tasks.add(lambda: None, "one", Priority.STORE)
    tasks.end()
    assert told == [["one"]]


def test_finish_says_when_it_takes_too_long():
    tasks = BusyTasks()
    assert not tasks.finish(0.05)
    tasks.go.set()
    assert tasks.finish(10) and tasks.finish(0)


def test_background_work_waits_for_all_requests():
    queue, order = DeviceQueue(), []

    def takes(name, background):
        with queue.turn(background=background):
            order.append((name, queue.has_waiting))

    threads = []
    with queue.turn():
        assert not queue.has_waiting
        for name, background in (("behind", True), ("first", False), ("second", False)):
            threads.append(started(takes, name, background))
            wanted = len(threads)  # one in the background is not in the queue
            until(lambda n=wanted: queue.request_count == n)
        assert queue.has_waiting
    for thread in threads:
        thread.join(SOON_S)
    assert order == [("first", True), ("second", False), ("behind", False)]
