"""Questions: the prompt's shape, the window, duplicates, what is said when nothing can be answered."""

import pytest

from ragblend.app.ingest import ingest
from ragblend.app.rag import Rag
from ragblend.app.retrieval import without_duplicates
from ragblend.engine.prompt import Chunk, Literal
from ragblend.kvstore.errors import LibraryError, PromptTooLongError, SettingsError, UsageError


@pytest.fixture
def rag(workspace, documents):
    ingest(workspace, [documents])
    return Rag(workspace)


def test_passages_come_first_and_the_question_last(rag, workspace):
    answer = rag.ask("What colour has the sky over the harbour?")
    prompt, method, ratio, longest, _, temperature = workspace.engine.requests[0]
    assert isinstance(prompt.segments[0], Literal) and isinstance(prompt.segments[-1], Literal)
    assert prompt.segments[-1].text.endswith("What colour has the sky over the harbour?")
    assert all(isinstance(segment, Chunk) for segment in prompt.segments[1:-1])
    assert (method, ratio, longest, temperature) == ("probe-shift", 0.15, 32, 0.0)
    assert answer.text == "It is blue."
    assert answer.sources[0].document == "sky.txt"
    best_last = [source.node_id for source in reversed(answer.sources)]
    assert [chunk.node_id for chunk in prompt.chunks] == best_last
    assert [s.score for s in answer.sources] == sorted((s.score for s in answer.sources), reverse=True)


def test_json_is_the_one_that_was_promised(rag):
    value = rag.ask("What colour has the sky?", top_k=2).to_json()
    assert list(value) == [
        "answer", "model", "device", "method", "ratio", "sources", "tokens", "timings", "store",
    ]  # fmt: skip
    assert list(value["sources"][0]) == ["node_id", "document", "location", "score", "text"]
    assert list(value["tokens"]) == ["prompt", "reused", "recomputed", "fresh", "missing", "generated"]
    promised = {"retrieve_ms", "load_ms", "stall_ms", "prefill_ms", "ttft_ms", "total_ms", "tokens_per_s"}
    assert promised <= value["timings"].keys()
    assert value["timings"]["ttft_ms"] == pytest.approx(10 + value["timings"]["retrieve_ms"], abs=0.02)
    assert value["store"] == {"hits": 2, "misses": 0}


def test_stream_gives_pieces_then_the_answer(rag):
    with rag.stream("What colour has the sky?") as stream:
        assert list(stream) == ["It ", "is ", "blue."]
        assert stream.answer.text == "It is blue."
    assert stream._stream.closed


def test_options_of_one_question(rag, workspace):
    rag.ask("Boats?", method="reuse", ratio=0.5, top_k=1, max_new_tokens=7, temperature=0.3, keep_tokens=9)
    prompt, *rest = workspace.engine.requests[0]
    assert rest == ["reuse", 0.5, 7, 9, 0.3] and len(prompt.chunks) == 1
    rag.ask("Boats?", repetition_penalty=1.4)
    assert workspace.engine.penalties == [1.1, 1.4]
    assert workspace.settings.top_k == 6, "one question changes no settings"


def test_lowest_ranked_passages_are_dropped_and_it_is_said(rag, workspace):
    everything = rag.ask("the sky over the harbour is blue")
    workspace.engine.context_window = 64
    answer = rag.ask("the sky over the harbour is blue")
    kept = len(answer.sources)
    assert 0 < kept < len(everything.sources) and answer.sources == everything.sources[:kept]
    assert f"{len(everything.sources) - kept} lowest-ranked" in answer.notice
    assert answer.to_json()["notice"] == answer.notice
    assert len(workspace.engine.requests[-1][0].token_ids) <= 64 - 32


def test_question_longer_than_the_window(rag, workspace):
    with pytest.raises(PromptTooLongError, match="Shorten the question"):
        rag.ask("why " * 5000)
    assert workspace.engine.requests == []


def test_nothing_ingested_says_what_to_do(workspace):
    with pytest.raises(LibraryError, match="ragblend ingest"):
        Rag(workspace).ask("Anything?")


def test_lost_index_says_what_to_do(rag, workspace):
    workspace.index.delete(list(workspace.index.node_ids()))
    with pytest.raises(LibraryError, match="store repair"):
        rag.ask("Anything?")


@pytest.mark.parametrize(
    ("question", "changes", "error"),
    [
        ("x", {"ratio": 2.0}, SettingsError),
        ("x", {"top_k": 0}, SettingsError),
        ("x", {"colour": "red"}, SettingsError),
        ("x", {"method": "magic"}, UsageError),
        ("  ", {}, UsageError),
    ],
)
def test_wrong_use_is_named_before_any_work(rag, workspace, question, changes, error):
    with pytest.raises(error):
        rag.ask(question, **changes)
    assert workspace.engine.requests == []


def test_same_passage_in_two_files_is_read_once(workspace, documents):
    (documents / "copy.txt").write_text((documents / "sky.txt").read_text())
    ingest(workspace, [documents])
    texts = [source.text for source in Rag(workspace).ask("the sky over the harbour is blue").sources]
    assert len(texts) == len(set(texts)) == 4


def test_first_of_two_duplicates_is_kept(rag):
    first = rag.ask("boats").sources
    assert without_duplicates([*first, *first]) == list(first)


def test_history_comes_between(rag, workspace):
    rag.ask("And the red one?", history=[("How many boats?", "Three.")])
    assert any(
        "Three." in (s.text or "") for s in workspace.engine.requests[0][0].segments if isinstance(s, Literal)
    )
