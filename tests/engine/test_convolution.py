"""LFM2, whose layers are attention or short convolutions: any row is computed from the stored rows before it."""

import pytest
import tiny_models
import torch
from benches import ALWAYS, Bench, EveryThird, StagedTransfers, chat, largest_error, make_prompt, make_text

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.model import convolution
from ragblend.engine.model.attention import register
from ragblend.engine.model.decoder import TransformersDecoder
from ragblend.engine.model.gate import run_gate
from ragblend.engine.prompts.session import Session
from ragblend.engine.selection import METHODS

TEXTS = [make_text(seed) for seed in range(4)]
ALLOWED = 1e-4
CONVOLUTIONS = (0, 2)


@pytest.fixture
def bench(bench_for):
    bench = bench_for("lfm2", fuse="all")
    bench.engine.encode(TEXTS)
    return bench


@torch.inference_mode()
def inputs_of(model, token_ids):
    """(T, C) by layer: the convolutions' inputs, by transformers alone."""
    found = {}

    def note(layer):
        def hook(module, given, out):
            first, _, last = out[0].chunk(3, dim=-1)
            found[layer] = first * last

        return model.model.layers[layer].conv.in_proj.register_forward_hook(hook)

    hooks = [note(layer) for layer in CONVOLUTIONS]
    model(torch.tensor([list(token_ids)]), use_cache=False)
    for each in hooks:
        each.remove()
    return found


def assert_inputs(bench, cache, token_ids, stop):
    """The cache's convolution inputs of the rows before `stop` are the model's own."""
    for layer, expected in inputs_of(bench.reference, token_ids).items():
        keys, values = cache.span(layer, 0, stop)
        found = torch.cat([part.transpose(0, 1).flatten(1) for part in (keys, values)], dim=1)
        assert found.shape == expected[:stop].shape
        assert largest_error(found, expected[:stop]) < ALLOWED, f"layer {layer}"


def test_they_are_fused_only_if_the_setting_says_so(fresh_bench_for):
    """No quality was measured with real weights."""
    bench = fresh_bench_for("lfm2")
    assert bench.engine.encode(TEXTS).encoded == 0
    prefilled = bench.engine.prefill(make_prompt(TEXTS))
    assert prefilled.report.method == "full" and "RAGBLEND_FUSE=all" in prefilled.report.warning
    assert largest_error(prefilled.logits, bench.logits(make_prompt(TEXTS))[-1]) < ALLOWED
    result = bench.engine.generate(make_prompt(TEXTS), max_new_tokens=20)
    assert list(result.token_ids) == bench.answer(make_prompt(TEXTS), 20)
    chosen = Engine.open(str(bench.folder), bench.engine.runtime.home, "cpu", "float32", fuse="all")
    assert chosen.gate.passed and not bench.engine.gate.passed
    chosen.close()


@pytest.mark.parametrize("method", [*ALWAYS, "full", "exact", "auto", "prefix", "recompute"])
def test_a_ratio_of_one_equals_the_model_and_smaller_ones_are_sound(bench, method):
    prompt = make_prompt(TEXTS)
    expected = bench.logits(prompt)[-1]
    found = bench.engine.prefill(prompt, method, ratio=1.0)
    assert found.report.warning is None and found.report.method == method
    if METHODS[method].fixed_ratio in (None, 1.0):
        assert largest_error(found.logits, expected) < ALLOWED
        assert_inputs(bench, found.cache, found.prompt.token_ids, len(found.prompt.token_ids))
    some = bench.engine.prefill(prompt, method, ratio=0.4)
    assert some.logits.isfinite().all() and some.report.method == method


def test_a_probe_collects_from_the_nearest_attention(tmp_path, judged):
    """Of the layers that a method names, only some have attention: here neither the second nor the last."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    folder = tiny_models.save_model("lfm2", tmp_path / "model", layer_types=kinds)
    home = judged(tmp_path / "home")
    bench = Bench("lfm2", folder, Engine.open(str(folder), home, "cpu", "float32", fuse="all"))
    bench.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    for method in ("a3", "prophet", "qcfuse", "probe-shift"):
        some, everything = (bench.engine.prefill(prompt, method, ratio) for ratio in (0.4, 1.0))
        assert some.report.method == method and some.report.probe_rows > 0
        assert 0 < some.report.tokens.recomputed < everything.report.tokens.recomputed
        assert largest_error(everything.logits, bench.logits(prompt)[-1]) < ALLOWED
    bench.engine.close()


def test_reuse_is_far_from_the_model(bench):
    """Else the tests above would show little."""
    prompt = make_prompt(TEXTS)
    assert largest_error(bench.engine.prefill(prompt, "reuse").logits, bench.logits(prompt)[-1]) > 0.1


@pytest.mark.parametrize("staged", [False, True])
def test_scattered_rows_over_exact_rows_equal_the_model(bench, monkeypatch, staged):
    """The first passage is directly after its prefix: what is stored of it is what a full prefill computes."""
    if staged:
        monkeypatch.setattr(bench.engine.runtime, "transfers", StagedTransfers())
    prompt = chat(bench, TEXTS[:1])
    for method in ("reuse", "cacheblend", EveryThird(name="third")):
        found = bench.engine.prefill(prompt, method)
        assert found.report.hits == 1
        assert largest_error(found.logits, bench.logits(prompt)[-1]) < ALLOWED
        assert_inputs(bench, found.cache, prompt.token_ids, len(prompt.token_ids))


def test_a_first_passage_after_its_prefix_is_exact_before_others(bench):
    prompt = chat(bench, TEXTS)
    cache = bench.engine.prefill(prompt, "reuse").cache
    assert_inputs(bench, cache, prompt.token_ids, prompt.places[0][1])


def test_answers_go_on_as_the_model_does(bench):
    prompt = make_prompt(TEXTS)
    expected = bench.answer(prompt, 24)
    for method in ("full", "exact", "recompute"):
        prefilled = bench.engine.prefill(prompt, method)
        for _ in range(2):  # the prompt's own cache is as it was
            assert list(bench.engine.decode(prefilled, max_new_tokens=24).token_ids) == expected
        forced = bench.engine.continue_logits(prefilled, expected)
        assert forced.argmax(-1).tolist() == expected


@pytest.mark.parametrize("options", [{}, {"keep_tokens": 20}, {"method": "auto"}])
def test_fused_answers_are_answers(bench, options):
    result = bench.engine.generate(make_prompt(TEXTS), max_new_tokens=12, **options)
    assert len(result.token_ids) == 12 or result.stopped
    assert (result.report.evicted_tokens > 0) == ("keep_tokens" in options)


def test_a_session_goes_on_exactly(bench):
    """What a session holds includes the convolutions' inputs of its last rows."""
    session, first = Session(), Prompt([Literal("The harbour master kept two ledgers.\n\nWho did?")])
    answer = bench.engine.generate(first, max_new_tokens=6, session=session)
    held = session.tokens
    assert held == len(answer.prompt.token_ids) + len(answer.token_ids) - 1
    ids = answer.token_ids[:-1] if answer.stopped else answer.token_ids
    second = Prompt([*first.segments, Literal(token_ids=ids), Literal("\n\nand where?")])
    again = bench.engine.generate(second, "reuse", max_new_tokens=12, session=session)
    assert again.report.tokens.reused == held
    assert list(again.token_ids) == bench.answer(second, 12)


def test_paths_give_the_same_bits_whatever_is_stored(fresh_bench_for):
    bench = fresh_bench_for("lfm2", fuse="all")
    bench.engine.encode(TEXTS)
    prompt = chat(bench, TEXTS)
    expected = bench.engine.prefill(prompt, "exact")
    assert largest_error(expected.logits, bench.logits(prompt)[-1]) < ALLOWED
    for _ in range(3):
        bench.engine.generate(prompt, "exact", max_new_tokens=2)
        assert bench.engine.finish_background(timeout_s=60)
    found = bench.engine.prefill(prompt, "exact")
    assert found.report.hits == len(TEXTS) and torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_packed_rows_are_near_the_others(bench, fresh_bench_for, codec):
    packed = fresh_bench_for("lfm2", fuse="all", kv_codec=codec)
    packed.engine.encode(TEXTS)
    expected, found = (each.engine.prefill(make_prompt(TEXTS), "reuse") for each in (bench, packed))
    assert found.report.hits == len(TEXTS)
    distance = (found.logits - expected.logits).norm() / expected.logits.norm()
    assert 0 < distance < (0.02 if codec == "int8" else 0.5)


def test_a_long_prompt_passes_in_blocks(bench, monkeypatch):
    monkeypatch.setattr("ragblend.engine.fusion.BLOCK_ROWS", 50)
    monkeypatch.setattr("ragblend.engine.encode.BLOCK_ROWS", 50)
    long = [make_text(9, words=90), make_text(10, words=90)]
    bench.engine.encode(long)
    prompt = make_prompt(long)
    assert largest_error(bench.engine.prefill(prompt, "recompute").logits, bench.logits(prompt)[-1]) < ALLOWED


@pytest.mark.parametrize("missing", ["rows before", "the first row's zeros"])
def test_the_self_test_refuses_a_wrong_convolution(model_folder, monkeypatch, missing):
    model = tiny_models.load_reference(model_folder("lfm2"), attention=register())
    decoder, ids = TransformersDecoder(model, "float32"), list(range(40, 160))
    assert run_gate(decoder, ids).passed
    inputs_at = convolution._inputs_at

    def wrong(cache, layer, rows, channels):
        return inputs_at(cache, layer, rows - 1 if missing == "rows before" else rows.clamp_min(0), channels)

    monkeypatch.setattr(convolution, "_inputs_at", wrong)
    assert not run_gate(decoder, ids).passed


def test_in_bfloat16_it_rounds_as_the_models_own_convolution():
    """Rounded after each product, the logits were 0.01 to 0.04 off, and 0.08 with 16 layers: the self-test refused."""
    model = tiny_models.make_model("lfm2").to(torch.bfloat16)
    model.set_attn_implementation(register())
    all_rows = run_gate(TransformersDecoder(model, "bfloat16"), list(range(40, 160))).checks[0]
    assert all_rows.error < 0.005


def test_chunks_are_stored_in_one_file_of_the_same_format(bench):
    geometry = bench.engine.runtime.fingerprint.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.key_size) == (4, 2, 16)
    (key,) = bench.engine.encode(TEXTS[:1]).keys
    chunk = bench.engine.store.get(key, bench.engine.tokenize(Prompt([Chunk(TEXTS[0])])).token_ids)
    for layer, keys in enumerate(chunk.keys):
        assert bool(keys[1].any()) == (layer in CONVOLUTIONS), "attention has one head here"
