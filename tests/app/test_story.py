"""The whole story on the bundled models, without fakes: ingest, answers, reused KV, removal, repair."""

import subprocess
import sys
import threading

import pytest
from app_fakes import answer_of, make_cross_encoder

from ragblend.app import samples
from ragblend.app.answering.rerank import CrossEncoder
from ragblend.app.library.ingest import ingest
from ragblend.app.library.maintenance import check
from ragblend.app.library.removal import remove_document
from ragblend.app.workspace import Workspace
from ragblend.engine.engine import Engine
from ragblend.kvstore.errors import ModelError

TIDES = (
    "The tide table of Harrow Sound is kept by the widow Marsh. High water comes twice a day, and the causeway is "
    "closed for two hours before and after it. Nobody has been lost on the causeway since the bell was hung in 1911. "
)
BELL = (
    "The bell at the causeway is rung by hand. It was cast in Lowestoft from the bronze of a ship's propeller, and it "
    "weighs forty stone. The ringer is paid in herring, one barrel a month, and may keep a goat on the green. "
)
QUESTION = "What is the ringer of the bell at the causeway paid in?"


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


def test_suggested_questions_are_answered_with_a_citation(tmp_path, with_smollm2):
    """A newcomer sees them first. Passages were cut in another way, and two of three were answered wrongly."""
    with Workspace.open(with_smollm2(tmp_path / "home"), max_new_tokens=32) as opened:
        ingest(opened, [samples.documents_folder()])
        suggested = [each for each in samples.questions() if each.suggested]
        answers = [answer_of(opened, each.question) for each in suggested]
        opened.engine.close()
    assert samples.questions()[0] in suggested and len(suggested) == 3  # the first is the demo's
    for each, answer in zip(suggested, answers, strict=True):
        assert answer.report.tokens.reused and any(right in answer.text for right in each.answers), (
            answer.text
        )
        assert answer.citations, answer.text


def test_second_run_encodes_nothing(workspace, folder):
    report = ingest(workspace, [folder])
    assert len(report.unchanged) == 2 and report.encoded == report.embedded == 0


def test_stored_kv_is_reused_for_the_same_prompt(workspace):
    fused, full = answer_of(workspace, QUESTION), answer_of(workspace, QUESTION, method="full")
    assert fused.sources[0].document == "bell.md"
    assert any("herring" in source.text for source in fused.sources)
    for answer in (fused, full):
        tokens = answer.report.tokens
        assert tokens.reused + tokens.recomputed + tokens.fresh + tokens.missing == tokens.prompt
    assert fused.report.tokens.prompt == full.report.tokens.prompt
    assert (fused.report.hits, fused.report.misses) == (len(fused.sources), 0)
    assert fused.report.tokens.reused > fused.report.tokens.prompt / 3 > full.report.tokens.reused == 0
    assert full.text.strip() and fused.text.strip()


def test_an_ask_imports_no_reader_index_or_framework(workspace):
    """Imports were five of the eight seconds that a question took. The vectors are searched without chromadb."""
    assert workspace.engine.finish_background()  # what is measured once would be measured there
    words = "import sys; from ragblend.app.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", words, "ask", QUESTION, "--max-new-tokens", "1"]
    command += ["--home", str(workspace.home.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unused = {
        "chromadb",
        "fastapi",
        "gguf",
        "gradio",
        "langchain_core",
        "llama_index",
        "nltk",
        "openpyxl",
        "pandas",
    }
    unused |= {"pypdfium2", "sentence_transformers", "sklearn", "starlette"}
    imported = set(done.stdout.splitlines()[-1].split())
    assert imported & unused == set() and {"torch", "ragblend.engine.engine"} <= imported


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


def test_reranker_decides_while_the_device_prefills(workspace, tmp_path, monkeypatch):
    """As on an accelerator, where there is something to gain."""
    from ragblend.engine import engine as engines
    from ragblend.engine.scheduling import speculation

    reranker = make_cross_encoder(tmp_path / "reranker", [TIDES, BELL, QUESTION])
    opened = workspace.workspaces.with_settings(
        workspace.settings.changed({"reranker": str(reranker), "top_k": 2})
    )
    read, real = {"ahead": 0, "in place": 0}, speculation.prefill
    begun = threading.Event()

    def counted(where):
        def prefill(*given, **how):
            read[where] += 1
            begun.set()
            return real(*given, **how)

        return prefill

    monkeypatch.setattr(speculation, "prefill", counted("ahead"))
    monkeypatch.setattr(engines, "prefill", counted("in place"))
    engine = workspace.engine
    monkeypatch.setattr(
        engine.runtime.decode_selector, "needs_measurement", False
    )  # one decode loop for all answers
    expected = answer_of(opened.first, QUESTION)
    fused = answer_of(workspace, QUESTION, top_k=2)
    assert read == {"ahead": 0, "in place": 2} and expected.sources != fused.sources

    class Slow(CrossEncoder):
        """Has not finished before reading has begun."""

        agrees = False

        def scores(self, question, texts, cancel=None):
            assert begun.wait(300)
            return (
                [-n for n, _ in enumerate(texts)] if self.agrees else super().scores(question, texts, cancel)
            )

    slow = Slow(str(reranker), "cpu")
    monkeypatch.setattr(type(workspace), "reranker", slow)
    monkeypatch.setattr(engines.Engine, "device", "cuda")
    for slow.agrees, want, times in ((False, expected, 2), (True, fused, 1)):
        assert engine.finish_background(), "it reads ahead only on an idle device"
        begun.clear()
        read.update({"ahead": 0, "in place": 0})
        answer = answer_of(opened.first, QUESTION)
        assert (answer.text, answer.sources) == (want.text, want.sources)
        assert read["ahead"] >= 1 and sum(read.values()) == times


def test_failing_reranker_releases_the_device(workspace, monkeypatch):
    class Broken:
        def scores(self, question, texts, cancel=None):
            raise ModelError("the reranker is damaged")

    monkeypatch.setattr(type(workspace), "reranker", Broken())
    monkeypatch.setattr(Engine, "device", "cuda")
    opened = workspace.workspaces.with_settings(workspace.settings.changed({"reranker": "some/one"}))
    with pytest.raises(ModelError, match="damaged"):
        answer_of(opened.first, QUESTION)
    with workspace.engine.runtime.queue.turn():
        assert workspace.engine.runtime.queue.request_count == 1
