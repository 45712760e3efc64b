"""A device that hangs ends the process, and one that is slow, loading or idle does not."""

import threading

import pytest
from servers import serving
from waiting import SOON_S

from ragblend.app.serve.watchdog import EX_TEMPFAIL, watch

LIMIT_S = 0.5


@pytest.mark.parametrize("what", ["an answer", "a passage", "what is measured after it"])
def test_a_device_that_hangs_ends_the_process(home_of, tiny_folder, what) -> None:
    with serving(home_of(), tiny_folder) as served:
        served.chat()
        assert served.engine.finish_background(SOON_S)
        runtime = served.engine.runtime
        hanging, comes_back, ended = threading.Event(), threading.Event(), []
        over = threading.Event()

        def measure(_):
            runtime.choice.is_open = True
            runtime.choose_steps()

        begun = {
            "an answer": served.chat,
            "a passage": lambda text: served.engine.encode([text]),
            "what is measured after it": measure,
        }

        def hang(*_):
            hanging.set()
            assert comes_back.wait(SOON_S)

        def end(status):
            ended.append(status)
            over.set()

        hook = runtime.loaded.model.model.layers[1].register_forward_pre_hook(hang)
        stopped = watch(lambda: runtime.queue, LIMIT_S, end)
        try:
            assert not over.wait(3 * LIMIT_S), "nobody has the device"
            asked = threading.Thread(target=begun[what], args=("Is it there?",))
            asked.start()
            assert hanging.wait(SOON_S) and over.wait(SOON_S)
            assert ended == [EX_TEMPFAIL]
        finally:
            stopped.set()
            hook.remove()
            comes_back.set()
            asked.join(SOON_S)


def test_what_takes_its_time_before_the_first_layer_is_left_alone(home_of, tiny_folder) -> None:
    """Loading and converting a model does, with the device in hand."""
    with serving(home_of(), tiny_folder) as served:
        served.chat()
        ended, queue = threading.Event(), served.engine.runtime.queue
        stopped = watch(lambda: queue, LIMIT_S, lambda _: ended.set())
        with queue.turn():
            assert not ended.wait(3 * LIMIT_S)
        stopped.set()
