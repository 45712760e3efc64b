"""The gate refuses models that have been made wrong, by each of its checks."""

import sys

import pytest
import tiny_models
import torch
from benches import largest_error, make_prompt, make_text

from ragblend.engine.model import decoder as decoder_module
from ragblend.engine.model import gate
from ragblend.engine.model.attention import register
from ragblend.engine.model.decoder import TransformersDecoder
from ragblend.engine.model.gate import TOLERANCE, run_gate
from ragblend.engine.selection import METHODS

IDS = list(range(40, 160))


@pytest.fixture
def decoder(model_folder):
    model = tiny_models.load_reference(model_folder("llama"), attention=register())
    return TransformersDecoder(model, "float32")


def refused(decoder):
    """Names of the checks that failed."""
    verdict = run_gate(decoder, IDS)
    failed = [check.name for check in verdict.checks if not check.passed]
    assert verdict.passed == (not failed)
    assert all(name in (verdict.reason or "") for name in failed)
    return failed


def with_wrong_frequencies(decoder, monkeypatch):
    for kind, inv_freq in decoder.ropes.items():
        decoder.ropes[kind] = inv_freq * 1.1


def with_keys_normed_after_rotation(decoder, monkeypatch):
    """As HunYuan does: a weight per dimension does not commute with the rotation."""
    weight, module = torch.linspace(0.5, 2.0, 16), sys.modules[type(decoder.model).__module__]
    rotate = module.apply_rotary_pos_emb

    def normed(*args, **kwargs):
        query, key = rotate(*args, **kwargs)
        return query, key * weight

    monkeypatch.setattr(module, "apply_rotary_pos_emb", normed)


def with_a_wrong_output_layer(decoder, monkeypatch):
    head = decoder.head
    monkeypatch.setattr(decoder, "head", lambda hidden: head(hidden).roll(1))


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (with_wrong_frequencies, "rotated keys"),
        (with_keys_normed_after_rotation, "rotated keys"),
        (with_a_wrong_output_layer, "all rows"),
    ],
)
def test_wrong_models_are_refused(decoder, monkeypatch, wrong, check):
    wrong(decoder, monkeypatch)
    assert any(check in name for name in refused(decoder))


def test_non_causal_masks_are_refused(decoder, monkeypatch):
    blocks = decoder_module.tiles

    def future(*arguments):
        found = blocks(*arguments)
        for block in found:
            block.mask.zero_()
        return found

    monkeypatch.setattr(decoder_module, "tiles", future)
    found = run_gate(decoder, IDS)  # without blocks all is right
    assert found.passed and not found.shows_attention and not decoder.tiles
    mask = decoder_module.position_mask
    monkeypatch.setattr(decoder_module, "position_mask", lambda *a: torch.ones_like(mask(*a)))
    names = refused(decoder)
    assert any("some rows" in name for name in names)
    assert any("later chunk" in name or "exact" in name for name in names)


@pytest.mark.parametrize(
    ("method", "ratio"), [("cacheblend", 0.5), ("cacheblend-gradual", 0.7), ("cacheblend", 0.85)]
)
def test_evidence_has_stored_and_new_kv(llama, monkeypatch, method, ratio):
    """Also where every row is computed, and the buffers are about to be written over."""
    texts = [make_text(seed) for seed in range(4)]
    keys = llama.engine.encode(texts).keys
    prompt = llama.engine.tokenize(make_prompt(texts, prefix="", suffix="?"))
    chunk = llama.engine.store.get(keys[0], prompt.segment_ids[0])
    policy, errors = METHODS[method], []
    narrow = type(policy).narrow

    def look(self, plan, evidence, next_layer):  # now: afterwards the buffers hold something else
        inside = evidence.rows < len(chunk.token_ids)
        expected = chunk.values[evidence.layer][:, evidence.rows[inside]]
        pair = evidence.old_values[:, inside], evidence.new_values[:, inside]
        errors.append([largest_error(values, expected) for values in pair])
        return narrow(self, plan, evidence, next_layer)

    monkeypatch.setattr(type(policy), "narrow", look)
    llama.engine.prefill(prompt, method=policy, ratio=ratio)
    assert errors
    assert all(old < 1e-6 and new > 1e-3 for old, new in errors)


@pytest.mark.parametrize("error_factor", [1.0, 2.0])
def test_other_kernels_may_round_more(decoder, error_factor, monkeypatch):
    """Where the model's own forward is by other kernels than its parts, more lies between the two."""
    own, off = decoder.own_logits, 1.5 * TOLERANCE["float32"]
    monkeypatch.setattr(decoder, "own_logits", lambda ids: (logits := own(ids)) + off * logits.std())
    monkeypatch.setattr(decoder, "error_factor", error_factor)
    assert (refused(decoder) == []) == (error_factor == 2.0)


@pytest.mark.parametrize("layers", [1, 4])
def test_tolerance_grows_with_the_number_of_layers(decoder, layers, monkeypatch):
    """By the root of their number: 1.5 times what is allowed is a fault there, and rounding in four times so many."""
    monkeypatch.setattr(gate, "SHALLOW_LAYERS", decoder.geometry.layers / layers)
    encode = gate.ChunkEncoder.encode

    def off(encoder, ids):
        chunk = encode(encoder, ids)
        for keys in chunk.keys:
            keys += 1.5 * TOLERANCE["float32"] * keys.std()
        return chunk

    monkeypatch.setattr(gate.ChunkEncoder, "encode", off)
    assert refused(decoder) == ([] if layers == 4 else ["a chunk directly after its prefix is exact"])
