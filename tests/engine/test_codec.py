"""An engine whose KV is packed: fewer bytes, nearly the same logits, on the CPU and before an accelerator."""

from dataclasses import replace

import pytest
import torch
from benches import StagedTransfers, chat, largest_error, make_prompt, make_text

from ragblend import Engine
from ragblend.kvstore.codec import CODECS, RAW
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.layout import value_files

TEXTS = [make_text(seed) for seed in range(3)]


@pytest.fixture(params=["int8", "int4"])
def packed(fresh_bench_for, request):
    engine = fresh_bench_for(kv_codec=request.param).engine
    engine.encode(TEXTS)
    return engine


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.02), ("int4", 0.5)])
def test_logits_are_near_those_of_unpacked_kv(fresh_bench_for, codec, most):
    plain, packed = fresh_bench_for().engine, fresh_bench_for(kv_codec=codec).engine
    for engine in (plain, packed):
        engine.encode(TEXTS)
    expected = plain.prefill(make_prompt(TEXTS), method="reuse").logits
    found = packed.prefill(make_prompt(TEXTS), method="reuse")
    assert found.report.hits == len(TEXTS)
    distance = (found.logits - expected).norm() / expected.norm()
    assert 0 < distance < most


@pytest.mark.parametrize(
    ("kind", "method", "staged"),
    [
        *((kind, "cacheblend", False) for kind in ("llama", "phi3-partial", "gemma3", "smollm3")),
        *(("gemma3", method, True) for method in ("reuse", "naive", "cacheblend")),
    ],
)
def test_keys_that_are_stored_unrotated_are_rotated_when_they_are_read(
    fresh_bench_for, monkeypatch, kind, method, staged
):
    """By a codec that rounds nothing, so that each key must be where it was."""
    unrotated = replace(RAW, name="unrotated", number=99, unrotated=True)
    monkeypatch.setitem(CODECS, "unrotated", unrotated)
    monkeypatch.setattr("ragblend.kvstore.blob.codec_numbered", {0: RAW, 99: unrotated}.get)
    plain, packed = fresh_bench_for(kind).engine, fresh_bench_for(kind, kv_codec="unrotated").engine
    for engine in (plain, packed):
        engine.encode(TEXTS)
        if staged:
            monkeypatch.setattr(engine.runtime, "transfers", StagedTransfers())
    expected = plain.prefill(make_prompt(TEXTS), method=method).logits
    found = packed.prefill(make_prompt(TEXTS), method=method)
    assert found.report.hits == len(TEXTS)
    assert largest_error(found.logits, expected) < 1e-4


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_packed_first_passage_is_corrected_like_any_other(fresh_bench_for, codec):
    """Its rounding is nothing that a path may end in: at a ratio of 1 the logits are full prefill's."""
    bench = fresh_bench_for(kv_codec=codec)
    bench.engine.encode(TEXTS[:1])
    report = bench.engine.prefill(chat(bench, TEXTS[:1]), method="reuse").report
    assert report.tokens.reused > 0
    found = bench.engine.prefill(chat(bench, TEXTS[:1]), method="cacheblend", ratio=1.0)
    assert found.report.tokens.recomputed == report.tokens.reused
    assert (
        largest_error(found.logits, bench.engine.prefill(chat(bench, TEXTS[:1]), method="full").logits) < 1e-4
    )


def test_a_staged_lane_gets_the_packed_bytes_and_unpacks_them_itself(packed, monkeypatch):
    expected = packed.prefill(make_prompt(TEXTS), method="cacheblend").logits
    transfers, shapes = StagedTransfers(), []
    monkeypatch.setattr(
        transfers, "staging", lambda like: shapes.append((like.dim(), like.dtype)) or _staged(like)
    )
    monkeypatch.setattr(packed.runtime, "transfers", transfers)
    assert torch.equal(packed.prefill(make_prompt(TEXTS), method="cacheblend").logits, expected)
    assert set(shapes) == {(2, torch.uint8)}


def _staged(like):
    return torch.empty(like.shape, dtype=like.dtype)


def test_what_is_stored_is_read_whatever_the_codec_is_now(packed, fresh_bench_for, monkeypatch):
    again = fresh_bench_for(home=packed.home, kv_codec="raw").engine
    assert again is packed
    report = again.encode([*TEXTS, make_text(9)])
    assert (report.encoded, report.skipped) == (1, len(TEXTS))
    prompt = make_prompt([TEXTS[0], make_text(9), *TEXTS[1:]])
    found = again.prefill(prompt, method="reuse")
    assert found.report.misses == 0
    monkeypatch.setattr(again.runtime, "transfers", StagedTransfers())
    assert torch.equal(again.prefill(prompt, method="reuse").logits, found.logits)
    sizes = {round(file.nbytes / 1000) for file in value_files(again.store.root)}
    assert max(sizes) > 2 * min(sizes)


def test_an_unknown_codec_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UsageError, match="int3"):
        Engine.open(home=tmp_path, kv_codec="int3")
