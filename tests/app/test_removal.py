"""Deletion is complete, by every command, also after a kill: the home's bytes do not contain the text."""

import pytest

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT, Chats
from ragblend.app.library.ingest import ingest
from ragblend.app.library.registry import Library
from ragblend.app.workspace import Workspaces


@pytest.fixture
def told(home, workspace, documents, secret):
    """The documents ingested, and an answer that was given the secret and one other passage."""
    ingest(workspace, [documents])
    with Chats(home / "chats.sqlite") as chats:
        chat = chats.create("A talk")
        chats.add(chat.id, "user", "Where?")
        for first, name in enumerate(("secret.txt", "sky.txt")):
            document = workspace.library.find("default", name)
            passages = enumerate(workspace.library.passages_of(document.id))
            sources = [AnswerSource.of(document, each, 0.5, 10 * first + number) for number, each in passages]
            segments = [{"number": s.number, "text": s.text[:40]} for s in sources]
            chats.add(chat.id, "assistant", "There.", sources, {"segments": segments})
    return workspace


def test_docs_rm_erases_conversations_too(cli, home, told):
    """`docs rm` left the passages in chats.sqlite; the page did not."""
    nodes = told.library.node_ids(told.library.find("default", "secret.txt").id)
    assert left_of(home, nodes) and b"CANARY" in read(home)
    assert cli("docs", "rm", "secret.txt") == 0
    assert left_of(home, nodes) == [] and b"CANARY" not in read(home)
    with Chats(home / "chats.sqlite") as chats:
        first, second = [message for message in chats.messages(1) if message.role == "assistant"]
    assert {s.text for s in first.sources} == {DELETED_TEXT} and first.text == "There."
    assert "sky" in second.sources[0].text, "what others hold stays"


def test_text_removed_from_a_changed_document_is_erased(told, home, documents, secret):
    nodes = told.library.node_ids(told.library.find("default", "secret.txt").id)
    secret.write_text("Nothing is hidden here.")
    ingest(told, [documents])
    assert left_of(home, nodes) == [] and b"CANARY" not in read(home)


@pytest.mark.parametrize("place", ["remove", "forget_removed", "erase"])
def test_interrupted_removal_is_finished_by_the_next(cli, told, home, monkeypatch, place):
    """The registry's row is deleted last, and stores what is still to be erased in other files."""
    from ragblend.integrations.chroma import VectorIndex

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    nodes = told.library.node_ids(told.library.find("default", "secret.txt").id)
    owner = {"remove": Library, "forget_removed": Chats, "erase": VectorIndex}[place]
    with monkeypatch.context() as broken:
        broken.setattr(owner, place, killed)
        if place == "remove":
            broken.setattr(Workspaces, "erase_removed", killed)
        with pytest.raises(Killed):
            cli("docs", "rm", "secret.txt")
    assert left_of(home, nodes)
    cli("docs", "rm", "secret.txt")  # says that there is none, where the row is gone already
    assert left_of(home, nodes) == [] and b"CANARY" not in read(home)


def test_writing_without_deleting_erases_nothing(workspace, documents, monkeypatch):
    from ragblend.integrations.chroma import VectorIndex

    monkeypatch.setattr(VectorIndex, "erase", lambda self: pytest.fail("nothing was deleted"))
    ingest(workspace, [documents])
    ingest(workspace, [documents])


def read(home):
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())


def left_of(home, nodes):
    content = read(home)
    return [node for node in nodes if node.encode() in content or bytes.fromhex(node) in content]
