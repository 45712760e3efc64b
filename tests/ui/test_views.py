"""Views show the right words and figures for every state of the data."""

import pytest
from hostile import acts
from records import document, hood, job, message, queue, source

from ragblend.app.answering.citations import cite
from ragblend.app.library.encoding import KvProgress
from ragblend.app.library.jobs import QueuedFiles
from ragblend.app.library.registry import DocumentListPage
from ragblend.app.settings import Settings, cost_of
from ragblend.engine.selection import CONTROLS, METHODS, WITHOUT_RATIO
from ragblend.kvstore.policy import PrefillProfile
from ragblend.ui import page, views
from ragblend.ui.views import duration, milliseconds, size


def test_known_citations_are_buttons() -> None:
    html = views.chat.answer_turn(message("x"), cite("It is so [1]. And so [4].", [source("guide.html")]))
    assert acts(html).count("cite") >= 1
    assert 'data-number="1"' in html
    assert "rb-cite unknown" in html
    assert "The model cited [4], which is not among its sources." in html


def test_unsupported_citations_are_marked() -> None:
    boats = source("Three boats lie at the quay.")
    cited = cite("Three boats lie at the quay [1]. Nine boats lie at the quay [1].", [boats])
    html = views.chat.answer_turn(message("x"), cited)
    assert html.count("no sentence in it says this") == 2, "title and label, once"
    assert html.count('class="rb-cite model unsaid"') == html.count('class="rb-cite model"') == 1
    assert [f'data-at="{c.start}"' in html for c in cited.citations] == [True, True]
    assert '<span class="rb-cite">1</span>' in html


def test_figures_lead_to_their_source_and_what_no_source_says_is_marked() -> None:
    boats = source("Boat BO-7731 lies at the quay.")
    cited = cite("Boat BO-7731 lies at the quay. The mayor of Oslo bought nine boats.", [boats], ["Oslo"])
    html = views.chat.answer_turn(message("x"), cited)
    assert 'data-at="=BO-7731"' in html and html.count("rb-figure unknown") == 1
    assert 'title="Neither in the passages nor in the question">Oslo</span>' in html
    assert html.count('title="No source says this"') == 1


def test_an_answer_says_what_did_not_fit_that_it_was_stopped_and_what_went_wrong() -> None:
    report = {"notice": "2 passages were left out.", "stopped": True, "error": "The disk is full."}
    html = views.chat.answer_turn(message("x", report=report), cite("x", []))
    assert all(word in html for word in ("2 passages were left out.", "Stopped.", "The disk is full."))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"full_prefill_ms": 1550.0, "full_prefill_is": "measured"}, " · 3.1 times faster"),
        ({"full_prefill_ms": 1550.0, "full_prefill_is": "estimate"}, " · about 3.1 times faster"),
        ({"full_prefill_ms": 400.0, "full_prefill_is": "measured"}, ""),
        ({"full_prefill_ms": 1550.0, "method": "full"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_an_answer_says_how_much_faster_it_began(values, said) -> None:
    report = hood(ttft_ms=500.0, method="cacheblend") | values
    html = views.chat.answer_turn(message("x", report=report), cite("x", []))
    assert f"first token 500 ms{said}</button>" in html


# --- under the hood


def segment(label, number, text, **runs):
    tokens = sum(runs.values())
    return {"label": label, "number": number, "tokens": tokens, "runs": [*runs.items()], "text": text}


def segments():
    return [
        segment("instructions", None, "You are", f=10),
        segment("guide.pdf, p. 3", 1, "The causeway", r=80, c=20),
        segment("log.md", 2, "A leak", m=50),
    ]


def test_the_bar_has_a_stretch_for_every_run_in_proportion() -> None:
    html = views.hood.bar(segments())
    kinds = ("reused", "recomputed", "fresh", "missing")
    assert [html.count(f'class="k-{kind}"') for kind in kinds] == [1, 1, 1, 1]
    assert 'width="80.00"' in html
    assert "80 reused · [1] guide.pdf, p. 3: 100 tokens (80 reused, 20 recomputed)" in html
    html = views.hood.table(segments())
    assert html.count("<tr>") == 4
    assert "<td>80</td><td>20</td>" in html


def test_full_prefill_is_an_estimate_until_it_is_measured() -> None:
    fast = hood(ttft_ms=500.0, full_prefill_ms=2000.0, full_prefill_is="estimate", method="cacheblend")
    html = views.hood.speed(fast, 7)
    assert "full prefill, estimate" in html
    assert "First token 4.0 times faster." in html
    assert acts(html) == ["measure"]
    measured = views.hood.speed(fast | {"full_prefill_is": "measured"}, 7)
    assert "full prefill, measured" in measured
    assert acts(measured) == []
    slow = hood(ttft_ms=900.0, full_prefill_ms=300.0, full_prefill_is="measured", method="reuse")
    assert "Slower than full prefill" in views.hood.speed(slow, 1)
    assert "no details" in views.hood.view({"error": "x"}, 1)  # of an answer without a model


def test_the_timeline_has_a_row_a_track_and_draws_stalls_over_layers() -> None:
    events = [
        ("stall", "host", 2.0, 1.0, 0, None),
        ("compute", "host", 0.0, 8.0, 0, None),
        ("load", "w", 0.0, 3.0, 0, 2),
        ("probe", "host", 8.0, 1.5, 0, None),
    ]
    html = views.hood.timeline(events)
    assert html.count('class="track"') == 2
    assert html.index("p-compute") < html.index("p-stall")
    assert "load, layer 0, passage 3: 3.0 ms" in html
    assert "9.5 ms of prefill" in html
    assert (
        html.count('class="p-probe"') == 2 and "; probe 1.5 ms" in html
    )  # drawn, and in the legend and the sums


# --- library


def test_a_failed_document_says_why_and_can_be_tried_again() -> None:
    page = DocumentListPage((document(state="failed", reason="It is encrypted."), document()), 2, {})
    html = views.library.documents(page, 0, 50)
    assert "It is encrypted." in html
    assert acts(html) == [
        "retry-document",
        "delete-document",
        "view",
        "ask-document",
        "digest",
        "delete-document",
    ]


def test_every_skipped_file_is_listed_with_its_reason() -> None:
    """Five were, without reasons."""
    skipped = tuple((f"/x/{n}.exe", ".exe is not supported") for n in range(250))
    html = views.library.added(QueuedFiles(0, skipped, ()))
    assert html.count(".exe: .exe is not supported") == 200 and "and 50 more" in html


def test_what_was_guessed_or_left_out_is_shown_with_its_document() -> None:
    page = DocumentListPage(
        (document(notes=("its encoding was guessed: cp1252", "p. 3 <b>is</b> damaged")),), 1, {}
    )
    html = views.library.documents(page, 0, 50)
    assert '<div class="remark">Note: its encoding was guessed: cp1252</div>' in html
    assert "Note: p. 3 &lt;b&gt;is&lt;/b&gt; damaged" in html


def test_cancelled_document_is_not_shown_as_queued() -> None:
    """It was shown as queued, and could not be retried."""
    page = DocumentListPage((document(state="pending"),), 1, {})
    waiting, left = (views.library.documents(page, 0, 50, queued=paths) for paths in (["/x/a.pdf"], []))
    assert (">queued<" in waiting, ">queued<" in left) == (True, False)
    again = DocumentListPage((document(state="failed"),), 1, {})
    assert "rb-state s-pending" in views.library.documents(again, 0, 50, queued=["/x/a.pdf"])
    assert (acts(waiting), acts(left)) == (["delete-document"], ["retry-document", "delete-document"])


def test_every_method_of_the_engine_can_be_chosen_on_the_page() -> None:
    """The page offered nine of sixteen, without the best one and without those that `tune` may choose."""
    offered = METHODS.keys() - set(CONTROLS)
    assert set(views.LABELS) == offered
    assert WITHOUT_RATIO - set(CONTROLS) == views.WITHOUT_RATIO
    assert len(set(views.LABELS.values())) == len(offered)


def test_queue_heading_changes_when_all_files_are_done() -> None:
    """The heading still said "in the queue" when all files were done."""
    rows = [job(state="done")]
    waiting, over = (views.library.jobs(rows, 3, finished) for finished in (False, True))
    assert "<summary>3 files in the queue</summary>" in waiting
    assert "<summary>3 files: details</summary>" in over
    assert views.library.jobs([], 0, True) == ""


def kv(**values):
    return KvProgress(
        "encoding", "default", 12, 300, 90_000, 4 << 30, 1 << 30, "/x/b.pdf", 325.4, 900.0, **values
    )


def test_encoding_shows_progress_and_size_and_can_be_paused() -> None:
    html = views.library.queue(queue(finished=4, kv=kv()))
    assert "12 of 300 passages · 325 tokens a second · 15 min left" in html and "b.pdf" in html
    assert "4.0 GiB in total; 1.0 GiB of the budget is free" in html and "about all documents already" in html
    assert acts(html) == ["clear", "pause"]
    assert acts(views.library.queue(queue(finished=4, kv=kv(), paused=True))) == ["clear", "resume"]
    alone = views.library.queue(queue(total=0, finished=0, kv=KvProgress("converting", "default")))
    assert "Converting the model for its first use" in alone
    full = views.library.queue(
        queue(total=0, finished=0, kv_message="budget reached: 3 of 9 passages have KV")
    )
    assert "budget reached" in full and acts(full) == []
    assert "converting the model" in page.state_line(
        queue(finished=4, kv=KvProgress("converting", "default")), Settings()
    )
    assert page.fingerprint(queue(kv=kv())) != page.fingerprint(queue())


def test_header_shows_the_current_work() -> None:
    settings = Settings()
    assert page.state_line(queue(), settings) == "reading 1 of 4 files"
    assert page.state_line(queue(finished=4), settings) == "model: offline demo"
    assert page.state_line(queue(finished=4), settings, is_loading=True) == "loading the model …"
    assert "a line" in views.frame.header("a line")
    assert views.frame.banner("", None) == ""
    assert "no model" in views.frame.banner("no model", None)


def test_fingerprint_changes_with_each_step() -> None:
    first, second = queue(), queue(current=job(done=1, total=2))
    assert page.fingerprint(first) != page.fingerprint(second)
    # Tried again, and failed again between two looks: the page went on showing that it was being read.
    failed_again = queue(changes=9)
    listed = [page.documents_part(page.fingerprint(each)) for each in (first, second, failed_again)]
    assert listed[0] == listed[1] != listed[2]


def test_fingerprint_depends_on_the_view() -> None:
    """If an earlier collection's list arrives last, the next poll replaces it."""
    views = [("default", "", "", 0), ("letters", "", "", 0), ("letters", "a\nb: c", "", 0)]
    texts = [page.documents_part(page.fingerprint(queue(), view)) for view in views]
    assert len(set(texts)) == 3


# --- compare, store, settings


def test_only_reingesting_has_a_cost() -> None:
    profile = PrefillProfile.of("test", (0, 1024), (1, 1025), lambda cached, new: float(new))
    before = Settings()
    free = cost_of(before, before.changed({"top_k": 9}), 3, 30, profile)
    assert (free.encodes_again, free.passages) == (False, 0)
    shorter = cost_of(before, before.changed({"chunk_tokens": 256}), 3, 30, profile)
    assert shorter.cuts_again
    assert shorter.passages == 30
    assert shorter.seconds == pytest.approx(60 * 0.256)  # half as long, so twice as many
    other = cost_of(before, before.changed({"model": "x.gguf"}), 3, 30, profile)
    assert other.seconds is None  # the profile is another model's
    assert "not known" in views.settings.cost(other)
    assert "Nothing has changed" in views.settings.cost(cost_of(before, before, 3, 30, profile))
    assert "3 documents (30 passages) must be cut and embedded again" in views.settings.cost(shorter)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (milliseconds(4.25), "4.2 ms"),
        (milliseconds(870), "870 ms"),
        (milliseconds(1240), "1.24 s"),
        (milliseconds(None), "–"),
        (milliseconds(12_345), "12.3 s"),
        (size(1536), "1.5 KiB"),
        (size(5), "5 bytes"),
        (duration(40), "40 s"),
        (duration(7500), "2 h 5 min"),
    ],
)
def test_numbers_are_written_for_people(made, expected) -> None:
    assert made == expected
