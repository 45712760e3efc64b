"""A download in a thread of its own: what ends it must reach whoever waits, of whatever kind it is."""

import threading

import pytest

from ragblend.app import models
from ragblend.app.models import ModelDownload
from ragblend.kvstore.errors import DownloadStoppedError, ModelNotFoundError


def download_that(monkeypatch, act):
    monkeypatch.setattr(models, "download", act)
    return ModelDownload("anna/model")


@pytest.mark.parametrize(
    "error", [ModelNotFoundError("no such model"), ZeroDivisionError("a bug of somebody's")]
)
def test_whatever_ends_it_is_raised_to_who_waits(monkeypatch, error):
    """An error of no kind of ours would have passed for a model that is here."""

    def fail(name, progress, stop):
        raise error

    going = download_that(monkeypatch, fail)
    with pytest.raises(type(error), match=str(error)):
        going.wait(60)


def test_it_is_not_over_before_it_is_and_says_how_far_it_is(monkeypatch):
    come, go_on = threading.Event(), threading.Event()

    def fetch(name, progress, stop):
        progress(25, 100)
        come.set()
        assert go_on.wait(60)

    going = download_that(monkeypatch, fetch)
    assert come.wait(60) and not going.wait(0)
    assert (going.done, going.total) == (25, 100) and going.seconds_left > 0
    go_on.set()
    assert going.wait(60)


def test_a_stop_is_what_ended_it_whatever_the_thread_says_later(monkeypatch):
    stopped = threading.Event()

    def fetch(name, progress, stop):
        assert stop.wait(60)
        stopped.set()
        raise ConnectionError("the line was cut")

    going = download_that(monkeypatch, fetch)
    assert going.seconds_left is None
    going.stop()
    with pytest.raises(DownloadStoppedError, match="kept for the next time"):
        going.wait(60)
    assert stopped.wait(60)
    going._thread.join(60)
    with pytest.raises(DownloadStoppedError):
        going.wait(0)
