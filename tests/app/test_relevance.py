"""The one rule that says which passages have to do with a question, and how it is measured."""

import asyncio

import numpy as np
import pytest
from app_fakes import write_files

from ragblend.app.answering.comparing import compare
from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.app.answering.relevance import relevant_nodes
from ragblend.app.answering.retrieval import search
from ragblend.app.cli import demo
from ragblend.app.library.ingest import ingest
from ragblend.app.library.language import is_english
from ragblend.app.library.registry import UnrelatedSimilarity
from ragblend.app.library.similarity import RECORDED, UNRELATED_QUESTIONS
from ragblend.app.library.word_search import WordMatch
from ragblend.engine.prompts.segments import Chunk
from ragblend.integrations.embeddings import BUNDLED, DEFAULT

LEVEL = UnrelatedSimilarity(0.1, 0.5)


@pytest.mark.parametrize(
    ("scores", "words", "found"),
    [
        ({"a": 0.8, "b": 0.5, "c": 0.2}, {}, "ab"),  # relative to the best
        ({"a": 0.49, "b": 0.48}, {}, ""),  # nothing is near enough
        ({"a": 0.3, "b": 0.2}, {"a": WordMatch(False, 3, 0.9)}, "a"),  # words that the embedder does not know
        ({"a": 0.3, "b": 0.2}, {"a": WordMatch(False, 1, 1.0)}, ""),  # one word may be shared by chance
        ({"a": -0.2, "b": 0.2}, {"a": WordMatch(True, 0, 0.0)}, "a"),  # a code, however far
        ({"a": -0.2, "b": 0.7}, {"a": WordMatch(True, 0, 0.0)}, "ab"),
        ({"a": -0.2, "b": 0.2}, {"a": WordMatch(False, 1, 0.5, has_term=True)}, "a"),  # a medicine's name
        ({}, {}, ""),
    ],
)
def test_what_has_to_do_with_a_question(scores, words, found):
    assert sorted(relevant_nodes(scores, words, LEVEL)) == list(found)


def test_everything_is_relevant_to_an_embedder_that_was_not_measured():
    assert relevant_nodes({"a": -0.5, "b": 0.9}, {}, None) == {"a", "b"}


def test_every_way_in_finds_the_same(workspaces, documents, engine, monkeypatch):
    """`ask`, Compare, the demo and MCP took whatever was nearest; the page's answers had fewer passages."""
    mcp = pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    from ragblend.app.assistants import build_server

    level = UnrelatedSimilarity(0.0, 0.3)
    monkeypatch.setattr("ragblend.app.answering.retrieval.recorded_similarity", lambda name: level)
    ingest(workspaces.first, [documents])
    talks, question, found = Conversations(workspaces), "Whom does the red boat belong to?", []
    tokenize = engine.tokenize
    monkeypatch.setattr(
        engine,
        "tokenize",
        lambda p: found.append({c.text for c in p.segments if isinstance(c, Chunk)}) or tokenize(p),
    )

    async def assistant():
        async with mcp.Client(build_server(talks, workspaces)) as client:
            await client.call_tool("ask", {"question": question})
            return await client.call_tool("search", {"question": question})

    searched = asyncio.run(assistant()).structured_content["passages"]
    list(talks.ask(workspaces.chats.create().id, question, AskOptions(("default",), "documents")))  # page
    talks.answer(question, AskOptions(("default",), "chat")).whole()  # API, `ask`
    next(compare(talks, question, "default", []))
    demo.compare(talks, question)
    assert len(found) >= 5 and 0 < len(found[0]) < 3 and all(texts == found[0] for texts in found)
    assert {passage["text"] for passage in searched} == found[0]


class Scaled:
    """Whatever is unrelated has a similarity of 0.8, as of multilingual-e5-small."""

    name = "scaled"

    def load(self):
        pass

    def embed_passages(self, texts, progress=None, part="whole"):
        return [self.embed_question(text)[None] for text in texts]

    def terms(self, words, cancel=None):
        return set()

    def embed_question(self, text, cancel=None):
        vector = np.full(65, 0.0, np.float32)
        vector[0] = 2.0
        for word in text.lower().strip("?.").split():
            if len(word) > 3:
                vector[1 + sum(word.encode()) % 64] += 0.6
        return vector / np.linalg.norm(vector)


def test_an_unknown_embedder_is_measured_in_the_collection(open_workspace, tmp_path, monkeypatch):
    workspace = open_workspace(chunk_tokens=64)
    monkeypatch.setattr(type(workspace), "embedder", Scaled())
    (tmp_path / "few.txt").write_text("The ferry sails at noon.")
    ingest(workspace, [tmp_path / "few.txt"])
    assert workspace.library.embedder("default").unrelated is None, "too few passages"
    gates = [f"harbour{n} closes gate{n} when pilot{n} sleeps" for n in range(30)]
    ingest(workspace, [write_files(tmp_path, gates)])
    known = workspace.library.embedder("default")
    assert known.measured == 31 and 0.5 < known.unrelated.typical <= known.unrelated.best < 0.95
    assert search([workspace], "gate7 harbour7 pilot7", 3)[0].document == "7.txt"
    assert [s.document for s in search([workspace], "Spinach contains vitamins", 3)] == []


def test_the_bundled_embedder_is_recorded():
    assert (
        BUNDLED in RECORDED
        and len(set(UNRELATED_QUESTIONS)) == len(UNRELATED_QUESTIONS)
        and DEFAULT != BUNDLED
    )


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        ("The key to the boathouse hangs behind the blue door and is not to be taken home.", True),
        ("Der Schlüssel hängt hinter der blauen Tür, und niemand darf ihn mitnehmen.", False),
        ("船库的钥匙挂在工场的蓝色门后面。图书馆星期五六点半关门。", False),
        ("INV-2024-0817", True),  # too short to tell
        (
            "Invoice 2025-0042. Tarn & Vale Supplies, 14 Weir Lane, Kelder. Billed to: Mossley Dental. 21 March 2025. "
            "Item Quantity Price Amount. Chairs 9 EUR 129.00 EUR 1,161.00. Total due: EUR 1,161.00. Please pay by "
            "20 April 2025. Quote the number 2025-0042 with your payment.",
            True,
        ),  # numbers are no language's
        ("Oslo 12 14 9 11 Bergen 8 7 12 10 Tromsø 3 1 4 2", True),  # and these three words are too few to tell
        (
            "Sheet: Members\nNo.: 1003\nFirst name: Nell\nLast name: Ashdown\nJoined: 2016\nPaid: yes\n\n"
            "Sheet: Members\nNo.: 1010\nFirst name: Kieran\nLast name: Boyle\nJoined: 2012\nPaid: no",
            True,
        ),  # was Slovene and Catalan, in which `no` is a stop word
        ("Haustiere\nEin Hund ist nach Absprache erlaubt, und er kostet 6 Euro. Allein darf er nicht bleiben.", False),
    ],
)  # fmt: skip
def test_english_is_known_by_its_little_words(text, is_known):
    assert is_english(text) is is_known


def test_a_language_that_the_embedder_does_not_know_is_said_once(cli, tmp_path, capfd):
    text = "Die Schlüssel hängen hinter der blauen Tür, und niemand darf sie ohne Erlaubnis mit nach Hause nehmen, "
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(text * 3 + f"sagt Wart {n}.")
    said = []
    for n in range(3):
        cli("ingest", tmp_path / f"{n}.txt")
        said.append("multilingual-e5-small" in capfd.readouterr().err)
    assert said == [True, False, False]
