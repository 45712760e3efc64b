"""The loading controller against a pipeline that is simulated layer by layer, and through the engine."""

import errno
import json
import math

import pytest
import torch
from benches import PREFIX, StagedTransfers, largest_error, make_prompt, make_text
from doubles import raising

from ragblend import Engine
from ragblend.engine import background_work, controller, prefill, profiling
from ragblend.engine.config import DEFAULT_RATIO, EngineConfig
from ragblend.engine.controller import (
    DeviceProfile,
    MeasuredSpeeds,
    Tier,
    Workload,
    cheapest_tier,
    chunks_to_compute,
    compute_ms,
    decide,
    hidden_ratio,
    load_ms,
    ttft_ms,
)
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import DeviceTurn
from ragblend.kvstore import system
from ragblend.kvstore.codec import Part
from ragblend.kvstore.errors import StoreError, UsageError
from ragblend.kvstore.memory import held_nbytes
from ragblend.kvstore.policy import PrefillProfile

LAYERS = 20
MB = 10**6
TEXTS = [make_text(seed) for seed in range(3)]


def profile(memory=1000.0, disk=100.0, overlaps=True):
    """Speeds in MB/s; a row takes 0.1 ms, wherever it stands."""
    grid = PrefillProfile.of("test", (0, 1000), (10, 1000), lambda cached, new: 0.1 * new)
    tiers = Tier("memory", memory * MB), Tier("disk", disk * MB)
    return DeviceProfile("test", grid, tiers, overlaps)


def work(megabytes, stored=1000, always=100):
    return Workload(
        stored + always,
        LAYERS,
        {"disk": int(megabytes * MB)},
        lambda ratio: [(always + ratio * stored, LAYERS)],
    )


def simulated_ms(compute, load):
    """Reads one after the other; a layer is computed when it is there and the one before is done."""
    read = done = 0.0
    for _ in range(LAYERS):
        read += load / LAYERS
        done = max(read, done) + compute / LAYERS
    return done


@pytest.mark.parametrize("megabytes", [0.1, 1, 2, 5, 20])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_the_prediction_is_the_time_of_a_pipeline(megabytes, ratio):
    found, request = profile(), work(megabytes)
    compute, load = compute_ms(found, request, ratio), load_ms(found, request)
    assert compute == pytest.approx(0.1 * (100 + ratio * 1000))
    assert load == pytest.approx(10 * megabytes)
    assert ttft_ms(found, request, ratio) == pytest.approx(simulated_ms(compute, load))
    decision = decide(found, request, ratio, 0.15)
    assert (decision.ratio, decision.reason) == (ratio, "asked for")
    assert decision.predicted_ttft_ms == pytest.approx(simulated_ms(compute, load), abs=0.01)
    assert decision.predicted_load_ms == pytest.approx(load, abs=0.01)


@pytest.mark.parametrize(("megabytes", "expected"), [(0.5, 0.0), (3, 0.2), (6, 0.5), (50, 1.0)])
def test_what_loading_hides_costs_nothing_and_more_does(megabytes, expected):
    found, request = profile(), work(megabytes)
    hidden = hidden_ratio(found, request)
    assert hidden == pytest.approx(expected, abs=0.002)
    free = simulated_ms(compute_ms(found, request, 0.0), load_ms(found, request))
    # A row more is computed in the last layer, which nothing hides.
    taken = simulated_ms(compute_ms(found, request, hidden), load_ms(found, request))
    assert taken <= free + 0.1 * 1000 * hidden / LAYERS + 1e-9


def passage_works(passages, tokens, token_bytes, question=60, probes=False):
    """work(count) of a prompt whose first `count` passages are computed; ratio 0.15 of the others is recomputed.

    probes: a pass of the question and the computed passages through half of the layers comes first.
    """

    def work(count):
        loaded = (passages - count) * tokens
        always = count * tokens + question

        def passes(ratio):
            rows = always + ratio * loaded
            if not probes or not loaded:
                return [(rows, LAYERS)]
            half = LAYERS // 2
            return [(always, half), (rows - count * tokens, half), (rows, LAYERS - half)]

        return Workload(passages * tokens + question, LAYERS, {"disk": loaded * token_bytes}, passes)

    return work


def simulated_passes_ms(found, request, ratio):
    """The same layer by layer: each waits for its KV, and for the layer before."""
    load, done = load_ms(found, request), 0.0
    passes = request.passes(ratio)
    probe = sum(layers for _, layers in passes) - LAYERS
    layer = -probe
    for rows, layers in passes:
        own = found.rows_ms(request.tokens - rows, rows) / LAYERS
        for number in range(layers):
            at = number if layer < 0 else layer + number
            done = max(done, (at + 1) * load / LAYERS) + own
        layer += layers
    return done


@pytest.mark.parametrize("probes", [False, True])
def test_what_is_loaded_is_never_slower_than_computing_all_or_loading_all(probes):
    """Over tiers of 0.1 to 50 GB/s, devices of 0.1 to 300 ms for a thousand tokens, small and large KV."""
    near = better = cases = 0
    for gigabytes_per_s in (0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 30, 50):
        for ms in (0.1, 0.3, 1, 3, 10, 30, 100, 300):
            for token_bytes in (12_000, 131_000):
                for passages in (1, 8):
                    grid = PrefillProfile("made up", (0, 4096), (16, 1024), ((0.016 * ms, 1.024 * ms),) * 2)
                    found = DeviceProfile("made up", grid, (Tier("disk", gigabytes_per_s * 1e9),))
                    work = passage_works(passages, 1024, token_bytes, probes=probes)
                    chosen = chunks_to_compute(found, work, 0.15, 0, passages)
                    times = [simulated_passes_ms(found, work(count), 0.15) for count in range(passages + 1)]
                    load_all, compute_all = times[0], times[-1]
                    case = gigabytes_per_s, ms, token_bytes, passages
                    assert ttft_ms(found, work(chosen), 0.15) == pytest.approx(times[chosen], rel=1e-6), case
                    assert times[chosen] <= 1.05 * min(times), (case, times, chosen)
                    is_hidden = load_ms(found, work(0)) <= compute_ms(found, work(0), 0.15)
                    if passages >= 8 and not is_hidden and max(load_all, compute_all) < 3 * min(times):
                        near += 1
                        better += times[chosen] < min(load_all, compute_all)
                    cases += 1
    assert cases == 10 * 8 * 2 * 2
    assert better > 0.9 * near > 10, "a split is better than both wherever they are near each other"


@pytest.mark.parametrize(("disk", "computed"), [(1e6, 0), (0.001, 8)])
def test_without_overlap_the_sum_decides(disk, computed):
    found, work = profile(disk=disk, overlaps=False), passage_works(8, 512, 23_000)
    assert chunks_to_compute(found, work, 0.15, 0, 8) == computed
    assert chunks_to_compute(found, work, 0.15, 3, 8) == max(3, computed)  # three would arrive too late


def test_requests_correct_what_was_measured():
    speeds = MeasuredSpeeds()
    assert speeds.corrected(None) is None and speeds.corrected(profile()) == profile()
    speeds.record_load("disk", 100, 1.0)  # too little to say anything
    assert speeds.corrected(profile()).tier("disk").bytes_per_s == 100 * MB
    speeds.record_load("disk", 10 * MB, 1000)
    assert speeds.corrected(profile()).tier("disk").bytes_per_s == 10 * MB
    for _ in range(9):
        speeds.record_load("disk", 40 * MB, 1000)
    assert 35 * MB < speeds.corrected(profile()).tier("disk").bytes_per_s < 40 * MB
    speeds.record_load("page cache", 80 * MB, 1000)  # which nobody had measured
    assert speeds.corrected(profile()).tier("page cache").bytes_per_s == 80 * MB
    for _ in range(9):
        speeds.record_compute(
            predicted_ms=speeds.corrected(profile()).rows_ms(0, 100), ms=20
        )  # of 0.1 ms each
    assert speeds.corrected(profile()).rows_ms(0, 100) == pytest.approx(20, rel=0.01)
    assert DeviceProfile("untested", profile().prefill, ()).tier("disk").bytes_per_s == float("inf")


@pytest.mark.parametrize("method", ["reuse", "cacheblend", "probe-shift"])
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_slower_to_load_is_computed_from_the_front(engine, monkeypatch, method, staged):
    """A use of the passage and no miss; the report says what was computed, and why. `load=all` loads it."""
    runtime, prompt = engine.runtime, make_prompt(TEXTS)
    if staged:
        monkeypatch.setattr(runtime, "transfers", StagedTransfers())
    engine.encode(TEXTS)
    exact = engine.prefill(prompt, method="full").logits
    sizes = [len(chunk.token_ids) for chunk in engine.tokenize(prompt).chunks]
    asked = {"method": method} | ({} if method == "reuse" else {"ratio": 0.15})
    found = {}
    for disk in (1e-4, 0.1, 1e6):
        tiers = Tier("page cache", disk * MB), Tier("disk", disk * MB)
        monkeypatch.setattr(runtime, "profile", DeviceProfile("test", profile().prefill, tiers))
        monkeypatch.setattr(runtime, "speeds", MeasuredSpeeds())
        found[disk] = engine.prefill(prompt, **asked)
        report = found[disk].report
        assert (report.hits, report.misses) == (3, 0)
        assert report.served.count("n") == report.tokens.not_loaded
        computed = [report.served[start] == "n" for start, _ in engine.tokenize(prompt).places]
        assert computed == sorted(computed, reverse=True), "from the front"
        assert (report.decision.not_loaded is None) == (report.tokens.not_loaded == 0)
    assert found[1e6].report.tokens.not_loaded == 0 and found[1e6].report.tokens.reused > 0
    assert found[1e-4].report.tokens.not_loaded == sum(sizes) and found[1e-4].report.tokens.reused == 0
    assert largest_error(found[1e-4].logits, exact) < 1e-4  # all computed
    monkeypatch.setattr(runtime, "profile", DeviceProfile("test", profile().prefill, (Tier("disk", 100.0),)))
    loading = Engine.open(engine.config.model, engine.home, "cpu", "float32", load="all")
    if not staged:
        assert torch.equal(loading.prefill(prompt, **asked).logits, found[1e6].logits)


def test_on_a_cpu_loading_hides_nothing():
    """On two cores reading takes turns with computing: `reuse` was predicted a third too short, as if it did not."""
    found = profile(overlaps=False)
    assert hidden_ratio(found, work(50)) == 0.0
    assert decide(found, work(50), None, 0.15).ratio == 0.15
    assert ttft_ms(found, work(5), 0.4) == pytest.approx(compute_ms(found, work(5), 0.4) + 50)


def test_the_cheapest_tier_that_adds_no_delay():
    """10% of 1,000 rows and 100 fresh ones take 20 ms: time for 2 MB from the disk, and for 20 from memory."""
    assert cheapest_tier(profile(), work(1.9), 0.1) == "disk"
    assert cheapest_tier(profile(), work(2.3), 0.1) == "memory"
    assert cheapest_tier(profile(), work(2.3), 0.9) == "disk"
    assert cheapest_tier(profile(), work(900), 0.1) == "memory"  # none is quick enough: the fastest
    assert decide(profile(), work(1.9), 0.1, 0.15).cheapest_tier == "disk"
    assert decide(profile(), Workload(10, LAYERS), 0.1, 0.15).cheapest_tier is None  # nothing to load


def test_without_a_profile_nothing_is_predicted():
    decision = decide(None, work(5), None, 0.15)
    assert (decision.ratio, decision.predicted_ttft_ms) == (0.15, None)
    assert "doctor --profile" in decision.reason
    assert decide(None, work(5), 0.3, 0.15).ratio == 0.3


@pytest.mark.parametrize(
    "method", ["full", "reuse", "random", "cacheblend", "cacheblend-gradual", "a3", "probe-shift"]
)
def test_a_policy_says_what_it_will_cost(fresh, monkeypatch, method):
    """Few rows take longer each, so passes are predicted one by one; together they are what is then computed."""
    engine, seen = fresh.engine, []
    engine.encode(TEXTS)
    monkeypatch.setattr(engine.runtime, "profile", profile())
    monkeypatch.setattr(prefill, "decide", lambda *args: seen.append(args[1]) or decide(*args))
    for ratio in (0.0, 0.5, 1.0):
        report = engine.prefill(make_prompt(TEXTS), method=method, ratio=ratio).report
        request = seen.pop()
        passes = request.passes(report.decision.ratio)
        share = sum(rows * layers for rows, layers in passes) / (request.layers * request.tokens)
        assert share == pytest.approx(report.computed_fraction, rel=0.1), (ratio, passes)
        last = report.tokens.fresh + report.tokens.recomputed
        if "gradual" not in method:  # whose last layer has the fewest
            rows = next(rows for rows, layers in reversed(passes) if layers)
            assert rows == pytest.approx(last, abs=4) or method in ("probe", "probe-shift", "prophet")


@pytest.mark.parametrize("method", ["full", "prefix"])
def test_methods_that_compute_everything_are_predicted_so(fresh, monkeypatch, method):
    """A chunk right behind its prefix is no candidate, but `full` computes it: it was predicted as if it did not."""
    engine = fresh.engine
    engine.encode(TEXTS, prefix=PREFIX)
    monkeypatch.setattr(engine.runtime, "profile", profile())
    report = engine.prefill(make_prompt(TEXTS), method=method).report
    exact = report.tokens.prompt - report.tokens.fresh - report.tokens.recomputed
    assert (exact > 0) == (method == "prefix")
    wanted = profile().rows_ms(exact, report.tokens.prompt - exact)
    assert report.decision.predicted_compute_ms == pytest.approx(wanted, abs=0.01)


def test_a_profile_survives_the_disk_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "profiles" / "p.json"
    assert DeviceProfile.read(path) is None
    profile().save(path)
    assert DeviceProfile.read(path) == profile()
    value = json.loads(path.read_text())
    for broken in (
        "",
        "[]",
        "[" * 100_000,
        json.dumps(value | {"tiers": [{"name": "disk"}]}),
        json.dumps({}),
    ):
        path.write_text(broken)
        with pytest.raises(UsageError, match="doctor --profile"):
            DeviceProfile.read(path)
    with pytest.raises(UsageError, match="must be above 0; measure"):
        Tier("disk", 0.0)


def test_a_full_disk_keeps_the_profile_that_is_there(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    profile().save(path)
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(controller, "replace_durably", full)
    with pytest.raises(StoreError, match="No space left"):
        profile().save(path)
    assert DeviceProfile.read(path) == profile()


def test_the_engine_measures_once_and_decides_from_then_on(engine):
    engine.encode(TEXTS)
    engine.runtime.load = "all"  # of so small a model nothing would be
    prompt = make_prompt(TEXTS)
    before = engine.prefill(prompt, ratio="auto").report
    assert before.decision.predicted_ttft_ms is None and before.decision.ratio == DEFAULT_RATIO
    seen = []
    measured = engine.profile(lambda *progress: seen.append(progress))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert [tier.name for tier in measured.tiers] == ["memory", "page cache", "disk"]
    assert engine.store.stats().entries == len(TEXTS)
    after = engine.prefill(prompt, ratio="auto").report
    assert after.decision.predicted_ttft_ms > 0 and after.decision.ratio >= DEFAULT_RATIO
    assert after.ratio == pytest.approx(after.decision.ratio, abs=0.01), "whole rows"
    engine.close()
    again = engine.prefill(prompt, ratio=0.3).report  # from the file
    assert again.decision.predicted_ttft_ms > 0 and again.decision.ratio == 0.3
    assert engine.prefill(prompt, method="reuse").report.decision.ratio == 0.0
    full = engine.prefill(prompt, method="full").report
    assert full.ratio is None and full.decision.predicted_load_ms == 0.0


def test_every_tier_of_a_staged_device_is_measured_through_its_stream(engine, monkeypatch):
    """Before an accelerator memory is not read but copied, and the device's own tier was not measured at all."""
    transfers = StagedTransfers()
    monkeypatch.setattr(engine.runtime, "transfers", transfers)
    assert engine.gate.passed
    measured = engine.profile()
    assert [tier.name for tier in measured.tiers] == ["device", "memory", "page cache", "disk"]
    assert len(transfers.delivered) >= 3 * engine.runtime.decoder.geometry.layers


def test_a_profile_evicts_no_passage_and_leaves_nothing(fresh_bench_for):
    """It stored its random values in the user's store, and failed where the budget was too small for them."""
    engine = fresh_bench_for(store_budget_bytes=100_000).engine
    encoded = engine.encode(TEXTS[:1])
    assert len(engine.profile().tiers) == 3
    assert list(engine.store.keys()) == list(encoded.keys) and not list(engine.runtime.home.glob("profile-*"))


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_tiers_are_measured_in_the_bytes_that_are_loaded(fresh_bench_for, monkeypatch, codec):
    engine, loaded = fresh_bench_for(kv_codec=codec).engine, []

    def in_a_second(runtime, count, opened):
        with opened(0) as source:
            loaded.append(count * held_nbytes(source))
        return 1000.0

    monkeypatch.setattr(profiling, "_load_ms", in_a_second)
    assert engine.gate.passed
    assert [tier.bytes_per_s for tier in engine.profile().tiers] == loaded


GRID = PrefillProfile.of(
    "made up", (0, 1000), (256, 512, 1024), lambda cached, new: new * (1 + cached / 1000) + 256
)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "profile_path", tmp_path / "profile.json")
    return Runtime(EngineConfig(), tmp_path)


def test_with_a_profile_a_tokens_cost_is_a_multiple_of_a_typical_one(runtime):
    DeviceProfile("made up", GRID, ()).save(runtime.profile_path)
    assert runtime._token_cost(0, 512) == 1.0
    assert runtime._token_cost(0, 256) == pytest.approx((2.0) / (1.5))
    assert runtime._token_cost(1000, 512) == pytest.approx((2 + 0.5) / 1.5)


def test_the_first_answer_from_stored_kv_has_the_layers_measured(engine, monkeypatch):
    """In the background, once; what is loaded shows the speed of its tier."""
    monkeypatch.setattr(MeasuredSpeeds, "cannot_measure", False)
    monkeypatch.setattr(MeasuredSpeeds, "MIN_BYTES", 1)
    prompt = make_prompt(TEXTS)
    runtime = engine.runtime
    assert engine.prefill(prompt).report.hits == 0 and engine.finish_background()
    assert runtime.profile is None, "nothing was loaded"
    runtime.load = "all"
    assert engine.prefill(prompt).report.decision.predicted_ttft_ms is None and engine.finish_background()
    assert runtime.profile is None, "nobody asks for it"
    runtime.load = "auto"
    assert engine.prefill(prompt).report.hits == 3 and engine.finish_background()
    measured = runtime.profile
    assert measured is not None and measured.tiers == () and measured.rows_ms(100, 50) > 0
    assert DeviceProfile.read(runtime.profile_path) == measured
    assert runtime.speeds.corrected(measured).tier("page cache").bytes_per_s < math.inf
    assert engine.prefill(prompt).report.decision.predicted_ttft_ms > 0


def test_a_request_ends_the_measuring_and_an_error_is_not_repeated(engine, monkeypatch):
    monkeypatch.setattr(MeasuredSpeeds, "cannot_measure", False)
    prompt, begun = make_prompt(TEXTS), []
    engine.encode(TEXTS)

    def waiting(turn):
        begun.append(turn)
        return len(begun) > 1  # in the second layer

    monkeypatch.setattr(DeviceTurn, "should_stop", waiting)
    assert engine.prefill(prompt).report.hits == 3
    engine.finish_background()
    assert len(begun) == 2 and engine.runtime.profile is None and not engine.runtime.speeds.cannot_measure

    def broken(*given):
        begun.append(given)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(background_work, "measure_layers", broken)
    for _ in range(2):
        engine.prefill(prompt)
        engine.finish_background()
    assert len(begun) == 3 and engine.runtime.speeds.cannot_measure


def test_a_file_in_the_page_cache_is_told_from_one_that_is_not(engine, monkeypatch):
    (key,) = engine.encode(TEXTS[:1]).keys
    (chunk,) = engine.tokenize(make_prompt(TEXTS[:1])).chunks
    with engine.store.open_chunk(key, chunk.token_ids) as reader:
        for known, expected in ((True, "page cache"), (False, "disk")):
            monkeypatch.setattr(system, "is_cached", lambda fd, offset, known=known: known)
            assert reader.comes_from == expected and Part(reader, 1, 2).comes_from == expected
        assert reader.tier == "disk"
    assert not system.is_cached(-1, 0)
