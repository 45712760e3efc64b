"""Decoding: transformers' greedy answer, streams, stop strings, sampling, and wrong use."""

from collections import Counter

import pytest
import torch
from benches import in_turn, largest_error, make_prompt, make_text
from tiny_models import END, SUPPORTED, UNSUPPORTED, reference_logits

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.config import DEFAULT_RATIO
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.sampling import GumbelNoise
from ragblend.kvstore.errors import PromptTooLongError, UsageError

TEXTS = [make_text(seed) for seed in range(3)]


def test_greedy_full_equals_transformers_generate(bench):
    bench.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    result = bench.engine.generate(prompt, method="full", max_new_tokens=28)  # beyond a sliding window
    assert list(result.token_ids) == bench.answer(prompt, 28)
    assert result.report.tokens.generated == len(result.token_ids)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_answers_end_with_the_chat_templates_token(fresh_bench_for, kind):
    """A GGUF's config names one end token, which may be another (Phi-3, Gemma): answers ran on into a next turn."""
    engine = fresh_bench_for(kind).engine
    engine.runtime.loaded.model.generation_config.eos_token_id = None
    end = engine.tokenizer.convert_tokens_to_ids(END)
    result = engine.generate(Prompt([Literal("who?")]), max_new_tokens=4, logit_bias={end: 100})
    assert (result.token_ids, result.stopped) == ((end,), True)


@pytest.mark.parametrize(
    ("bench", "method"), in_turn(("reuse",), ("cacheblend",), ("cacheblend-gradual",)), indirect=["bench"]
)
def test_decoding_continues_from_the_fused_cache(bench, method):
    """With one chunk right behind its prefix nothing is approximate, so even `reuse` answers as the model does."""
    bench.engine.encode(TEXTS)
    prompt = bench.engine.chat_prompt(None, [Chunk(TEXTS[0])], "who?")
    answer = bench.engine.generate(prompt, method=method, max_new_tokens=28)
    assert list(answer.token_ids) == bench.answer(prompt, 28)


def test_answers_may_outgrow_the_buffers(stored):
    prompt = make_prompt(TEXTS)
    prefilled = stored.engine.prefill(prompt, "full")  # made with room for 64
    result = stored.engine.decode(prefilled, max_new_tokens=150)
    expected = stored.answer(prompt, 150)
    assert list(result.token_ids) == expected
    assert len(expected) > 64, "the model ended its answer too early for this test"


@pytest.mark.parametrize("kind", [*SUPPORTED, *UNSUPPORTED])
def test_continue_logits_equals_teacher_forcing(bench_for, kind):
    bench = bench_for(kind)
    bench.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    prefilled = bench.engine.prefill(prompt, "full")
    answer = [9, 30, 77, 200, 41, 5, 6, 8]
    for _ in range(2):  # the cache is as before afterwards
        found = bench.engine.continue_logits(prefilled, answer)
        expected = reference_logits(bench.reference, [*prefilled.prompt.token_ids, *answer])
        start = len(prefilled.prompt.token_ids) - 1
        assert found.shape == (len(answer), 400)
        assert largest_error(found, expected[start : start + len(answer)]) < 1e-4


def is_plain(text):
    return text.isascii() and text.isprintable()


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings_are_cut_and_never_streamed(stored, length):
    prompt = make_prompt(TEXTS)
    whole = stored.engine.generate(prompt, max_new_tokens=60).text
    at = next(i for i in range(8, len(whole)) if is_plain(whole[i : i + length]))
    stop = whole[at : at + length]
    expected = whole[: whole.index(stop)]
    result = stored.engine.generate(prompt, max_new_tokens=60, stop=[stop])
    assert result.text == expected
    assert len(result.token_ids) < 60
    assert "".join(stored.engine.stream(prompt, max_new_tokens=60, stop=stop)) == expected


def test_an_empty_stop_string_is_ignored(stored):
    prompt = make_prompt(TEXTS)
    expected = stored.engine.generate(prompt, max_new_tokens=10)
    assert stored.engine.generate(prompt, max_new_tokens=10, stop=[""]).text == expected.text


def test_sampling_follows_the_seed(stored):
    prompt = make_prompt(TEXTS)
    options = {"max_new_tokens": 20, "temperature": 1.5}
    one, two, other = (stored.engine.generate(prompt, seed=seed, **options).token_ids for seed in (1, 1, 2))
    assert one == two
    assert one != other
    narrow = stored.engine.generate(prompt, seed=3, top_k=1, **options)
    greedy = stored.engine.generate(prompt, max_new_tokens=20)
    assert narrow.token_ids == greedy.token_ids


def test_a_temperature_near_zero_is_greedy(stored):
    """Divided by less than 1e-37, the scores overflowed."""
    prompt = make_prompt(TEXTS)
    greedy = stored.engine.generate(prompt, max_new_tokens=20)
    cold = stored.engine.generate(prompt, max_new_tokens=20, temperature=1e-40, seed=1)
    assert cold.token_ids == greedy.token_ids


def test_sampling_does_not_touch_torchs_global_generator(stored):
    """A seed was given to all of torch: who drew numbers beside it got others, and it got others itself."""
    prompt, options = make_prompt(TEXTS), {"max_new_tokens": 20, "temperature": 1.5, "seed": 1}
    torch.manual_seed(77)
    before = torch.get_rng_state()
    alone = stored.engine.generate(prompt, **options).token_ids
    assert torch.equal(torch.get_rng_state(), before)
    stream = stored.engine.stream(prompt, **options)
    for _ in stream:
        torch.rand(3)
    assert stream.result.token_ids == alone


def test_sampling_without_a_seed_follows_torchs_seed(stored):
    prompt, options = make_prompt(TEXTS), {"max_new_tokens": 20, "temperature": 1.5}
    answers = []
    for seed in (5, 5, None):
        if seed is not None:
            torch.manual_seed(seed)
        answers.append(stored.engine.generate(prompt, **options).token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_sampling_frequencies_match_probabilities():
    likely = torch.tensor([0.5, 0.3, 0.2, 0.0])
    scores = likely.log().expand(20_000, -1)
    drawn = GumbelNoise(torch.Generator().manual_seed(0))(torch.empty(0), scores).argmax(-1)
    assert (drawn.bincount(minlength=4) / 20_000).tolist() == pytest.approx(likely.tolist(), abs=0.015)


def test_top_k_zero_samples_from_all_tokens(stored):
    """top_k 0 means no limit, not transformers' own default of 50."""
    prompt = make_prompt(TEXTS)
    first = {
        stored.engine.generate(prompt, max_new_tokens=1, temperature=50.0, seed=seed).token_ids
        for seed in range(80)
    }
    assert len(first) > 55


def test_timings_are_consistent(stored):
    report = stored.engine.generate(make_prompt(TEXTS), max_new_tokens=10).report
    timings = report.timings
    assert 0 < timings.prefill_ms <= timings.ttft_ms <= timings.total_ms
    assert timings.tokens_per_s > 0
    assert timings.stall_ms <= timings.prefill_ms
    assert report.method == "probe-shift" and report.ratio == pytest.approx(DEFAULT_RATIO, abs=0.01)


# --- wrong use


@pytest.mark.parametrize("ratio", [2, -0.1, float("nan"), "most"])
def test_invalid_ratios_are_refused(stored, ratio):
    for call in (stored.engine.prefill, stored.engine.generate, stored.engine.stream):
        with pytest.raises(UsageError, match=r"between 0 and 1.*auto"):
            call(make_prompt(TEXTS), ratio=ratio)


def test_unknown_options_are_refused(stored):
    prompt, engine = make_prompt(TEXTS), stored.engine
    prefilled = engine.prefill(prompt)
    for call, what in ((engine.generate, prompt), (engine.stream, prompt), (engine.decode, prefilled)):
        with pytest.raises(UsageError, match="temprature"):
            call(what, temprature=0.1)


def penalised(bench, prompt, tokens, penalty, prompt_too):
    """A greedy answer by hand: what was said before counts less, and the prompt's own tokens as well or not."""
    ids, answer = list(bench.engine.tokenize(prompt).token_ids), []
    for _ in range(tokens):
        logits = reference_logits(bench.reference, ids + answer)[-1].clone()
        for token in set(answer) | set(ids if prompt_too else []):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        answer.append(int(logits.argmax()))
    return answer


def test_the_repetition_penalty_ignores_the_prompt(stored):
    """An answer from passages is made of their words: transformers' own setting would penalise those too."""
    prompt = make_prompt(TEXTS)
    said = list(stored.engine.generate(prompt, "full", max_new_tokens=24, repetition_penalty=1.3).token_ids)
    assert said == penalised(stored, prompt, 24, 1.3, prompt_too=False)
    assert said != penalised(stored, prompt, 24, 1.3, prompt_too=True)
    assert said != stored.answer(prompt, 24), "nothing was repeated, so nothing was tested"


@pytest.mark.parametrize(
    ("presence", "frequency", "guesses"),
    [(1.5, 0.0, True), (0.0, 0.8, False), (-2.0, 0.2, True)],
    ids=["presence, guessed tokens", "frequency, one by one", "both, guessed tokens"],
)
def test_presence_and_frequency_penalties_are_openais(stored, monkeypatch, presence, frequency, guesses):
    """Over the answer's tokens: logit - presence * (count > 0) - frequency * count; guessed tokens change nothing."""
    prompt, runtime = make_prompt(TEXTS), stored.engine.runtime
    ids, answer = list(stored.engine.tokenize(prompt).token_ids), []
    for _ in range(40):
        logits = reference_logits(stored.reference, ids + answer)[-1].clone()
        for token, count in Counter(answer).items():
            logits[token] -= presence + frequency * count
        answer.append(int(logits.argmax()))
    if guesses:
        monkeypatch.setattr(runtime.decode_selector, "current", DirectDecode(runtime.decoder, {}))
    options = {"presence_penalty": presence, "frequency_penalty": frequency, "max_new_tokens": 40}
    assert list(stored.engine.generate(prompt, "full", **options).token_ids) == answer
    assert answer != stored.answer(prompt, 40), "nothing was repeated, so nothing was tested"


def test_min_p_drops_the_tokens_that_are_far_less_likely(stored):
    prompt, hot = make_prompt(TEXTS), {"temperature": 5.0, "seed": 1, "max_new_tokens": 20}
    told = stored.engine.generate(prompt, "full", min_p=1.0, **hot).token_ids
    assert list(told) == stored.answer(prompt, 20)
    assert told != stored.engine.generate(prompt, "full", **hot).token_ids


def test_prompts_longer_than_the_window_are_refused(stored):
    window = stored.engine.context_window
    ids = tuple(stored.engine.tokenizer.encode(TEXTS[0])) * (window // 10)
    for tokens in (window, window + 100):
        with pytest.raises(PromptTooLongError, match=str(window - 1)):
            stored.engine.prefill(Prompt([Literal(token_ids=ids[:tokens])]))
    with pytest.raises(PromptTooLongError):
        stored.engine.encode([TEXTS[0] * 100])
    last = stored.engine.generate(Prompt([Literal(token_ids=ids[: window - 1])]), max_new_tokens=50)
    assert len(last.token_ids) == 1  # the answer ends where the window does
