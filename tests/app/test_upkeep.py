"""Upkeep: what index and registry do not share is found, and a repair makes all of it again."""

import numpy as np
import pytest

from ragblend.app.ingest import ingest
from ragblend.app.upkeep import check, check_index, repair
from ragblend.kvstore.errors import LibraryError


@pytest.fixture
def filled(workspace, documents):
    ingest(workspace, [documents])
    assert check(workspace) == []
    return workspace


def test_missing_and_extra_vectors_are_found_and_mended(filled):
    nodes = sorted(filled.index.node_ids())
    filled.index.delete(nodes[:2])
    filled.index.upsert(["nobody"], [np.ones((1, 64), np.float32)])
    missing, extra = check_index(filled)
    assert missing.message.startswith("2 passages") and extra.message.startswith("1 vectors")
    repair(filled, lambda text: None)
    assert check(filled) == [] and sorted(filled.index.node_ids()) == nodes


def test_repair_makes_the_hashes_of_known_passages_again(filled):
    known = filled.known_passages
    before = len(known)
    known.close()
    known.path.unlink()
    assert len(known) == 0
    repair(filled, lambda text: None)
    assert len(known) == before > 0


def test_repair_encodes_what_is_missing_and_embeds_nothing(filled):
    gone = sorted(filled.engine.stored())[0]
    (filled.engine.folder / gone).unlink()
    filled.embedder.embedded.clear()
    notes = []
    assert repair(filled, notes.append).encoded == 1
    assert filled.embedder.embedded == [] and len(notes) == 3


def test_damaged_registry_is_not_repaired_over(filled, monkeypatch):
    monkeypatch.setattr(type(filled.library), "damage", lambda self: ["row 7 missing from index"])
    with pytest.raises(LibraryError, match="backup"):
        repair(filled, lambda text: None)
    assert filled.index.count() == filled.library.count_passages("default")
