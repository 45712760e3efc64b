"""The ingest queue: states and reasons of files; pause, cancel, delete and kills lose nothing."""

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from app_fakes import write_files
from waiting import SOON_S, at_once, idle, until

from ragblend.app.library.discovery import discover
from ragblend.app.library.documents import DocumentState
from ragblend.app.library.ingest import MANY_FILES, SKETCHED, ingest, ingest_file
from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.removal import remove_document
from ragblend.app.library.uploads import safe_name
from ragblend.app.workspace import Workspaces
from ragblend.kvstore import sqlite
from ragblend.kvstore.errors import Cancelled, StoreFullError, StoreLockedError
from ragblend.kvstore.lock import writer_lock


def finish(jobs):
    jobs.start()
    assert idle(jobs)


class Gate(threading.Event):
    """Holds whoever calls it until it is set."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def __call__(self, *_):
        self.reached.set()
        assert self.wait(SOON_S)


def held(jobs, work, *paths):
    """Holds the worker in the middle of `work`, its `on_embed` or `on_encode`, until what this gives is set."""
    gate = Gate()
    setattr(work, "on_embed" if hasattr(work, "on_embed") else "on_encode", gate)
    jobs.add(list(paths), "default")
    jobs.start()
    assert gate.reached.wait(SOON_S)
    return gate


def states(jobs):
    return {job.name: job.state for job in jobs.page()[0]}


def documents_of(workspaces, collection="default"):
    return {document.name: document.state for document in workspaces.library.documents(collection)}


def long_file(folder, name, lines=6):
    said = "Boat {0} number {1} lies at quay {1} and carries {1} barrels of herring."
    (folder / name).write_text(" ".join(said.format(name, n) for n in range(lines)))
    return folder / name


def test_a_bad_file_among_good_ones_has_its_reason_and_can_be_retried(jobs, workspaces, documents):
    bad = documents / "bad.pdf"
    bad.write_bytes(b"\x89PNG no pdf at all")
    (documents / "noise.xyz").write_text("?")
    added = jobs.add([documents, documents / "nowhere.txt"], "default")
    assert added.files == 4 and added.skipped == ((str(documents / "noise.xyz"), ".xyz is not supported"),)
    assert added.failed[0][0] == str(documents / "nowhere.txt") and "no such file" in added.failed[0][1]
    finish(jobs)
    failed = jobs.page(state="failed")[0]
    assert [job.name for job in failed] == ["bad.pdf"] and "PNG image" in failed[0].reason
    assert jobs.overview().counts["done"] == 3
    bad.write_bytes(b"%PDF-1.4 broken")
    assert jobs.retry([failed[0].id]) == 1
    assert idle(jobs)
    assert "damaged" in jobs.page(state="failed")[0][0].reason


def test_phases_and_progress_are_seen(jobs, embedder, tmp_path):
    gate = held(jobs, embedder, long_file(tmp_path, "a.txt"))
    current = jobs.overview().current
    assert (current.state, current.name, current.done) == ("embedding", "a.txt", 0) and current.total > 3
    assert jobs.page()[0][0] == current and not jobs.overview().is_idle
    gate.set()
    assert idle(jobs)
    assert jobs.overview().current is None


@pytest.mark.parametrize(("cancelled", "left"), [("all", "cancelled"), ("the current one", "done")])
def test_cancelling_interrupts_the_current_file(jobs, workspaces, embedder, tmp_path, cancelled, left):
    gate = held(jobs, embedder, long_file(tmp_path, "a.txt"), long_file(tmp_path, "b.txt"))
    ids = None if cancelled == "all" else [jobs.overview().current.id]
    assert jobs.cancel(ids) == (1 if ids else 2)
    gate.set()
    assert idle(jobs) and states(jobs) == {"a.txt": "cancelled", "b.txt": left}
    assert documents_of(workspaces)["a.txt"] is DocumentState.PENDING
    assert len([text for text in embedder.embedded if "a.txt" in text]) <= 8, "left after one batch"
    assert jobs.retry() == (1 if ids else 2) and idle(jobs)
    assert set(states(jobs).values()) == {"done"} == set(documents_of(workspaces).values())


def test_pause_survives_a_restart(jobs, workspaces, embedder, tmp_path):
    gate = held(jobs, embedder, long_file(tmp_path, "a.txt"))
    jobs.pause()
    gate.set()
    until(lambda: jobs.overview().current is None)
    assert states(jobs) == {"a.txt": "queued"} and jobs.overview().paused
    jobs.end()
    paused, again = [], JobQueue(workspaces)
    embedder.on_embed = lambda texts: paused.append(again.overview().paused)
    again.start()
    assert again.overview().paused and not again.overview().is_idle
    again.resume()
    assert idle(again) and states(again) == {"a.txt": "done"}
    again.end()
    assert not any(paused)


def test_opening_the_queue_does_not_restart_running_jobs(jobs, workspaces, embedder, tmp_path):
    """Starting a second `ragblend ui`, which is refused, made the first one miss that its file had changed."""
    path = long_file(tmp_path, "a.txt")
    gate = held(jobs, embedder, path)
    path.write_text(f"{path.read_text()} The last word.")
    jobs.add([path], "default")
    JobQueue(workspaces)
    assert states(jobs) == {"a.txt": "embedding"}
    gate.set()
    assert idle(jobs) and states(jobs) == {"a.txt": "done"}
    [document] = workspaces.library.documents("default")
    assert "The last word." in workspaces.library.passages_of(document.id)[-1].text


def test_a_delete_does_not_wait_for_a_long_file(jobs, workspaces, embedder, documents, tmp_path):
    ingest(workspaces.of("default"), [documents])
    gone = workspaces.library.find("default", "sky.txt")
    gate = held(jobs, embedder, long_file(tmp_path, "long.txt"))
    removed = []
    deleting = threading.Thread(target=lambda: removed.extend(jobs.remove([gone.id], "default")))
    deleting.start()
    until(lambda: workspaces.has_waiting_writer)
    gate.set()
    deleting.join(SOON_S)
    assert removed[0].path == gone.path and removed[0].bytes_freed > 0
    assert idle(jobs) and states(jobs) == {"long.txt": "done"}
    assert "sky.txt" not in documents_of(workspaces)


def test_deleting_a_queued_document_removes_its_job(jobs, workspaces, documents):
    ingest(workspaces.of("default"), [documents])
    jobs.add([documents], "default")
    sky = workspaces.library.find("default", "sky.txt")
    jobs.remove([sky.id], "default")
    finish(jobs)
    assert set(states(jobs)) == set(documents_of(workspaces)) == {"boats.txt", "bread.md"}


def test_queue_names_and_waits_for_another_writer(jobs, home, workspaces, documents):
    with writer_lock(home / "writer.lock", "ragblend ingest letters"):
        jobs.add([documents], "default")
        jobs.start()
        until(lambda: jobs.overview().waiting)
        assert "`ragblend ingest letters`" in jobs.overview().waiting
        assert jobs.overview().counts["queued"] == 3
        with pytest.raises(StoreLockedError, match="ragblend ingest letters"):
            jobs.remove([workspaces.library.begin("default", "/x")], "default")
    assert idle(jobs) and jobs.overview().waiting is None


def test_queue_reports_a_full_disk_and_retries(jobs, engine, documents):
    full = [True]

    def fail(text):
        if full[0]:
            raise StoreFullError("writing KV: the disk is full. Free some space.")

    engine.on_encode = fail
    jobs.add([documents], "default")
    jobs.start()
    until(lambda: jobs.overview().waiting)
    assert "disk is full" in jobs.overview().waiting and jobs.overview().counts["done"] == 3
    full[0] = False
    assert idle(jobs) and set(states(jobs).values()) == {"done"}


def test_unexpected_error_fails_one_file_only(jobs, embedder, documents):
    def fail(texts):
        if "baker" in " ".join(texts):
            raise ZeroDivisionError("oops")

    embedder.on_embed = fail
    jobs.add([documents], "default")
    finish(jobs)
    assert states(jobs) == {"bread.md": "failed", "boats.txt": "done", "sky.txt": "done"}
    assert "ZeroDivisionError" in jobs.page(state="failed")[0][0].reason


def test_kv_is_encoded_when_the_queue_is_empty_and_pauses_with_it(jobs, workspaces, engine, documents):
    gate = held(jobs, engine, documents)
    overview = jobs.overview()
    assert overview.counts["done"] == 3 and set(documents_of(workspaces).values()) == {DocumentState.DONE}
    assert overview.kv.phase == "encoding" and overview.kv.done == 0 < overview.kv.total
    assert not overview.is_idle, "it is not over yet"
    jobs.pause()
    gate.set()
    until(lambda: jobs.overview().kv is None)
    assert not jobs.overview().is_idle and engine.stored() == set()
    jobs.resume()
    assert idle(jobs) and jobs.overview().kv is None
    assert len(engine.stored()) == overview.kv.total == workspaces.library.count_passages("default")


def test_many_files_are_sketched_and_embedded_in_full_when_none_waits(jobs, workspaces, embedder, tmp_path):
    many, seen = range(MANY_FILES + 2), []
    boats = [f"Boat {n} carries herring and salt to quay number{n} of the town." for n in many]
    embedder.on_embed = lambda texts: seen.append((jobs.overview().kv, len(texts)))
    jobs.add([write_files(tmp_path / "boats", boats)], "default")
    finish(jobs)
    assert [kv.phase for kv, _ in seen if kv] == ["embedding"] * 2
    assert seen[-1][0].total == 2 and len(seen) == MANY_FILES + 4
    assert not any(d.recipe.endswith(SKETCHED) for d in workspaces.library.documents("default"))


def test_new_file_is_ingested_before_kv_is_encoded(jobs, engine, documents, tmp_path):
    gate = held(jobs, engine, documents)
    new = tmp_path / "new.txt"
    new.write_text("A new file that somebody wants to ask about now.")
    jobs.add([new], "default")
    gate.set()
    until(lambda: states(jobs)["new.txt"] == "done")
    assert idle(jobs)
    assert len(set(engine.encoded)) == len(engine.encoded) == len(engine.stored())


def test_a_delete_while_kv_is_encoded(jobs, workspaces, engine, documents):
    gate = held(jobs, engine, documents)
    everything = [document.id for document in workspaces.library.documents("default")]
    assert len(jobs.remove(everything, "default")) == 3, "it waits for nothing"
    gate.set()
    assert idle(jobs) and engine.stored() == set()


def test_a_file_that_is_queued_is_not_queued_twice(jobs, documents):
    jobs.add([documents], "default")
    again = jobs.add([documents / "sky.txt", documents], "default")
    assert again.files == 3 and jobs.overview().total == 3
    assert jobs.add([documents], "other").files == 3 and jobs.overview().total == 6


def test_queue_removes_documents_without_files(jobs, workspaces, documents):
    ingest(workspaces.of("default"), [documents])
    (documents / "sky.txt").unlink()
    paths = [documents / "sky.txt", documents / "boats.txt", documents / "never.txt"]
    assert jobs.queue_removal(paths, "default") == 2
    finish(jobs)
    assert states(jobs) == {"sky.txt": "done", "boats.txt": "unchanged"}, "what came back stays"
    assert set(documents_of(workspaces)) == {"boats.txt", "bread.md"}


def test_two_uploads_of_one_name_at_once_are_both_kept(jobs, home, tmp_path, monkeypatch):
    files, both = [], threading.Barrier(2)
    for name in "ab":
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "letter.txt")
        files[-1].write_text(name * 400)

    def discovered(paths, *skip):
        if not skip:  # of an upload: neither copies before the other one has begun
            both.wait(SOON_S)
        return discover(paths, *skip)

    monkeypatch.setattr("ragblend.app.library.jobs.discover", discovered)
    at_once(*(partial(jobs.upload, [file], "default") for file in files))
    kept = {file.name: file.read_text() for file in (home / "originals" / "default").iterdir()}
    assert kept.keys() == states(jobs).keys() == {"letter.txt", "letter (2).txt"}
    assert sorted(kept.values()) == ["a" * 400, "b" * 400]


def test_uploads_are_copied_in_and_removed_with_their_document(jobs, home, workspaces, documents, tmp_path):
    added = jobs.upload([documents / "sky.txt", documents / "sky.txt"], "default")
    (documents / "sky.txt").write_text("CANARY another sky")
    jobs.upload([documents / "sky.txt"], "default")
    (documents / "x.xyz").write_text("?")
    assert "not supported" in jobs.upload([documents / "x.xyz"], "default").failed[0][1]
    folder = home / "originals" / "default"
    assert added.files == 1 and sorted(f.name for f in folder.iterdir()) == ["sky (2).txt", "sky.txt"]
    assert {f.stat().st_mode & 0o777 for f in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    finish(jobs)
    second = workspaces.library.find("default", "sky (2).txt")
    removed = jobs.remove([second.id, "unknown"], "default")
    assert len(removed) == 1 and removed[0].bytes_freed >= 2 * len("CANARY another sky")
    left = [f for f in home.rglob("*") if f.is_file() and b"CANARY" in f.read_bytes()]
    assert left == []


def test_removing_a_collection_removes_its_documents_kv_and_uploads(jobs, home, workspaces, documents):
    """The copies of queued uploads stayed on the disk, and no list showed them."""
    workspaces.create("letters")
    jobs.upload([documents / "boats.txt"], "letters")
    finish(jobs)
    jobs.end()
    jobs.upload([documents / "sky.txt"], "default")
    jobs.upload([documents / "bread.md"], "letters")
    assert workspaces.names() == ["default", "letters"]
    removed, freed = jobs.remove_collection("letters")
    (one,) = removed
    assert freed == one.bytes_freed + (documents / "bread.md").stat().st_size and one.bytes_freed > 0
    assert workspaces.names() == ["default"] and list(states(jobs)) == ["sky.txt"]
    assert [file.name for file in (home / "originals").rglob("*.*")] == ["sky.txt"]


def test_a_file_that_is_ingested_while_its_collection_is_removed_does_not_bring_it_back(
    jobs, workspaces, documents
):
    workspaces.create("letters")
    with ThreadPoolExecutor(1) as pool:
        with workspaces.writing():  # as the worker does
            removal = pool.submit(jobs.remove_collection, "letters")
            until(lambda: workspaces.has_waiting_writer)
            ingest_file(workspaces.of("letters"), documents / "sky.txt")
        removed, _ = removal.result(SOON_S)
    assert [one.path for one in removed] == [str(documents / "sky.txt")]
    assert workspaces.names() == ["default"] and documents_of(workspaces, "letters") == {}


def test_removing_many_documents_does_not_check_the_queue_again_for_each(
    jobs, workspaces, documents, monkeypatch
):
    """Each removal opened its file anew, which reads all of it."""
    ingest(workspaces.first, [documents])
    jobs.add([documents], "default")
    checked = []
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "integrity", lambda sql, _: checked.extend(sql.execute("PRAGMA database_list")))
        jobs.remove([document.id for document in workspaces.library.documents("default")], "default")
    assert states(jobs) == {} and "jobs.sqlite" not in [Path(file).name for _, _, file in checked]


def test_clearing_deletes_cancelled_uploads(jobs, home, workspaces, documents, tmp_path):
    """And nothing else: no copy that is a document already, and no file of the user."""
    jobs.upload([documents / "sky.txt"], "default")
    finish(jobs)
    jobs.end()
    jobs.upload([documents / "sky.txt", documents / "bread.md"], "default")
    jobs.add([documents / "boats.txt"], "default")
    jobs.add([home / "originals"], "other")
    assert jobs.cancel() == 5
    assert len(list((home / "originals").rglob("*.*"))) == 2, "they can be retried"
    assert jobs.clear_finished() == 5 and jobs.overview().total == 0
    assert [file.name for file in (home / "originals").rglob("*.*")] == ["sky.txt"]
    assert (documents / "boats.txt").exists()


def test_cancelled_and_cleared_upload_is_a_document_or_deleted(
    jobs, home, workspaces, documents, monkeypatch
):
    gate = Gate()
    jobs.upload([documents / "sky.txt"], "default")
    monkeypatch.setattr("ragblend.app.library.ingest.check_file", gate)
    jobs.start()
    assert gate.reached.wait(SOON_S)
    jobs.cancel()
    clearing = threading.Thread(target=jobs.clear_finished)
    clearing.start()
    until(lambda: workspaces.has_waiting_writer or not clearing.is_alive())
    gate.set()
    clearing.join(SOON_S)
    jobs.end()
    copies = {file.name for file in (home / "originals").rglob("*.*")}
    assert copies == documents_of(workspaces).keys() and jobs.overview().total == 0


def test_what_was_copied_before_the_disk_was_full_is_queued(jobs, home, documents, monkeypatch):
    copyfile, full = shutil.copyfile, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_up(source, target):
        if source.name == "sky.txt":
            raise full
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", fill_up)
    with pytest.raises(StoreFullError, match=r"sky\.txt"):
        jobs.upload([documents / name for name in ("bread.md", "boats.txt", "sky.txt")], "default")
    assert states(jobs) == {"bread.md": "queued", "boats.txt": "queued"}


def test_uploads_are_deleted_whatever_path_names_the_home(home, fakes, documents):
    """A home with ".." in its path did not know its own copies."""
    named = home / ".." / home.name
    with Workspaces.open(named, chunk_tokens=16) as workspaces:
        jobs = JobQueue(workspaces)
        jobs.upload([documents / "sky.txt"], "default")
        finish(jobs)
        jobs.end()
        jobs.remove([workspaces.library.find("default", "sky.txt").id], "default")
    assert list((home / "originals").rglob("*.*")) == []


def test_the_home_itself_is_never_ingested(jobs, workspaces, home, tmp_path, documents):
    """The copies of uploads to one collection came into the collection of a folder around the home."""
    jobs.upload([documents / "sky.txt"], "default")
    (tmp_path / "elsewhere").symlink_to(home, target_is_directory=True)
    for folder in (tmp_path, home, tmp_path / "elsewhere"):
        added = jobs.add([folder], "other")
        assert added.files == (3 if folder == tmp_path else 0)
        assert "own data" in dict(added.skipped)[str(home if folder == tmp_path else folder)]
    report = ingest(workspaces.of("third"), [tmp_path])
    assert {Path(path).parent for path in report.added} == {documents}
    assert jobs.add([home / "originals" / "default"], "default").files == 1, "an upload, by its path"


def test_finished_jobs_are_cleared_and_vanished_files_do_not_fail(jobs, workspaces, documents):
    """Files of a build or a download that were gone before their turn stayed as failed rows."""
    (documents / "empty.txt").touch()
    jobs.add([documents], "default")
    (documents / "sky.txt").unlink()
    finish(jobs)
    assert states(jobs)["sky.txt"] == "unchanged"
    assert documents_of(workspaces).keys() == {"bread.md", "boats.txt", "empty.txt"}
    assert jobs.clear_finished() == 3 and list(states(jobs)) == ["empty.txt"]
    assert "is empty" in jobs.page(state="failed")[0][0].reason


def test_a_file_that_comes_back_while_it_is_removed_is_ingested(jobs, workspaces, documents, monkeypatch):
    """Its new job was marked as done together with the removal."""
    sky = documents / "sky.txt"
    jobs.add([sky], "default")
    finish(jobs)
    sky.unlink()

    def removed(*given):
        remove_document(*given)
        sky.write_text("The sky is back.")
        jobs.add([sky], "default")

    monkeypatch.setattr("ragblend.app.library.jobs.remove_document", removed)
    jobs.queue_removal([sky], "default")
    assert idle(jobs)
    assert documents_of(workspaces) == {"sky.txt": DocumentState.DONE}


def test_ingest_of_a_file_can_be_cancelled_while_reading_and_cutting(
    workspaces, engine, monkeypatch, tmp_path
):
    (tmp_path / "a.txt").write_text("A word. " * 500)
    counted, count, workspace = [], engine.count_tokens, workspaces.of("default")
    monkeypatch.setattr(engine, "count_tokens", lambda piece: counted.append(piece) or count(piece))
    with workspaces.writing(), pytest.raises(Cancelled):
        ingest_file(workspace, tmp_path / "a.txt", is_cancelled=lambda: bool(counted))
    assert len(counted) == 1 and workspaces.library.counts_by_state("default")["pending"] == 1
    reading = []

    def read(path, on_page, recognition):
        reading.append(path)
        on_page(0, 0)
        pytest.fail("it was not left")

    monkeypatch.setattr("ragblend.app.library.readers.read_document", read)
    with workspaces.writing(), pytest.raises(Cancelled):
        ingest_file(workspace, tmp_path / "a.txt", is_cancelled=lambda: bool(reading))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd.txt", "passwd.txt"),
        ("C:\\x\\report.pdf", "report.pdf"),
        (".hidden.md", "hidden.md"),
        ("a\x00b\n\u202ec.txt", "abc.txt"),
        ("", "document"),
        ("...", "document"),
        ("ä" * 200 + ".pdf", "ä" * 98 + ".pdf"),
    ],
)
def test_names_of_uploads(name, safe):
    assert safe_name(name) == safe
