"""Watched folders: changes become jobs, and a missing folder loses no documents."""

import os
import shutil
import threading
import unicodedata
from contextlib import closing
from pathlib import Path

import pytest
from waiting import idle, until

from ragblend.app.library.watching import Watcher
from ragblend.kvstore.errors import SettingsError, UsageError

pytest.importorskip("watchfiles")


@pytest.fixture
def watcher(jobs):
    watching = Watcher(jobs, quiet_ms=50)
    jobs.start()
    watching.start()
    yield watching
    watching.close()


def says(workspaces, word):
    document = workspaces.library.find("default", "sky.txt")
    return word in workspaces.library.passages_of(document.id)[0].text


def names(workspaces):
    return {document.name: document.state.value for document in workspaces.library.documents("default")}


def watched(watcher, folder):
    """The folder is under watch, and has been looked through."""
    found = watcher.add(folder, "default")
    until(lambda: all(each.reason == "" for each in watcher.folders()))
    return found


def test_links_in_a_folder_are_not_followed(watcher, jobs, workspaces, documents, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("A secret that nobody shared.")
    (documents / "before.txt").symlink_to(secret / "key.txt")
    watched(watcher, documents)
    (documents / "after.txt").symlink_to(secret / "key.txt")
    (documents / "linked").symlink_to(secret)
    (documents / "last.txt").write_text("This one is a file.")
    until(lambda: "last.txt" in names(workspaces))
    assert idle(jobs)
    assert set(names(workspaces)) == {"sky.txt", "bread.md", "boats.txt", "last.txt"}


def test_changes_in_a_watched_folder_are_ingested(watcher, jobs, workspaces, documents):
    watched(watcher, documents)
    everything = {"sky.txt": "done", "bread.md": "done", "boats.txt": "done"}
    until(lambda: names(workspaces) == everything)
    (documents / "new.txt").write_text("A new document about trains.")
    (documents / "unknown.xyz").write_text("?")
    (documents / ".hidden.txt").write_text("hidden")
    until(lambda: names(workspaces) == everything | {"new.txt": "done"})
    (documents / "sky.txt").write_text("The sky is grey today.")
    until(lambda: says(workspaces, "grey"))
    (documents / "new.txt").rename(documents / "moved.txt")
    until(lambda: names(workspaces) == everything | {"moved.txt": "done"})
    (documents / "bread.md").unlink()
    until(lambda: set(names(workspaces)) == {"sky.txt", "boats.txt", "moved.txt"})


def test_uploads_are_not_ingested_for_a_watched_folder_around_the_home(
    watcher, jobs, workspaces, documents, tmp_path
):
    """Each upload to another collection came into that of the watched folder."""
    watched(watcher, tmp_path)
    jobs.upload([documents / "sky.txt"], "other")
    (documents / "last.txt").write_text("This one is no upload.")
    until(lambda: "last.txt" in names(workspaces))
    assert idle(jobs)
    assert {each.file.parent for each in workspaces.library.documents("default")} == {documents}


def test_changes_in_a_watched_folder_within_the_home_are_ingested(watcher, workspaces):
    """Such a folder was scanned once, and later changes were ignored."""
    folder = workspaces.home.root / "notes"
    folder.mkdir()
    watched(watcher, folder)
    (folder / "last.txt").write_text("A new document about trains.")
    until(lambda: names(workspaces) == {"last.txt": "done"})


def test_a_file_that_becomes_a_folder_loses_its_passages(watcher, workspaces, documents):
    watched(watcher, documents)
    until(lambda: names(workspaces).get("sky.txt") == "done")
    (documents / "sky.txt").unlink()
    (documents / "sky.txt").mkdir()
    (documents / "sky.txt" / "inner.txt").write_text("A letter in a folder.")
    until(lambda: names(workspaces).get("inner.txt") == "done" and "sky.txt" not in names(workspaces))
    shutil.rmtree(documents / "sky.txt")
    (documents / "sky.txt").write_text("The sky is a file again.")
    until(lambda: names(workspaces).get("sky.txt") == "done" and "inner.txt" not in names(workspaces))


def test_a_file_renamed_to_the_other_unicode_form_stays_one_document(watcher, jobs, workspaces, documents):
    one, other = (documents / unicodedata.normalize(form, "Prüfung.txt") for form in ("NFC", "NFD"))
    one.write_text("The exam is in May.")
    watched(watcher, documents)
    until(lambda: names(workspaces).get(one.name) == "done")
    one.rename(other)
    until(lambda: other.name in names(workspaces))
    assert idle(jobs) and len(names(workspaces)) == 4


def test_a_file_whose_name_is_not_utf8_is_watched(watcher, workspaces, documents, monkeypatch):
    monkeypatch.setattr("ragblend.app.library.watching.RETRY_S", 0.05)
    watched(watcher, documents)
    odd = documents / os.fsdecode(b"caf\xe9.txt")
    odd.write_text("The café opens at nine.")
    until(lambda: names(workspaces).get("caf\\xe9.txt") == "done")
    odd.unlink()
    until(lambda: "caf\\xe9.txt" not in names(workspaces))


def test_moved_folder_moves_its_documents(watcher, workspaces, documents, tmp_path):
    watched(watcher, documents)
    inner = tmp_path / "letters"
    inner.mkdir()
    (inner / "a.txt").write_text("A letter about the harbour.")
    inner.rename(documents / "letters")
    until(lambda: names(workspaces).get("a.txt") == "done")
    (documents / "letters").rename(tmp_path / "elsewhere")
    until(lambda: "a.txt" not in names(workspaces))


def test_changes_before_watching_are_found(jobs, workspaces, documents):
    jobs.add([documents], "default")
    jobs.start()
    assert idle(jobs)
    first = Watcher(jobs)
    first.add(documents, "default")
    (documents / "sky.txt").unlink()
    (documents / "late.txt").write_text("It came while nobody watched.")
    with closing(Watcher(jobs, quiet_ms=50)) as second:
        second.start()
        until(lambda: names(workspaces).keys() == {"late.txt", "bread.md", "boats.txt"})


def test_an_empty_or_missing_folder_keeps_its_documents(jobs, workspaces, documents, monkeypatch):
    monkeypatch.setattr("ragblend.app.library.watching.RETRY_S", 0.05)
    jobs.add([documents], "default")
    jobs.start()
    assert idle(jobs)
    with closing(Watcher(jobs, quiet_ms=50)) as watcher:
        folder = watcher.add(documents, "default")
        shutil.rmtree(documents)
        watcher.start()
        until(lambda: "does not exist" in folder.reason)
        documents.mkdir()
        until(lambda: "its 3 documents stay" in folder.reason)
        assert len(names(workspaces)) == 3
        (documents / "sky.txt").write_text("It is back, and blue.")
        until(lambda: says(workspaces, "It is back"))


def test_watched_folders_are_stored_and_checked(watcher, jobs, documents, tmp_path):
    found = watched(watcher, documents)
    assert (found.path, found.collection) == (str(documents), "default")
    with pytest.raises(UsageError, match="watched for 'default' already"):
        watcher.add(tmp_path, "default")
    with pytest.raises(UsageError, match="no such folder"):
        watcher.add(documents / "sky.txt", "default")
    with pytest.raises(UsageError, match="no such folder"):
        watcher.add(Path("~nosuch/docs"), "default")
    with pytest.raises(SettingsError):
        watcher.add(documents, "no name")
    assert [w.id for w in Watcher(jobs).folders()] == [found.id] and Watcher(jobs).folders()[0].reason
    watcher.remove(found.id)
    assert watcher.folders() == []
    assert not [t for t in threading.enumerate() if t.name == "ragblend-watch"], "its thread has ended"
