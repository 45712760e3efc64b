"""The loading controller against a pipeline that is simulated layer by layer, and through the engine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benches import PREFIX, SUFFIX, make_prompt, make_text
from test_device import StagedLane

from ragblend import Engine
from ragblend.engine import controller, profile_policies, profiling, serving
from ragblend.engine.config import EngineConfig
from ragblend.engine.controller import (
    USD_PER_GB_MONTH,
    DeviceProfile,
    Tier,
    Workload,
    cheapest_tier,
    compute_ms,
    decide,
    hidden_ratio,
    load_ms,
    ttft_ms,
)
from ragblend.engine.machine import Machine
from ragblend.engine.packing import MOST_ROWS
from ragblend.engine.plan import make_plan
from ragblend.engine.selection import METHODS
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.profile import PrefillProfile

LAYERS = 20
MB = 10**6
TEXTS = [make_text(seed) for seed in range(3)]


def profile(memory=1000.0, disk=100.0, overhead_ms=0.0, in_the_way=0.0):
    """Speeds in MB/s; a row takes 0.1 ms, wherever it stands."""
    grid = PrefillProfile.of("test", (0, 1000), (10, 1000), lambda cached, new: 0.1 * new)
    tiers = (Tier("memory", memory * MB, 3.0, in_the_way), Tier("disk", disk * MB, 0.1, in_the_way))
    return DeviceProfile("test", grid, tiers, overhead_ms)


def work(megabytes, tier="disk", stored=1000, candidates=1000, always=100):
    return Workload(stored + always, always, candidates, stored, LAYERS, {tier: int(megabytes * MB)})


def simulated_ms(compute, load, in_the_way=0.0):
    """Reads one after the other; a layer is computed when it is there and the one before is done.

    in_the_way: for so much of each read the layers stand still; not in the first, before which there are none.
    """
    read = done = 0.0
    for layer in range(LAYERS):
        read += load / LAYERS
        done = max(read, done + in_the_way * load / LAYERS * (layer > 0)) + compute / LAYERS
    return done


@pytest.mark.parametrize("megabytes", [0.1, 1, 2, 5, 20])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_the_prediction_is_what_a_pipeline_takes(megabytes, ratio):
    found, request = profile(), work(megabytes)
    compute, load = compute_ms(found, request, ratio), load_ms(found, request)
    assert compute == pytest.approx(0.1 * (100 + ratio * 1000))
    assert load == pytest.approx(10 * megabytes)
    assert ttft_ms(found, request, ratio) == pytest.approx(simulated_ms(compute, load))
    assert ttft_ms(profile(overhead_ms=7), request, ratio) == pytest.approx(7 + simulated_ms(compute, load))
    for share in (0.3, 1.0):
        expected = simulated_ms(compute, load, share)
        assert ttft_ms(profile(in_the_way=share), request, ratio) == pytest.approx(expected)


@pytest.mark.parametrize("megabytes", [0.5, 3, 6, 50])
def test_what_loading_hides_costs_nothing_and_more_does(megabytes):
    found, request = profile(), work(megabytes)
    hidden = hidden_ratio(found, request)
    free = ttft_ms(found, request, 0.0)
    # A row more is computed in the last layer, which nothing hides.
    assert ttft_ms(found, request, hidden) <= free + 0.1 * 1000 * hidden / LAYERS + 1e-9
    if hidden == 0:
        assert compute_ms(found, request, 0.0) >= load_ms(found, request) - 0.1
    elif hidden < 1:
        assert compute_ms(found, request, hidden + 0.01) > load_ms(found, request)


def test_loading_that_takes_what_computes_hides_less():
    """On two cores reading takes turns with computing: `reuse` was predicted a third too short, as if it did not."""
    request = work(5)  # 50 ms from the disk
    assert hidden_ratio(profile(in_the_way=0.5), request) == pytest.approx(0.15, abs=0.002)  # not 0.4
    assert hidden_ratio(profile(in_the_way=1.0), request) == 0.0
    # Neither tier delays 100 ms of rows, if it only reads; taking turns with them the disk does.
    assert cheapest_tier(profile(), work(2.1), 0.9) == "disk"
    assert cheapest_tier(profile(in_the_way=1.0), work(2.1), 0.9) == "memory"
    with pytest.raises(UsageError, match="makes no sense"):
        Tier("disk", 1.0, 1.0, in_the_way=1.5)


def row_layers(request, ratio):
    """Rows computed in a layer, over all layers and passes."""
    whole = request.whole(ratio)
    behind = (request.layers - int(whole)) * request.rows(ratio)
    probed = (request.probe_rows - request.settled_rows) * request.probe_layers
    return probed + whole * (request.always + request.candidates) + behind


@pytest.mark.parametrize("method", METHODS)
def test_what_choosing_costs_is_in_the_prediction(fresh, monkeypatch, method):
    """Few rows take longer each, so passes are predicted one by one; together they are what is then computed."""
    engine, seen = fresh.engine, []
    engine.encode(TEXTS)
    monkeypatch.setattr(engine._resources.server, "profile", profile())

    def noted(measured, request, *args):
        seen.append(request)
        return decide(measured, request, *args)

    monkeypatch.setattr(serving, "decide", noted)
    for ratio in (0.0, 0.5, 1.0):
        report = engine.prefill(make_prompt(TEXTS), method=method, ratio=ratio).report
        request = seen.pop()
        share = row_layers(request, report.decision.ratio) / (request.layers * request.tokens)
        assert share == pytest.approx(report.computed_fraction, rel=0.1), (ratio, request)
        last = report.tokens.fresh + report.tokens.recomputed
        if "gradual" not in method:  # whose last layer has the fewest
            assert request.rows(report.decision.ratio) == pytest.approx(last, abs=4), (ratio, request)


@pytest.mark.parametrize(("method", "shifts"), [("probe-shift", True), ("probe", False), ("reuse", False)])
def test_a_shift_takes_its_time_beside_the_ratio(fresh, monkeypatch, method, shifts):
    engine, seen = fresh.engine, []
    engine.encode(TEXTS)
    slow = replace(profile(), shift_ms=(30.0, 0.5, 0.02))
    monkeypatch.setattr(engine._resources.server, "profile", slow)
    monkeypatch.setattr(serving, "decide", lambda *args: seen.append(args[1]) or decide(*args))
    report = engine.prefill(make_prompt(TEXTS), method=method, ratio=0.5).report
    request, ratio = seen.pop(), report.decision.ratio
    assert request.shifted == (request.candidates if shifts else 0)
    added = compute_ms(slow, request, ratio) - compute_ms(profile(), request, ratio)
    learnt = request.rows(ratio) - request.always
    assert 0 < learnt < request.candidates or not shifts
    assert added == pytest.approx(30 + (0.5 + 0.02 * learnt) * request.candidates if shifts else 0)
    with monkeypatch.context() as patch:
        patch.setattr(controller, "MOST_LEARNT", 3)
        added = compute_ms(slow, request, ratio) - compute_ms(profile(), request, ratio)
    assert added == pytest.approx(30 + (0.5 + 0.02 * 3) * request.candidates if shifts else 0)
    assert report.decision.predicted_compute_ms == pytest.approx(compute_ms(slow, request, ratio), abs=0.01)
    assert compute_ms(slow, request, 0.0) == compute_ms(profile(), request, 0.0)


def test_a_slow_tier_buys_rows_and_a_fast_one_none():
    slow = decide(profile(disk=100), work(5), None, 0.15)
    assert slow.reason == "what loading hides"
    assert slow.ratio == pytest.approx(0.4, abs=0.002)  # 50 ms of loading, 10 of which the fresh rows take
    fast = decide(profile(disk=5000), work(5), None, 0.15)
    assert (fast.ratio, fast.reason) == (0.15, "the least for quality")
    asked = decide(profile(), work(5), 0.05, 0.15)
    assert (asked.ratio, asked.reason) == (0.05, "asked for")


def test_candidates_bound_what_a_ratio_can_buy():
    request = work(5, candidates=300)
    assert request.rows(1.0) == 400
    assert decide(profile(disk=10), request, None, 0.15).ratio == 1.0


def test_the_cheapest_tier_that_adds_no_delay():
    """10% of 1,000 rows and 100 fresh ones take 20 ms: time for 2 MB from the disk, and for 20 from memory."""
    assert cheapest_tier(profile(), work(1.9), 0.1) == "disk"
    assert cheapest_tier(profile(), work(2.1), 0.1) == "memory"
    assert cheapest_tier(profile(), work(2.1), 0.9) == "disk"
    assert cheapest_tier(profile(), work(900), 0.1) == "memory"  # none is quick enough: the fastest


def test_without_a_profile_nothing_is_predicted():
    decision = decide(None, work(5), None, 0.15)
    assert (
        decision.ratio == 0.15
        and decision.predicted_ttft_ms is None
        and "doctor --profile" in decision.reason
    )
    assert decide(None, work(5), 0.3, 0.15).ratio == 0.3


@pytest.mark.parametrize(
    ("method", "share"), [("prophet", 1.0), ("probe", 0.75), ("probe:since=0.5", 0.5), ("epic", 0.0)]
)
def test_watching_takes_its_time_beside_the_ratio(fresh, monkeypatch, method, share):
    engine = fresh.engine
    engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    slow, found = replace(profile(), watch_ms=0.01), []
    for each in (slow, profile()):
        monkeypatch.setattr(engine._resources.server, "profile", each)
        found.append(engine.prefill(prompt, method=method, ratio=0.8).report)
    watched = len(engine.tokenizer.encode(SUFFIX, add_special_tokens=False))
    added = found[0].decision.predicted_compute_ms - found[1].decision.predicted_compute_ms
    assert added == pytest.approx(0.01 * watched * share * found[0].tokens.prompt, rel=1e-3)


@pytest.mark.parametrize("method", ["full", "recompute", "prefix"])
def test_what_computes_all_is_predicted_with_all_its_rows(fresh, monkeypatch, method):
    """A chunk right behind its prefix is no candidate, but `full` computes it: it was predicted as if it did not."""
    engine = fresh.engine
    engine.encode(TEXTS, prefix=PREFIX)
    slow = profile()
    monkeypatch.setattr(engine._resources.server, "profile", slow)
    report = engine.prefill(make_prompt(TEXTS), method=method).report
    exact = report.tokens.prompt - report.tokens.fresh - report.tokens.recomputed
    assert (exact > 0) == (method == "prefix")
    wanted = slow.prefill.ms(exact, report.tokens.prompt - exact)
    assert report.decision.predicted_compute_ms == pytest.approx(wanted, abs=0.01)


def test_a_profile_survives_the_disk_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "profiles" / "p.json"
    assert DeviceProfile.read(path) is None
    profile().save(path)
    assert DeviceProfile.read(path) == profile()
    replace(profile(), shift_ms=(1.5, 0.25, 0.01), watch_ms=0.125).save(path)
    assert (
        DeviceProfile.read(path).shift_ms == (1.5, 0.25, 0.01) and DeviceProfile.read(path).watch_ms == 0.125
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift_ms": [1.5, 0.25]}))
    assert DeviceProfile.read(path).shift_ms == (1.5, 0.25, 0.0), "one of an older version"
    older = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("shift_ms", "watch_ms")}
    path.write_text(json.dumps(older))
    assert DeviceProfile.read(path) == profile(), "one of an older version"
    value = json.loads(path.read_text())
    for broken in ("", "[]", json.dumps(value | {"tiers": [{"name": "disk"}]}), json.dumps({})):
        path.write_text(broken)
        with pytest.raises(UsageError, match="doctor --profile"):
            DeviceProfile.read(path)
    with pytest.raises(UsageError, match="makes no sense"):
        Tier("disk", 0.0, 1.0)


def test_the_engine_measures_once_and_decides_from_then_on(fresh):
    engine: Engine = fresh.engine
    engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    before = engine.prefill(prompt, ratio="auto").report
    assert before.decision.predicted_ttft_ms is None and before.ratio == 0.15
    seen = []
    measured = engine.profile(lambda *progress: seen.append(progress))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert {tier.name for tier in measured.tiers} == {"memory", "disk"}
    assert engine.store.stats().entries == len(TEXTS)  # what it stored for that is gone again
    after = engine.prefill(prompt, ratio="auto").report
    assert after.decision.predicted_ttft_ms > 0 and after.ratio == after.decision.ratio >= 0.15
    engine.close()
    again = engine.prefill(prompt, ratio=0.3).report  # from the file
    assert again.decision.predicted_ttft_ms > 0 and again.decision.ratio == again.ratio == 0.3
    assert engine.prefill(prompt, method="reuse").report.decision.ratio == 0.0
    full = engine.prefill(prompt, method="full").report
    assert full.ratio is None and full.decision.predicted_load_ms == 0.0


def test_a_ratio_is_a_number_or_auto(fresh):
    for wrong in ("most", 2, -0.1, float("nan")):
        with pytest.raises(UsageError, match="auto"):
            fresh.engine.prefill(make_prompt(TEXTS), ratio=wrong)


def test_prices_are_the_settings_and_measurements_stay():
    measured = profile()
    found = measured.priced({"memory": 9.0})
    assert found.tier("memory").usd_per_gb_month == 9.0
    assert found.tier("memory").bytes_per_s == measured.tier("memory").bytes_per_s
    assert found.tier("disk") == measured.tier("disk")


def test_an_engine_is_priced_as_it_is_opened(model_folder, tmp_path):
    """A kept profile has the prices of the day it was measured."""
    folder = str(model_folder("llama"))
    engine = Engine.open(folder, home=tmp_path, device="cpu", dtype="float32")
    assert engine.profile().tier("memory").usd_per_gb_month == USD_PER_GB_MONTH["memory"]
    measured = engine._machine.resources.profile
    config = EngineConfig(folder, "cpu", "float32", usd_per_gb_month=(("memory", 0.01),))
    again = Machine(config, engine.home)
    assert again.resources.profile.tier("memory").usd_per_gb_month == 0.01
    assert again.resources.profile.tier("memory").bytes_per_s == measured.tier("memory").bytes_per_s
    engine.close()


@pytest.mark.parametrize("prices", [(("tape", 1.0),), (("disk", -1.0),)])
def test_prices_that_make_no_sense_are_refused(prices):
    with pytest.raises(UsageError, match=prices[0][0]):
        EngineConfig(usd_per_gb_month=prices)


def test_every_tier_of_a_staged_device_is_measured_through_its_lane(fresh, monkeypatch):
    """Before an accelerator memory is not read but copied, and the device's own tier was not measured at all."""
    lane = StagedLane()
    monkeypatch.setattr(fresh.engine._resources.server, "lane", lane)
    measured = fresh.engine.profile()
    assert [tier.name for tier in measured.tiers] == ["device", "memory", "disk"]
    assert len(lane.delivered) >= 3 * fresh.engine._resources.decoder.geometry.layers
    assert not list(fresh.engine.store.keys())


def test_the_grid_has_points_on_both_sides_of_what_changes_kernels():
    """Linear layers are faster up to that many rows: interpolated across it, few rows looked dear and many cheap."""
    at = profiling.NEW.index(MOST_ROWS)
    assert profiling.NEW[at + 1] <= 1.5 * MOST_ROWS


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (2, 2), (7, 7), (100, 1), (4113, 16), (5120, 1024)])
def test_measured_rows_are_spread_and_the_last_is_among_them(tokens, count):
    """Rows at the end look at everything, and 455 of them took a fifth longer than as many that a policy chose."""
    plan = make_plan(torch.ones(tokens, dtype=torch.int64), (), 2, 0.0, 0.3)
    rows = profile_policies.Spread(count).rows(plan)
    assert rows.numel() == count and rows[-1] == tokens - 1 and (rows.diff() > 0).all()
    assert rows.diff().float().std(correction=0) < 1 if count > 1 else True


def test_long_prompts_behind_something_are_composed_of_goes(monkeypatch):
    """A go of 1,024 rows has the ones before it behind it; only behind nothing they are measured."""
    asked = []

    def made_up(bench, behind, count):
        asked.append((behind, count))
        return float(count * (1 + behind))

    monkeypatch.setattr(profiling, "_prefill_ms", made_up)
    bench = profiling.Bench(None, None, None, None, 0, lambda: None)
    grid = profiling._grid(bench, "test", (0, 2048), (16, 1024), (2048,))
    assert grid.ms(0, 2048) == 2048 and (2048, 2048) not in asked
    assert grid.ms(2048, 2048) == 1024 * 2049 + 1024 * 3073


@pytest.mark.parametrize(
    ("once", "each", "pair"), [(10.0, 0.01, 0.001), (0.0, 0.02, 0.0), (5.0, 0.0, 0.0), (5.0, 0.0, 0.002)]
)
def test_what_a_shift_takes_is_told_apart_from_what_it_takes_a_token_and_a_row(
    fresh, monkeypatch, once, each, pair
):
    def load_ms(bench, count, opened, rows=0, policy=None):
        assert rows > 0
        return 100.0 + ((once + (each + pair * rows) * count * profiling.CHUNK_TOKENS) if policy else 0.0)

    monkeypatch.setattr(profiling, "_load_ms", load_ms)
    monkeypatch.setattr(profiling, "REPEATS", 1)
    bench = SimpleNamespace(decoder=fresh.engine._resources.decoder, window=8192, step=lambda: None)
    assert profiling._shift_ms(bench, profiling._made_up(bench.decoder)) == pytest.approx((once, each, pair))


def test_what_watching_takes_is_told_of_a_row_and_a_token_in_all_layers(fresh, monkeypatch):
    layers = fresh.engine._resources.decoder.geometry.layers

    def load_ms(bench, count, opened, rows=0, policy=None):
        tokens = profiling.MOVED_TOKENS + count * profiling.CHUNK_TOKENS + rows
        plan = SimpleNamespace(layers=layers)
        return 100.0 + 0.002 * rows * tokens * sum(policy.watches(plan, n) for n in range(layers)) / layers

    monkeypatch.setattr(profiling, "_load_ms", load_ms)
    monkeypatch.setattr(profiling, "REPEATS", 1)
    bench = SimpleNamespace(decoder=fresh.engine._resources.decoder, window=8192, step=lambda: None)
    assert profiling._watch_ms(bench, profiling._made_up(bench.decoder)) == pytest.approx(0.002)


def test_where_nothing_can_be_watched_watching_takes_nothing(fresh, monkeypatch):
    """It was measured all the same, and the profile of such a model failed."""
    decoder, steps = fresh.engine._resources.decoder, []
    monkeypatch.setattr(decoder, "watches", False)
    monkeypatch.setattr(profiling, "_load_ms", None)
    bench = SimpleNamespace(decoder=decoder, window=8192, step=lambda: steps.append(1))
    assert profiling._watch_ms(bench, profiling._made_up(decoder)) == 0.0
    assert steps == [1], "the progress bar counts it"
