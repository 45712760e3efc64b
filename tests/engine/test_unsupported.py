"""Models that cannot be fused use full prefill with a warning; none gives wrong answers."""

import threading

import pytest
import tiny_models
import torch
from benches import Bench, largest_error, make_prompt, make_text

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.kvstore.errors import Cancelled, UnknownChunkError

TEXTS = [make_text(seed) for seed in range(3)]
ALLOWED = 1e-4


@pytest.fixture(params=tiny_models.UNSUPPORTED)
def plain(request, bench_for):
    return bench_for(request.param)


def test_unsupported_models_use_full_prefill_with_a_warning(plain):
    prompt, verdict = make_prompt(TEXTS), plain.engine.gate
    assert not verdict.passed and verdict.reason
    prefilled = plain.engine.prefill(prompt, method="cacheblend")
    assert prefilled.report.method == "full"
    assert verdict.reason in prefilled.report.warning
    assert prefilled.report.tokens.prompt == prefilled.report.tokens.fresh == len(prefilled.prompt.token_ids)
    assert largest_error(prefilled.logits, plain.logits(prompt)[-1]) < ALLOWED


def test_unsupported_models_have_penalties_and_biases(plain):
    prompt, options = make_prompt(TEXTS), {"presence_penalty": 0.5, "frequency_penalty": 1.0}
    ids, answer = list(plain.engine.tokenize(prompt).token_ids), []
    for _ in range(12):
        logits = tiny_models.reference_logits(plain.reference, ids + answer)[-1].clone()
        for token in answer:
            logits[token] -= 1.0 + 0.5 / answer.count(token)
        logits[7] += 5.0
        answer.append(int(logits.argmax()))
    given = {"max_new_tokens": 12, "logit_bias": {7: 5.0}, **options}
    assert list(plain.engine.generate(prompt, **given).token_ids) == answer != plain.answer(prompt, 12)


def test_unsupported_models_answer_as_transformers(plain):
    prompt = make_prompt(TEXTS)
    expected = plain.answer(prompt, 20)
    assert list(plain.engine.generate(prompt, method="reuse", max_new_tokens=20).token_ids) == expected
    stream = plain.engine.stream(prompt, max_new_tokens=20)
    assert list(stream.result.token_ids) == expected


def test_nothing_is_stored_for_unsupported_models(plain):
    report = plain.engine.encode(TEXTS)
    assert (report.encoded, report.tokens, report.keys) == (0, 0, (None,) * 3)
    assert plain.engine.store.stats().entries == 0


def test_node_ids_work_for_unsupported_models(plain):
    """Without KV a chunk is still a text: a question over ingested nodes is answered, by full prefill."""
    plain.engine.encode(TEXTS[:1], node_ids=["one"])
    by_id = Prompt([Literal("read: "), Chunk(node_id="one"), Literal("?")])
    by_text = Prompt([Literal("read: "), Chunk(TEXTS[0]), Literal("?")])
    assert plain.engine.tokenize(by_id).token_ids == plain.engine.tokenize(by_text).token_ids
    with pytest.raises(UnknownChunkError, match="nobody"):
        plain.engine.tokenize(Prompt([Chunk(node_id="nobody")]))


# --- frequencies that depend on the length


def test_longrope_is_fused_only_up_to_its_constant_length(fresh_bench_for):
    bench = fresh_bench_for("phi3-longrope")
    assert bench.engine.gate.passed, bench.engine.gate.reason
    bench.engine.encode(TEXTS)
    short, long = make_prompt(TEXTS), make_prompt([*TEXTS, make_text(9, words=120)])
    for _ in range(2):  # back and forth: transformers changes the live frequencies
        inside = bench.engine.prefill(short, method="recompute")
        assert (inside.report.warning, inside.report.method, inside.report.hits) == (None, "recompute", 3)
        assert largest_error(inside.logits, bench.logits(short)[-1]) < ALLOWED
        beyond = bench.engine.prefill(long, method="recompute")
        assert beyond.report.method == "full"
        assert str(tiny_models.REGIME_TOKENS) in beyond.report.warning
        assert largest_error(beyond.logits, bench.logits(long)[-1]) < ALLOWED
    reuse = bench.engine.tokenize(short)
    start, stop = reuse.places[-1]
    keys = bench.engine.prefill(short, method="reuse").cache.span(0, start, stop)[0]
    assert largest_error(keys, bench.kv(reuse.token_ids)[0][0][:, start:stop]) < ALLOWED


def test_passages_beyond_the_constant_length_are_not_stored(fresh_bench_for):
    """It is read with other frequencies than any prompt that may be fused; behind a shorter prefix it was reused."""
    engine = fresh_bench_for("phi3-longrope").engine
    long = make_text(9, words=185)
    alone = engine.count_tokens(long)
    assert alone + 10 < tiny_models.REGIME_TOKENS < alone + len(engine.runtime.canonical_prefix)
    report = engine.encode([long, TEXTS[0]], node_ids=["long", "short"])
    assert (report.encoded, report.skipped, report.keys[0]) == (1, 1, None)
    assert engine.store.stats().entries == 1
    bare = engine.prefill(Prompt([Literal("-"), Chunk(node_id="long"), Literal("?")]), "reuse").report
    assert (bare.hits, bare.misses, bare.warning) == (0, 1, None)
    assert engine.finish_background(timeout_s=60)
    assert engine.store.stats().entries == 1


@pytest.fixture(scope="module")
def endless_longrope(tmp_path_factory):
    base = tmp_path_factory.mktemp("longrope")
    folder = tiny_models.save_model("phi3-longrope", base / "model", is_endless=True)
    bench = Bench("phi3-longrope", folder, Engine.open(str(folder), base / "home", "cpu", "float32"))
    yield bench
    bench.engine.close()


def below_the_regime(bench, by):
    """A tokenized prompt that ends so many tokens before it, of a passage that is stored."""
    bench.engine.encode(TEXTS[:1])
    prompt = make_prompt(TEXTS[:1], suffix="")
    missing = tiny_models.REGIME_TOKENS - by - len(bench.engine.tokenize(prompt).token_ids)
    ids = tuple(range(10, 390))[:missing]
    return bench.engine.tokenize(Prompt([*prompt.segments, Literal(token_ids=ids)]))


@pytest.mark.parametrize("by", [0, 1, 7])
def test_answers_beyond_the_constant_length_equal_transformers(endless_longrope, by):
    """Queries rotated by the long factors met keys rotated by the short ones."""
    bench = endless_longrope
    prompt, session = below_the_regime(bench, by), Session()
    assert len(prompt.token_ids) == tiny_models.REGIME_TOKENS - by
    expected = bench.answer(prompt, 24)
    result = bench.engine.generate(prompt, method="full", max_new_tokens=24, session=session)
    assert (list(result.token_ids), result.report.warning) == (expected, None)
    assert session.tokens == tiny_models.REGIME_TOKENS, "what was read beyond is of no use to shorter prompts"
    prefilled = bench.engine.prefill(prompt, method="full")
    for _ in range(2):  # the prompt's own cache is as it was
        assert list(bench.engine.decode(prefilled, max_new_tokens=24).token_ids) == expected
    logits = bench.engine.continue_logits(prefilled, expected)
    assert logits.argmax(-1).tolist() == expected
    # What the session holds is right in the regime it was read in.
    shorter = Prompt([Literal(token_ids=(*prompt.token_ids[:200], 9, 30, 77))])
    found = bench.engine.generate(shorter, max_new_tokens=12, session=session)
    assert list(found.token_ids) == bench.answer(shorter, 12)


def test_full_prefill_beyond_the_constant_length_can_be_cancelled(endless_longrope):
    engine, prompt, cancel = endless_longrope.engine, below_the_regime(endless_longrope, 3), threading.Event()
    passed = []

    def note(layer, given):
        if given[0].shape[1] > tiny_models.REGIME_TOKENS:
            passed.append(layer)
            cancel.set()

    assert engine.gate.passed
    hooks = [layer.register_forward_pre_hook(note) for layer in engine.runtime.decoder.layers]
    with pytest.raises(Cancelled):
        engine.generate(prompt, method="full", max_new_tokens=24, cancel=cancel)
    for hook in hooks:
        hook.remove()
    assert len(passed) == 1
    found = engine.generate(prompt, method="full", max_new_tokens=24)
    assert list(found.token_ids) == endless_longrope.answer(prompt, 24)


# --- models that are not on the list, but load: right or refused, never wrong


@pytest.mark.parametrize("name", ["llama-dynamic", *tiny_models.OTHERS])
def test_unlisted_models_answer_as_transformers(bench_for, name):
    """Attention with soft caps (Gemma 2) or sinks (gpt-oss) is not what torch's sdpa computes."""
    bench = bench_for(name)
    prompt = make_prompt(TEXTS)
    found = bench.engine.prefill(prompt, method="full")
    assert largest_error(found.logits, bench.logits(prompt)[-1]) < ALLOWED
    answer = bench.engine.generate(prompt, method="full", max_new_tokens=20)
    assert list(answer.token_ids) == bench.answer(prompt, 20)


@pytest.mark.parametrize("name", [*tiny_models.SUPPORTED, "llama-dynamic", *tiny_models.OTHERS])
def test_stored_keys_are_moved_as_the_model_rotates(bench_for, name):
    """By the model's own rotation: back to position 0, and on to the new one. A layer without RoPE moves nothing."""
    bench = bench_for(name)
    if not bench.engine.gate.passed:
        pytest.skip("refused")
    keys = bench.engine.encode(TEXTS).keys
    prompt = bench.engine.tokenize(make_prompt(TEXTS))
    cache = bench.engine.prefill(prompt, method="reuse").cache
    start, stop = prompt.places[-1]
    chunk = bench.engine.store.get(keys[-1], prompt.token_ids[start:stop])
    for layer, stored in enumerate(chunk.keys):
        expected = rotated_by_the_model(bench.reference, layer, stored, chunk.start, start)
        found = cache.span(layer, start, stop - 1)[0]  # the last token before the suffix is stored too
        assert largest_error(found, expected[:, :-1]) < ALLOWED, f"layer {layer}"


def rotated_by_the_model(model, layer, keys, old_start, new_start):
    """keys (H, T, D), through transformers' own tables and `apply_rotary_pos_emb`."""
    import sys

    attention = model.model.layers[layer].self_attn
    if not getattr(attention, "use_rope", True):
        return keys
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    rotary, steps = model.model.rotary_emb, torch.arange(keys.shape[1])[None]
    kind = (getattr(model.config, "layer_types", None) or ["full_attention"] * 99)[layer]
    arguments = (kind,) if hasattr(rotary, f"{kind}_inv_freq") else ()
    (old_cos, old_sin), (new_cos, new_sin) = (
        rotary(keys[None], start + steps, *arguments) for start in (old_start, new_start)
    )
    scale = (old_cos**2 + old_sin**2)[..., :1]  # YaRN scales its tables: undone once, done once
    unrotated = apply(keys[None], keys[None], old_cos / scale, -old_sin / scale)[1]
    return apply(unrotated, unrotated, new_cos, new_sin)[1][0]
