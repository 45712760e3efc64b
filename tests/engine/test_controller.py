"""The loading controller against a pipeline that is simulated layer by layer, and through the engine."""

import json

import pytest
from benches import make_prompt, make_text

from ragblend import Engine
from ragblend.engine.controller import (
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
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.profile import PrefillProfile

LAYERS = 20
MB = 10**6
TEXTS = [make_text(seed) for seed in range(3)]


def profile(memory=1000.0, disk=100.0, overhead_ms=0.0):
    """Speeds in MB/s; a row takes 0.1 ms, wherever it stands."""
    grid = PrefillProfile.of("test", (0, 1000), (10, 1000), lambda cached, new: 0.1 * new)
    tiers = (Tier("memory", memory * MB, 3.0), Tier("disk", disk * MB, 0.1))
    return DeviceProfile("test", grid, tiers, overhead_ms)


def work(megabytes, tier="disk", stored=1000, candidates=1000, always=100):
    return Workload(stored + always, always, candidates, stored, LAYERS, {tier: int(megabytes * MB)})


def simulated_ms(compute, load):
    """Reads one after the other; a layer is computed when it is there and the one before is done."""
    read = done = 0.0
    for _ in range(LAYERS):
        read += load / LAYERS
        done = max(read, done) + compute / LAYERS
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


def test_a_profile_survives_the_disk_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "profiles" / "p.json"
    assert DeviceProfile.read(path) is None
    profile().save(path)
    assert DeviceProfile.read(path) == profile()
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
