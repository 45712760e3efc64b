"""Streaming: pieces are joined without loss, and a page shows its newest question only."""

import threading
from itertools import islice

import pytest
from waiting import SOON_S

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

import gradio as gr
from serverless import built

from ragblend.app.library.ingest import ingest
from ragblend.ui.coalesce import coalesced
from ragblend.ui.page import PageLayout
from ragblend.ui.page_context import PageContext
from ragblend.ui.page_sessions import PageSessions
from ragblend.ui.tab_library import delete_uploads


def test_all_text_arrives_in_order_and_in_fewer_pieces() -> None:
    words = [f"{number} " for number in range(500)]
    pieces = [piece for piece in coalesced(words) if piece]
    assert "".join(pieces) == "".join(words)
    assert len(pieces) < len(words)


def test_silence_gives_empty_pieces() -> None:
    go = threading.Event()

    def source():
        go.wait(SOON_S)
        yield "late"

    pieces = coalesced(source(), silence_s=0.01)
    assert next(pieces) == ""
    go.set()
    assert "".join(pieces) == "late"


def test_stop_affects_only_the_pages_own_answer() -> None:
    sessions, yours, mine = PageSessions(), threading.Event(), threading.Event()
    asked = sessions.begin("mine")
    with sessions.begin("yours").running(yours.set), asked.running(mine.set):
        sessions.set_shown("mine", 3)
        assert sessions.is_shown("mine", 3)
        sessions.close("mine")
        assert not sessions.is_shown("mine", 3)
        assert (mine.is_set(), yours.is_set()) == (True, False)
    assert yours.is_set(), "nobody waits for it any more"
    mine.clear()
    asked.stop()
    assert not mine.is_set(), "it has ended"


class Page:
    """A page over a model that costs nothing; `engine` is the model, `document` is all that was read."""

    def __init__(self, services):
        self.services, self.engine = services, services.workspaces.first.engine
        self.engine.store = services.workspaces.first.store
        with gr.Blocks() as blocks:
            self.frame = PageLayout(PageContext(services), blocks)
        self.chat, self.compare = self.frame.chat, self.frame.compare
        self.request = gr.Request(session_hash="here")

    def send(self, question, chat_id=None):
        return self.chat.send(question, chat_id, ["default"], "chat", "", self.request)

    def in_list(self, act, chat_id=None, **values):
        return self.chat.click_in_list(chat_id, gr.EventData(None, {"act": act, **values}), self.request)

    def edit(self, message_id, question, chat_id):
        event = gr.EventData(None, {"act": "edit", "id": str(message_id), "text": question})
        return self.chat.again(chat_id, ["default"], "chat", "", event, self.request)

    def measure(self, message):
        event = gr.EventData(None, {"act": "measure", "message": str(message.id)})
        return self.chat.measure(event, self.request)

    def compared(self, question):
        return self.compare.run(question, "default", "probe-shift", "full", 15, 100, self.request)

    def close(self):
        self.frame.close(self.request)

    def held(self):
        """The next answer is begun, and waits in the middle until what this gives is set."""
        go = threading.Event()
        self.engine.on_piece = lambda number: number == 0 or go.wait(SOON_S)
        return go

    def answers(self):
        chats = self.services.chats
        said = [message for chat in chats.page()[0] for message in chats.messages(chat.id)]
        return [message for message in said if message.role == "assistant"]


@pytest.fixture
def page(tmp_path, fake_engine):
    with built(tmp_path, Page) as (made, _):
        yield made


@pytest.fixture
def library(page, tmp_path):
    """The page has something to compare over."""
    (tmp_path / "sky.txt").write_text("The sky over the harbour is blue in the morning.")
    ingest(page.services.workspaces.first, [tmp_path / "sky.txt"])


def until_text(answer, live):
    """Draw it until there is text of it."""
    return next(updates for updates in answer if "It" in str(updates.get(live, "")))


def is_send_back(page, updates):
    sends, stops = updates[page.chat.send_button], updates[page.chat.stop_button]
    return sends["visible"] and not stops["visible"]


def changed(updates):
    """What is drawn at all."""
    return [each for each in updates if updates[each] != gr.skip()]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("leave", ["stop", "close"])
def test_stopping_during_the_search_ends_it(page, leave) -> None:
    """Stop had no effect before the answer began, and of a closed page it was lost."""
    answer = page.send("Why is the sky blue?")
    next(answer)
    page.chat.stop(page.request) if leave == "stop" else page.close()
    (last,) = answer
    assert is_send_back(page, last) and page.answers() == page.engine.requests == []
    if leave == "stop":
        assert "This question was not answered." in last[page.chat.transcript]
        assert last[page.chat.live] == "", "no error"


@pytest.mark.usefixtures("library")
def test_stopping_a_comparison_during_the_search_ends_it(page) -> None:
    compared = page.compared("Sky?")
    next(compared)
    page.compare.stop(page.request)
    (last,) = compared
    assert "Stopped." in last[page.compare.result]


def test_newer_question_cancels_the_search_of_the_older(page) -> None:
    """The next question reset the stop of the one before, and both were computed."""
    left = page.send("Why?")
    next(left)
    page.chat.new(page.request)
    asked = page.send("And who?")
    next(asked)
    list(left)
    assert page.answers() == []
    assert is_send_back(page, list(asked)[-1])
    assert [each.text for each in page.answers()] == ["It is blue."]


def test_end_of_an_older_answer_keeps_the_stop_button(page) -> None:
    """Edited and sent again while an answer streams: the page lost its Stop, and the question that it shows."""
    go, older = page.held(), page.send("Why?")
    until_text(older, page.chat.live)
    (chat,) = page.services.chats.page()[0]
    question = page.services.chats.messages(chat.id)[0]
    page.engine.on_piece = lambda number: None
    newer = page.edit(question.id, "Who?", chat.id)
    assert page.chat.stop_button in next(newer)
    go.set()
    drawn = list(older)
    assert [changed(updates) for updates in drawn] == [[]], "Gradio repeats the last ones at the end"
    assert is_send_back(page, list(newer)[-1])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("steps", [1, 2], ids=["searching", "reading"])
def test_older_comparison_does_not_overwrite_the_newer(page, steps) -> None:
    """Asked by the button and then by Enter: "Stopped." was written over the one that ran, and its Stop went."""
    older, newer = page.compared("Sky?"), page.compared("Harbour?")
    list(islice(older, steps))
    next(newer)
    assert [changed(updates) for updates in older] == [[]]
    newer.close()


@pytest.mark.usefixtures("library")
def test_closing_the_page_stops_its_comparison(page) -> None:
    compared = page.compared("Sky?")
    list(islice(compared, 2))
    page.engine.on_prefill = page.close
    assert "Stopped." in str(list(compared)[-1])
    assert len(page.engine.prefilled) == 1


@pytest.mark.parametrize("leave", ["close", "new"])
def test_leaving_a_conversation_stops_its_measurement(page, leave) -> None:
    """Full prefill of a long prompt held the device to its end."""
    list(page.send("Why?"))
    (answer,) = page.answers()
    page.engine.on_prefill = page.close if leave == "close" else lambda: page.chat.new(page.request)
    measured = page.measure(answer)
    assert "Running full prefill" in str(next(measured))
    assert [changed(updates) for updates in measured] == [[]]
    assert "measured" not in page.answers()[0].report["full_prefill_is"]


def test_a_second_measurement_ends_the_first(page) -> None:
    list(page.send("Why?"))
    (answer,) = page.answers()
    first = page.measure(answer)
    next(first)
    second = page.measure(answer)
    next(second)
    assert [changed(updates) for updates in first] == [[]]
    assert "full prefill, measured" in str(list(second)[-1])


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_conversation_that_is_deleted_elsewhere_leaves_a_usable_page(page, when) -> None:
    """There was no Send button, Stop had no effect, and the typed text was lost."""
    list(page.send("Why?"))
    (chat,) = page.services.chats.page()[0]
    if when == "before":
        page.services.chats.delete(chat.id)
    answer = page.send("And who?", chat.id)
    if when == "while":
        until_text(answer, page.chat.live)
        page.services.chats.delete(chat.id)
    last = list(answer)[-1]
    assert is_send_back(page, last)
    assert (last[page.chat.question], last[page.chat.chat_id], last[page.chat.transcript]) == (
        "And who?",
        None,
        "",
    )
    assert "was deleted" in last[page.chat.live]
    assert is_send_back(page, list(page.send("And who?"))[-1])
    assert [each.text for each in page.answers()] == ["It is blue."]


def test_an_answer_keeps_the_list_of_conversations_as_it_is(page, monkeypatch) -> None:
    """Each question replaced what a search had found, and what "older ones" had shown, by the newest conversations."""
    monkeypatch.setattr("ragblend.ui.tab_chat.CHATS_PER_PAGE", 2)
    for question in ("Is granite hard?", "Why?"):
        list(page.send(question))
    page.in_list("more-chats")

    def lists():
        answered = [
            updates[page.chat.chats] for updates in page.send("And who?") if page.chat.chats in updates
        ]
        return [*answered, page.chat.new(page.request)[page.chat.chats]]

    assert all("granite" in listed for listed in lists())
    page.chat.search("granite", None, page.request)
    assert all("granite" in listed and "Why?" not in listed for listed in lists())


def test_a_conversation_that_is_gone_is_not_opened_and_stops_no_answer(page) -> None:
    go, answer = page.held(), page.send("Why?")
    until_text(answer, page.chat.live)
    gone = page.services.chats.create().id
    page.services.chats.delete(gone)
    with pytest.warns(UserWarning, match="was deleted"):  # Gradio's message, without a server
        page.in_list("open-chat", id=str(gone))
    go.set()
    assert is_send_back(page, list(answer)[-1])
    assert [each.text for each in page.answers()] == ["It is blue."]


def test_a_deletion_is_offered_to_be_undone_on_every_page(page, library) -> None:
    tab, view = page.frame.library, ("default", "", "", 0)
    (document,) = page.services.workspaces.library.documents("default")

    def click(act):
        return tab.act(*view, gr.EventData(None, {"act": act, "id": document.id}))

    drawn = click("delete-document")
    assert "sky.txt was deleted." in drawn[tab.deleted] and "No documents here" in drawn[tab.documents]
    assert tab.refresh(*view)[tab.deleted] == drawn[tab.deleted], "another page, or this one after a reload"
    seen = page.frame.tick("earlier", *view)[tab.fingerprint]
    drawn = click("undo-delete")
    assert drawn[tab.deleted] == "" and "sky.txt" in drawn[tab.documents] and drawn[tab.message] == ""
    assert page.frame.tick(seen, *view)[tab.deleted] == "", "other pages see it"
    assert "the document is back already" in click("undo-delete")[tab.message]


def test_only_gradios_copy_of_an_upload_is_deleted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "temporary"))
    mine, other = tmp_path / "temporary" / "hash" / "a.txt", tmp_path / "documents" / "b.txt"
    for path in (mine, other):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    delete_uploads([mine, other, tmp_path / "temporary" / "c.txt"])
    assert not mine.parent.exists()
    assert other.exists()
    assert (tmp_path / "temporary").exists()
