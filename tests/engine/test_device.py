"""Devices and transfers: an accelerator's staged transfers, simulated on the CPU, give the same bits."""

import contextlib
import threading

import pytest
import torch
from benches import StagedTransfers, chat, largest_error, make_prompt, make_text
from doubles import raising

from ragblend.engine.cache import FusedLayer
from ragblend.engine.loader import StagedLoader
from ragblend.engine.model import device
from ragblend.engine.model.device import MpsTransfers, pick_device, pick_dtype
from ragblend.engine.model.load import load
from ragblend.kvstore.blob import ChunkReader
from ragblend.kvstore.errors import DeviceError, UsageError

TEXTS = [make_text(seed) for seed in range(4)]


@pytest.fixture
def staged(fresh, monkeypatch):
    fresh.engine.encode(TEXTS)
    transfers = StagedTransfers()
    expected = {m: fresh.engine.prefill(make_prompt(TEXTS), method=m).logits for m in METHODS}
    monkeypatch.setattr(fresh.engine.runtime, "transfers", transfers)
    return fresh.engine, transfers, expected


METHODS = ("reuse", "naive", "cacheblend", "cacheblend-gradual", "recompute")


def test_staged_delivery_is_awaited_before_compute_and_gives_the_same_bits(staged):
    engine, transfers, expected = staged
    engine.prefill(make_prompt(TEXTS), method="reuse")
    layers = engine.runtime.decoder.geometry.layers
    assert len(transfers.delivered) == layers, "all chunks of a layer at once"
    assert transfers.arrived == transfers.delivered
    assert (transfers.calls[0], transfers.calls[-1]) == ("begin", "finish")
    assert transfers.threads == {threading.get_ident()}, "others would take the interpreter from it"
    assert transfers.calls.count("pace") == layers, "the host may not queue a whole prompt"
    for method in METHODS:
        assert torch.equal(engine.prefill(make_prompt(TEXTS), method=method).logits, expected[method]), method


def test_files_are_read_only_a_few_layers_ahead(staged, monkeypatch):
    """What they take until it is copied is pinned memory: a prompt's whole KV would be a gigabyte."""
    engine, transfers, _ = staged
    read, most = [], []

    def watched(reader, first, packed, own=ChunkReader.read_packed_layers):
        read.extend(range(first, first + len(packed)))
        most.append(max(read) - len(transfers.delivered))
        own(reader, first, packed)

    monkeypatch.setattr(ChunkReader, "read_packed_layers", watched)
    monkeypatch.setattr("ragblend.engine.loader.GROUP_BYTES", 1)
    monkeypatch.setattr("ragblend.engine.loader.READ_AHEAD_BYTES", 1)
    engine.prefill(make_prompt(TEXTS), method="reuse")
    layers = engine.runtime.decoder.geometry.layers
    assert sorted(read) == sorted(list(range(layers)) * len(TEXTS)) and layers > 2
    assert max(most) == 0


def test_later_layers_are_read_together(staged, monkeypatch):
    """A call for each layer of each chunk took the interpreter from the thread that computes."""
    engine, _, expected = staged
    runs = []

    def watched(reader, first, packed, own=ChunkReader.read_packed_layers):
        runs.append((first, len(packed)))
        own(reader, first, packed)

    monkeypatch.setattr(ChunkReader, "read_packed_layers", watched)
    assert torch.equal(engine.prefill(make_prompt(TEXTS), method="reuse").logits, expected["reuse"])
    assert sorted(runs) == sorted([(0, 1), (1, 1), (2, 2)] * len(TEXTS))


def test_sources_of_apple_copies_live_until_the_copies_end(staged, monkeypatch):
    """They do not hold what they read themselves."""
    engine, _, expected = staged
    finished = []
    clear = StagedLoader.finish

    def finish(self):
        held = len(self._kept_alive)
        monkeypatch.setattr(
            torch.mps, "synchronize", lambda: finished.append(held and held == len(self._kept_alive))
        )
        clear(self)
        assert not self._kept_alive

    monkeypatch.setattr(StagedLoader, "finish", finish)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(engine.runtime, "transfers", MpsTransfers(torch.device("cpu")))
    for method in METHODS:
        assert torch.equal(engine.prefill(make_prompt(TEXTS), method=method).logits, expected[method]), method
    assert finished[0] is True


def test_buffers_made_in_inference_mode_are_writable_by_threads(engine):
    geometry = engine.runtime.decoder.geometry
    with torch.inference_mode():
        layer = FusedLayer(geometry, 4, 0, torch.device("cpu"))
        assert not layer.key_buffer.is_inference() and not layer.value_buffer.is_inference()


def test_encoded_kv_is_awaited_once(fresh, monkeypatch):
    """Not for every tensor: the device would be idle meanwhile."""
    transfers, waits = StagedTransfers(), []
    monkeypatch.setattr(transfers, "synchronize", lambda: waits.append(len(waits)))
    monkeypatch.setattr("ragblend.engine.encode.transfer_stream", lambda device: transfers)
    fresh.engine.encode(TEXTS[:1])
    assert waits == [0]
    prompt = chat(fresh, TEXTS[:1])
    found, expected = (fresh.engine.prefill(prompt, method=method) for method in ("reuse", "full"))
    assert found.report.tokens.reused and largest_error(found.logits, expected.logits) < 1e-4


def test_missing_and_unknown_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="cuda"):
        pick_device("cuda")
    with pytest.raises(UsageError, match="abacus"):
        pick_device("abacus")
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("features", "expected"), [({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")]
)
def test_the_default_dtype_is_the_processors_fast_one(monkeypatch, features, expected):
    monkeypatch.setattr(device.torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert pick_dtype(torch.device("cpu"), None) == expected
    assert pick_dtype(torch.device("cpu"), "float16") == "float16"


def test_emulated_bfloat16_is_not_chosen(monkeypatch):
    """Cards before Ampere: torch says that they support it, by emulation."""
    monkeypatch.setattr(torch.cuda, "device", lambda of: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_dtype(torch.device("cuda"), None) == "float16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert pick_dtype(torch.device("cuda"), None) == "bfloat16"


def test_available_memory_respects_the_containers_limit(tmp_path):
    free = device.available_bytes(tmp_path)
    assert free > 1 << 20
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 700000\ninactive_file 150000\nactive_file 50000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    assert device.available_bytes(tmp_path) == 250_000, "files that were read give way"
    (tmp_path / "memory.max").write_text("max\n")
    assert device.available_bytes(tmp_path) > 1 << 20


def test_out_of_memory_while_loading_is_not_reported_as_damage(engine, monkeypatch):
    full = raising(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(DeviceError, match="too little memory on cpu for the model in"):
        load(engine.runtime.folder, torch.device("cpu"), "float32")


@pytest.mark.parametrize("staging", [False, True])
def test_kv_from_the_memory_tier_gives_the_same_bits_unstaged(fresh_bench_for, monkeypatch, staging):
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


def test_reader_threads_use_cores_that_compute_does_not_need(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert [device.reader_count(torch.device(kind)) for kind in ("cpu", "cuda", "mps")] == [2, 8, 8]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert device.reader_count(torch.device("cuda")) == 2


def test_default_memory_budgets():
    cpu = torch.device("cpu")
    assert device.memory_tiers(cpu, None, None) == []
    (tier,) = device.memory_tiers(cpu, 5, None)
    assert (tier.name, tier.budget_bytes) == ("memory", 5)
    assert device.default_budgets(torch.device("mps"))[0] > 0
