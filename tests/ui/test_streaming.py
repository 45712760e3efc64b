"""Pieces are gathered without losing any, and a page's Stop reaches its own answer and no other."""

import threading

from ragblend.ui.coalesce import coalesced
from ragblend.ui.sessions import Sessions
from ragblend.ui.tab_library import discard


def test_all_text_arrives_in_order_and_in_fewer_pieces() -> None:
    words = [f"{number} " for number in range(500)]
    pieces = [piece for piece in coalesced(words) if piece]
    assert "".join(pieces) == "".join(words)
    assert len(pieces) < len(words)


def test_silence_gives_empty_pieces_so_that_the_caller_can_look_up() -> None:
    go = threading.Event()

    def source():
        go.wait(60)
        yield "late"

    pieces = coalesced(source(), silence_s=0.01)
    assert next(pieces) == ""
    go.set()
    assert "".join(pieces) == "late"


class Turn:
    def __init__(self):
        self.stopped = False

    def stop(self):
        self.stopped = True


def test_a_stop_before_the_turn_exists_stops_it_when_it_comes() -> None:
    """Retrieval takes a while: a click in that time must not be lost."""
    sessions, turn, following = Sessions(), Turn(), Turn()
    sessions.begin("page")
    sessions.stop("page")
    with sessions.running("page", turn.stop):
        assert turn.stopped
    sessions.begin("page")  # the next question is not stopped by it
    with sessions.running("page", following.stop):
        assert not following.stopped


def test_a_page_that_is_stopped_or_goes_away_stops_its_own_answer_and_no_other() -> None:
    sessions, turn, yours, mine = Sessions(), Turn(), Turn(), Turn()
    with sessions.running("yours", yours.stop), sessions.running("mine", mine.stop):
        sessions.stop("mine")
        assert (mine.stopped, yours.stopped) == (True, False)
    assert yours.stopped  # nobody waits for it any more
    with sessions.running("page", turn.stop):
        sessions.show("page", 3)
        assert sessions.shows("page", 3)
        sessions.close("page")
        assert turn.stopped
        assert not sessions.shows("page", 3)
    turn.stopped = False
    sessions.stop("page")
    assert not turn.stopped


def test_what_gradio_kept_of_an_upload_goes_and_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "temporary"))
    mine, other = tmp_path / "temporary" / "hash" / "a.txt", tmp_path / "documents" / "b.txt"
    for path in (mine, other):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    discard([mine, other, tmp_path / "temporary" / "c.txt"])
    assert not mine.parent.exists()
    assert other.exists()
    assert (tmp_path / "temporary").exists()
