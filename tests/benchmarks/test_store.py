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
from ragblend.engine.controller import DeviceProfile
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


def test_three_percent_of_the_documents_take_sixty_percent_of_mmlus_requests():
    trace = make_trace("mmlu", "passages", 1000, 20_000, 1, 0)
    counts = sorted((sum(request == [d] for request in trace.requests) for d in range(1000)), reverse=True)
    assert sum(counts[:30]) / 20_000 == pytest.approx(0.6, abs=0.02)


def test_drift_makes_other_documents_popular():
    requests = make_trace("drift", "passages", 1000, 8000, 1, 0).requests
    heads = [
        {d for d in range(1000) if requests[start : start + 2000].count([d]) > 20} for start in (0, 2000)
    ]
    assert min(map(len, heads)) >= 10
    assert len(heads[0] & heads[1]) < 5


def test_lengths_vary_as_said():
    documents = make_trace("mmlu", "documents", 2000, 40, 1, 0).tokens
    passages = make_trace("mmlu", "passages", 2000, 40, 1, 0).tokens
    assert min(documents) >= 64
    assert max(documents) <= 4096
    assert sorted(documents)[1000] == pytest.approx(600, rel=0.1)
    assert max(passages) <= 512
    assert sum(length < 400 for length in passages) / 2000 == pytest.approx(0.2 * 368 / 481, abs=0.03)


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


@pytest.mark.parametrize("policy", ["lru", "pgdsf"])
def test_only_leaves_of_the_tree_are_evicted(policy, monkeypatch):
    trace = make_trace("mmlu", "documents", 60, 600, 3, 0)
    tier = cache(policy, 4000, TreeCache)
    put = tier.put

    def checked(name, tokens, cost):
        put(name, tokens, cost)
        stored = set(tier.stored)
        assert all(path.rpartition("/")[0] in stored for path in stored if "/" in path)

    monkeypatch.setattr(tier, "put", checked)
    assert 0 < replay(trace, tier, MACHINE, prefix=True).hit_rate < 1


def test_whoever_knows_popularity_finds_most():
    trace = make_trace("mmlu", "documents", 300, 4000, 1, 0)
    rates = {name: run(name, trace, 0.08).hit_rate for name in [*POLICIES, "oracle"]}
    assert max(rates, key=rates.__getitem__) == "oracle"


@pytest.mark.parametrize("top_k", [1, 5])
def test_counts_that_outlive_eviction_are_worth_their_memory(top_k):
    """At a small budget, as in RAGCache: PGDSF against LRU and against the same clock without such counts."""
    trace = make_trace("mmlu", "passages", 500, 6000, top_k, 0)
    rates = {name: run(name, trace, 0.05).hit_rate for name in ("lru", "gdsf-size", "pgdsf")}
    assert rates["pgdsf"] > 1.05 * rates["lru"]
    assert rates["pgdsf"] > rates["gdsf-size"]


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


def test_a_measured_profile_is_what_times_come_from(bench, tmp_path):
    DeviceProfile("a device", FLAT, ()).save(tmp_path / "profile.json")
    options = "--traces", "mmlu", "--top-k", "1", "--budgets", "8", "--profile", tmp_path / "profile.json"
    done = bench(*options, "--json")
    assert json.loads(done.stdout)["settings"]["profile"]["about"] == "2 ms a token"


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
