"""The store simulator: traces are what they are called, a replay is right by hand, and the files come out."""

import json
import random

import pytest
from typer.testing import CliRunner

from benchmarks.store import app, compare
from benchmarks.store_replay import (
    POLICIES,
    QUESTION_TOKENS,
    Machine,
    PolicyCache,
    TreeCache,
    default_profile,
    oracle,
    replay,
)
from benchmarks.store_traces import Trace, check_kind, make_trace
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.policy import PrefillProfile

FLAT = PrefillProfile.of("2 ms a token", (0, 1000), (1, 1000), lambda cached, new: 2.0 * new)
MACHINE = Machine(FLAT, bytes_per_token=10, bytes_per_ms=5.0)  # loading a token takes 2 ms, too


def cache(policy, tokens, kind=PolicyCache):
    return kind(POLICIES[policy], tokens * 10, 10, half_life=1e9)


def run(policy, trace, share, kind=PolicyCache):
    policy = oracle(trace) if policy == "oracle" else POLICIES[policy]
    machine = Machine(default_profile(), 10, 1e9)
    tier = kind(policy, int(sum(trace.tokens) * 10 * share), 10, 1e4)
    return replay(trace, tier, machine, kind is TreeCache)


@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_those_of_a_full_sort_whatever_happened_before(name):
    """A plain dictionary is the oracle."""
    seeded, tier = random.Random(name), PolicyCache(POLICIES[name], 1000, 10, half_life=20.0)
    for _ in range(1500):
        digest = str(min(int(seeded.paretovariate(0.7)), 300))
        if tier.find(digest):
            continue
        order = sorted(tier.stored.values(), key=lambda entry: (entry.priority, entry.used_at, entry.digest))
        tier.put(digest, seeded.randint(1, 30), seeded.random())
        victims = {entry.digest for entry in order} - set(tier.stored)
        assert victims == {entry.digest for entry in order[: len(victims)]}
        assert tier.nbytes == sum(entry.nbytes for entry in tier.stored.values()) <= 1000
        spared = order[len(victims) - 1].nbytes if victims else 1001
        assert tier.nbytes + spared > 1000, "one more was evicted than had to be"


# --- traces


@pytest.mark.parametrize("kind", ["zipf:0.9", "drift"])
def test_a_trace_is_its_arguments_and_seed(kind):
    first, again, other = (make_trace(kind, "documents", 200, 900, 3, seed) for seed in (1, 1, 2))
    assert (first.tokens, first.requests) == (again.tokens, again.requests)
    assert first.requests != other.requests
    assert (len(first.requests), first.warm_up) == (300, 75)
    assert all(len(set(request)) == 3 for request in first.requests)
    assert (first.popularity is None) == (kind == "drift")


@pytest.mark.parametrize("kind", ["", "zipf:x", "zipf:nan", "zipf:9", "mmlu:1"])
def test_unknown_traces_are_refused(kind):
    with pytest.raises(UsageError, match="--traces"):
        check_kind(kind)


# --- replay


def test_a_replay_is_right_by_hand():
    """Room for two documents of 100 tokens; the first request warms up."""
    trace = Trace([100, 100, 100], [[0, 1], [0, 1], [0, 2], [1, 2]], 1, None)
    outcome = replay(trace, cache("lru", 200), MACHINE)
    # [0, 1] both there; [0, 2]: 2 displaces 1; [1, 2]: 2 is there.
    assert outcome.hit_rate == pytest.approx(4 / 6)
    assert outcome.byte_hit_rate == pytest.approx(4 / 6)
    half, all_loaded = 2.0 * (100 + QUESTION_TOKENS), 2.0 * 200
    assert outcome.ttft_ms == pytest.approx((all_loaded + half + half) / 3)
    uneven = replay(Trace([300, 100], [[0], [1], [0], [1], [1]], 1, None), cache("lru", 300), MACHINE)
    assert (uneven.hit_rate, uneven.byte_hit_rate) == pytest.approx((1 / 4, 100 / 600))
    # What is larger than the budget is not stored, and displaces nothing.
    large = Trace([500, 100], [[1], [0], [1], [0]], 0, None)
    assert replay(large, cache("lru", 200), MACHINE).hit_rate == pytest.approx(1 / 4)


def test_the_store_is_told_what_the_request_paid_for_each_new_token():
    """Algorithm 1: T(cached, new)/new of the whole request, for all that it had to compute, averaged over them."""
    profile = PrefillProfile.of("by both", (0, 1000), (1, 1000), lambda c, n: n + 0.01 * c * n)
    tier = cache("pgdsf", 10_000)
    trace = Trace([100, 100, 100], [[0], [0, 1, 2]], 0, None)
    replay(trace, tier, Machine(profile, 10, 1e9))
    costs = {digest: entry.cost for digest, entry in tier.stored.items()}
    assert costs == {"0": pytest.approx(1.0), "1": pytest.approx(2.0), "2": pytest.approx(2.0)}


def test_behind_a_miss_nothing_counts_where_only_prefixes_serve():
    trace = Trace([100, 100], [[0, 1], [1, 0], [0, 1]], 0, None)
    assert replay(trace, cache("lru", 1000), MACHINE).hit_rate == pytest.approx(4 / 6)
    assert replay(trace, cache("lru", 1000, TreeCache), MACHINE, prefix=True).hit_rate == pytest.approx(2 / 6)


# --- the command


@pytest.fixture
def bench(tmp_path):
    def run(*arguments):
        line = ["--home", tmp_path / "home", "--output", tmp_path / "out", *arguments]
        small = ["--documents", 60, "--retrievals", 240, "--seeds", 2]
        return CliRunner().invoke(app, [str(part) for part in [*line, *small]], catch_exceptions=False)

    return run


def test_store_prints_rows_comparisons_and_settings_and_writes_files(bench, tmp_path):
    done = bench("--traces", "mmlu,drift", "--top-k", "1,3", "--budgets", "8,32", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    policies = {"lru", "gdsf", "gdsf-size", "pgdsf"}
    for kind, more in (("mmlu", {"oracle"}), ("drift", set())):
        rows = [row for row in found["rows"] if row["trace"] == kind]
        assert {row["policy"] for row in rows} == policies | more
        assert len(rows) == 4 * len(policies | more)
    for row in found["rows"]:
        assert 0 <= row["hit_rate_ci"][0] <= row["hit_rate"] <= row["hit_rate_ci"][1] <= 1
        assert row["ttft_ms"] > 0
        assert row["n"] == len(row["hit_rates"]) == 2
    assert found["settings"]["profile"]["about"].startswith("an estimate, not a measurement")
    assert json.loads((tmp_path / "out" / "store.json").read_text())["rows"] == found["rows"]
    told = bench("--traces", "mmlu", "--top-k", "1", "--budgets", "8").output
    assert "Times are simulated" in told and "hit rate as a multiple" in told
    prefixes = bench("--traces", "mmlu", "--top-k", "3", "--budgets", "16", "--reuse", "prefix", "--json")
    assert {row["policy"] for row in json.loads(prefixes.stdout)["rows"]} == set(POLICIES)  # no oracle
    assert {row["against"] for row in found["comparisons"]} == {"lru", "gdsf", "gdsf-size"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--traces", " , "),
        ("--top-k", "7"),
        ("--budgets", "101"),
        ("--policies", "fifo"),
        ("--lengths", "tweets"),
        ("--reuse", "anywhere,prefix"),
        ("--profile", "absent.json"),
    ],
)
def test_wrong_arguments_are_named(bench, option, value, tmp_path):
    with pytest.raises(UsageError, match=option if option != "--profile" else "absent"):
        bench(option, value)
    assert not (tmp_path / "out").exists()


def test_a_comparison_holds_if_its_interval_does():
    def row(policy, rates):
        return {"trace": "t", "top_k": 1, "budget": 4, "policy": policy, "hit_rates": rates}

    rows = [row("lru", [0.5, 0.5]), row("steady", [0.55, 0.56]), row("lucky", [0.7, 0.5])]
    verdicts = {found["policy"]: found for found in compare(rows)}
    assert verdicts["steady"]["holds"]
    assert verdicts["steady"]["ratio"] == pytest.approx(1.11)
    assert not verdicts["lucky"]["holds"]
    assert verdicts["lucky"]["lowest"] == pytest.approx(1.0)
