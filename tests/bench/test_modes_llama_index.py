"""LlamaIndex's response synthesizers beside the methods, on the real engine over the tiny model."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ragblend.app.bench import modes, modes_llama_index
from ragblend.app.bench.cli import bench_app
from ragblend.app.bench.data import load_questions
from ragblend.app.bench.prefilling import BenchError, stored
from ragblend.app.bench.variants import LLAMA_INDEX_MODES, MODES, Variant, parse_variants
from ragblend.integrations.backend import Backend
from ragblend.integrations.llama_index import WholePassages
from ragblend.kvstore.errors import PromptTooLongError, UsageError

TREE, REFINE = LLAMA_INDEX_MODES


@pytest.fixture(autouse=True)
def one_event_loop():
    """LlamaIndex's `asyncio_run` takes the thread's event loop, makes one where there is none, and never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def questions(data_file):
    return load_questions(data_file)


@pytest.fixture
def asked(monkeypatch):
    """Every (prompt, options) that LlamaIndex's adapter has the engine answer; the answers stay the engine's."""
    found, generate = [], Backend.generate

    def listening(self, prompt, **options):
        found.append((prompt, options))
        return generate(self, prompt, **options)

    monkeypatch.setattr(Backend, "generate", listening)
    return found


def answer(engine, variant, question, max_new_tokens=4):
    with stored(engine, question.passages):
        return modes.answer(engine, variant, question.passages, question.text, max_new_tokens)


@pytest.mark.parametrize(("mode", "seen"), [(TREE, [[0, 1, 2]]), (REFINE, [[0], [1], [2]])])
def test_every_call_is_counted_and_read_in_full(engine, questions, asked, mode, seen, caplog) -> None:
    question = questions[0]
    said = answer(engine, Variant(mode), question)
    texts = [engine.tokenizer.decode(prompt.token_ids) for prompt, _ in asked]
    places = [[place for place, each in enumerate(question.passages) if each in text] for text in texts]
    assert places == seen  # all in one call where they fit into the window; one after another
    assert said.calls == len(seen)
    assert all(question.text in text for text in texts)
    assert said.prompt_tokens == sum(len(prompt.token_ids) for prompt, _ in asked)
    assert {(options["method"], options["max_new_tokens"]) for _, options in asked} == {("full", 4)}
    assert 0 < said.generated_tokens <= 4 * len(seen)
    assert said.unscored is None
    assert caplog.records == []


def test_a_tree_is_built_where_the_passages_do_not_fit_into_one_call(
    engine, questions, asked, monkeypatch
) -> None:
    question = questions[0]
    # LlamaIndex's own limit: by the tiny model's long tokens no window holds its template and part of the passages.
    most = sum(engine.count_tokens(each) + 2 for each in question.passages[:2])
    helper = SimpleNamespace(of_llm=partial(WholePassages.of_llm, chunk_size_limit=most))
    monkeypatch.setattr(modes_llama_index, "WholePassages", helper)
    said = answer(engine, Variant(TREE), question)
    texts = [engine.tokenizer.decode(prompt.token_ids) for prompt, _ in asked]
    assert said.calls == len(texts) == 3
    assert not any(each in texts[-1] for each in question.passages)  # it holds the summaries
    for each in question.passages:
        assert sum(each in text for text in texts) == 1


@pytest.mark.parametrize("mode", LLAMA_INDEX_MODES)
def test_calls_that_recompute_everything_answer_as_those_read_in_full(engine, questions, mode) -> None:
    """Same classes, same token ids, KV from the store: ratio 1 is full prefill, and at 0 something must differ."""
    full = [answer(engine, Variant(mode), each, 12) for each in questions]
    exact = [answer(engine, Variant(f"{mode}+random", 1.0), each, 12) for each in questions]
    assert [each.text for each in exact] == [each.text for each in full]
    assert [each.prompt_tokens for each in exact] == [each.prompt_tokens for each in full]
    reused = [answer(engine, Variant(f"{mode}+reuse"), each, 12) for each in questions]
    assert [each.text for each in reused] != [each.text for each in full]


def test_a_passage_that_is_not_stored_stops_a_fused_mode_because_it_would_look_perfect(
    engine, questions
) -> None:
    engine.encode(list(questions[0].passages[:2]))
    with pytest.raises(BenchError, match=r"llama-refine\+reuse reused 2 of 3 passages"):
        modes.answer(engine, Variant("llama-refine+reuse"), questions[0].passages, "why?", 2)
    engine.finish_background()


@pytest.mark.parametrize("error", [UsageError("no"), PromptTooLongError("long")])
def test_what_goes_wrong_in_a_call_is_raised_and_is_no_empty_response(
    engine, questions, monkeypatch, error
) -> None:
    """`Refine` takes a ValueError for a badly formed answer, logs it and goes on."""
    monkeypatch.setattr(Backend, "generate", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(type(error), match=str(error)):
        answer(engine, Variant(REFINE), questions[0])


@pytest.mark.parametrize(("mode", "expected_ms"), [(TREE, 30), (REFINE, 2 * 90 + 30)])
def test_the_first_token_is_the_final_answers(engine, questions, monkeypatch, mode, expected_ms) -> None:
    from ragblend.integrations.llama_index import llm

    now, generate = [0.0], Backend.generate
    times = {"ttft_ms": 30.0, "total_ms": 90.0}

    def timed(self, prompt, **options):
        now[0] += 0.09
        return generate(self, prompt, **options)

    statistics = llm.kv_statistics
    monkeypatch.setattr(modes_llama_index, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Backend, "generate", timed)
    monkeypatch.setattr(llm, "kv_statistics", lambda result: statistics(result) | times)
    assert answer(engine, Variant(mode), questions[0]).ttft_ms == pytest.approx(expected_ms)


def test_both_frameworks_stand_in_one_table_under_names_of_their_own(
    model_folder, home, tmp_path, data_file, monkeypatch
) -> None:
    pytest.importorskip("langchain_classic", reason="LangChain's chains are not installed")
    where = ["--model", model_folder, "--home", home, "--device", "cpu", "--dtype", "float32"]
    line = ["quality", *where, "--output", tmp_path / "out", "--data", data_file, "--limit", "1", "--json"]
    names = "full,refine,llama-refine,llama-tree_summarize,llama-refine+reuse"
    done = CliRunner().invoke(
        bench_app,
        [str(part) for part in (*line, "--max-new-tokens", "2", "--methods", names)],
        catch_exceptions=False,
    )
    rows = json.loads(done.stdout)
    assert [row["method"] for row in rows] == names.split(",")
    assert [row["calls"] for row in rows] == [1, 3, 3, 1, 3]
    assert all(row["kl"] is None and row["ttft_ms"] > 0 and 0 <= row["f1"] <= 1 for row in rows[1:])
    settings = json.loads((tmp_path / "out" / "quality.json").read_text())["settings"]["modes"]
    assert settings["llama_index.core"]


def test_only_the_framework_that_is_asked_for_must_be_there(monkeypatch) -> None:
    both = parse_variants("refine,llama-refine", "", {"full"}, {"full"}, MODES)
    monkeypatch.setattr(modes, "PACKAGES", ("no_such_chains",))
    modes.check_packages(both[1:])
    assert modes.settings()["no_such_chains"] is None
    with pytest.raises(
        UsageError, match=r"refine are LangChain's and need no_such_chains.*'ragblend\[langchain\]'$"
    ):
        modes.check_packages(both)
    for missing in ("no_such_index.core", "llama_index.no_such_core"):
        monkeypatch.setattr(modes, "LLAMA_INDEX_PACKAGES", (missing,))
        with pytest.raises(
            UsageError, match=f"llama-refine are LlamaIndex's and need {missing}.*llama-index"
        ):
            modes.check_packages(both[1:])
