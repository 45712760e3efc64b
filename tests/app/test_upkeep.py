"""Upkeep: what index and registry do not share is found, and a repair makes all of it again."""

import numpy as np
import pytest

from ragblend.app.ingest import ingest
from ragblend.app.upkeep import check, check_index, repair
from ragblend.kvstore.errors import DamagedDocumentError, LibraryError


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
    assert missing.message.startswith("default: 2 passages") and extra.message.startswith(
        "default: 1 vectors"
    )
    repair(filled, lambda text: None)
    assert check(filled) == [] and sorted(filled.index.node_ids()) == nodes


def test_an_index_of_words_that_does_not_fit_is_found_and_mended(filled):
    with filled.library.transaction() as sql:
        sql.execute("INSERT INTO words (words) VALUES ('delete-all')")
    (finding,) = check(filled)
    assert finding.part == "index" and "words" in finding.message
    repair(filled, lambda text: None)
    assert check(filled) == [] and filled.library.by_words(["default"], "rye", 1)


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


def test_a_repair_that_is_left_says_what_has_kv_and_loads_no_model(filled):
    engine = filled.engine
    (engine.folder / sorted(engine.stored())[0]).unlink()
    engine.weights_loaded = False
    done = repair(filled, lambda text: None, leave=lambda: True)
    assert (done.encoded, done.with_kv) == (0, done.passages - 1)
    assert not engine.weights_loaded


def test_all_collections_are_checked_and_repaired_and_nothing_is_said_twice(filled, tmp_path):
    (tmp_path / "letter.txt").write_text("Dear Ada, the boat is red.")
    letters = filled.workspaces.of("letters")
    ingest(letters, [tmp_path / "letter.txt"])
    truth = [each.index.node_ids() for each in (filled, letters)]
    assert check(filled) == []
    letters.index.delete(sorted(truth[1]))
    with filled.library.transaction() as sql:
        sql.execute("INSERT INTO words (words) VALUES ('delete-all')")
    words, missing = check(filled)
    assert words.message.startswith("that of words")
    assert missing.message.startswith("letters: 1 passages") and "--collection letters" in missing.message
    assert check(filled, "default") == [words]
    done = repair(filled, lambda text: None)
    assert (done.vectors, done.passages, done.with_kv) == (5, 5, 5)
    assert check(filled) == [] and [each.index.node_ids() for each in (filled, letters)] == truth


def test_a_damaged_document_of_another_collection_is_restored(filled, open_workspace, tmp_path):
    (tmp_path / "letter.txt").write_text("Dear Ada, the boat is red.")
    ingest(filled.workspaces.of("letters"), [tmp_path / "letter.txt"])
    flip_in(filled.library, filled.library.find("letters", "letter.txt"), "text")
    again = open_workspace()
    assert [each.part for each in check(again)].count("library") == 1
    assert repair(again, lambda text: None).restored == 1
    assert check(again) == []


def test_an_index_that_no_collection_can_be_read_from_is_named_once_and_made_again(filled, tmp_path):
    """All collections share Chroma's files."""
    (tmp_path / "letter.txt").write_text("Dear Ada, the boat is red.")
    letters = filled.workspaces.of("letters")
    ingest(letters, [tmp_path / "letter.txt"])
    truth = [each.index.node_ids() for each in (filled, letters)]
    (filled.home.chroma / "chroma.sqlite3").write_bytes(b"rubbish" * 1000)
    assert [finding.part for finding in check(filled)] == ["index"]
    repair(filled, lambda text: None)
    assert check(filled) == [] and [each.index.node_ids() for each in (filled, letters)] == truth


@pytest.mark.parametrize("field", ["text", "embedding", "location"])
def test_a_flipped_bit_in_the_registry_is_named_and_mended_from_the_document(filled, open_workspace, field):
    """A question was answered from the changed text, and nobody noticed."""
    truth = everything(filled)
    document = filled.library.find("default", "bread.md")
    flip_in(filled.library, document, field)
    again = open_workspace()
    nodes = again.library.node_ids(document.id)
    assert len(again.library.passages(nodes)) == len(nodes) - 1
    with pytest.raises(DamagedDocumentError, match="store repair"):
        again.library.passages_of(document.id)
    (found,) = [each for each in again.library.documents("default") if each.state == "failed"]
    assert found.id == document.id and "damaged" in found.reason
    assert [finding.part for finding in check(again)].count("library") == 1
    repaired = repair(again, lambda text: None)
    assert (repaired.restored, repaired.lost) == (1, ()) and check(again) == []
    assert everything(again) == truth


def test_a_damaged_row_of_a_document_is_named_and_made_again_by_ingest(filled, open_workspace, documents):
    truth, document = everything(filled), filled.library.find("default", "bread.md")
    flip_in(filled.library, document, "path")
    again = open_workspace()
    (found,) = [each for each in again.library.documents("default") if each.state == "failed"]
    assert found.id == document.id and "damaged" in found.reason and found.path != document.path
    assert repair(again, lambda text: None).lost == (found.path,), "nothing says what its path was"
    ingest(again, [documents])
    assert check(again) == [] and everything(again) == truth


def test_what_cannot_be_restored_stays_named_and_is_never_answered_from(filled, open_workspace, documents):
    library, document = filled.library, filled.library.find("default", "bread.md")
    others = {*library.nodes("default")} - {*library.node_ids(document.id)}
    flip_in(library, document, "text")
    (documents / "bread.md").write_text("Something else.")
    again, notes = open_workspace(), []
    assert repair(again, notes.append).lost == (document.path,)
    assert any("bread.md" in note for note in notes)
    assert again.index.node_ids() == others
    assert again.library.find("default", "bread.md").state == "failed"
    report = ingest(again, [documents])
    assert report.updated == [document.path] or report.added == [document.path]
    assert check(again) == []


def everything(workspace):
    library = workspace.library
    return {d.id: (d.path, str(d.state), library.passages_of(d.id)) for d in library.documents("default")}


def flip_in(library, document, field):
    """One bit of that field, in the file."""
    table, key = ("documents", "id") if field == "path" else ("chunks", "document_id")
    (row,) = library.rows(f"SELECT {field} FROM {table} WHERE {key} = ? LIMIT 1", document.id)
    library.erase()
    library.close()
    value = row[0] if isinstance(row[0], bytes) else row[0].encode()
    content = bytearray(library.path.read_bytes())
    content[content.index(value[:400] + (b"default" if field == "path" else b"")) + 2] ^= 1
    library.path.write_bytes(content)


def test_damaged_registry_is_not_repaired_over(filled):
    vectors, path = filled.index.count(), filled.home.library
    filled.close()
    content = bytearray(path.read_bytes())
    content[4096:4196] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(LibraryError, match="backup"):
        repair(filled, lambda text: None)
    assert filled.index.count() == vectors
