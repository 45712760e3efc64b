"""Scenario: pages of a registry are overwritten; readable rows are kept, and lost ones are named."""

import random
import shutil
from pathlib import Path

import numpy as np

from ragblend.app.library.documents import DocumentPassage, FileFacts, id_of_document, node_id
from ragblend.app.library.registry import LOST, Library
from ragblend.kvstore.errors import RagBlendError

WORDS = 40  # of a passage: with its embedding under a kibibyte, so that no row needs a page of its own
PAGE = 4096


def make_library(path: Path, documents: int = 12, passages: int = 6, seed: int = 0) -> dict[str, str]:
    """A registry as ingest leaves it: documents in two collections. Returns the text of each passage, by node id."""
    chance, truth = random.Random(seed), {}
    with Library(path) as library:
        for number in range(documents):
            collection = "default" if number % 3 else "letters"
            name = f"/documents/{chance.randbytes(4).hex()}-{number}.txt"
            key = library.begin(collection, name)
            assert key == id_of_document(collection, name)
            texts = [" ".join(chance.randbytes(4).hex() for _ in range(WORDS)) for _ in range(passages)]
            parts = [
                DocumentPassage(node_id(key, i, text), key, i, text, f"p. {i + 1}")
                for i, text in enumerate(texts)
            ]
            rows = [np.array([[chance.gauss(0, 1) for _ in range(96)]], np.float32) for _ in texts]
            facts = FileFacts(chance.randrange(10**6), chance.randrange(10**18), chance.randbytes(32).hex())
            library.replace_passages(key, facts, "recipe", parts, rows)
            library.finish(key)
            truth |= {part.node_id: part.text for part in parts}
    return truth


def spoil(path: Path, seed: int) -> list[int]:
    """Overwrite one to three pages, but not the first, with noise, ones or zeros. Returns their numbers."""
    chance = random.Random(seed)
    content = bytearray(path.read_bytes())
    pages = chance.sample(range(1, len(content) // PAGE), chance.randint(1, 3))
    for page in pages:
        noise = chance.choice((bytes(PAGE), b"\xff" * PAGE, chance.randbytes(PAGE)))
        content[page * PAGE : (page + 1) * PAGE] = noise
    path.write_bytes(content)
    return pages


def verdict_on(sound: Path, at_work: Path, truth: dict[str, str], seed: int) -> str:
    """'harmless', 'rescued', 'refused', or what is missing or changed without being named."""
    for left in at_work.parent.glob(f"{at_work.name}*"):
        left.unlink()
    shutil.copyfile(sound, at_work)
    pages = spoil(at_work, seed)
    spoilt = at_work.read_bytes()
    try:
        library = Library(at_work)
    except RagBlendError as error:
        return (
            "refused"
            if at_work.read_bytes() == spoilt
            else f"pages {pages}: {error}, and the file is another"
        )
    with library:
        rescued, found = library.rescued, library.passages(list(truth))
        if wrong := [node for node, passage in found.items() if passage.text != truth[node]]:
            return f"pages {pages}: the passage {wrong[0]} is another"
        whole: dict[str, int] = {}
        for passage in found.values():
            whole[passage.document_id] = whole.get(passage.document_id, 0) + 1
        for name in library.collections():
            for document in library.documents(name):
                if whole.get(document.id) != 6 and (document.state, document.reason) != ("failed", LOST):
                    return f"pages {pages}: {document.path} lacks passages and is {document.state}"
        if rescued is None:
            return (
                "harmless"
                if len(found) == len(truth)
                else f"pages {pages}: rows are missing, and nothing was said"
            )
        if rescued.kept.read_bytes()[PAGE:] != spoilt[PAGE:]:
            return f"pages {pages}: what was set aside is another file"
    with Library(at_work) as again:
        return "rescued" if again.rescued is None else f"pages {pages}: rescued twice"
