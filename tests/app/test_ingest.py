"""Ingest: added, unchanged, updated, failed and missing files; an interruption at any point loses nothing."""

import errno
import json
import os
import re
import signal
import threading
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import killed_worker
import numpy as np
import pytest
from forked import exit_code
from waiting import idle, until

from ragblend.app.answering.retrieval import search
from ragblend.app.library import readers
from ragblend.app.library.discovery import discover, is_gone
from ragblend.app.library.documents import DocumentState, on_one_line, printable
from ragblend.app.library.encoding import encode_missing
from ragblend.app.library.ingest import MANY_FILES, SKETCHED, embed_in_full, ingest, ingest_paths
from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.removal import remove_document
from ragblend.app.workspace import Workspaces
from ragblend.engine.model.gate import GateVerdict
from ragblend.integrations.chroma import separate_vectors
from ragblend.integrations.text_index import MIN_TEXT_CHARS
from ragblend.kvstore.errors import StoreFullError, StoreLockedError


@pytest.fixture
def reopen(open_workspace, documents):
    """Ingests the documents, and opens the home anew when it is called."""
    ingest(open_workspace(), [documents])
    return open_workspace


def nodes_of(workspace):
    return {node for ids, _ in workspace.library.embeddings("default") for node in ids}


def assert_consistent(workspace):
    """Registry, index, KV and what is found in prompts are the same nodes, and nothing is left to do."""
    nodes = nodes_of(workspace)
    passages = workspace.library.passages(sorted(nodes)).values()
    findable = [passage.text for passage in passages if len(passage.text) >= MIN_TEXT_CHARS]
    assert len(workspace.known_passages) == len(findable)
    for text in findable:
        (found,) = workspace.known_passages.find(f"<<{text}>>")
        assert found.stop - found.start == len(text)
    assert workspace.index.node_ids() == nodes
    assert workspace.engine.stored() == nodes
    for document in workspace.library.documents("default"):
        assert document.state is DocumentState.DONE and not workspace.library.stale(document.id)


def test_files_are_ingested(workspace, documents):
    seen = []
    report = ingest(workspace, [documents], lambda *progress: seen.append(progress))
    assert len(report.added) == 3 and not report.failed and not report.interrupted
    assert report.passages == report.embedded == report.encoded == len(nodes_of(workspace)) > 3
    assert_consistent(workspace)
    seen = [(*progress, "")[:4] for progress in seen]
    final = {stage: (done, total) for stage, done, total, _ in seen}
    assert final == {"parse": (3, 3), "embed": (report.passages,) * 2, "encode": (report.passages,) * 2}
    assert {name for stage, _, _, name in seen if stage == "embed"} == {"sky.txt", "bread.md", "boats.txt"}


def test_unchanged_files_cost_nothing(reopen, documents, monkeypatch):
    second = reopen()
    monkeypatch.setattr(
        "ragblend.app.library.ingest._read_facts", lambda path: pytest.fail("read all the same")
    )
    report = ingest(second, [documents])
    assert len(report.unchanged) == 3
    assert second.embedder.embedded == [] and second.engine.encoded == []
    assert (report.embedded, report.encoded) == (0, 0)


def test_changed_file_replaces_only_what_changed(open_workspace, documents):
    path = documents / "boats.txt"
    lines = [f"Boat number {n} lies at quay {n} and carries {n} barrels of herring today." for n in range(6)]
    path.write_text(" ".join(lines))
    first = open_workspace()
    ingest(first, [documents])
    before = nodes_of(first)
    last = "The last boat has sunk with all of its barrels of herring today."
    path.write_text(" ".join([*lines[:-1], last]))
    second = open_workspace()
    report = ingest(second, [documents])
    assert report.updated == [str(path)] and len(report.unchanged) == 2
    assert len(second.engine.encoded) == len(second.embedder.embedded) == 1
    assert len(before - nodes_of(second)) == len(nodes_of(second) - before) == 1
    assert_consistent(second)


@pytest.mark.parametrize("changed", [{"chunk_tokens": 64}, {"ocr_language": "thai"}])
def test_other_chunks_or_another_language_of_scans_read_documents_again(reopen, documents, changed):
    second = reopen(**changed)
    again = ingest(second, [documents])
    assert len(again.updated) == 3 and not again.unchanged
    assert bool(again.embedded) == ("chunk_tokens" in changed)
    assert_consistent(second)


def test_unreadable_path_is_not_missing(workspace, documents, monkeypatch):
    """It raised an error; and `--prune` must not treat it as deleted."""
    ingest(workspace, [documents])
    stat = Path.stat

    def refuse(path, **options):
        if path.name == "sky.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    report = ingest_paths(workspace, [documents], prune=True)
    assert report.pruned == [] and report.failed.keys() == {str(documents / "sky.txt")}


def test_bad_files_are_listed_and_stop_nothing(workspace, documents, make):
    (documents / "empty.txt").touch()
    (documents / "fake.pdf").write_text("no pdf")
    make["pdf"](documents / "locked.pdf", ["secret"], password="x")
    (documents / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    (documents / ".hidden.txt").write_text("hidden")
    report = ingest(workspace, [documents, documents / "none.txt", documents / "photo.jpg"])
    kinds = {Path(path).name: kind for path, (kind, _) in report.failed.items()}
    assert kinds == {
        "empty.txt": "EmptyDocumentError",
        "fake.pdf": "UnreadableDocumentError",
        "locked.pdf": "EncryptedDocumentError",
        "none.txt": "DocumentNotFoundError",
        "photo.jpg": "UnreadableDocumentError",
    }
    assert len(report.added) == 3
    assert report.skipped == {
        str(documents / ".hidden.txt"): "the setting `skip` leaves out its name",
        str(documents / "photo.jpg"): ".jpg is not supported",
    }
    states = {d.name: d.state for d in workspace.library.documents("default")}
    assert states["locked.pdf"] is DocumentState.FAILED
    assert not {"none.txt", ".hidden.txt"} & states.keys()
    (documents / "empty.txt").write_text("Now there is something in it.")
    assert ingest(workspace, [documents]).added == [str(documents / "empty.txt")]


def test_file_that_becomes_unreadable_keeps_its_earlier_version(reopen, documents):
    (documents / "sky.txt").write_bytes(b"\x89PNG\r\n\x1a\n")
    second = reopen()
    report = ingest(second, [documents])
    document = second.library.document("default", str(documents / "sky.txt"))
    assert len(report.failed) == 1 and document.state is DocumentState.FAILED
    assert document.passages == 1 and "earlier version is kept" in document.reason
    (documents / "sky.txt").write_text("The sky over the harbour is blue in the morning.")
    third = reopen()
    assert not ingest(third, [documents]).failed
    assert third.embedder.embedded == [] and third.engine.encoded == []
    assert_consistent(third)


def test_an_odd_path_fails_alone(workspace, documents, monkeypatch):
    """Word's lock files and unknown users' homes ended the run, and so did a name longer than names may be."""
    monkeypatch.chdir(documents)
    (documents / "~$report.docx").write_bytes(b"\x05Ada" + bytes(158))
    odd = ["~$report.docx", "~nosuch/docs", f"{'a' * 300}.txt", "loop.txt"]
    (documents / "loop.txt").symlink_to("loop.txt")
    report = ingest(workspace, [*map(Path, odd), documents])
    assert len(report.added) == 3
    assert report.failed.keys() == {printable(documents / name) for name in odd}
    assert "File name too long. Check its name" in report.failed[str(documents / odd[2])][1]
    json.dumps(report.to_json()).encode()


@contextmanager
def nobody(folder):
    """A user whom modes stop, in the place of root, whom none does; what is in the folder can be reached."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.parents):
        path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_entered_fails_alone(tmp_path):
    closed, listed, good = (tmp_path / name for name in ("closed", "listed", "good"))
    modes = {closed: 0o000, listed: 0o644, good: 0o755}
    for folder, mode in modes.items():
        folder.mkdir()
        (folder / "a.txt").write_text("x")
        folder.chmod(mode)
    try:
        with nobody(tmp_path):
            found = discover([closed / "a.txt", *modes])
            assert not is_gone(closed / "a.txt") and is_gone(good / "b.txt")
    finally:
        for folder in modes:
            folder.chmod(0o700)
    assert found.files == (listed / "a.txt", good / "a.txt"), "the first fails when it is read"
    assert dict(found.failed).keys() == {closed, closed / "a.txt"}
    assert all("Permission denied. Check its" in str(error) for _, error in found.failed)


def test_other_writers_get_the_lock_between_two_files(workspace, documents):
    """Deletes and uploads waited until a whole ingest was finished."""
    spaces, late = workspace.workspaces, documents.parent / "late.txt"
    late.write_text("A letter that came late.")
    ingest(workspace, [documents])
    for path in documents.iterdir():
        path.write_text(f"{path.read_text()} And more.")
    gone, seen = spaces.library.find("default", "sky.txt"), []
    jobs = JobQueue(spaces)
    deleting = threading.Thread(target=jobs.remove, args=([gone.id], "default"))

    def begin(texts):
        """Of boats.txt, bread.md, then of what has passed, which is not left before its end, and of sky.txt."""
        seen.append(gone.id in spaces.library.documents_with([gone.id]))
        if len(seen) == 1:
            deleting.start()
        elif len(seen) == 2:
            jobs.add([late], "default")
            jobs.start()
        if len(seen) <= 3:
            until(lambda: spaces.has_waiting_writer)

    workspace.embedder.on_embed = begin
    report = ingest_paths(workspace, [documents])
    assert idle(jobs) and [job.state for job in jobs.page()[0]] == ["done"]
    jobs.end()
    assert seen == [True, False, False, True]
    assert len(report.updated) == 2 and report.added == [gone.path]
    encode_missing(workspace)
    assert_consistent(workspace)


@pytest.fixture
def many(tmp_path):
    """A folder of so many files that the first three are sketched; the second half of each says what no other does."""
    folder = tmp_path / "many"
    folder.mkdir()
    for n in range(MANY_FILES + 3):
        text = f"Boat {n} carries herring and salt to quay number{n} whose keeper is called keeper{n} there."
        (folder / f"boat{n:02}.txt").write_text(text)
    return folder


def vectors_of(workspace):
    """Of every passage, as the registry has them and as the index does."""
    rows = {
        node: row.tolist()
        for nodes, found in workspace.library.embeddings("default")
        for node, row in zip(nodes, found, strict=True)
    }
    collection = workspace.index._collection()
    found = collection.get(include=["embeddings"])
    indexed = dict(zip(found["ids"], found["embeddings"], strict=True))
    stored = {node: separate_vectors(node, np.array(rows[node])) for node in rows}
    known = {f"{node}#{n}": row for node in rows for n, row in enumerate(stored[node])}
    assert indexed.keys() == known.keys()
    np.testing.assert_allclose([indexed[name] for name in known], list(known.values()), atol=1e-6)
    return rows


def sketched(workspace):
    found = workspace.library.documents("default")
    return sorted(document.name for document in found if document.recipe.endswith(SKETCHED))


def test_first_of_many_files_is_searchable_by_its_sketch(workspace, many, tmp_path):
    ingest_paths(workspace, [many])
    assert sketched(workspace) == ["boat00.txt", "boat01.txt", "boat02.txt"]
    before = vectors_of(workspace)
    found = search([workspace], "boat 0 carries herring", 8)
    assert "boat00.txt" in [source.document for source in found]
    assert workspace.engine.stored() == set() and not workspace.engine.weights_loaded, "no model is needed"
    workspace.embedder.embedded.clear()
    assert embed_in_full(workspace) and len(workspace.embedder.embedded) == 3 and not sketched(workspace)
    after = vectors_of(workspace)
    assert sum(map(len, after.values())) == sum(map(len, before.values())) + 3
    assert search([workspace], "keeper0 there", 1)[0].document == "boat00.txt"
    # File by file: none waits behind another.
    with Workspaces.open(tmp_path / "other", chunk_tokens=16) as other:
        for path in sorted(many.iterdir()):
            ingest_paths(other.first, [path])
        assert vectors_of(other.first) == after
    report = ingest_paths(workspace, [many])
    assert len(report.unchanged) == MANY_FILES + 3 and report.embedded == 0
    assert embed_in_full(workspace) and len(workspace.embedder.embedded) == 3, "nothing is embedded twice"


def test_embedding_in_full_is_cancelled_and_continued(open_workspace, many):
    first = open_workspace()
    ingest_paths(first, [many])
    first.embedder.embedded.clear()
    assert not embed_in_full(first, is_cancelled=lambda: len(first.embedder.embedded) == 2)
    assert len(sketched(first)) == 2, "left behind the second was embedded and before it was written"
    second = open_workspace()
    assert len(ingest(second, [many]).unchanged) == MANY_FILES + 3
    assert not sketched(second) and len(second.embedder.embedded) == 2
    assert_consistent(second)


@pytest.mark.parametrize("point", ["embed_passages", "embeddings_of"])
def test_document_deleted_during_full_embedding_stays_deleted(workspace, many, monkeypatch, point):
    ingest_paths(workspace, [many])
    (document, *_) = workspace.library.documents("default")
    owner = workspace.embedder if point == "embed_passages" else workspace.library
    original = getattr(owner, point)

    def delete_first(*given):
        monkeypatch.setattr(owner, point, original)
        with workspace.workspaces.writing():
            remove_document(workspace, document)
        return original(*given)

    monkeypatch.setattr(owner, point, delete_first)
    assert embed_in_full(workspace) and not sketched(workspace)
    assert len(workspace.library.documents("default")) == MANY_FILES + 2
    assert workspace.index.node_ids() == nodes_of(workspace)


def test_a_changed_file_is_embedded_in_full_at_once(workspace, many):
    ingest_paths(workspace, [many])
    for path in many.iterdir():
        path.write_text(
            path.read_text() + " And then it sails home again to the harbour that it came from before."
        )
    assert len(ingest_paths(workspace, [many]).updated) == MANY_FILES + 3
    assert not sketched(workspace)
    vectors_of(workspace)


@pytest.mark.parametrize(
    ("limits", "stopped", "without_kv", "words"),
    [
        ({"room_bytes": 100}, "budget", None, "budget reached: {encoded} of {passages} passages"),
        ({"left_out": 2}, "", 2, "Too long for fake, or not ingested with it: 2 passages."),
        (
            {"verdict": GateVerdict(False, (), "no keys")},
            "model",
            None,
            "is not fused (no keys)",
        ),
    ],
)
def test_passages_without_kv_are_reported(workspace, documents, limits, stopped, without_kv, words):
    """One passage longer than the model's window kept all later ones from being encoded, in every run."""
    vars(workspace.engine).update(limits)
    report = ingest(workspace, [documents])
    kv = report.kv
    assert len(report.added) == 3 and kv.stopped == stopped and words.format(**vars(kv)) in report.notice
    assert kv.encoded == len(workspace.engine.stored())
    assert kv.with_kv == (kv.encoded if without_kv is None else kv.passages - without_kv)
    assert encode_missing(workspace).message == kv.message, "the same in every run"


@pytest.mark.parametrize("error", [StoreLockedError("a repair runs"), StoreFullError("no space on the disk")])
def test_a_store_that_cannot_be_written_ends_the_run_and_keeps_what_is_done(open_workspace, documents, error):
    """Such a lock was taken for another encoder's, and the run ended as if all were well."""
    first = open_workspace()

    def fail(text):
        if "sky" in text:
            raise error

    first.engine.on_encode = fail
    with pytest.raises(type(error), match=str(error)):
        ingest(first, [documents])
    assert {d.state for d in first.library.documents("default")} == {DocumentState.DONE}, "all can be asked"
    second = open_workspace()
    ingest(second, [documents])
    assert second.embedder.embedded == [], "embeddings are in the registry already"
    assert_consistent(second)


def test_ctrl_c_while_the_model_is_loaded_loses_no_report(workspace, documents, monkeypatch):
    def interrupted(node_ids):
        raise KeyboardInterrupt

    monkeypatch.setattr(workspace.engine, "missing", interrupted)
    report = ingest(workspace, [documents])
    assert len(report.added) == 3 and report.interrupted
    assert report.kv.stopped == "left" and "continue it" in report.kv.message


def test_a_file_that_changes_while_it_is_read_is_read_again(workspace, documents, monkeypatch):
    """And has its old content again afterwards: what was hashed is not what was cut."""
    path, read = documents / "sky.txt", readers.read_document
    text, times = path.read_text(), path.stat()

    def swapped(file, *given):
        if file != path:
            return read(file, *given)
        file.write_text("A scratch that nobody was to see.")
        found = read(file, *given)
        file.write_text(text)
        return found

    monkeypatch.setattr(readers, "read_document", swapped)
    assert len(ingest_paths(workspace, [documents]).added) == 3
    monkeypatch.setattr(readers, "read_document", read)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = ingest_paths(workspace, [documents])
    assert [Path(each).name for each in report.updated] == ["sky.txt"] and len(report.unchanged) == 2
    known = workspace.library.find("default", "sky.txt")
    assert "scratch" not in workspace.library.passages_of(known.id)[0].text


def test_a_file_that_changed_while_it_was_read_is_read_again_at_once(workspace, documents, monkeypatch):
    """Its passages were those of a half-written file until the next run."""
    path, read, seen = documents / "sky.txt", readers.read_document, []

    def written_once(file, *given):
        found = read(file, *given)
        if file == path and not seen:
            seen.append(file.write_text("The sky is green now, and the file is longer."))
        return found

    monkeypatch.setattr(readers, "read_document", written_once)
    assert len(ingest_paths(workspace, [documents]).added) == 3
    known = workspace.library.find("default", "sky.txt")
    assert "green" in workspace.library.passages_of(known.id)[0].text
    assert len(ingest_paths(workspace, [documents]).unchanged) == 3


def test_a_file_that_vanishes_before_its_turn_is_no_failure(workspace, documents, monkeypatch):
    """It stayed in the list as a failed document."""
    sky, bread, read = documents / "sky.txt", documents / "bread.md", readers.read_document

    def vanishing(file, *given):
        if file == bread:
            bread.unlink()  # while it is read, the other one before
            sky.unlink()
        return read(file, *given)

    monkeypatch.setattr(readers, "read_document", vanishing)
    report = ingest_paths(workspace, [documents])
    assert not report.failed
    assert report.skipped == dict.fromkeys((str(bread), str(sky)), "it was deleted before it could be read")
    assert {each.name for each in workspace.library.documents("default")} == {"boats.txt"}
    boats = documents / "boats.txt"
    boats.write_text("Other boats lie here.")
    monkeypatch.setattr(readers, "read_document", lambda file, *given: (file.unlink(), read(file, *given)))
    report = ingest_paths(workspace, [documents])
    assert not report.failed and report.gone == [str(boats)]
    (known,) = workspace.library.documents("default")
    assert known.state is DocumentState.DONE and known.passages, "it is gone, and not pending for ever"


def test_a_path_that_becomes_a_folder_and_a_file_again_loses_its_old_passages(workspace, documents):
    path, inner = documents / "sky.txt", documents / "sky.txt" / "a.txt"
    ingest(workspace, [documents])
    path.unlink()
    path.mkdir()
    inner.write_text("A letter in a folder.")
    report = ingest(workspace, [documents])
    assert (report.added, report.pruned) == ([str(inner)], [str(path)])
    inner.unlink()
    path.rmdir()
    path.write_text("It is a file again.")
    report = ingest(workspace, [path])
    assert (report.added, report.pruned) == ([str(path)], [str(inner)])
    assert_consistent(workspace)


FORMS = {form: unicodedata.normalize(form, "Prüfung Ärger.txt") for form in ("NFC", "NFD")}


@pytest.mark.parametrize(("first", "second"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_in_the_other_unicode_form_is_the_same_document(workspace, documents, first, second):
    """It was listed twice after a move between file systems, and could not be removed by what a user types."""
    one, other = (documents / FORMS[form] for form in (first, second))
    one.write_text("The exam is in May.")
    ingest(workspace, [documents])
    assert workspace.library.find("default", other.name).path == str(one), "shown as written"
    one.rename(other)
    report = ingest(workspace, [documents])
    assert str(other) in report.unchanged and not report.gone
    document = workspace.library.find("default", str(one))
    assert document.path == str(other) and len(workspace.library.documents("default")) == 4
    one.write_text("Two files of one name.")
    assert str(max(one, other)) in ingest(workspace, [documents]).failed
    with workspace.workspaces.writing():
        remove_document(workspace, document)
    assert len(workspace.library.documents("default")) == 3


ODD_NAMES = [
    b"two\nlines.txt",
    b"it's \"quoted\" and 'so'.txt",
    b"caf\xe9.txt",
    b"back\\slash \\xe9.txt",
    "\u202egpj.txt".encode(),
    "שלום \u200fعالم.txt".encode(),
    b"-rf *.txt",
    b" blank .txt",
    b"\x1b[31mred.txt",
    ("ü" * 120).encode() + b".txt",
]


def test_names_of_all_characters_that_a_file_system_allows(cli, tmp_path, capfd):
    """A name that is not UTF-8 was refused, and one with a line end broke the list."""
    folder = tmp_path / "odd"
    folder.mkdir()
    for number, name in enumerate(ODD_NAMES):
        (folder / os.fsdecode(name)).write_text(
            f"Herring number {number} came to the quay at the hour {number}."
        )
    assert cli("ingest", str(folder)) == 0
    capfd.readouterr()
    assert cli("docs", "list") == 0
    listed = capfd.readouterr().out
    assert len(listed.splitlines()) == 1 + len(ODD_NAMES) and not re.search("[\x1b\u202e]", listed)
    for number, name in enumerate(ODD_NAMES):
        path = os.fsdecode(bytes(folder) + b"/" + name)
        typed = path if number % 2 else on_one_line(printable(path))
        assert cli("docs", "show", "--json", typed) == 0
        assert f"number {number} " in json.loads(capfd.readouterr().out)["passage_list"][0]["text"]
        assert cli("ask", f"When did herring number {number} come to the quay?") == 0
        assert on_one_line(printable(os.fsdecode(name))) in capfd.readouterr().out
        assert cli("docs", "rm", typed) == 0
        capfd.readouterr()
    assert cli("docs", "list", "--json") == 0
    assert json.loads(capfd.readouterr().out)["documents"] == []


def test_one_process_encodes_at_a_time(open_workspace, documents):
    first, second = open_workspace(), open_workspace()
    ingest_paths(first, [documents])
    reports = []
    first.engine.on_encode = lambda text: reports.append(encode_missing(second))
    encode_missing(first)
    assert {report.stopped for report in reports} == {"elsewhere"}
    assert f"Process {os.getpid()}" in reports[0].message and second.engine.encoded == []


def test_missing_files_are_reported_and_removed_by_prune_alone(open_workspace, documents, tmp_path):
    outside, sky = tmp_path / "outside.txt", documents / "sky.txt"
    outside.write_text("This file lies in another folder and goes as well.")
    (documents / "nowhere.txt").symlink_to(documents / "never-there.txt")
    ingest(open_workspace(), [documents, outside])
    sky.unlink()
    outside.unlink()
    second = open_workspace()
    assert ingest(second, [documents]).gone == [str(sky)]
    assert second.library.document("default", str(sky)).state is DocumentState.DONE
    assert_consistent(second)
    report = ingest_paths(second, [documents], prune=True)
    assert (report.pruned, report.gone) == ([str(sky)], [])
    assert {d.name for d in second.library.documents("default")} == {"boats.txt", "bread.md", "outside.txt"}
    assert_consistent(second)


def test_a_file_that_could_not_be_read_leaves_the_list_when_it_is_gone(open_workspace, documents):
    """It stayed there as failed, even with `--prune`. A link that leads nowhere is reported once, as failed."""
    workspace, empty, link = open_workspace(), documents / "empty.txt", documents / "link.txt"
    empty.touch()
    link.symlink_to(documents / "never-there.txt")
    ingest_paths(workspace, [documents])
    empty.unlink()
    report = ingest_paths(workspace, [documents, link])
    assert (report.pruned, report.gone, list(report.failed)) == ([str(empty)], [], [str(link)])
    names = {each.name for each in workspace.library.documents("default")}
    assert names == {"sky.txt", "bread.md", "boats.txt", "link.txt"}


@pytest.mark.parametrize("point", ["before-passages", "before-index", "before-entering", "before-done"])
def test_next_run_resumes_after_a_kill_anywhere(open_workspace, home, documents, point):
    assert exit_code(killed_worker.ingest, home, signal.SIGKILL, point, documents) == -signal.SIGKILL
    second = open_workspace()
    states = [document.state for document in second.library.documents("default")]
    assert states == [DocumentState.DONE, DocumentState.PENDING]
    report = ingest(second, [documents])
    assert not report.failed and len(report.unchanged) == 1
    assert_consistent(second)
    clean = ingest(second, [documents])
    assert clean.to_json()["unchanged"] == [str(path) for path in sorted(documents.iterdir())]


def test_killed_while_replacing_leaves_no_stale_node(reopen, home, documents):
    for path in documents.iterdir():
        path.write_text("Entirely new words stand in this file now.")
    assert exit_code(killed_worker.ingest, home, signal.SIGKILL, "before-index", documents) == -signal.SIGKILL
    second = reopen()
    ingest(second, [documents])
    assert len(nodes_of(second)) == 3
    assert_consistent(second)


def test_ctrl_c_in_a_real_process(open_workspace, home, documents):
    assert exit_code(killed_worker.ingest, home, signal.SIGINT, "before-entering", documents) == 1
    out, err = (home.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
    assert "Interrupted" in err and "Traceback" not in err and json.loads(out)["interrupted"] is True
    second = open_workspace()
    assert len(ingest(second, [documents]).unchanged) == 1
    assert_consistent(second)


def test_discovery_order_and_rules(tmp_path):
    for name in ("b.txt", "a.md", ".git/x.txt", "sub/c.PDF", "sub/d.exe"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = discover([tmp_path, tmp_path / "b.txt", tmp_path / ".git" / "x.txt"])
    names = [str(path.relative_to(tmp_path)) for path in found.files]
    assert names == ["a.md", "b.txt", "sub/c.PDF", ".git/x.txt"]
    assert [path.name for path in found.skipped] == [".git", "loop", "d.exe"] and found.failed == ()


def test_only_links_given_by_the_user_are_followed(tmp_path):
    """A folder that others write to could have any file of the account read."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for each in (folder, outside):
        each.mkdir()
        (each / "a.txt").write_text("x")
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "inside.txt").symlink_to(folder / "a.txt")
    (folder / "gone.txt").symlink_to(folder / "none.txt")
    (folder / "linked").symlink_to(outside)
    found = discover([folder])
    assert found.files == (folder / "a.txt",)
    assert [path.name for path in found.skipped] == ["gone.txt", "inside.txt", "linked", "passwd.txt"]
    assert discover([folder / "inside.txt", folder / "linked"]).files == (
        folder / "inside.txt",
        folder / "linked" / "a.txt",
    )


BROKEN = "Die Möwen schreien über dem Fluss, während die Fähre ablegt. " * 20
REPLACED = "1 bytes that are not UTF-8 were replaced by \ufffd"


def test_what_was_replaced_is_said_until_the_file_is_mended(open_workspace, tmp_path):
    """The reader's notes were dropped."""
    path, workspace = tmp_path / "a.txt", open_workspace()
    path.write_bytes(BROKEN.encode() + b"\xe4")
    report = ingest(workspace, [path])
    assert report.notes == {str(path): (REPLACED,)}
    assert report.to_json()["notes"] == [{"path": str(path), "notes": (REPLACED,)}]
    assert workspace.library.document("default", str(path)).notes == (REPLACED,)
    assert ingest(workspace, [path]).notes == {}, "it was not read again"
    path.write_text(BROKEN)
    assert ingest(workspace, [path]).notes == {}
    assert workspace.library.document("default", str(path)).notes == ()


def test_notes_outlive_an_interruption_and_the_second_embedding(open_workspace, tmp_path):
    for number in range(MANY_FILES + 1):
        (tmp_path / f"{number:02}.txt").write_bytes(BROKEN.encode() + b"\xe4")
    workspace = open_workspace()
    ingest_paths(workspace, [tmp_path])
    assert workspace.library.document("default", str(tmp_path / "00.txt")).recipe.endswith(SKETCHED)
    embed_in_full(workspace)
    found = workspace.library.documents("default")
    assert {each.notes for each in found} == {(REPLACED,)} and not any(
        SKETCHED in each.recipe for each in found
    )
    workspace.library.begin("default", found[0].path)
    again = ingest(workspace, [tmp_path])
    assert again.resumed == [found[0].path] and again.notes == {found[0].path: (REPLACED,)}
