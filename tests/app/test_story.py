"""The whole story on the bundled models, nothing faked: documents in, answers out, KV reused, removed, mended."""

import pytest

from ragblend.app.conversation import ANY, AskOptions, Conversations
from ragblend.app.ingest import ingest
from ragblend.app.removal import remove_document
from ragblend.app.upkeep import check
from ragblend.app.workspace import Workspace

TIDES = (
    "The tide table of Harrow Sound is kept by the widow Marsh. High water comes twice a day, and the causeway is "
    "closed for two hours before and after it. Nobody has been lost on the causeway since the bell was hung in 1911. "
)
BELL = (
    "The bell at the causeway is rung by hand. It was cast in Lowestoft from the bronze of a ship's propeller, and it "
    "weighs forty stone. The ringer is paid in herring, one barrel a month, and may keep a goat on the green. "
)
QUESTION = "What is the ringer of the bell paid in?"


def asked(workspace, question, **options):
    talks = Conversations(workspace.workspaces)
    return talks.answer(question, AskOptions(least_score=ANY, **options)).whole()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "tides.txt").write_text(TIDES)
    (folder / "bell.md").write_text(f"# The bell\n\n{BELL}\n")
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, folder, with_smollm2):
    home = with_smollm2(tmp_path_factory.mktemp("home"))
    opened = Workspace.open(home, chunk_tokens=32, max_new_tokens=12)
    report = ingest(opened, [folder])
    assert len(report.added) == 2 and report.encoded == report.embedded == report.passages >= 3
    yield opened
    opened.close()
    opened.engine.close()


def test_second_run_encodes_nothing(workspace, folder):
    report = ingest(workspace, [folder])
    assert len(report.unchanged) == 2 and report.encoded == report.embedded == 0


def test_stored_kv_is_reused_for_the_same_prompt(workspace):
    fused, full = asked(workspace, QUESTION), asked(workspace, QUESTION, method="full")
    assert fused.sources[0].document == "bell.md"
    assert any("herring" in source.text for source in fused.sources)
    for answer in (fused, full):
        tokens = answer.report.tokens
        assert tokens.reused + tokens.recomputed + tokens.fresh + tokens.missing == tokens.prompt
    assert fused.report.tokens.prompt == full.report.tokens.prompt
    assert (fused.report.hits, fused.report.misses) == (len(fused.sources), 0)
    assert fused.report.tokens.reused > fused.report.tokens.prompt / 2 > full.report.tokens.reused == 0
    assert full.text.strip() and fused.text.strip()


def test_removing_a_document_removes_its_kv_and_no_other(workspace, folder):
    extra = folder / "extra.txt"
    extra.write_text("The lamp in the chapel burns seal oil, which the bishop sends in a blue jar.")
    before = set(workspace.engine.store.keys())
    ingest(workspace, [folder])
    assert len(set(workspace.engine.store.keys()) - before) == 1
    extra.unlink()
    with workspace.workspaces.writing():
        removed = remove_document(workspace, workspace.library.find("default", "extra.txt"))
    assert removed.bytes_freed > 0 and set(workspace.engine.store.keys()) == before
    assert check(workspace) == []
