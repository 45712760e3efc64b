"""Documents by the hundred: ingested, asked about, chatted about, taken out by every way; then the home is searched.

Searched for, in the bytes of every file: pieces of the text, as UTF-8 and UTF-16, token ids in four codings, node ids,
and vectors, to a few digits. What stays must be found, or the search proves nothing.
"""

import json

import numpy as np
import pytest
from waiting import idle

from ragblend.app.answering.conversation import AskOptions
from ragblend.app.library.ingest import ingest
from ragblend.app.services import AppServices
from ragblend.app.workspace import Workspace
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.integrations.chroma import separate_vectors

SIZE = 64
PIECE = 24  # bytes of text that may be nowhere
RUN = 8  # token ids


class Embedder:
    """Each word has a direction of its own; a text has the sum of its words'."""

    name = "words"

    def load(self):
        pass

    def embed_passages(self, texts, progress=None, part="whole"):
        return [self.embed_question(text)[None][: part != "rest"] for text in texts]

    def terms(self, words, cancel=None):
        return set()

    def embed_question(self, text, cancel=None):
        seeds = [int.from_bytes(word.encode()[:8], "little") for word in text.lower().split()]
        total = sum(np.random.default_rng(seed).normal(size=SIZE) for seed in seeds)
        return (total / np.linalg.norm(total)).astype(np.float32)


@pytest.fixture
def home(tmp_path, tiny_folder, monkeypatch):
    """A home whose model is tiny and whose embedder knows words alone."""
    settings = {"MODEL": tiny_folder, "CHUNK_TOKENS": 80, "MAX_NEW_TOKENS": 2, "DEVICE": "cpu", "TOP_K": 2}
    for name, value in settings.items():
        monkeypatch.setenv(f"RAGBLEND_{name}", str(value))
    monkeypatch.setattr(Workspace, "embedder", Embedder())
    return tmp_path / "home"


def write(folder, number, seed):
    """A document of words that stand in no other."""
    chance = np.random.default_rng((number, seed))
    words = ["".join(chance.choice(list("abcdefghijklmnoprstuvw"), 7)) for _ in range(20)]
    path = folder / f"d{number}.txt"
    path.write_text(f"{' '.join(words)}.")
    return path


def traces(workspace, document):
    """Everything by which a document's passages could be found, by kind."""
    library, engine = workspace.library, workspace.engine
    passages, (nodes, rows) = library.passages_of(document.id), library.embeddings_of(document.id)
    rows = [*rows, *map(separate_vectors, nodes, rows)]  # as they are kept, and as they are indexed
    ids = [list(engine.tokenize(Prompt([Chunk(p.text)])).chunks[0].token_ids) for p in passages]
    runs = [i[at : at + RUN] for i in ids for at in range(0, len(i) - RUN, RUN)]
    texts = [p.text[at : at + PIECE] for p in passages for at in range(0, len(p.text) - PIECE, PIECE)]
    return {
        "text": [t.encode() for t in texts],
        "text in utf-16": [t.encode("utf-16-le") for t in texts],
        "node": [n.encode() for n in nodes],
        "node, raw": [bytes.fromhex(n) for n in nodes],
        "tokens, int32": [np.array(r, "<i4").tobytes() for r in runs],
        "tokens, int64": [np.array(r, "<i8").tobytes() for r in runs],
        "tokens, json": [json.dumps(r)[1:-1].encode() for r in runs],
        "tokens, compact": [json.dumps(r, separators=(",", ":"))[1:-1].encode() for r in runs],
        "vector": [row.tobytes()[at : at + 32] for r in rows for row in r for at in (0, 64, 128)],
        "vector, float64": [row.astype("<f8").tobytes()[:64] for r in rows for row in r],
    }, [row for r in rows for row in r]


def found(home, marks):
    """Which kinds of which documents stand in which files: {(document, kind): file}."""
    every = [needle for kinds, _ in marks.values() for needles in kinds.values() for needle in needles]
    beginnings = np.unique(np.frombuffer(b"".join(needle[:8] for needle in every), "<u8"))
    result = {}
    for path in home.rglob("*"):
        if not path.is_file() or path.is_relative_to(home / "models"):
            continue
        content = path.read_bytes()
        near, begun = _rounded(content), _begun(content, beginnings)
        for name, (kinds, rows) in marks.items():
            for kind, needles in kinds.items():
                if any(needle[:8] in begun and needle in content for needle in needles):
                    result[name, kind] = path.name
            if any(tuple(np.round(row[:3], 4)) in near for row in rows):
                result[name, "vector, nearly"] = path.name
    return result


def _begun(content, beginnings):
    """Which of these beginnings, of 8 bytes, stand anywhere in a file."""
    runs = [np.frombuffer(content, "<u8", (len(content) - at) // 8, at) for at in range(min(8, len(content)))]
    return {each.tobytes() for run in runs for each in run[np.isin(run, beginnings)]}


def _rounded(content):
    """All runs of three numbers in a file, as float32 at any offset, that could be of a unit vector."""
    runs = set()
    for offset in range(4):
        with np.errstate(all="ignore"):
            numbers = np.frombuffer(content[offset:], "<f4", (len(content) - offset) // 4)
            likely = (np.abs(numbers) < 1) & (np.abs(numbers) > 1e-4)
            at = np.flatnonzero(likely[:-2] & likely[1:-1] & likely[2:]) if len(numbers) > 2 else []
            near = (
                np.round(np.stack([numbers[at], numbers[at + 1], numbers[at + 2]], 1), 4) if len(at) else []
            )
        runs |= {tuple(each) for each in near}
    return runs


@pytest.mark.timeout(3600)
def test_nothing_of_a_removed_document_is_found(home, tmp_path, count):
    number = count(300, 8)
    folder = tmp_path / "documents"
    folder.mkdir()
    paths = [write(folder, n, 0) for n in range(number)]
    ways = dict(zip(paths, WAYS * number, strict=False))
    with AppServices.open(home) as desk:
        letters = [path for path in paths if ways[path] == "collection"]
        ingest(desk.workspaces.of("default"), [path for path in paths if path not in letters])
        desk.workspaces.create("letters")
        ingest(desk.workspaces.of("letters"), letters)
        marks = {path: _marks(desk, path, ways[path]) for path in paths}
        _talk_about(desk, paths, ways)
        before = found(home, marks)
        for path in paths:
            kinds = {kind for name, kind in before if name == path}
            assert {"text", "node", "tokens, int32", "vector"} <= kinds, (path, kinds)
        for way in dict.fromkeys(WAYS):
            _remove(desk, home, way, [path for path in paths if ways[path] == way], folder)
        undone = [path for path in paths if ways[path] == "undone"]
        _undo(desk, undone)
    with AppServices.open(home) as desk:  # what was to be undone was completed
        after = found(home, marks)
        stay = ("kept", "undone")
        left = {(ways[path], kind): file for (path, kind), file in after.items() if ways[path] not in stay}
        assert left == {}
        kept = {path for path in paths if ways[path] in stay}
        assert {path for path, kind in after if kind == "text"} == kept
        for path in (sorted(kept)[0], undone[0]):
            assert path.name in {s.document for s in desk.conversations.answer(_words(path)).whole().sources}
    engine = desk.workspaces.of("default").engine
    engine.close()


WAYS = ["command line", "page", "collection", "watched folder", "changed", "undone", "kept"]


def _undo(desk, paths):
    """Delete them, and take that back: they are as before, with their KV."""
    library, engine = desk.workspaces.library, desk.workspaces.of("default").engine
    documents = [library.find("default", str(path)) for path in paths]
    nodes = [node for document in documents for node in library.node_ids(document.id)]
    before = engine.missing(nodes)
    desk.deletions.delete([document.id for document in documents], "default")
    assert engine.missing(nodes).left_out == len(nodes)
    for document in documents:
        desk.deletions.undo(document.id)
    assert engine.missing(nodes) == before


def _marks(desk, path, way):
    workspace = desk.workspaces.of("letters" if way == "collection" else "default")
    return traces(workspace, workspace.library.find(workspace.settings.collection, str(path)))


def _words(path):
    return " ".join(path.read_text().split()[3:5])


def _talk_about(desk, paths, ways):
    """Each document is asked about twice, by the command line's way and in a conversation of three."""
    chat = None
    for at, path in enumerate(paths):
        name = "letters" if ways[path] == "collection" else "default"
        desk.conversations.answer(_words(path), AskOptions((name,))).whole()
        chat = desk.chats.create().id if at % 3 == 0 else chat
        for _ in desk.conversations.ask(chat, _words(path), AskOptions(collections=(name,))):
            pass


def _remove(desk, home, way, paths, folder):
    from ragblend.app.cli.main import main

    library = desk.workspaces.library
    if way == "command line":
        assert main(["docs", "rm", *map(str, paths), "--home", str(home)]) == 0
    elif way == "page":
        desk.deletions.delete([library.find("default", str(path)).id for path in paths], "default")
    elif way == "collection":
        desk.remove_collection("letters")
    elif way == "watched folder":
        for path in paths:
            path.unlink()
        desk.jobs.start()
        assert desk.jobs.queue_removal(paths, "default") == len(paths) and idle(desk.jobs, 120)
        with desk.workspaces.writing():
            pass  # the worker has let go
    elif way == "changed":
        for path in paths:
            write(folder, int(path.stem[1:]), 1)
        ingest(desk.workspaces.of("default"), paths)
