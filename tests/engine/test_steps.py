"""How the tokens of an answer are computed: both ways say the same, and the faster one is taken only if it does."""

import json

import pytest
import torch
from benches import largest_error, make_prompt, make_text
from tiny_models import SUPPORTED

from ragblend.engine import steps as steps_module
from ragblend.engine.few_rows import FewRows, four_bits
from ragblend.engine.fourbit import four_bit, joined
from ragblend.engine.steps import ModelSteps, StepsVerdict, kept_steps, measure_steps

TEXTS = [make_text(seed) for seed in range(3)]
KNOWN = ("llama", "llama-llama3", "llama-linear", "llama-yarn", "qwen2", "qwen3")
ANSWER = [9, 30, 77, 200, 41, 5, 6, 8]


@pytest.fixture
def prefilled_for(stored_for):
    """A prompt that was read, and the decoder that read it."""

    def prefilled(kind):
        engine = stored_for(kind).engine
        found = engine.prefill(make_prompt(TEXTS), "full")
        found.cache.truncate()
        return found, engine.runtime.decoder

    return prefilled


@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_kinds_of_layers_that_are_known(prefilled_for, kind):
    assert FewRows.knows(prefilled_for(kind)[1]) == (kind in KNOWN)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KNOWN)
def test_rows_say_what_the_model_says_and_leave_the_same_cache(prefilled_for, kind):
    """One by one, several at once, and beyond the room of the buffers."""
    prefilled, decoder = prefilled_for(kind)
    told, caches = [], []
    for steps in (ModelSteps(decoder.model), FewRows.of(decoder, {})):
        for held in prefilled.cache.fused:  # what stands in the room that is not used yet counts for nothing
            held.key_buffer[:, :, held.keys.shape[2] :] = torch.nan
        logits = [steps.run(prefilled.cache, [token]) for token in ANSWER]
        logits += [steps.run(prefilled.cache, ANSWER * 12), steps.run(prefilled.cache, [7])]
        told.append(torch.cat(logits))
        assert prefilled.cache.get_seq_length() == prefilled.cache.prompt_tokens + 13 * len(ANSWER) + 1
        caches.append([part.clone() for held in prefilled.cache.fused for part in (held.keys, held.values)])
        prefilled.cache.truncate()
    assert largest_error(told[1], told[0]) < 1e-4
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*caches, strict=True))


def test_rows_that_say_something_else_are_not_taken(prefilled_for, tmp_path):
    prefilled, decoder = prefilled_for("llama")
    ids = prefilled.prompt.token_ids
    rows = FewRows.of(decoder, {})
    assert measure_steps(decoder, rows, ids).divergence < 1e-6
    for part in rows.layers:
        object.__setattr__(part, "scaling", part.scaling * 1.5)
    verdict = measure_steps(decoder, rows, ids)
    assert verdict.divergence > 0.01 and not verdict.takes_rows
    assert not StepsVerdict(0.0, rows_ms=2.0, model_ms=1.0).takes_rows
    assert not StepsVerdict(float("nan"), rows_ms=1.0, model_ms=2.0).takes_rows


def test_what_was_measured_is_kept_with_the_weights(prefilled_for, tmp_path, monkeypatch):
    prefilled, decoder = prefilled_for("llama")
    monkeypatch.setattr(
        steps_module, "measure_steps", lambda *given: measured.append(given) or StepsVerdict(0.0, 1.0, 2.0)
    )
    measured = []
    given = tmp_path / "models", "f" * 64, decoder, prefilled.prompt.token_ids
    assert kept_steps(*given) is not None and kept_steps(*given) is not None
    assert len(measured) == 1
    files = {path.suffix: path for path in (tmp_path / "models").iterdir()}
    assert set(files) == {".json", ".safetensors"}
    for suffix, damage in ((".safetensors", b"rubbish"), (".json", b"{")):  # found and measured again
        files[suffix].write_bytes(damage)
        assert kept_steps(*given) is not None
        assert json.loads(files[".json"].read_text())["divergence"] == 0.0
    assert len(measured) == 3
    files[".json"].write_text('{"divergence": 0.0, "rows_ms": 3.0, "model_ms": 2.0}')
    assert kept_steps(*given) is None


@pytest.mark.parametrize("takes_rows", [False, True])
def test_what_runs_changes_no_answer(stored, takes_rows, monkeypatch):
    """Sampling, penalties, log-probabilities and eviction, whichever of the two computes."""
    engine = stored.engine
    by_model = ModelSteps(engine.runtime.loaded.model)
    steps = FewRows.of(engine.runtime.decoder, {}) if takes_rows else by_model
    monkeypatch.setitem(vars(engine.runtime), "steps", steps)
    prompt = make_prompt(TEXTS)
    assert list(engine.generate(prompt, "full", max_new_tokens=30).token_ids) == stored.answer(prompt, 30)
    options = {"temperature": 1.2, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}
    sampled = engine.generate(prompt, "full", max_new_tokens=16, **options)
    kept = engine.generate(prompt, "full", max_new_tokens=16, keep_tokens=20)
    monkeypatch.setitem(vars(engine.runtime), "steps", by_model)
    again = engine.generate(prompt, "full", max_new_tokens=16, **options)
    assert sampled.token_ids == again.token_ids
    assert [each.logprob for each in sampled.logprobs] == pytest.approx(
        [each.logprob for each in again.logprobs], abs=1e-4
    )
    assert kept.token_ids == engine.generate(prompt, "full", max_new_tokens=16, keep_tokens=20).token_ids


# --- weights that were four-bit numbers


def on_levels(rows, columns, dtype, seed=0):
    """Weights of sixteen levels a group; some groups use fewer, some one."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (rows, columns // 32, 32), generator=draw)
    levels[::3] = levels[::3].clamp(2, 9)
    levels[5, 0] = 4
    scale, lowest = (torch.randn(rows, columns // 32, 1, generator=draw) * 0.1 for _ in range(2))
    return (levels * scale.abs() + lowest).view(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bit_weights_are_found_and_multiply_as_they_did(dtype):
    weight, rows = on_levels(128, 96, dtype), torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    packed = four_bit(weight)
    assert packed is not None and packed.levels.nbytes == 128 * 96 // 2
    expected = rows @ weight.float().T
    assert largest_error(packed(rows.to(dtype)), expected) < 0.03
    both = joined([packed, packed])
    assert torch.equal(both(rows.to(dtype)), torch.cat([packed(rows.to(dtype))] * 2, 1))


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(128, 96, generator=torch.Generator().manual_seed(2)),
        on_levels(128, 96, torch.float32)
        .index_fill(0, torch.tensor([127]), 1)
        .addcmul_(torch.eye(128, 96), torch.full((), 0.02)),
        on_levels(120, 96, torch.float32),
        on_levels(128, 96, torch.float32)[:, :80],
    ],
    ids=["random", "one row a little off", "rows of no whole block", "columns of no whole group"],
)
def test_other_weights_are_left_as_they_are(weight):
    assert four_bit(weight) is None


def test_a_model_of_four_bit_weights_is_decoded_with_them(prefilled_for, model_folder, monkeypatch):
    """Within what rounding to bfloat16 does; and the weights that are no four-bit ones stay the model's own."""
    prefilled, decoder = prefilled_for("qwen2")
    saved = {name: each.detach().clone() for name, each in decoder.model.named_parameters()}
    try:
        for seed, layer in enumerate(decoder.layers):
            for linear in (
                layer.self_attn.q_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
                layer.mlp.down_proj,
            ):
                linear.weight.data.copy_(on_levels(*linear.weight.shape, torch.float32, seed) * 0.3)
        found = four_bits(decoder)
        names = {name.partition(".")[2] for name in found}
        assert names == {"q_proj", "gate_proj", "up_proj", "down_proj"}
        verdict = measure_steps(decoder, FewRows.of(decoder, found), prefilled.prompt.token_ids)
        assert 0 < verdict.divergence < 0.05
    finally:
        for name, each in decoder.model.named_parameters():
            each.data.copy_(saved[name])
