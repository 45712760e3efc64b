"""Whatever stands in documents, answers, names or errors, the HTML that is made of it does nothing by itself."""

import pytest
from hostile import HUNDRED, acts, faults

from ragblend.app.chat_records import Chat, ChatPage, FoundChat, Message
from ragblend.app.citations import SourceRow, cite
from ragblend.app.hood import Event, Hood, HoodSegment, Run
from ragblend.app.upkeep import Finding
from ragblend.ui import (
    render_chat,
    render_compare,
    render_frame,
    render_hood,
    render_library,
    render_passage,
    render_store,
    render_timeline,
)
from ragblend.ui.render_text import markdown, problem

WHEN = "2026-03-04T10:00:00+00:00"


def source(text, number=1):
    return SourceRow(number, "n", "d", "default", text, text, 0.5, text)


def message(text, role="assistant", report=None):
    return Message(1, 1, role, text, WHEN, (source(text),), report or {})


def hood(text):
    segment = HoodSegment(text, 1, 5, (Run("reused", 3), Run("recomputed", 2)), text)
    return Hood(
        model=text,
        device=text,
        dtype=text,
        method=text,
        ratio=0.15,
        segments=(segment,),
        tokens={"prompt": 5, "reused": 3},
        retrieve_ms=1.0,
        load_ms=1.0,
        stall_ms=0.0,
        prefill_ms=1.0,
        ttft_ms=2.0,
        total_ms=3.0,
        tokens_per_s=4.0,
        full_prefill_ms=None,
        full_prefill_is="",
        full_prefill_why=text,
        timeline=(Event(text, text, 0.0, 1.0, 1, 0),),
        memory_bytes={text: 5},
        hits=1,
        misses=0,
        notice=text,
        stopped=False,
    )


class Anything:
    """A record of the app with one text wherever a text may stand."""

    def __init__(self, text, **values):
        self._text = text
        self.__dict__.update(values)

    def __getattr__(self, name):
        return self._text


def views(text):
    """Every view that shows something which documents, models, file names or errors may hold."""
    cited = cite(f"{text} [1] and [7].", [source(text)])
    job = Anything(text, id=1, done=1, total=2)
    overview = Anything(
        text,
        counts={text: 2},
        total=3,
        finished=1,
        files_per_minute=1.0,
        seconds_left=9.0,
        paused=False,
        current=job,
    )
    document = Anything(text, size=1, passages=1, updated_at=WHEN, scanned=True, uploaded=False)
    error = message(text, report={"error": text, "notice": text, "stopped": True, "ttft_ms": 5.0})
    yield markdown(text)
    yield problem(text)
    yield render_chat.answer_turn(message(text), cited, is_last=True)
    yield render_chat.answer_turn(error, cited)
    yield render_chat.user_turn(message(text, "user"))
    yield render_chat.live_turn(text, text, text, text)
    yield render_chat.welcome(3, [text])
    chat = Chat(1, text, WHEN, WHEN, 2)
    yield render_chat.conversations(ChatPage((chat,), 1), 1)
    yield render_chat.found_conversations([FoundChat(chat, text)], None)
    for found in highlights(text):
        yield render_passage.source_view(source(text), found)
    yield render_hood.hood_view(hood(text), 1)
    yield render_timeline.timeline(hood(text).timeline)
    yield render_library.documents(Anything(text, documents=[document], total=1), 0, 50, text)
    yield render_library.documents(Anything(text, documents=[], total=0), 0, 50, text)
    yield render_library.queue(overview)
    yield render_library.queue(
        Anything(text, counts={text: 1, "failed": 1}, total=1, finished=1, waiting=text)
    )
    for finished in (False, True):
        yield render_library.jobs([job], 5, finished)
    yield render_library.added(Anything(text, files=1, skipped=(text,) * 9, failed=((text, text),)))
    yield render_library.watched([Anything(text, active=False)])
    yield render_store.findings([Finding("kv", text)])
    yield render_frame.header(text)
    yield render_frame.banner(text)
    yield render_compare.difference(text, "other words")


def highlights(text):
    class PageHighlight(Anything):
        pass

    class TextHighlight(Anything):
        pass

    class NotLocated(Anything):
        pass

    image = Anything(
        text,
        number=1,
        png=b"\x89PNG",
        width=10,
        height=10,
        boxes=[Anything(text, left=1, top=1, right=5, bottom=5)],
    )
    yield PageHighlight(text, pages=[image])
    yield TextHighlight(text, start=0, stop=len(text), cut_before=True, cut_after=True)
    yield NotLocated(text)


def test_there_are_a_hundred_hostile_texts() -> None:
    assert len(HUNDRED) == 100


@pytest.mark.parametrize("text", HUNDRED, ids=range(100))
def test_nothing_hostile_becomes_more_than_text(text) -> None:
    ours = list(views("plain words"))
    for number, html in enumerate(views(text)):
        assert faults(html) == [], (number, html[:2000])
        assert acts(html) == acts(ours[number]) or set(acts(html)) <= {"cite", *acts(ours[number])}, number


def test_the_check_sees_what_it_looks_for() -> None:
    """The other side: raw, nearly every one of the scripts is a fault."""
    from hostile import SCRIPTS

    assert sum(bool(faults(text)) for text in SCRIPTS) > 25
    assert acts(SCRIPTS[36]) == ["delete-document"]


def test_markdown_is_drawn_without_images_and_links_say_nothing_about_the_page() -> None:
    made = markdown("**b** ![x](http://evil.example/i.png) [l](https://example.org/)\n\n| a |\n|---|\n| 1 |")
    assert "<strong>b</strong>" in made
    assert "<table>" in made
    assert "<img" not in made
    assert 'rel="noopener noreferrer nofollow"' in made


def test_the_marks_of_inserts_cannot_be_written_by_a_document() -> None:
    """A text that holds the private characters would otherwise put somebody else's citation into an answer."""
    made = markdown(["a \ue0005\ue001 ", 5, " z"], lambda number: f"<b>{number}</b>")
    assert made.count("<b>5</b>") == 1
