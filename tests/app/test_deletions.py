"""Deletion is complete, by every command, also after a kill; the page's can be undone for ten minutes."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import killed_worker
import pytest
from app_fakes import SECRET, FakeEmbedder, Killed
from forked import exit_code
from waiting import SOON_S, until

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT, Chats
from ragblend.app.answering.highlight import open_document
from ragblend.app.answering.retrieval import search
from ragblend.app.library.deletions import UNDO_S, UndoableDeletions
from ragblend.app.library.encoding import encode_missing
from ragblend.app.library.ingest import ingest
from ragblend.app.library.maintenance import check_index
from ragblend.app.library.registry import Library
from ragblend.app.library.switching import switch_to_next_embedder
from ragblend.app.services import AppServices
from ragblend.app.workspace import Workspaces
from ragblend.integrations.chroma import VectorIndex
from ragblend.kvstore.errors import LibraryError, StoreLockedError
from ragblend.kvstore.lock import writer_lock

QUESTION = "Where is ruby RX-77012 hidden, behind which stair?"


class Clock:
    """A clock that a test turns on."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


def cite(workspaces, *names):
    """Store an answer for each of these documents that was given all of its passages."""
    for first, name in enumerate(names):
        document = workspaces.library.find("default", name)
        passages = enumerate(workspaces.library.passages_of(document.id), 10 * first)
        sources = [AnswerSource.of(document, each, 0.5, number) for number, each in passages]
        segments = [{"number": each.number, "text": each.text[:40]} for each in sources]
        workspaces.chats.add(1, "assistant", "There.", sources, {"segments": segments})


@pytest.fixture
def document(workspaces, documents, secret):
    """The secret document, ingested with others, with KV; an answer cites it."""
    ingest(workspaces.first, [documents])
    workspaces.chats.create("A talk")
    workspaces.chats.add(1, "user", "Where?")
    cite(workspaces, "secret.txt")
    return workspaces.library.find("default", "secret.txt")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def deletions(jobs, clock):
    with UndoableDeletions(jobs, clock) as opened:
        yield opened


def cited(workspaces):
    """The texts of the old answer's sources, and what its report says of them."""
    answer = workspaces.chats.messages(1)[-1]
    assert answer == workspaces.chats.message(answer.id)
    return {each.text for each in answer.sources} | {each["text"] for each in answer.report["segments"]}


def names(workspaces):
    return [each.name for each in workspaces.library.documents("default")]


def found(workspaces):
    return {source.document for source in search([workspaces.first], QUESTION, 10)}


def left_of(home, nodes):
    """Of these nodes, those that stand in a file, as text or as bytes; and the text, if it does."""
    content = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    left = [node for node in nodes if node.encode() in content or bytes.fromhex(node) in content]
    return left + ["CANARY"] * (b"CANARY" in content)


def is_gone(home, nodes):
    return left_of(home, nodes) == []


def test_docs_rm_erases_conversations_too(cli, home, workspaces, document):
    """`docs rm` left the passages in chats.sqlite; the page did not."""
    nodes = workspaces.library.node_ids(document.id)
    cite(workspaces, "sky.txt")
    assert left_of(home, nodes) == [*nodes, "CANARY"]
    assert cli("docs", "rm", "secret.txt") == 0
    assert is_gone(home, nodes)
    first, second = workspaces.chats.messages(1)[1:]
    assert {s.text for s in first.sources} == {DELETED_TEXT} and first.text == "There."
    assert "sky" in second.sources[0].text, "what others hold stays"


def test_text_removed_from_a_changed_document_is_erased(home, workspaces, document, secret):
    nodes = workspaces.library.node_ids(document.id)
    secret.write_text("Nothing is hidden here.")
    ingest(workspaces.first, [secret])
    assert is_gone(home, nodes)


@pytest.mark.parametrize(
    ("owner", "place"), [(Library, "remove"), (Chats, "erase_deleted_texts"), (VectorIndex, "erase")]
)
def test_interrupted_removal_is_finished_by_the_next(
    cli, home, workspaces, document, monkeypatch, owner, place
):
    """The registry's row is deleted last, and stores what is still to be erased in other files."""

    def killed(*_):
        raise Killed

    nodes = workspaces.library.node_ids(document.id)
    with monkeypatch.context() as broken:
        broken.setattr(owner, place, killed)
        if place == "remove":
            broken.setattr(Workspaces, "erase_removed", killed)
        with pytest.raises(Killed):
            cli("docs", "rm", "secret.txt")
    assert left_of(home, nodes)
    cli("docs", "rm", "secret.txt")  # says that there is none, where the row is gone already
    assert is_gone(home, nodes)


def test_writing_without_deleting_erases_nothing(workspace, documents, monkeypatch):
    monkeypatch.setattr(VectorIndex, "erase", lambda self: pytest.fail("nothing was deleted"))
    ingest(workspace, [documents])
    ingest(workspace, [documents])


def test_a_deleted_document_is_nowhere_but_can_be_brought_back(
    deletions, workspaces, document, unrelated, cli, told, capfd
):
    library, first = workspaces.library, workspaces.first
    before = cited(workspaces)
    assert "secret.txt" in found(workspaces) and "CANARY" in str(before)
    assert deletions.delete([document.id, "unknown"], "default") == 1
    assert [each.name for each in deletions.pending()] == ["secret.txt"]
    assert "secret.txt" not in found(workspaces) and "secret.txt" not in names(workspaces)
    assert library.page("default").total == 3 and document.path not in library.nodes("default").values()
    assert open_document(library, document.id).reason == "The document was deleted from the library."
    assert cited(workspaces) == {DELETED_TEXT, ""}
    assert "CANARY" not in workspaces.chats.export_markdown(1)
    assert encode_missing(first).passages == library.count_passages("default")
    assert check_index(first) == []
    # Other processes, one of which writes.
    assert "secret.txt" not in str(told("docs", "list", "--all"))
    assert cli("docs", "rm", "secret.txt") == 1 and "there is none" in capfd.readouterr().err
    assert cli("docs", "rm", "sky.txt") == 0
    embedded, encoded = len(first.embedder.embedded), list(first.engine.encoded)
    deletions.undo(document.id)
    assert deletions.pending() == [] and "secret.txt" in found(workspaces)
    assert cited(workspaces) == before
    assert library.documents_with([document.id])[document.id] == document
    assert check_index(first) == []
    ingest(first, [Path(document.path)])
    assert len(first.embedder.embedded) == embedded and first.engine.encoded == encoded, (
        "nothing is done again"
    )
    with pytest.raises(LibraryError, match="is back already"):
        deletions.undo(document.id)


def test_after_ten_minutes_nothing_of_it_is_left(deletions, workspaces, document, home, clock):
    nodes = workspaces.library.node_ids(document.id)
    deletions.delete([document.id], "default")
    clock.seconds += UNDO_S - 1
    deletions.delete_expired()
    assert left_of(home, nodes) and len(deletions.pending()) == 1
    clock.seconds += 1
    assert deletions.pending() == []
    with pytest.raises(LibraryError, match="it was deleted for good"):
        deletions.undo(document.id)
    deletions.delete_expired()
    assert is_gone(home, nodes) and names(workspaces) == ["boats.txt", "bread.md", "sky.txt"]
    assert cited(workspaces) == {DELETED_TEXT, ""}


def test_closing_completes_deletions(workspaces, document, home):
    nodes = workspaces.library.node_ids(document.id)
    with AppServices(Workspaces(workspaces.home, workspaces.settings)) as services:
        services.deletions.delete([document.id], "default")
        assert left_of(home, nodes)
    assert is_gone(home, nodes)


@pytest.mark.parametrize("by", ["docs rm", "ingest", "store gc", "the page"])
def test_a_killed_process_leaves_deletions_to_the_next(workspaces, document, home, cli, by):
    nodes = workspaces.library.node_ids(document.id)
    assert exit_code(killed_worker.delete, home, document.id) == 9
    assert left_of(home, nodes) and "secret.txt" not in names(workspaces)
    if by == "the page":
        with AppServices(Workspaces(workspaces.home, workspaces.settings)) as services:
            services.deletions.start()
            until(lambda: is_gone(home, nodes))
    else:
        paths = {"docs rm": ["sky.txt"], "ingest": [Path(document.path).with_name("sky.txt")]}
        assert cli(*by.split(), *paths.get(by, ())) == 0
    assert is_gone(home, nodes)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_closing_leaves_no_timer(workspaces, document, jobs, home, monkeypatch, call):
    """A running timer could set the next one after it was looked for. It was never stopped, and later opened the files
    of the closed home again.

    call: of the clock by the running timer, during which the closing begins.
    """
    monkeypatch.setattr("ragblend.app.library.deletions.RETRY_S", 0.0)
    nodes, cancel = workspaces.library.node_ids(document.id), threading.Timer.cancel
    times, calls, is_there, is_closing = iter([0.0]), [], threading.Event(), threading.Event()

    def clock():
        if threading.current_thread() is threading.main_thread():
            return next(times, UNDO_S)  # so that the timer is called at once
        calls.append(None)
        if len(calls) == call:
            is_there.set()
            assert is_closing.wait(SOON_S)
        return 0.0

    opened = UndoableDeletions(jobs, clock)
    opened.delete([document.id], "default")
    assert is_there.wait(SOON_S)
    monkeypatch.setattr(threading.Timer, "cancel", lambda timer: (cancel(timer), is_closing.set()))
    opened.close()
    left = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    for timer in left:
        cancel(timer)
    assert left == [] and is_gone(home, nodes)


def test_a_deletion_that_comes_too_late_is_refused(workspaces, document, jobs):
    """One that waited for another writer while it was closed was hidden, and neither completed nor undone."""
    with UndoableDeletions(jobs) as opened, ThreadPoolExecutor() as pool:
        with workspaces.writing():
            waiting = pool.submit(opened.delete, [document.id], "default")
            until(lambda: workspaces.has_waiting_writer)
            opened.close()
        with pytest.raises(LibraryError, match="nothing was deleted"):
            waiting.result(SOON_S)
    assert "secret.txt" in names(workspaces)


def test_what_a_killed_process_left_is_tried_again(workspaces, document, home, monkeypatch, caplog):
    """While another process wrote, the page only said so."""
    monkeypatch.setattr("ragblend.app.library.deletions.RETRY_S", 0.0)
    nodes = workspaces.library.node_ids(document.id)
    assert exit_code(killed_worker.delete, home, document.id) == 9
    with AppServices(Workspaces(workspaces.home, workspaces.settings)) as services:
        with writer_lock(workspaces.home.lock):
            services.deletions.start()
            until(lambda: "this is tried again" in caplog.text)
        until(lambda: is_gone(home, nodes))


def test_only_one_process_can_undo(deletions, workspaces, document, jobs):
    deletions.delete([document.id], "default")
    other = workspaces.library.find("default", "sky.txt")
    with UndoableDeletions(jobs) as second, pytest.raises(StoreLockedError, match="can still undo deletions"):
        second.delete([other.id], "default")
    assert "sky.txt" in names(workspaces)


@pytest.mark.parametrize("changed", [False, True])
def test_ingesting_it_again_brings_it_back(deletions, workspaces, document, home, secret, clock, changed):
    nodes, embedded = workspaces.library.node_ids(document.id), len(workspaces.first.embedder.embedded)
    deletions.delete([document.id], "default")
    if changed:
        secret.write_text("The keeper has moved the gems to the cellar of the brewery.")
    report = ingest(workspaces.first, [secret])
    assert deletions.pending() == [] and "secret.txt" in names(workspaces)
    assert (report.updated if changed else report.unchanged) == [str(secret)]
    assert (len(workspaces.first.embedder.embedded) == embedded) is not changed
    clock.seconds += UNDO_S
    deletions.delete_expired()
    assert "secret.txt" in names(workspaces), "the old deadline does not count"
    assert is_gone(home, nodes) is changed
    deletions.delete([document.id], "default")  # the same again
    clock.seconds += UNDO_S
    deletions.delete_expired()
    assert is_gone(home, nodes) and "secret.txt" not in names(workspaces)


def test_an_upload_that_waits_in_the_queue_is_not_deleted(deletions, workspaces, jobs, tmp_path, clock):
    (letter := tmp_path / "letter.txt").write_text(SECRET)
    jobs.upload([letter], "default")
    job = jobs.store.next()
    ingest(workspaces.first, [Path(job.path)])
    jobs.store.finish(job.id, "done")
    deletions.delete([workspaces.library.find("default", "letter.txt").id], "default")
    jobs.upload([letter], "default")
    clock.seconds += UNDO_S
    deletions.delete_expired()
    assert os.path.exists(job.path)
    assert ingest(workspaces.first, [Path(job.path)]).unchanged and "letter.txt" in found(workspaces)


def test_deleting_its_collection_completes_it(deletions, workspaces, document, jobs, home):
    nodes = workspaces.library.node_ids(document.id)
    deletions.delete([document.id], "default")
    removed, _ = jobs.remove_collection("default")
    assert len(removed) == 3 and is_gone(home, nodes) and deletions.pending() == []
    assert workspaces.library.collections() == []


def test_another_embedder_completes_it(deletions, workspaces, documents, document, home, monkeypatch):
    """Its vectors are by the old embedder; a switch that waited for the deletion would never have ended."""
    made = {}
    monkeypatch.setattr(Workspaces, "embedder", lambda self, model: made.setdefault(model, FakeEmbedder()))
    nodes = workspaces.library.node_ids(document.id)
    everything = [each.id for each in workspaces.library.documents("default")]
    deletions.delete(everything, "default")
    workspaces.change(embedder="sentence-transformers/other")
    assert workspaces.first.embedder_name == "default"
    assert switch_to_next_embedder(workspaces.first)
    assert workspaces.first.embedder_name == "sentence-transformers/other"
    assert deletions.pending() == []
    assert is_gone(home, nodes)


def test_a_file_that_vanishes_meanwhile_changes_nothing(deletions, workspaces, document, jobs, secret):
    deletions.delete([document.id], "default")
    secret.unlink()
    assert jobs.queue_removal([secret], "default") == 0
    deletions.undo(document.id)
    assert "secret.txt" in found(workspaces)
    assert jobs.queue_removal([secret], "default") == 1
