"""Flipped bits in a registry: what is read is what was written, or the damage is named. Nothing else is right."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.app.documents import FileFacts, Passage, document_id, node_id
from ragblend.app.library import Library
from ragblend.kvstore.errors import RagBlendError

WORDS = 40  # of a passage: two kibibytes of text and embedding, as a real one has


def make_library(path: Path, documents: int = 12, passages: int = 6, seed: int = 0) -> None:
    """A registry as ingest leaves it: documents in two collections, one that failed, one empty collection."""
    chance = random.Random(seed)
    library = Library(path)
    for number in range(documents):
        collection = "default" if number % 3 else "letters"
        name = f"/documents/{chance.randbytes(4).hex()}-{number}.txt"
        key = document_id(collection, name)
        library.begin(collection, name)
        texts = [" ".join(chance.randbytes(4).hex() for _ in range(WORDS)) for _ in range(passages)]
        parts = [Passage(node_id(key, i, text), key, i, text, f"p. {i + 1}") for i, text in enumerate(texts)]
        rows = [np.array([[chance.gauss(0, 1) for _ in range(96)]], np.float32) for _ in texts]
        facts = FileFacts(chance.randrange(10**6), chance.randrange(10**18), chance.randbytes(32).hex())
        library.replace_passages(key, facts, "recipe", parts, rows)
        library.finish(key) if number % 5 else library.fail(key, "It could not be read again.")
    library.keep_collection("empty")
    library.close()


def flip(path: Path, seed: int) -> int:
    """Turn one bit round; the byte's offset."""
    chance, content = random.Random(seed), bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return at


def read_all(path: Path) -> dict[str, Any]:
    """All that a registry says, by the names that the app reads it by; what is refused by name is None."""
    said: dict[str, Any] = {}
    library = Library(path)
    try:
        for collection in library.collections():
            said[f"collection {collection}"] = library.counts_by_state(collection)
            for document in library.documents(collection):
                said[f"document {document.id}"] = document
                for read in (library.passages_of, library.embeddings_of):
                    try:
                        said[f"{read.__name__} {document.id}"] = repr(read(document.id))
                    except RagBlendError:
                        said[f"{read.__name__} {document.id}"] = None
    finally:
        library.close()
    return said


def verdict_on(sound: Path, at_work: Path, truth: dict[str, Any], nodes: list[str], seed: int) -> str:
    """'harmless', 'named', or what was silently changed."""
    shutil.copyfile(sound, at_work)
    for suffix in ("-wal", "-shm"):
        at_work.with_name(at_work.name + suffix).unlink(missing_ok=True)
    at = flip(at_work, seed)
    try:
        said = read_all(at_work)
        library = Library(at_work)
        try:
            found = library.passages(nodes)
            marked = [
                each for name in library.collections() for each in library.documents(name) if _marked(each)
            ]
        finally:
            library.close()
    except RagBlendError:
        return "named"
    paths = {each.path for each in marked}  # a flipped bit in an id leaves the path to name it by
    named = {each.id for each in marked} | {
        name.removeprefix("document ")
        for name, document in truth.items()
        if name.startswith("document ") and document.path in paths
    }
    wrong = [node for node, passage in found.items() if repr(passage) != truth[f"passage {node}"]]
    if wrong:
        return f"byte {at}: the passage {wrong[0]} is another"
    keys = {key for key in {*truth, *said} if not key.startswith(("passage ", "owner "))}
    changed = {key for key in keys if truth.get(key) != said.get(key)}
    changed |= {f"passage {node} of {truth[f'owner {node}']}" for node in nodes if node not in found}
    silent = [key for key in changed if not _is_named(key, said, named)]
    return f"byte {at}: {sorted(silent)[:2]}" if silent else "named" if changed else "harmless"


def _marked(document: Any) -> bool:
    return document.state == "failed" and "damaged" in document.reason


def _is_named(key: str, said: dict[str, Any], named: set[str]) -> bool:
    if key.startswith("collection "):  # its counts by state follow its documents
        return bool(named)
    return any(key.endswith(document) for document in named) or (key in said and said[key] is None)
