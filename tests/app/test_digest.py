"""Summaries: every passage is in a window, encoded once, and notes are kept."""

import json
import threading
from itertools import pairwise

import pytest
from forked import start
from waiting import SOON_S, until

from ragblend.app.answering.conversation import Conversations
from ragblend.app.cli.main import main
from ragblend.app.library.ingest import ingest_paths
from ragblend.app.library.registry import Library
from ragblend.app.library.removal import remove_document
from ragblend.kvstore.errors import LibraryError, PromptTooLongError


def ships(count):
    return [f"The ship number {n} carries {n + 3} barrels of salted herring to Dunlin." for n in range(count)]


SHIPS = ships(12)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("\n\n".join(SHIPS))
    return path


@pytest.fixture
def document(workspaces, log):
    """Twelve passages, not encoded yet."""
    ingest_paths(workspaces.first, [log])
    found = workspaces.library.find("default", str(log))
    assert found.passages == len(SHIPS)
    return found


@pytest.fixture
def talks(workspaces):
    workspaces.change(top_k=4)
    return Conversations(workspaces)


@pytest.fixture
def engine(talks, workspaces):
    """After the change of settings, which opens another one."""
    return workspaces.first.engine


def passages_in(request):
    return [segment.text for segment in request[0].chunks]


def test_windows_overlap_and_each_passage_is_encoded_once(talks, document, engine):
    shown = []
    engine.reply = ("The ship number 7 carries 10 barrels of salted herring.",)
    turn = talks.digest(document, show=lambda *told: shown.append(told))
    answer = turn.whole()
    windows = [passages_in(request) for request in engine.requests]
    assert [len(window) for window in windows] == [4, 4, 4, 3, 0]
    assert all(before[-1] == after[0] for before, after in pairwise(windows[:4]))
    assert [text for n, window in enumerate(windows) for text in window[n > 0 :]] == SHIPS
    assert sorted(engine.encoded) == sorted(SHIPS)
    assert answer.text == engine.reply[0], "nothing of the notes is shown"
    assert [source.text for source in answer.sources] == [SHIPS[7]] and answer.sources[0].number == 1
    assert shown[0][:3] == ("encode", 1, 12) and shown[-1] == ("digest", 5, 5, "log.txt")
    told = turn.to_json()
    assert (told["parts_written"], told["parts_kept"], told["passages_encoded"]) == (5, 0, 12)
    assert told["tokens"]["generated"] == 5 * 3, "all of what was written counts"


def test_a_short_document_is_summed_up_at_once(talks, workspaces, log, engine):
    log.write_text(SHIPS[0])
    ingest_paths(workspaces.first, [log])
    with talks.digest(workspaces.library.find("default", "log.txt")) as turn:
        assert list(turn) == ["It ", "is ", "blue."]
    assert [passages_in(request) for request in engine.requests] == [[SHIPS[0]]]


def test_stored_notes_are_reused(talks, document, engine, workspaces):
    """Interrupted after two parts, then asked for twice: the first writes the rest, the second nothing."""

    def die(number):
        if len(engine.requests) == 3:
            raise KeyboardInterrupt

    engine.on_piece = die
    with pytest.raises(KeyboardInterrupt):
        talks.digest(document).whole()
    engine.on_piece, engine.requests = lambda number: None, []
    first = talks.digest(document).whole().text
    assert [len(passages_in(request)) for request in engine.requests] == [4, 3, 0]
    engine.requests = []
    turn = talks.digest(document)
    assert turn.whole().text == first and not engine.requests
    assert turn.to_json()["parts_kept"] == 5


def test_stopping_a_summary_keeps_its_notes(talks, document, engine, workspaces):
    chat, second, stopped = workspaces.chats.create().id, threading.Event(), threading.Event()

    def wait(number):
        if len(engine.requests) == 2:
            second.set()
            assert stopped.wait(SOON_S)

    engine.on_piece = wait
    with talks.digest(document, chat) as turn:
        assert second.wait(SOON_S)
        turn.stop()
        stopped.set()
        assert list(turn) == []
    assert turn.message.report["stopped"] and not turn.message.text
    engine.on_piece, engine.requests = lambda number: None, []
    again = talks.regenerate(chat)
    assert again.whole().text == "It is blue."
    assert len(engine.requests) == 4, "the first part was kept"
    assert [message.text for message in workspaces.chats.messages(chat)] == [
        "Summarise log.txt.",
        "It is blue.",
    ]


def test_a_question_is_asked_again_though_a_summary_ended_after_its_answer(talks, document, workspaces):
    chats = workspaces.chats
    chat = chats.create().id
    first, second = (chats.add(chat, "user", text) for text in ("Summarise log.txt.", "How many ships?"))
    chats.add(chat, "assistant", "Five.", report={"question": second.id})
    chats.add(chat, "assistant", "Ships.", report={"question": first.id, "digest": document.id})
    again = talks.regenerate(chat)
    again.whole()
    assert "digest" not in again.message.report


def test_notes_are_deleted_with_and_on_change_of_the_document(talks, document, engine, workspaces, log):
    def kept():
        return workspaces.library.column("SELECT count(*) FROM digest_notes")[0]

    talks.digest(document).whole()
    assert kept() == 5
    log.write_text("\n\n".join([*SHIPS[:-1], "The last ship carries nothing but sand."]))
    ingest_paths(workspaces.first, [log])
    assert kept() == 0
    workspaces.library.store_note(document, "an answer about the text before", "late")
    assert kept() == 0, "what was asked about the earlier text came too late"
    changed = workspaces.library.find("default", "log.txt")
    talks.digest(changed).whole()
    assert kept() == 5
    with workspaces.writing():
        remove_document(workspaces.first, changed)
    assert kept() == 0


def test_summary_errors_are_reported(talks, document, engine, workspaces):
    engine.context_window = 300
    engine.reply = ("word " * 90,)
    with pytest.raises(PromptTooLongError, match="two notes do not fit"):
        talks.digest(document).whole()
    with workspaces.writing():
        remove_document(workspaces.first, document)
    with pytest.raises(LibraryError, match="no passages in the library"):
        talks.digest(document).whole()


def test_digest_command_ingests_a_file_and_names_sources(told, cli, log, capfd):
    cli.engine.reply = ("The ship number 7 carries 10 barrels of salted herring.",)
    found = told("digest", log, "--top-k", "4")
    assert (found["document"], found["passages"], found["passages_encoded"]) == ("log.txt", 12, 12)
    assert [source["text"] for source in found["sources"]] == [SHIPS[7]]
    assert told("digest", "log.txt", "--top-k", "4")["parts_written"] == 0, "by its name, from what was kept"
    assert cli("digest", log, "--top-k", "4") == 0
    assert "[1] log.txt" in capfd.readouterr().out
    (log.parent / "other.txt").write_text("The other one.")
    for nobodys in ("nobodys.txt", log.parent):  # a folder is not taken in to find that out
        assert "there is none" in told("digest", nobodys, code=1)["error"]["message"]
    assert [row["document"] for row in told("docs", "list")["documents"]] == ["log.txt"]


def test_killed_command_is_continued(home, log, tiny_folder, monkeypatch, capsys):
    """On a real model: nothing is encoded twice, and every window has all of its KV."""
    log.write_text("\n\n".join(ships(16)))
    command = ["digest", str(log), "--home", str(home), "--json", "--model", str(tiny_folder)]
    command += ["--device", "cpu", "--dtype", "float32", "--top-k", "2"]
    monkeypatch.setenv("RAGBLEND_CHUNK_TOKENS", "128")
    monkeypatch.setenv("RAGBLEND_MAX_NEW_TOKENS", "16")
    running = start(main, command)

    def notes():
        if not (home / "library.sqlite").exists():
            return 0
        with Library(home / "library.sqlite") as library:
            return library.column("SELECT count(*) FROM digest_notes")[0]

    until(lambda: notes() >= 2, 240)
    running.kill()
    running.join()
    kept = notes()
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_kept"] == kept and found["passages_encoded"] == 0
    assert found["parts_kept"] + found["parts_written"] > found["passages"] / 2
    assert found["store"]["misses"] == 0 and found["tokens"]["missing"] == 0 < found["tokens"]["reused"]
