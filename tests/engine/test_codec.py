"""An engine whose KV is packed: half the bytes, nearly the same logits, on the CPU and before a staged transfers."""

import pytest
import torch
from benches import make_prompt, make_text
from test_device import StagedTransfers

from ragblend import Engine
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.layout import value_files

TEXTS = [make_text(seed) for seed in range(3)]


@pytest.fixture
def packed(fresh_bench_for):
    engine = fresh_bench_for(kv_codec="int8").engine
    engine.encode(TEXTS)
    return engine


def test_logits_are_near_those_of_unpacked_kv(packed, fresh):
    fresh.engine.encode(TEXTS)
    expected = fresh.engine.prefill(make_prompt(TEXTS), method="reuse").logits
    found = packed.prefill(make_prompt(TEXTS), method="reuse")
    assert found.report.hits == len(TEXTS)
    distance = (found.logits - expected).norm() / expected.norm()
    assert 0 < distance < 0.02
    assert packed.prefill(make_prompt(TEXTS), method="full").logits.argmax() == found.logits.argmax()


def test_a_staged_lane_gets_the_packed_bytes_and_unpacks_them_itself(packed, monkeypatch):
    expected = packed.prefill(make_prompt(TEXTS), method="cacheblend").logits
    transfers, shapes = StagedTransfers(), []
    monkeypatch.setattr(
        transfers, "staging", lambda like: shapes.append((like.dim(), like.dtype)) or _staged(like)
    )
    monkeypatch.setattr(packed.runtime, "transfers", transfers)
    assert torch.equal(packed.prefill(make_prompt(TEXTS), method="cacheblend").logits, expected)
    assert set(shapes) == {(1, torch.uint8)}


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
