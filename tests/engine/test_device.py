"""The device seam: what an accelerator's transfers does differently, run on the CPU, gives the same."""

import threading

import pytest
import torch
from benches import make_prompt, make_text

from ragblend.engine import device
from ragblend.engine.device import TransferStream, pick_device, pick_dtype
from ragblend.kvstore.blob import ChunkReader
from ragblend.kvstore.errors import UsageError

TEXTS = [make_text(seed) for seed in range(4)]


class StagedTransfers(TransferStream):
    """As on CUDA: reads land in memory of their own, are delivered by the loader's threads, and awaited by ticket."""

    staged = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[str] = []
        self.arrived: list[object] = []
        self.delivered: list[object] = []
        self.threads: set[str] = set()

    def begin(self):
        self.calls.append("begin")

    def staging(self, like):
        return torch.full(like.shape, torch.nan, dtype=like.dtype)

    def deliver(self, copies):
        self.threads.add(threading.current_thread().name)
        copies()
        self.delivered.append(ticket := object())
        self.calls.append("deliver")
        return ticket

    def arrive(self, ticket):
        self.arrived.append(ticket)

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def staged(fresh, monkeypatch):
    fresh.engine.encode(TEXTS)
    transfers = StagedTransfers()
    expected = {m: fresh.engine.prefill(make_prompt(TEXTS), method=m).logits for m in METHODS}
    monkeypatch.setattr(fresh.engine.runtime, "transfers", transfers)
    return fresh.engine, transfers, expected


METHODS = ("reuse", "naive", "cacheblend", "cacheblend-gradual", "recompute")


def test_staged_delivery_gives_the_same_bits(staged):
    engine, _, expected = staged
    for method in METHODS:
        assert torch.equal(engine.prefill(make_prompt(TEXTS), method=method).logits, expected[method]), method


def test_every_delivery_is_awaited_and_ordered_before_what_follows(staged):
    engine, transfers, _ = staged
    engine.prefill(make_prompt(TEXTS), method="reuse")
    layers = engine.runtime.decoder.geometry.layers
    assert len(transfers.delivered) == layers * len(TEXTS)
    assert set(map(id, transfers.arrived)) == set(map(id, transfers.delivered))
    assert (transfers.calls[0], transfers.calls[-1]) == ("begin", "finish")
    assert all(name.startswith("ragblend-loader") for name in transfers.threads)


def test_a_missing_device_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="cuda"):
        pick_device("cuda")
    with pytest.raises(UsageError, match="abacus"):
        pick_device("abacus")
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("features", "expected"), [({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")]
)
def test_the_dtype_is_what_the_processor_multiplies_fast(monkeypatch, features, expected):
    monkeypatch.setattr(device.torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert pick_dtype(torch.device("cpu"), None) == expected
    assert pick_dtype(torch.device("cpu"), "float16") == "float16"


@pytest.mark.parametrize("staging", [False, True])
def test_kv_in_memory_gives_the_same_bits_and_is_not_staged(fresh_bench_for, monkeypatch, staging):
    """Used once it is read from the disk, then from memory; the deciding profile sees which."""
    engine = fresh_bench_for("llama", memory_budget_bytes=1 << 30).engine
    engine.encode(TEXTS)
    transfers = StagedTransfers()
    if staging:
        monkeypatch.setattr(engine.runtime, "transfers", transfers)
    prompt = make_prompt(TEXTS)
    first = {m: engine.prefill(prompt, method=m).logits for m in METHODS}
    assert engine.finish_background(30)
    memory = engine.store.stats_by_tier()["memory"]
    assert memory.entries == len(TEXTS)
    monkeypatch.setattr(transfers, "staging", lambda like: pytest.fail("staged what lies in memory"))
    monkeypatch.setattr(ChunkReader, "read_layer", lambda *a: pytest.fail("read from the disk"))
    for method in METHODS:
        assert torch.equal(engine.prefill(prompt, method=method).logits, first[method]), method
    assert engine.finish_background(30)
    assert engine.store.stats_by_tier()["memory"].hits >= memory.hits + len(TEXTS) * len(METHODS)


def test_budgets_of_memory_where_nobody_said():
    cpu = torch.device("cpu")
    assert device.memory_tiers(cpu, None, None) == []
    (tier,) = device.memory_tiers(cpu, 5, None)
    assert (tier.name, tier.budget_bytes) == ("memory", 5)
    assert device.default_budgets(torch.device("mps"))[0] > 0


def test_a_full_device_is_freed_each_time(monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    for _ in range(2):
        device.free_cached(torch.device("cuda"))
    assert len(freed) == 2
