"""Stored conversations: messages, search, export, and complete deletion."""

import multiprocessing
import threading

import pytest

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT, Chats
from ragblend.kvstore.errors import LibraryError, UsageError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chats.sqlite"


@pytest.fixture
def chats(path):
    with Chats(path) as opened:
        yield opened


def source(number=1, document="d1", text="The sky is blue."):
    return AnswerSource(number, f"node{number}", document, "default", "sky.txt", "p. 3", 0.71, text)


def talk(chats, question="What colour has the sky?", answer="Blue [1]."):
    chat = chats.create()
    asked = chats.add(chat.id, "user", question)
    return chat.id, asked, chats.add(chat.id, "assistant", answer, [source()], {"ttft_ms": 12.5})


def test_messages_survive_a_restart(path):
    with Chats(path) as chats:
        chat_id, asked, answered = talk(chats)
    with Chats(path) as chats:
        assert chats.messages(chat_id) == [asked, answered]
        assert answered.sources == (source(),) and answered.report == {"ttft_ms": 12.5}
        assert (asked.role, asked.report, asked.sources) == ("user", {}, ())
        assert chats.get(chat_id).messages == 2
        assert chats.message(answered.id) == answered


def test_the_first_question_is_the_title_until_somebody_writes_one(chats):
    asked = "What   colour\nhas the sky over the harbour in the early morning, before the sun?"
    chat_id, *_ = talk(chats, question=asked)
    title = chats.get(chat_id).title
    assert title.startswith("What colour has the sky") and title.endswith("…") and len(title) <= 60
    assert chats.rename(chat_id, " Sky ").title == "Sky"
    chats.add(chat_id, "user", "And the sea?")
    assert chats.get(chat_id).title == "Sky"
    with pytest.raises(UsageError, match="title is empty"):
        chats.rename(chat_id, "  ")


def test_pages_are_by_the_last_message(chats):
    ids = [chats.create(f"chat {n}").id for n in range(7)]
    chats.add(ids[2], "user", "Hello?")
    latest, total = chats.page(limit=3)
    assert [chat.id for chat in latest] == [ids[2], ids[6], ids[5]] and total == 7
    assert [chat.id for chat in chats.page(offset=3, limit=3)[0]] == [ids[4], ids[3], ids[1]]
    assert chats.page(offset=7)[0] == []


def test_search_finds_all_words_in_titles_and_messages(chats):
    answer = "In Trier, " + "sehr " * 60 + "alt, über die Mosel."
    first, *_ = talk(chats, "Wo liegt die ÄLTESTE Brücke?", answer)
    second, *_ = talk(chats, "What colour has the sky?")
    assert [chat.id for chat, _ in chats.search("älteste brücke")] == [first]
    found = chats.search("MOSEL über")
    assert [chat.id for chat, _ in found] == [first]
    assert "Mosel" in found[0][1] and len(found[0][1]) < 140
    assert [chat.id for chat, _ in chats.search("sky colour")] == [second]
    assert chats.search("colour Mosel") == []
    assert chats.search("100%") == [] and chats.search("_") == []
    assert [chat.id for chat, _ in chats.search(" ")] == [second, first]
    assert [chat.id for chat, _ in chats.search("e", limit=1)] == [second]


def test_deleting_leaves_nothing_behind(path, chats):
    kept, *_ = talk(chats)
    chat = chats.create()
    chats.add(chat.id, "user", "Where is the CANARY-7f3a?" * 300)
    told, report = [source(text="CANARY-7f3a")], {"notice": "CANARY-7f3a"}
    chats.add(chat.id, "assistant", "In the CANARY-7f3a mine.", told, report)
    assert chats.delete(chat.id) > 300 * 25
    for file in path.parent.iterdir():
        assert b"CANARY-7f3a" not in file.read_bytes(), file
    with pytest.raises(LibraryError, match="was deleted"):
        chats.messages(chat.id)
    with pytest.raises(LibraryError, match="was deleted"):
        chats.add(chat.id, "user", "Hello?")
    assert len(chats.messages(kept)) == 2


def test_editing_a_question_deletes_the_messages_after_it(path, chats):
    chat_id, *_ = talk(chats)
    asked = chats.add(chat_id, "user", "SECRET-branch?")
    chats.add(chat_id, "assistant", "No.")
    again = chats.replace_from(asked.id, "Another question?")
    assert [message.text for message in chats.messages(chat_id)][2:] == ["Another question?"]
    assert again.id > asked.id, "numbers do not come back"
    assert all(b"SECRET-branch" not in file.read_bytes() for file in path.parent.iterdir())


def test_a_deleted_document_is_forgotten_in_the_sources(path, chats):
    texts = {3: "CANARY begins", 2: "other", None: "x"}
    segments = [{"number": number, "text": text} for number, text in texts.items()]
    chat_id, *_ = talk(chats)
    sources = [source(3, "d9", "CANARY"), source(2, "d1")]
    answer = chats.add(chat_id, "assistant", "Yes.", sources, {"segments": segments})
    later = chats.add(chat_id, "assistant", "It stays.", [source(2, "d1")], {"segments": segments})
    assert chats.erase_deleted_texts(lambda nodes: {"node1", "node2"})
    beginnings = [s["text"] for s in chats.message(later.id).report["segments"]]
    assert beginnings == ["", "other", "x"], "what an earlier turn brought stands in later reports too"
    gone, other = chats.message(answer.id).sources
    assert (gone.text, gone.document, gone.location) == (DELETED_TEXT, "sky.txt", "p. 3")
    assert other == source(2, "d1")
    assert [s["text"] for s in chats.message(answer.id).report["segments"]] == ["", "other", "x"]
    assert all(b"CANARY" not in file.read_bytes() for file in path.parent.iterdir())


def test_exports(chats):
    chat_id, *_ = talk(chats)
    chats.add(chat_id, "assistant", "…", report={"notice": "Two passages did not fit."})
    value = chats.export_json(chat_id)
    assert value["title"] == "What colour has the sky?" and value["format"] == 1
    assert [m["role"] for m in value["messages"]] == ["user", "assistant", "assistant"]
    assert value["messages"][1]["sources"][0]["text"] == "The sky is blue."
    assert value["messages"][1]["report"] == {"ttft_ms": 12.5}
    text = chats.export_markdown(chat_id)
    assert text.startswith("# What colour has the sky?\n")
    assert "## Answer\n\nBlue [1].\n\n- [1] sky.txt, p. 3 (similarity 0.71)" in text
    assert "> Two passages did not fit." in text


def test_names_that_are_not_utf8_are_stored(chats):
    chat = chats.create("\ud800 title")
    message = chats.add(chat.id, "user", "half a pair: \ud83d, \x00 and 🙂", report={"x": "\udc00"})
    assert message.text == "half a pair: ?, \x00 and 🙂"
    assert chats.messages(chat.id) == [message]


def _write(path, count):
    with Chats(path) as chats:
        chat = chats.create("other process")
        for number in range(count):
            chats.add(chat.id, "user", f"message {number}")


def test_several_processes_and_threads_write_and_read(path, chats):
    others = [multiprocessing.get_context("spawn").Process(target=_write, args=(path, 20)) for _ in range(2)]
    mine = [threading.Thread(target=talk, args=(chats,)) for _ in range(8)]
    for worker in [*others, *mine]:
        worker.start()
    for worker in [*others, *mine]:
        worker.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert chats.page()[1] == 10
    counts = sorted(len(chats.messages(chat.id)) for chat in chats.page()[0])
    assert counts == [2] * 8 + [20] * 2


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(LibraryError, match="No such file"):
        Chats(tmp_path / "nowhere" / "chats.sqlite")
