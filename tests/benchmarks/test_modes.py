"""LangChain's own chains on the real engine with the tiny model.

A fake model stands in only where the chain's arithmetic is under test: what it says and how long it takes are known.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import modes
from benchmarks.quality import modes_of, parse
from ragblend.integrations import calls as calls_module
from ragblend.integrations.backend import Backend
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.prefilling import BenchError, stored

pytest.importorskip("langchain_classic", reason="LangChain's chains are not installed")


def mode_of(name, ratio=None):
    """As `--methods` and `--ratios` have it."""
    (found,) = modes_of(name, "" if ratio is None else str(ratio))
    return found


def text_of(engine, prompt):
    return engine.tokenizer.decode(prompt.token_ids)


def answer(engine, variant, question, max_new_tokens=4):
    with stored(engine, question.passages):
        return modes.answer(engine, variant, question.passages, question.text, max_new_tokens, 6)


# --- on the engine


@pytest.mark.parametrize(
    ("mode", "calls", "longest"),
    [("map_reduce", 4, [6, 6, 6, 4]), ("map_rerank", 3, [20] * 3), ("refine", 3, [4] * 3)],
)
def test_every_call_of_a_chain_is_counted(
    engine, questions, asked, mode, calls, longest, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(calls_module, "_warned", set())  # it says a thing once a process
    question = questions[0]
    said = answer(engine, mode_of(mode), question)
    texts = [text_of(engine, prompt) for prompt, _ in asked]
    assert len(texts) == said.calls == calls
    assert all(question.text in text for text in texts)
    for place, passage in enumerate(question.passages):  # each read once, in its own call, in their order
        assert [passage in text for text in texts] == [call == place for call in range(calls)]
    assert said.prompt_tokens == sum(len(prompt.token_ids) for prompt, _ in asked)
    assert [options["max_new_tokens"] for _, options in asked] == longest
    assert 0 < said.generated_tokens <= sum(longest)
    assert {options["method"] for _, options in asked} == {"full"}
    assert caplog.records == []  # that the reduce prompt holds no document is no news


def test_ratio_1_answers_as_full_prefill(engine, questions) -> None:
    """Same chains, same token ids, KV from the store: ratio 1 is full prefill, and at 0 something must differ."""
    full = [answer(engine, mode_of("refine"), each, 12) for each in questions]
    exact = [answer(engine, mode_of("refine+random", 1.0), each, 12) for each in questions]
    assert [each.text for each in exact] == [each.text for each in full]
    assert [each.prompt_tokens for each in exact] == [each.prompt_tokens for each in full]
    reused = [answer(engine, mode_of("refine+reuse"), each, 12) for each in questions]
    assert [each.text for each in reused] != [each.text for each in full]


def test_modes_leave_no_registered_passages(engine, questions, monkeypatch) -> None:
    """It fails where a passage is not stored, because that one would look perfect."""
    engine.encode(list(questions[0].passages[:2]))
    with pytest.raises(BenchError, match=r"refine\+reuse reused 2 of 3 passages"):
        modes.answer(engine, mode_of("refine+reuse"), questions[0].passages, "why?", 2)
    engine.finish_background()
    registry = Backend(home=str(engine.home), collection="bench").registry
    answer(engine, mode_of("refine"), questions[0], 1)
    assert len(registry) == 0
    monkeypatch.setattr(
        calls_module.PreparedCall, "generate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        answer(engine, mode_of("refine"), questions[0], 1)
    assert len(registry) == 0


# --- LangChain's chains, with a model whose words and times are known


def fake_models(answers, clock, before_ms=0.0, after_ms=0.0):
    """One model for all calls that gives these answers in turn, so long before and after its first token."""
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    from benchmarks.modes import Models

    left = iter(answers)

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def get_num_tokens(self, text: str) -> int:
            return len(text.split())

        def _generate(self, *arguments: Any, **options: Any) -> ChatResult:
            clock.s += (before_ms + after_ms) / 1000
            times = {"ttft_ms": before_ms, "total_ms": before_ms + after_ms}
            kv = {"method": "full", "hits": 0, "misses": 0, **times}
            usage = {"input_tokens": 100, "output_tokens": 7, "total_tokens": 107}
            message = AIMessage(next(left), usage_metadata=usage, response_metadata={"kv": kv})
            return ChatResult(generations=[ChatGeneration(message=message)])

    return Models(Fake(), Fake(), Fake(), prompt_tokens=4000)


@pytest.fixture
def ask(monkeypatch):
    def run(mode, answers, **times):
        clock = SimpleNamespace(s=0.0)  # it goes on only where it is told to
        monkeypatch.setattr(modes, "perf_counter", lambda: clock.s)
        passages = [f"passage {place}" for place in range(3)]
        return modes.ask(mode, fake_models(answers, clock, **times), passages, "who?")[0]

    return run


@pytest.mark.parametrize(
    ("mode", "calls", "expected_ms"),
    [
        ("map_reduce", 4, 3 * 90 + 30),  # the fourth call's first token
        ("refine", 3, 2 * 90 + 30),
        ("map_rerank", 3, 3 * 90),  # nothing is known before the last candidate is complete
    ],
)
def test_ttft_is_that_of_the_final_answer(ask, mode, calls, expected_ms) -> None:
    said = ask(mode, ["yes\nScore: 50"] * calls, before_ms=30, after_ms=60)
    assert said.ttft_ms == pytest.approx(expected_ms)
    assert (said.calls, said.prompt_tokens, said.generated_tokens) == (calls, 100 * calls, 7 * calls)


@pytest.mark.parametrize(
    ("answers", "chosen", "unscored"),
    [
        (["red\nScore: 10", "blue\nScore: 90", "green\nScore: 20"], "blue", 0),
        (["no idea", "blue\nScore: 0", "green\nScore: "], "blue", 2),  # any score is better than none
        (["  no idea ", "none", "never"], "no idea", 3),
    ],
)
def test_map_rerank_takes_the_best_score_if_there_is_one(ask, answers, chosen, unscored) -> None:
    said = ask("map_rerank", answers)
    assert (said.text, said.unscored) == (chosen, unscored)


# --- as it is typed


def test_modes_with_and_without_a_method() -> None:
    own, others = parse("full,refine,refine+reuse,map_reduce+random,random", "0.1,0.2", [])
    assert own == "full,random"
    found = ["refine", "refine+reuse", "map_reduce+random 0.1", "map_reduce+random 0.2"]
    assert [str(each) for each in others.variants] == found
    assert modes_of("refine", "")[0].arguments == {"method": "full"}
    assert modes_of("map_reduce+random", "0.1")[0].arguments == {"method": "random", "ratio": 0.1}
    assert parse("full,random", "0.1", [])[1].settings is None


def test_unknown_modes_and_incomparable_ones_are_refused() -> None:
    for wrong in ("refine+", "refine+magic"):
        with pytest.raises(UsageError, match="--methods"):
            parse(wrong, "0.1", [])
    with pytest.raises(UsageError, match=r"--compare .*there are reuse, transplant:by=random@0.1"):
        parse("reuse,refine,transplant:by=random", "0.1", ["refine,reuse"])  # a mode has no divergence
