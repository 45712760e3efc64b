"""Helper threads of OpenMP: none is left of a thread that has given the device back."""

import os
import sys
import threading

import pytest
import torch

from ragblend.engine.scheduling.helper_threads import _pause, end_helper_threads
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import DeviceQueue

pytestmark = pytest.mark.skipif(
    _pause() is None or torch.get_num_threads() < 2, reason="torch starts no GNU OpenMP threads here"
)
SHARES = Claim(shares=True)


def multiply() -> None:
    matrix = torch.ones(1024, 1024)
    matrix @ matrix


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_turn_leaves_no_helper_threads() -> None:
    queue = DeviceQueue()
    with queue.turn():
        pass
    before = threads()
    with queue.turn():
        multiply()
        assert threads() > before
    assert threads() == before


def test_a_request_that_yields_has_no_helper_threads_while_another_computes() -> None:
    queue, found = DeviceQueue(), list[int]()
    with queue.turn():
        pass
    before = threads()

    def other() -> None:
        with queue.turn(claim=SHARES):
            found.append(threads())

    with queue.turn(claim=SHARES) as turn:
        multiply()
        thread = threading.Thread(target=other)
        thread.start()
        while not found:
            turn.between_tokens()
    thread.join()
    assert found == [before + 1]  # the other thread itself


def test_the_library_is_looked_for_once_torch_is_there(monkeypatch) -> None:
    """Not found before torch was imported, it stayed unknown."""
    _pause.cache_clear()
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch")
        end_helper_threads()
    assert _pause.cache_info().currsize == 0 and _pause() is not None
