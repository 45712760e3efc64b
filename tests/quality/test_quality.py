"""`quality.run` on the real engine: nothing is reported that was not measured."""

from dataclasses import replace

import pytest

from ragblend.engine.selection import METHODS
from ragblend.measuring import quality
from ragblend.measuring.prefilling import BenchError, temporarily_stored, timed_prefill
from ragblend.measuring.records import Journal, run_digest
from ragblend.measuring.summary import summarise
from ragblend.measuring.variants import Variant

VARIANTS = (Variant("full"), Variant("reuse"), Variant("random", 0.3), Variant("cacheblend", 0.5))


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.jsonl")


def run(engine, questions, journal, **options):
    quality.run(engine, questions, VARIANTS, journal, **{"max_new_tokens": 5, **options})


def test_an_incomplete_line_is_measured_again(engine, questions, journal) -> None:
    """And so are records of another shape."""
    run(engine, questions[:1], journal)
    whole = journal.path.read_text().rstrip("\n")
    journal.path.write_text('{"question": "q", "kl": 0}\n[]\nnull\n' + whole[:-20])
    cut = Journal(journal.path)
    assert len(cut.records) == 3
    run(engine, questions[:1], cut)
    assert len(Journal(journal.path).records) == 4


def test_each_time_of_full_prefill_is_compared_with_once(engine, questions, journal) -> None:
    """One, perhaps disturbed, stood for eight questions about the same passages."""
    same = [replace(questions[0], index=number, text=f"Question {number}?") for number in range(3)]
    run(engine, same, journal)
    times = [record.full_ttft_ms for record in journal.records.values() if record.method == "reuse"]
    assert [each is None for each in times] == [False, True, True]
    (row,), _ = summarise(journal.records, same, [Variant("reuse")], 0)
    assert row["speedup_n"] == 1 and row["speedup"] > 0


def test_one_decode_implementation_gives_all_answers(engine, tmp_path, monkeypatch) -> None:
    """The first answers came from the model's forward, later ones from the faster loop."""
    choice = engine.runtime.decode_selector
    monkeypatch.setattr(choice, "needs_measurement", True)
    by_forward = quality.open_journal(engine, tmp_path, False, "raw", 8).path
    assert not choice.needs_measurement
    monkeypatch.setattr(choice, "current", type("Another", (), {})())
    assert quality.open_journal(engine, tmp_path, False, "raw", 8).path != by_forward


def test_the_shortcut_for_equal_answers_equals_decoding(engine, questions) -> None:
    """The bench does not decode it again: the shortcut must not change a single answer."""
    question = questions[0]
    prompt = quality.build_prompt(engine, question, 8)
    engine.encode(list(question.passages))
    reference = quality.reference_outcome(engine, prompt, 8)
    seen = set()
    for variant in (Variant("reuse"), Variant("epic", 0.2), Variant("random", 1.0)):
        timed = timed_prefill(engine, prompt, variant)
        logits = quality.teacher_logits(engine, timed.prefilled, reference.answer)
        agrees = quality.would_give_answer(logits, reference.answer)
        decoded = engine.decode(timed.prefilled, max_new_tokens=8, temperature=0.0)
        assert agrees == (decoded.token_ids == reference.answer.token_ids)
        seen.add(agrees)
    assert seen == {True, False}


def test_teacher_forced_logits_equal_a_plain_forwards(engine, questions) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = quality.build_prompt(engine, questions[0], 6)
    reference = quality.reference_outcome(engine, prompt, 6)
    model = AutoModelForCausalLM.from_pretrained(engine.model_name, dtype=torch.float32)
    ids = [*prompt.token_ids, *reference.answer.token_ids]
    with torch.inference_mode():
        plain = model(torch.tensor([ids])).logits[0, len(prompt.token_ids) - 1 : -1]
    assert torch.allclose(reference.logits, plain, atol=1e-4)
    assert plain.argmax(-1).tolist() == list(reference.answer.token_ids)  # greedy, then


def test_nan_logits_stop_the_run(engine, questions, journal, monkeypatch) -> None:
    logits = quality.teacher_logits
    calls = []

    def spoilt(*arguments):
        calls.append(arguments)
        return logits(*arguments) * (float("nan") if len(calls) == 2 else 1)  # the first are full prefill's

    monkeypatch.setattr(quality, "teacher_logits", spoilt)
    said = r"question 0, method random at ratio 0.3: .* the method's logits hold NaN"
    with pytest.raises(BenchError, match=said):
        quality.run(engine, questions[:1], [Variant("random", 0.3)], journal, max_new_tokens=3)
    assert journal.records == {}
    monkeypatch.setattr(quality, "teacher_logits", lambda *arguments: logits(*arguments) * float("nan"))
    with pytest.raises(BenchError, match=r"method reuse: .* full prefill's logits hold NaN"):
        quality.run(engine, questions[:1], [Variant("reuse")], journal, max_new_tokens=3)


def test_a_method_must_have_the_engines_name(engine, questions, monkeypatch) -> None:
    """A policy of another package may be registered under another name than its own."""
    monkeypatch.setitem(METHODS, "alias", METHODS["probe"])
    prompt = quality.build_prompt(engine, questions[0], 5)
    engine.encode(list(questions[0].passages))
    with pytest.raises(BenchError, match=r"the method 'alias' is called 'probe' by the engine"):
        timed_prefill(engine, prompt, Variant("alias", 0.3))


def test_kv_of_another_codec_is_encoded_again(engine, model_folder, home, questions, monkeypatch) -> None:
    """A key does not name the codec: int8 was asked for, and the raw KV of before was measured."""
    text = questions[0].passages[0]
    (key,) = engine.encode([text]).keys
    raw = codec_of(engine, key, text)
    how = {"device": "cpu", "dtype": "float32", "collection": "bench", "kv_codec": "int8"}
    type(engine).open(model=str(model_folder), home=home, **how)
    with temporarily_stored(engine, questions[0].passages) as keys:
        codecs = [codec_of(engine, *each) for each in zip(keys, questions[0].passages, strict=True)]
        with monkeypatch.context() as patch:  # what is stored as it should be is left alone
            patch.setattr(type(engine.store), "delete", lambda *_: pytest.fail("encoded once more"))
            with temporarily_stored(engine, questions[0].passages):
                pass
    assert (raw, codecs) == ("raw", ["int8"] * 3)
    assert list(engine.store.keys()) == [key]  # as before the block, and packed as the engine packs now
    assert codec_of(engine, key, text) == "int8"


def codec_of(engine, key, text):
    from ragblend.engine.prompts.segments import Chunk

    (chunk,) = engine.tokenize(engine.chat_prompt(None, [Chunk(text)], "why?")).chunks
    with engine.store.open_chunk(key, chunk.token_ids) as reader:
        return reader.codec.name


def test_the_digest_of_a_run_depends_on_settings_and_code(tmp_path) -> None:
    (tmp_path / "engine.py").write_text("one")
    first = run_digest({"model": "a"}, (tmp_path,))
    assert run_digest({"model": "a"}, (tmp_path,)) == first
    assert run_digest({"model": "b"}, (tmp_path,)) != first
    (tmp_path / "engine.py").write_text("two")
    assert run_digest({"model": "a"}, (tmp_path,)) != first
