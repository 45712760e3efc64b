"""Maintenance: differences between index and registry are found and repaired."""

import numpy as np
import pytest

from ragblend.app.library.ingest import ingest
from ragblend.app.library.maintenance import check, repair
from ragblend.app.library.word_search import by_words


@pytest.fixture
def filled(workspace, documents):
    ingest(workspace, [documents])
    assert check(workspace) == []
    return workspace


def test_repair_makes_the_hashes_of_known_passages_again(filled):
    known = filled.known_passages
    before = len(known)
    known.close()
    known.path.unlink()
    assert len(known) == 0
    repair(filled, lambda text: None)
    assert len(known) == before > 0


def test_repair_encodes_missing_kv_without_embedding(filled):
    gone = sorted(filled.engine.stored())[0]
    (filled.engine.folder / gone).unlink()
    filled.embedder.embedded.clear()
    notes = []
    assert repair(filled, notes.append).encoded == 1
    assert filled.embedder.embedded == [] and len(notes) == 3


def test_cancelled_repair_reports_kv_without_loading_a_model(filled):
    engine = filled.engine
    (engine.folder / sorted(engine.stored())[0]).unlink()
    engine.weights_loaded = False
    done = repair(filled, lambda text: None, is_cancelled=lambda: True)
    assert (done.encoded, done.with_kv) == (0, done.passages - 1)
    assert not engine.weights_loaded


@pytest.fixture
def letters(filled, tmp_path):
    """Another collection of the same home."""
    (tmp_path / "letter.txt").write_text("Dear Ada, the boat is red.")
    other = filled.workspaces.of("letters")
    ingest(other, [tmp_path / "letter.txt"])
    return other


def test_check_and_repair_cover_all_collections_without_duplicates(filled, letters):
    truth = [each.index.node_ids() for each in (filled, letters)]
    assert check(filled) == []
    letters.index.delete(sorted(truth[1]))
    filled.index.upsert(["nobody"], [np.ones((1, 64), np.float32)])
    with filled.library.transaction() as sql:
        sql.execute("INSERT INTO words (words) VALUES ('delete-all')")
    words, extra, missing = check(filled)
    assert words.part == "index" and words.message.startswith("index of words")
    assert extra.message.startswith("default: 1 vectors")
    assert missing.message.startswith("letters: 1 passages") and "--collection letters" in missing.message
    assert check(filled, "default") == [words, extra]
    done = repair(filled, lambda text: None)
    assert (done.vectors, done.passages, done.with_kv) == (5, 5, 5)
    assert check(filled) == [] and [each.index.node_ids() for each in (filled, letters)] == truth
    assert by_words(filled.library, ["default"], "rye", 1)


def test_a_damaged_page_of_the_registry_is_named_and_its_documents_are_made_again_from_their_files(
    filled, open_workspace
):
    truth = everything(filled)
    document = filled.library.find("default", "bread.md")
    spoil(filled.library, document)
    again = open_workspace()
    assert document.id in {each.id for each in again.library.incomplete_documents()}
    (aside,) = [finding for finding in check(again) if "damaged-1" in finding.message]
    repaired = repair(again, lambda text: None)
    assert repaired.restored >= 1 and repaired.lost == ()
    assert check(again) == [aside] and everything(again) == truth
    again.home.library.with_name(f"{again.home.library.name}.damaged-1").unlink()
    assert check(again) == []


def test_incomplete_documents_are_reported_until_ingested(filled, open_workspace, documents):
    document = filled.library.find("default", "bread.md")
    spoil(filled.library, document)
    (documents / "bread.md").write_text("Something else.")
    again, notes = open_workspace(), []
    assert document.path in repair(again, notes.append).lost
    assert any("bread.md" in note for note in notes)
    assert again.library.find("default", "bread.md").state == "failed"
    report = ingest(again, [documents])
    assert document.path in [*report.added, *report.updated]
    assert [finding.part for finding in check(again)] == ["library"]  # the file that was set aside


def everything(workspace):
    library = workspace.library
    return {d.id: (d.path, str(d.state), library.passages_of(d.id)) for d in library.documents("default")}


def spoil(library, document):
    """The page of the file in which a passage of the document stands."""
    text = library.passages_of(document.id)[0].text.encode()
    library.erase()
    library.close()
    content = bytearray(library.path.read_bytes())
    page = content.index(text[:40]) // 4096
    content[page * 4096 : (page + 1) * 4096] = b"\xff" * 4096
    library.path.write_bytes(content)
