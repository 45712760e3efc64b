"""The runtime inside vLLM: reader threads, refused configurations and models, and workers' failures."""

import multiprocessing
import os
import weakref
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm_helpers import TIMEOUT_S

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.errors import UnsupportedModelError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore


def runtime_of(home: Path, **settings):
    from ragblend.integrations.vllm.runtime import VllmRuntime
    from ragblend.integrations.vllm.settings import ConnectorSettings

    model = SimpleNamespace(model="m", dtype="torch.bfloat16")
    config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cpu"))
    return VllmRuntime(config, ConnectorSettings(home=str(home), **settings))


def test_the_connectors_limit_on_the_disk_is_the_stores(tmp_path):
    (tmp_path / "settings.toml").write_text("store_budget_bytes = 54_321")
    for given, budget in (({"store_bytes": 12_345}, 12_345), ({}, 54_321)):
        runtime = runtime_of(tmp_path, **given)
        assert runtime.store.stats().budget_bytes == budget
        runtime.close()


def cores_of_readers(home: Path, core: int) -> set[int]:
    """The cores of a reader thread in a process whose main thread is bound to one, as vLLM binds a worker."""
    os.sched_setaffinity(0, {core})
    runtime = runtime_of(home)
    try:
        return set(runtime.loader_threads.submit(os.sched_getaffinity, 0).result())
    finally:
        runtime.close()


def test_reader_threads_are_not_bound_to_the_worker_core(tmp_path):
    """They inherited the binding, and slowed down the matrix products there."""
    mine = os.sched_getaffinity(0)
    if len(mine) == 1:
        pytest.skip("there is one core")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        assert worker.submit(cores_of_readers, tmp_path, min(mine)).result(TIMEOUT_S) == mine


HUB = {"model": "own/tiny"}
OTHER_GROUP = SimpleNamespace(kv_cache_spec=SimpleNamespace())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # What a hub id means is looked up here in its default revision; vLLM may have been configured otherwise.
        (HUB | {"revision": "abc"}, "a revision (abc) of a hub model"),
        (HUB | {"download_dir": "/elsewhere"}, "a download_dir (/elsewhere) of a hub model"),
        (HUB | {"load_format": "dummy"}, "random weights"),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, "hf_overrides"),
        ({"hf_config_path": "/another"}, "a config from elsewhere (/another)"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"weight_transfer_config": object()}, "sleep mode and weight transfer"),
        (HUB, None),
        ({"hf_config_path": "/a/folder"}, None),
        ({"revision": "abc", "download_dir": "/elsewhere"}, None),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline parallel of 2"),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=4)},
            "prefill context parallel of 4",
        ),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"quantization": "awq"}, "quantization awq"),
        ({"is_multimodal_model": True}, "only text generation"),
        ({"runner_type": "pooling"}, "only text generation"),
        ({"tokenizer": "another"}, "a tokenizer (another)"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "the KV cache's dtype fp8"),
        ({"groups": [OTHER_GROUP]}, "KV caches of the kinds SimpleNamespace"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_unsupported_configurations_are_refused_by_name(changes, reason):
    from ragblend.integrations.vllm.runtime import unsupported_reason

    changes = {"model": "/a/folder", "groups": ()} | changes
    groups = changes.pop("groups")
    load = {
        name: changes.pop(name, usual) for name, usual in (("download_dir", None), ("load_format", "auto"))
    }
    config = {
        "parallel_config": SimpleNamespace(),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "speculative_config": None,
        "lora_config": None,
    }
    config |= {name: changes.pop(name) for name in list(changes) if name.endswith("_config")}
    model = {"revision": None, "quantization": None, "dtype": "torch.float32", "tokenizer": changes["model"]}
    model |= {"is_multimodal_model": False, "runner_type": "generate", "hf_overrides": {}} | changes
    config |= {"model_config": SimpleNamespace(**model), "load_config": SimpleNamespace(**load)}
    refusal = unsupported_reason(SimpleNamespace(**config), SimpleNamespace(kv_cache_groups=groups))
    assert refusal is None if reason is None else str(refusal).startswith(reason)


def layer_of(**changes):
    """A layer with the attributes that are checked; a part that is None is missing."""
    impl = {"do_kv_cache_update": print, "logits_soft_cap": None, "sinks": None, "alibi_slopes": None}
    parts = {"impl": SimpleNamespace(**impl), "rotary_emb": object()} | changes
    attn = SimpleNamespace(impl=parts.pop("impl"))
    return SimpleNamespace(self_attn=SimpleNamespace(attn=attn, **{n: p for n, p in parts.items() if p}))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([layer_of(), layer_of(impl=SimpleNamespace())], "no attention that writes KV"),
        ([layer_of(), SimpleNamespace(mixer=object())], "no attention that writes KV"),
        ([layer_of()], "not a decoder with known layers"),
        ([layer_of(), layer_of(rotary_emb=None)], "no rotary positions"),
        ([layer_of(), layer_of(impl=SimpleNamespace(do_kv_cache_update=print, sinks=1))], "sinks"),
        (
            [layer_of(), layer_of(impl=SimpleNamespace(do_kv_cache_update=print, logits_soft_cap=50.0))],
            "caps",
        ),
    ],
    ids=["no operator", "no attention", "too few layers", "no rotary", "sinks", "caps"],
)
def test_unsupported_layers_are_refused_by_name(layers, said):
    from ragblend.integrations.vllm.decoder import VllmDecoder
    from ragblend.integrations.vllm.tensor_parallel import TensorParallelGroup

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = SimpleNamespace(layers=layers, norm=print)

        def compute_logits(self):
            pass

    with pytest.raises(UnsupportedModelError, match=said):
        VllmDecoder(Model(), SimpleNamespace(num_hidden_layers=2), "float32", None, TensorParallelGroup())


def test_a_failure_within_a_shared_layer_ends_the_worker_without_another_broadcast():
    """The other workers are in a collective operation of that layer, and would mistake a broadcast for it."""
    pytest.importorskip("vllm")
    from ragblend.integrations.vllm.settings import ConnectorSettings
    from ragblend.integrations.vllm.tensor_parallel import TensorParallelGroup, WorkersOutOfSync
    from ragblend.integrations.vllm.worker import ConnectorWorker

    sent = []
    group = TensorParallelGroup(
        SimpleNamespace(
            world_size=2,
            rank_in_group=0,
            broadcast_tensor_dict=sent.append,
            gather=lambda flat, dim: torch.cat((flat, flat), dim),
        )
    )
    worker, decoder = (
        ConnectorWorker(SimpleNamespace(), ConnectorSettings()),
        SimpleNamespace(finish=lambda: group.broadcast("end")),
    )
    plan = SimpleNamespace(options=SimpleNamespace(method="probe-shift", label=None))
    order = SimpleNamespace(request_id="1", plan=plan, salt="", start=0, stop=8)

    def asked(fails_in_attention):
        def fuse(order, method):
            with group.operation("layer"):
                if fails_in_attention and method != "full":
                    group.gather_and_scatter(torch.ones(2, 4), lambda whole: 1 / 0)
                if not fails_in_attention:
                    raise torch.OutOfMemoryError("CUDA out of memory")

        worker._fuse = fuse
        sent.clear()
        with worker._lead_or_follow(decoder):
            worker._serve(order)

    asked(fails_in_attention=True)
    assert [each.get("name") for each in sent] == ["layer", None, "layer", "end"]
    with pytest.raises(WorkersOutOfSync, match="'layer'"):
        asked(fails_in_attention=False)
    assert [each.get("name") for each in sent] == ["layer"]


def test_blocks_behind_failed_ones_are_evicted():
    pytest.importorskip("vllm")
    from ragblend.integrations.vllm.scheduler import ConnectorScheduler

    side, evicted = ConnectorScheduler.__new__(ConnectorScheduler), []
    side._plans, side._reports, side.evict = {"lost": 1, "well": 1}, {}, evicted.append
    side._given_salts = {}
    for name, status in (("lost", "FINISHED_ERROR"), ("well", "FINISHED_STOPPED"), ("own", "FINISHED_ERROR")):
        request = SimpleNamespace(
            request_id=name, status=SimpleNamespace(name=status), kv_transfer_params=None, cache_salt=None
        )
        side.finished(request, ([0, 3, 4], [7]))
    assert evicted == [{3, 4, 7}]


def test_prompts_are_fused_only_if_all_workers_report_that_they_can():
    """None may report (with another kind of cache), or another connector's workers may (MultiConnector)."""
    pytest.importorskip("vllm")
    from ragblend.integrations.vllm.connector import RAGBlendConnector
    from ragblend.integrations.vllm.messages import WorkerStatus

    side = RAGBlendConnector.__new__(RAGBlendConnector)
    side._scheduler = SimpleNamespace(refusal="nobody yet")
    for metadata in ({}, {0: object()}, {0: WorkerStatus(None), 1: object()}):
        side.set_xfer_handshake_metadata(metadata)
        assert side._scheduler.refusal == "nobody yet"
    for verdicts, refusal in (([None, None], None), ([None, "no room"], "no room")):
        side.set_xfer_handshake_metadata({rank: WorkerStatus(each) for rank, each in enumerate(verdicts)})
        assert side._scheduler.refusal == refusal


def test_a_failed_prompts_memory_is_freed_before_it_is_computed_in_full(monkeypatch):
    """Computing all rows takes more memory than the try that failed for lack of it."""
    pytest.importorskip("vllm")
    from ragblend.integrations.vllm.settings import ConnectorSettings
    from ragblend.integrations.vllm.worker import ConnectorWorker, log

    monkeypatch.setattr(log, "disabled", True)  # pytest keeps log records, and what they hold
    worker, held = ConnectorWorker(SimpleNamespace(), ConnectorSettings()), []
    plan = SimpleNamespace(options=SimpleNamespace(method="probe-shift"))
    order = SimpleNamespace(request_id="1", plan=plan, salt="", start=0, stop=8)

    def fuse(order, method):
        if method == "full":
            assert [each() for each in held] == [None]
            held.append(method)
            return
        cache = torch.ones(8)
        held.append(weakref.ref(cache))
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker._fuse, worker._report = fuse, lambda order, said: None
    worker._serve(order)
    assert held[1:] == ["full"]


def test_the_most_requested_passages_are_read_ahead(tmp_path, monkeypatch):
    """Requests for passages that are not stored were counted, and reading those ahead does nothing."""
    pytest.importorskip("vllm")
    from ragblend.integrations.vllm.settings import ConnectorSettings
    from ragblend.integrations.vllm.worker import ConnectorWorker

    geometry, read = Geometry(1, 1, 2, 2, "float32"), list[ChunkKey]()
    keys = [ChunkKey(f"{number:064x}") for number in range(4)]
    with KVStore.open(tmp_path / "kv", 1 << 20) as store:
        for number, key in enumerate(keys[:3]):
            store.put(key, ChunkKV((number,), 0, geometry, [torch.zeros(1, 1, 2)], [torch.zeros(1, 1, 2)]))
        for number, requests in enumerate((1, 3, 2, 5)):  # the last one is not stored
            for _ in range(requests):
                store.get(keys[number], (number,))
        monkeypatch.setattr(store, "read_ahead", read.append)
        ConnectorWorker(SimpleNamespace(store=store), ConnectorSettings(warm=2))._read_ahead()
    assert read == [keys[1], keys[2]]
