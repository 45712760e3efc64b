"""Views make harmless HTML of whatever documents, answers, names or errors contain."""

import re
from pathlib import Path

import pytest
from hostile import HUNDRED, SCRIPTS, acts, faults
from records import WHEN, document, hood, job, message, queue, source, stats

from ragblend.app.answering.chats import Chat
from ragblend.app.answering.citations import cite
from ragblend.app.answering.comparing import Comparison, MethodResult
from ragblend.app.answering.highlight import Highlight
from ragblend.app.library.documents import SCANNED
from ragblend.app.library.encoding import KvProgress
from ragblend.app.library.jobs import QueuedFiles
from ragblend.app.library.maintenance import Finding, RepairReport
from ragblend.app.library.pdf_pages import Box, PageImage
from ragblend.app.library.registry import DocumentListPage
from ragblend.app.library.removal import RemovedDocument
from ragblend.app.library.watching import WatchedFolder
from ragblend.app.model_offers import GIGABYTE, MachineCapacity, offers
from ragblend.app.settings import Cost
from ragblend.engine.config import TokenCounts
from ragblend.measuring.variants import Variant
from ragblend.ui import views
from ragblend.ui.views import markdown, problem


def compared(method, text, ratio=None, kl=0.02):
    return MethodResult(Variant(method, ratio), text, 500.0, kl, 0.9, TokenCounts(100, 80, 10), text)


def drawn(text):
    """Every view that the page draws, as `file.macro` and what it is given."""
    cited = cite(f"{text} [1] and [7].", [source(text)])
    asked, answered = message(text, "user"), message(text)
    failed = message(text, report={"error": text, "notice": text, "stopped": True, "ttft_ms": 5.0})
    yield "chat.transcript", [asked, failed, asked, answered], [None, cited, None, cited]
    yield "chat.live_turn", text, text, text, text
    yield "chat.welcome", 3, [text], text
    yield "chat.welcome", 0, [], text, offers(MachineCapacity(40 * GIGABYTE, 2, 1e13, 1e11))
    yield ("chat.reading_samples",)
    yield "chat.asked_document", text
    yield ("chat.attach",)
    chat = Chat(1, text, WHEN, WHEN, 2)
    yield "chat.conversations", [chat], 1, 1
    yield "chat.found_conversations", [(chat, text)], None
    yield "chat.export_links", 1
    image = PageImage(1, text, text, 10, 10, (Box(1, 1, 5, 5),))
    yield ("passage.empty",)
    origin = {"document": text, "message": text, "number": text, "at": text}
    for found in (
        Highlight(text, (image,), page_count=3),
        Highlight(text, (), text, 0, len(text), True, True),
        Highlight(text, reason=text),
    ):
        yield "passage.view", source(text), found, origin, True
        yield "passage.viewer", found, origin, 0
    yield ("hood.empty",)
    yield "hood.view", hood(text), 1
    rows = tuple(
        document(text, state=state, reason=text + SCANNED, notes=(text,)) for state in ("done", "failed")
    )
    yield "library.documents", DocumentListPage(rows, 200, {}), 0, 50, text
    yield "library.documents", DocumentListPage((), 0, {}), 0, 50, text
    yield "library.collection_tools", text, 3
    kv = KvProgress("encoding", text, 1, 2, 100, 2000, 1000, text, 10.0, 10.0)
    yield "library.queue", queue(counts={text: 2}, current=job(text, done=1, total=2), waiting=text)
    yield "library.queue", queue(total=1, counts={text: 1, "failed": 1}, kv=kv)
    yield "library.queue", queue(total=1, kv_message=text)
    for state in ("failed", "embedding"):
        yield "library.jobs", [job(text, reason=text, state=state)], 5, state == "failed"
    yield "library.added", QueuedFiles(1, ((text, text),) * 9, ((text, text),))
    folder = WatchedFolder(1, text, text)
    folder.reason = text
    yield "library.watched", [folder]
    yield "library.undoable", rows
    yield "library.deleted", [RemovedDocument(text, 3, 500)]
    yield ("compare.looking",)
    full, left = (compared(name, text) for name in ("full", text))
    yield "compare.comparison", Comparison(100, 3, text, full, (left, full)), False
    yield "store.overview", stats(text), 2, 7, 5000
    yield "store.hit_rates", [(1.0, 1, 1), (2.0, 5, 1)]
    yield "store.findings", [Finding("kv", text)]
    yield "store.repaired", RepairReport(1, 3, 3, 2, 0, 0, ())
    yield "settings.cost", Cost(("model", text), True, True, 3, 30, None)
    yield "settings.downloading", text, 1, 2, 3.0
    yield "settings.saved", 2, text
    yield "settings.meaning", text
    yield "frame.header", text
    yield "frame.banner", text, text
    yield "frame.error_box", text
    yield ("parts.close_cover",)
    yield "login.page", False, text


def test_every_view_that_the_page_draws_is_here() -> None:
    called = re.compile(r"\bviews\.([a-z]+\.[a-z_]+)\(")
    source_files = Path(views.__file__).parent.glob("*.py")
    used = {name for file in source_files for name in called.findall(file.read_text())}
    assert len(used) > 25
    assert used - {"login.landing"} == {name for name, *_ in drawn("x")}


def html_of(name, *values):
    file, macro = name.split(".")
    return getattr(getattr(views, file), macro)(*values)


@pytest.fixture(scope="module")
def plain():
    """Each view's name, what it asks for, and what would run in it: the login is a page with a style and a form."""
    made = [(name, html_of(name, *values)) for name, *values in drawn("plain words")]
    return [(name, acts(html), faults(html) if name == "login.page" else []) for name, html in made]


@pytest.mark.parametrize("text", HUNDRED, ids=range(100))
def test_hostile_values_are_escaped(plain, text) -> None:
    for (name, expected, allowed), theirs in zip(plain, drawn(text), strict=True):
        html = html_of(*theirs)
        assert faults(html) == allowed, (name, html[:2000])
        assert set(acts(html)) <= {"cite", *expected}, name
        if "cite" not in expected:  # a text may hold any number of citations
            assert acts(html) == expected, name
    assert faults(markdown(text) + problem(text)) == acts(markdown(text) + problem(text)) == []


def test_invisible_and_direction_characters_are_replaced() -> None:
    for name, *values in drawn("a\u202eb\x1bc"):
        assert not re.search("[\u202e\x1b]", html_of(name, *values)), name


def test_the_check_can_fail() -> None:
    """Unescaped, nearly every script is a fault."""
    assert sum(bool(faults(text)) for text in SCRIPTS) > 25
    assert acts(SCRIPTS[36]) == ["delete-document"]


def test_markdown_is_drawn_without_images_and_links_say_nothing_about_the_page() -> None:
    made = markdown("**b** ![x](http://evil.example/i.png) [l](https://example.org/)\n\n| a |\n|---|\n| 1 |")
    assert "<strong>b</strong>" in made
    assert "<table>" in made
    assert "<img" not in made
    assert 'rel="noopener noreferrer nofollow"' in made


def test_documents_cannot_fake_citation_marks() -> None:
    """A text that holds the private characters would otherwise put somebody else's citation into an answer."""
    made = markdown(["a \ue0005\ue001 ", 5, " z"], lambda number: f"<b>{number}</b>")
    assert made.count("<b>5</b>") == 1
