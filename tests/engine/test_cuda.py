"""On a CUDA device, if there is one: the CPU's logits, KV in every tier, and CUDA graphs."""

import threading

import pytest
import tiny_models
import torch
from benches import largest_error, make_prompt, make_text

from ragblend import Chunk
from ragblend.engine.decoding.cuda_graph import CudaGraphDecode
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.eviction import evict
from ragblend.engine.decoding.implementations import (
    DecodeSelector,
    TransformersDecode,
    compare_implementations,
)
from ragblend.engine.engine import Engine
from ragblend.engine.model.device import record_calls
from ragblend.engine.prompts.session import Session
from ragblend.engine.selection import by_attention, static
from ragblend.engine.selection.static import nearness_to_beginning
from ragblend.kvstore.errors import Cancelled, DeviceError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

TEXTS = [make_text(seed) for seed in range(4)]
METHODS = ["full", "exact", "recompute", "reuse", "naive", "epic", "cacheblend", "a3", "probe-shift"]
KINDS = (*tiny_models.SUPPORTED, *tiny_models.OTHERS)
CLOSE = 2e-3  # in float32: sums in another order


@pytest.fixture
def on_cuda(model_folder, tmp_path):
    """on_cuda(kind): an engine there, on a home of its own that has the passages."""
    made: list[Engine] = []

    def engine(kind="llama", **options):
        options = {"device": "cuda", "dtype": "float32", "home": tmp_path / f"home{len(made)}"} | options
        made.append(Engine.open(str(model_folder(kind)), **options))
        made[-1].encode(TEXTS)
        return made[-1]

    yield engine
    for each in made:
        each.close()


def logits(engine, method, **options):
    return engine.prefill(make_prompt(TEXTS), method=method, **options).logits.cpu()


def without_ties(plan):
    return nearness_to_beginning(plan) - 1e-4 * torch.arange(plan.tokens, device=plan.token_ids.device)


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_gives_the_cpus_logits(on_cuda, kind, monkeypatch):
    """Of rows as near to the beginnings of their chunks each device takes others, where not all are paid for."""
    for module in (by_attention, static):
        monkeypatch.setattr(module, "nearness_to_beginning", without_ties)
    cuda, cpu = on_cuda(kind), on_cuda(kind, device="cpu")
    assert cuda.gate.passed == cpu.gate.passed and cuda.gate.layouts == cpu.gate.layouts
    apart = {m: largest_error(logits(cuda, m, ratio=0.3), logits(cpu, m, ratio=0.3)) for m in METHODS}
    assert not {method: each for method, each in apart.items() if not each < CLOSE}
    assert largest_error(logits(cuda, "recompute"), logits(cuda, "full")) < CLOSE


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_kv_from_every_tier_gives_the_same_logits(on_cuda, codec):
    engine = on_cuda(kv_codec=codec, memory_budget_bytes=1 << 28, device_budget_bytes=1 << 28)
    told, tiers = [], []
    for _ in range(3):
        prefilled = engine.prefill(make_prompt(TEXTS), method="probe-shift", ratio=0.3)
        told.append(prefilled.logits.cpu())
        tiers.append({tier.name: tier.stats().entries for tier in engine.store.tiers})
        engine.finish_background()
    assert [each["memory"] for each in tiers] == [0, 4, 4]
    assert tiers[-1]["device"] == 4
    assert torch.equal(told[0], told[1]) and torch.equal(told[1], told[2])


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("method", ["reuse", "cacheblend", "probe-shift"])
def test_triton_kernels_give_the_logits_of_the_plain_way(on_cuda, codec, method, monkeypatch):
    """In bfloat16, where both round; files are read in groups of layers, and kept in no tier."""
    nothing = {"memory_budget_bytes": 0, "device_budget_bytes": 0}
    engine = on_cuda("llama", dtype="bfloat16", kv_codec=codec, **nothing)
    exact = logits(on_cuda("llama", **nothing), method, ratio=0.3)
    found = {}
    for by_kernels in (False, True):
        monkeypatch.setattr(engine.runtime.decoder, "kernels", by_kernels)
        found[by_kernels] = logits(engine, method, ratio=0.3)
    errors = {by_kernels: largest_error(each, exact) for by_kernels, each in found.items()}
    assert errors[True] < max(1.5 * errors[False], 0.05), errors
    for name, *more in (("placement", codec), ("shift",)):
        assert engine.runtime.decoder.has_kernels(name, *more), "Triton works on this card"


def test_reading_in_many_groups_gives_the_same_logits(on_cuda, monkeypatch):
    """Pinned memory is used again while copies from it are queued."""
    engine = on_cuda(memory_budget_bytes=0, device_budget_bytes=0)
    expected = logits(engine, "probe-shift", ratio=0.3)
    for nbytes in (1, 30_000, 1 << 20):
        monkeypatch.setattr("ragblend.engine.loader.GROUP_BYTES", nbytes)
        monkeypatch.setattr("ragblend.engine.loader.READ_AHEAD_BYTES", 2 * nbytes)
        for _ in range(3):
            assert torch.equal(logits(engine, "probe-shift", ratio=0.3), expected)


def test_paths_in_the_tree_and_what_was_read_ahead_are_exact_beside_packed_kv(on_cuda):
    engine = on_cuda(kv_codec="int4", memory_budget_bytes=1 << 28, device_budget_bytes=1 << 28)
    prompt = engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in TEXTS], "who kept them?"))
    full, reused = engine.prefill(prompt, method="full").logits, []
    for _ in range(5):  # computed, stored, loaded, and from faster tiers
        found = engine.prefill(prompt, method="exact")
        assert largest_error(found.logits, full) < CLOSE
        reused.append(found.report.tokens.reused)
        assert engine.finish_background(60)
    assert reused[0] == 0 and reused[-1] > 0
    prompts = [make_prompt(TEXTS[:3]), make_prompt(TEXTS)]
    alone = engine.generate(prompts[-1], max_new_tokens=6).token_ids
    with engine.stream_staged(prompts, max_new_tokens=6) as stream:
        assert stream.result.token_ids == alone


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("llama", "qwen"))])
def test_cuda_graphs_give_the_models_logits(on_cuda, kind):
    engine = on_cuda(kind)
    decoder = engine.runtime.decoder
    if not DirectDecode.supports(decoder):
        pytest.skip("no layers that the loop knows")
    rows, model = CudaGraphDecode(decoder, {}), TransformersDecode(decoder.model)
    prompts = [make_prompt(TEXTS), make_prompt(TEXTS[::-1])]
    caches = [[engine.prefill(prompt, "full").cache for prompt in prompts] for _ in range(2)]
    for number in range(
        300
    ):  # beyond the room of the buffers, two answers in turns, now and then with guesses
        for mine, own in zip(*caches, strict=True):
            read = [7 + number % 50] if number % 5 else [9, 11, 13, 15]
            assert largest_error(rows.run(mine, read), model.run(own, read)) < CLOSE, (number, read)
    assert all(set(rows._recordings[mine]) == {1, 4} for mine in caches[0]), "something was not recorded"
    assert [mine.get_seq_length() for mine in caches[0]] == [own.get_seq_length() for own in caches[1]]
    together = rows.run_together([(mine, [3]) for mine in caches[0]])
    for one, own in zip(together, caches[1], strict=True):
        assert largest_error(one, model.run(own, [3])) < CLOSE
    assert compare_implementations(decoder, rows, engine.tokenize(prompts[0]).token_ids).divergence < 1e-4


def test_cuda_graphs_work_after_eviction(on_cuda):
    engine = on_cuda()
    decoder, prompt = engine.runtime.decoder, make_prompt(TEXTS)
    rows, model = CudaGraphDecode(decoder, {}), TransformersDecode(decoder.model)
    told = []
    for steps in (rows, model):
        prefilled = engine.prefill(prompt, "full")
        prefilled.cache.truncate()
        first = steps.run(prefilled.cache, [5])
        evict(decoder, prefilled.prompt, prefilled.cache, 64)
        told.append(torch.cat([first, *(steps.run(prefilled.cache, [token]) for token in (6, 7, 8))]))
    assert largest_error(*told) < CLOSE


def test_cuda_graphs_do_not_change_answers(on_cuda, tmp_path):
    engine = on_cuda()
    options = {"max_new_tokens": 60, "method": "full"}
    before = engine.generate(make_prompt(TEXTS), **options).token_ids
    assert engine.finish_background(60)
    choice = engine.runtime.decode_selector
    again = DecodeSelector(
        engine.runtime.decoder, engine.home / "models", engine.runtime.fingerprint.digest, True
    )
    assert isinstance(choice.current, CudaGraphDecode) == isinstance(again.current, CudaGraphDecode)
    assert len(choice._ratios) >= 5
    choice.current = CudaGraphDecode(engine.runtime.decoder, {})
    after = engine.generate(make_prompt(TEXTS), **options).token_ids
    assert after == before and choice.current._can_record
    sampled = [
        engine.generate(make_prompt(TEXTS), max_new_tokens=9, temperature=1.0, seed=4).token_ids
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    evicted = engine.generate(make_prompt(TEXTS), max_new_tokens=9, keep_tokens=64)
    assert evicted.report.evicted_tokens > 0
    session = Session()
    first = engine.stream(make_prompt(TEXTS), session=session, max_new_tokens=9).result
    assert session.tokens >= len(first.prompt.token_ids)


def test_a_failed_recording_is_logged_and_harmless(on_cuda):
    device, made = on_cuda().runtime.device, torch.ones(4, device="cuda")
    before = record_calls(device, lambda: made.mul_(2))
    with pytest.raises(RuntimeError):
        record_calls(device, lambda: made.add_(1).sum().item())
    play = record_calls(device, lambda: made.add_(1))
    play()
    play()
    before()
    assert made.tolist() == [6.0] * 4


def test_concurrent_requests_give_the_same_answers(on_cuda):
    engine = on_cuda()
    engine.runtime.decode_selector.needs_measurement = False
    engine.runtime.decode_selector.current = CudaGraphDecode(engine.runtime.decoder, {})
    prompts = [make_prompt(TEXTS[number:] + TEXTS[:number]) for number in range(4)]
    alone = [engine.generate(prompt, max_new_tokens=40).token_ids for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def ask(number):
        found[number] = engine.generate(prompts[number], max_new_tokens=40).token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == alone
    assert engine.runtime.decode_selector.current._can_record


def test_out_of_device_memory_is_reported_and_freed(on_cuda):
    engine, long = on_cuda(), make_prompt([make_text(seed, words=150) for seed in range(4)])
    expected = logits(engine, "reuse")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)  # nothing beyond what is held
    try:
        with pytest.raises(DeviceError):
            engine.prefill(long, method="full")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert largest_error(logits(engine, "reuse"), expected) < CLOSE


def test_cancelling_between_layers_leaves_later_requests_intact(on_cuda):
    engine, leave = on_cuda(), threading.Event()
    expected = logits(engine, "probe-shift")
    leave.set()
    with pytest.raises(Cancelled):
        engine.prefill(make_prompt(TEXTS), method="probe-shift", cancel=leave)
    assert torch.equal(logits(engine, "probe-shift"), expected)
