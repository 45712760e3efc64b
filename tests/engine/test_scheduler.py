"""The queue for the device, and background tasks."""

import threading
import time
from functools import partial

import pytest
from waiting import until

from ragblend.engine.scheduling.background import BackgroundTasks, Priority
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import DeviceQueue
from ragblend.kvstore.errors import Cancelled


def test_first_come_first_served_and_one_at_a_time():
    queue, order, inside = DeviceQueue(), [], []

    def work(number):
        with queue.turn():
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            time.sleep(0.002)
            inside.remove(number)

    threads = []
    with queue.turn():
        for number in range(8):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            until(lambda n=number: queue.inside == n + 2)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == list(range(8))


def test_one_who_gives_up_does_not_hold_up_the_others():
    queue, cancel, outcome = DeviceQueue(), threading.Event(), []

    def gives_up():
        with pytest.raises(Cancelled), queue.turn(cancel):
            outcome.append("never")
        outcome.append("gave up")

    def waits():
        with queue.turn():
            outcome.append("served")

    with queue.turn():
        one = threading.Thread(target=gives_up)
        one.start()
        until(lambda: queue.inside == 2)
        two = threading.Thread(target=waits)
        two.start()
        until(lambda: queue.inside == 3)
        cancel.set()
        one.join(10)
        assert outcome == ["gave up"]
    two.join(10)
    assert outcome == ["gave up", "served"]


def test_who_has_begun_goes_on_behind_its_deadline():
    """Alone as beside others: it is for those that wait to begin."""
    queue, deadline = DeviceQueue(), time.monotonic() + 1

    def other():
        with queue.turn(claim=Claim(shares=True)):
            until(lambda: time.monotonic() > deadline + 0.3)  # several of the polls of who waits

    thread = threading.Thread(target=other)
    with queue.turn(claim=Claim(shares=True, deadline=deadline)) as turn:
        thread.start()
        until(lambda: queue.inside == 2)
        turn.between_tokens()
        assert time.monotonic() > deadline
    thread.join(10)
    with pytest.raises(Cancelled), queue.turn(claim=Claim(shares=True, deadline=deadline)):
        pass


def test_work_in_the_background_begins_when_no_next_call_comes(monkeypatch):
    """Between two calls of one program it would be stopped again, and have taken the cores from retrieval."""
    monkeypatch.setattr("ragblend.engine.scheduling.queue.PAUSE_S", 0.5)
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
        time.sleep(0.02)
    thread.join(10)
    assert order == [0, 1, 2, "background"]


def test_an_error_gives_the_device_back():
    queue = DeviceQueue()
    with pytest.raises(ZeroDivisionError), queue.turn():
        raise ZeroDivisionError
    with queue.turn():
        pass
    assert not queue.inside


def test_tasks_run_in_order_and_survive_a_failing_one(caplog):
    tasks, done = BackgroundTasks(), []
    tasks.add(lambda: done.append(1))
    tasks.add(lambda: 1 / 0)
    tasks.add(lambda: done.append(2))
    assert tasks.finish(10)
    assert done == [1, 2]
    assert "failed" in caplog.text


def test_what_waits_is_not_added_again_and_there_is_a_most_of_it(monkeypatch):
    monkeypatch.setattr("ragblend.engine.scheduling.background.MAX_WAITING", 3)
    tasks, done, begun, go = BackgroundTasks(), [], threading.Event(), threading.Event()
    tasks.add(lambda: (begun.set(), go.wait(60)))
    assert begun.wait(10)
    for number in (1, 2, 1, 2, 3, 4):
        tasks.add(partial(done.append, number), ("passage", number))
    tasks.add(done.clear)  # nobody would bring it again
    tasks.add(done.clear)
    tasks.add(partial(done.append, "last"))
    go.set()
    assert tasks.finish(10)
    assert done == ["last"]


def test_work_for_which_no_thread_starts_waits_for_the_next(monkeypatch, caplog):
    """Where processes may have no more threads it counted as begun for ever, and whoever ended it waited for ever."""
    tasks, done, start = BackgroundTasks(), [], threading.Thread.start

    def fails(thread):
        if thread.name == "ragblend-background":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        tasks.add(partial(done.append, 1), "one")
        assert "can't start new thread" in caplog.text
        assert not tasks.finish(10), "something is left to do"
    tasks.add(partial(done.append, 1), "one")  # the same waits already
    assert tasks.finish(10)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        tasks.add(partial(done.append, 2))
    assert tasks.finish(10)
    assert done == [1, 2]
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        tasks.add(partial(done.append, 3))
        tasks.add(partial(done.append, 4), priority=Priority.STORE)
        tasks.end()
    assert tasks.finish(10)
    assert done == [1, 2, 4]


def test_what_stores_goes_first_and_what_measures_last():
    tasks, done, begun, go = BackgroundTasks(), [], threading.Event(), threading.Event()
    tasks.add(lambda: (begun.set(), go.wait(60)))
    assert begun.wait(10)
    for priority in (Priority.MEASURE, Priority.PREPARE, Priority.STORE):
        for number in (1, 2):
            tasks.add(partial(done.append, (priority, number)), priority=priority)
    assert not tasks.should_stop(Priority.STORE) and tasks.should_stop(Priority.PREPARE)
    go.set()
    assert tasks.finish(10)
    assert done == [(priority, number) for priority in sorted(Priority) for number in (1, 2)]
    assert not tasks.should_stop(Priority.MEASURE)


def test_what_gave_way_to_what_stores_is_done_after_it_and_what_was_cancelled_else_is_dropped():
    tasks, done, begun, go = BackgroundTasks(), [], threading.Event(), threading.Event()

    def prepare():
        begun.set()
        assert go.wait(60)
        if tasks.should_stop(Priority.PREPARE) or not done:
            done.append("gave way")
            raise Cancelled("for what stores")
        done.append("prepared")

    tasks.add(prepare)
    assert begun.wait(10)
    tasks.add(partial(done.append, "stored"), priority=Priority.STORE)
    go.set()
    assert tasks.finish(10)
    assert done == ["gave way", "stored", "prepared"]
    done.clear()
    tasks.add(prepare)
    assert tasks.finish(10)
    assert done == ["gave way"]


def test_at_the_end_of_a_process_what_stores_is_done_and_the_rest_is_dropped():
    left = []
    tasks, done, begun, go = BackgroundTasks(left.append), [], threading.Event(), threading.Event()
    tasks.add(lambda: (begun.set(), go.wait(60)))
    assert begun.wait(10)
    tasks.add(partial(done.append, "prepared"))
    tasks.add(partial(done.append, "stored"), priority=Priority.STORE)
    go.set()
    tasks.end()
    assert done == ["stored"] and left == []


def test_what_was_not_stored_in_the_time_that_there_is_is_told(monkeypatch):
    monkeypatch.setattr("ragblend.engine.scheduling.background.EXIT_S", 0.0)
    left = []
    tasks, done, begun, go = BackgroundTasks(left.append), [], threading.Event(), threading.Event()
    tasks.add(lambda: (begun.set(), go.wait(60)))
    assert begun.wait(10)
    tasks.add(partial(done.append, 1), "one", Priority.STORE)
    go.set()
    tasks.end()
    assert (done, left) == ([], [["one"]])


def test_finish_says_when_it_takes_too_long():
    tasks, go = BackgroundTasks(), threading.Event()
    tasks.add(go.wait)
    assert not tasks.finish(0.05)
    go.set()
    assert tasks.finish(10)
    assert tasks.finish(0)


def test_work_in_the_background_lets_everybody_pass():
    queue, order = DeviceQueue(), []

    def takes(name, background):
        with queue.turn(background=background):
            order.append((name, queue.has_waiting))

    threads = []
    with queue.turn():
        assert not queue.has_waiting
        for name, background in (("behind", True), ("first", False), ("second", False)):
            threads.append(threading.Thread(target=takes, args=(name, background)))
            threads[-1].start()
            wanted = len(threads)  # one in the background is not in the queue
            until(lambda n=wanted: queue.inside == n)
        assert queue.has_waiting
    for thread in threads:
        thread.join(10)
    assert order == [("first", True), ("second", False), ("behind", False)]
