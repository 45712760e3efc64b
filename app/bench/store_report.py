"""One `bench store`: traces replayed under every policy; rows, comparisons, JSON and picture out."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ragblend.app.bench.environment import check_extra
from ragblend.app.bench.intervals import mean_interval
from ragblend.app.bench.progress import Progress, progress_bar
from ragblend.app.bench.results import make_folder, write_json
from ragblend.app.bench.store_plots import plot_store
from ragblend.app.bench.store_profile import default_profile
from ragblend.app.bench.store_replay import Machine, Outcome, PolicyCache, TreeCache, oracle, replay
from ragblend.app.bench.store_traces import LENGTHS, Trace, check_kind, make_trace
from ragblend.app.bench.variants import parse_choices, parse_counts
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.policy import POLICIES
from ragblend.kvstore.profile import PrefillProfile

Row = dict[str, Any]
REUSES = ("anywhere", "prefix")
AGAINST = {"lru": 1.05, "gdsf": 1.0, "gdsf-size": 1.0}  # the hit rate to reach, as a multiple of theirs
KNOWS_ALL = "oracle"


@dataclass(frozen=True)
class StoreRequest:
    """The arguments of `bench store`."""

    traces: str
    top_k: str
    budgets: str
    policies: str
    lengths: str
    reuse: str
    documents: int
    retrievals: int
    seeds: int
    half_life: float
    profile: Path | None
    bytes_per_token: int
    load_mb_per_s: float
    output: Path


@dataclass(frozen=True)
class Plan:
    """The same, checked."""

    kinds: tuple[str, ...]
    top_k: tuple[int, ...]
    budgets: tuple[int, ...]
    policies: tuple[str, ...]
    lengths: str
    prefix: bool
    documents: int
    retrievals: int
    seeds: int
    half_life: float
    machine: Machine


def report_store(request: StoreRequest) -> dict[str, Any]:
    """Replay, and write `store.json` and `store.png`; the results, and `files` by kind. Raises UsageError."""
    check_extra()
    plan = make_plan(request)
    folder = make_folder(request.output)
    with progress_bar("replaying") as progress:
        rows = run(plan, progress)
    results = {
        "rows": rows,
        "comparisons": compare(rows),
        "settings": _settings(request, plan),
    }
    write_json(folder / "store.json", results)
    plot_store(rows, _title(plan), folder / "store.png")
    return results | {"files": {kind: str(folder / f"store.{kind}") for kind in ("json", "png")}}


def make_plan(request: StoreRequest) -> Plan:
    """Raises UsageError for what cannot be replayed."""
    kinds = tuple(check_kind(kind.strip()) for kind in request.traces.split(",") if kind.strip())
    if not kinds:
        raise UsageError("--traces is empty; give one or more of mmlu, drift and zipf:EXPONENT")
    top_k = parse_counts(request.top_k, "--top-k")
    if max(top_k) * 10 > request.documents or max(top_k) * 40 > request.retrievals:
        raise UsageError(
            "too few --documents or --retrievals: 10 documents and 40 retrievals for each of --top-k's largest"
        )
    budgets = parse_counts(request.budgets, "--budgets")
    if max(budgets) > 100:
        raise UsageError(f"--budgets: {max(budgets)} is more than 100 percent of the corpus")
    (reuse,) = _one(request.reuse, "--reuse", REUSES)
    (lengths,) = _one(request.lengths, "--lengths", LENGTHS)
    profile = default_profile() if request.profile is None else PrefillProfile.read(request.profile)
    return Plan(
        kinds=tuple(dict.fromkeys(kinds)),
        top_k=top_k,
        budgets=budgets,
        policies=parse_choices(request.policies, "--policies", tuple(POLICIES)),
        lengths=lengths,
        prefix=reuse == "prefix",
        documents=request.documents,
        retrievals=request.retrievals,
        seeds=request.seeds,
        half_life=request.half_life,
        machine=Machine(profile, request.bytes_per_token, request.load_mb_per_s * 1e3),
    )


def _one(text: str, option: str, choices: Sequence[str]) -> tuple[str]:
    found = parse_choices(text, option, choices)
    if len(found) != 1:
        raise UsageError(f"{option} takes one of {', '.join(choices)}")
    return (found[0],)


def run(plan: Plan, progress: Progress) -> list[Row]:
    """One row a (trace, top_k, budget, policy): means over the seeds, every policy on the same traces."""
    rows = []
    cases = list(product(plan.kinds, plan.top_k))
    for done, (kind, top_k) in enumerate(cases):
        outcomes: dict[tuple[int, str], list[Outcome]] = {}
        for seed in range(plan.seeds):
            progress(done * plan.seeds + seed, len(cases) * plan.seeds)
            trace = make_trace(kind, plan.lengths, plan.documents, plan.retrievals, top_k, seed)
            for case, outcome in _replays(plan, trace):
                outcomes.setdefault(case, []).append(outcome)
        rows += [
            {"trace": kind, "top_k": top_k, "budget": budget, "policy": policy} | _summary(found)
            for (budget, policy), found in outcomes.items()
        ]
    progress(len(cases) * plan.seeds, len(cases) * plan.seeds)
    return rows


def _replays(plan: Plan, trace: Trace) -> Iterator[tuple[tuple[int, str], Outcome]]:
    policies = [POLICIES[name] for name in plan.policies]
    if trace.popularity is not None and not plan.prefix:
        policies.append(oracle(trace))
    kind = TreeCache if plan.prefix else PolicyCache
    per_token = plan.machine.bytes_per_token
    for budget in plan.budgets:
        room = sum(trace.tokens) * per_token * budget // 100
        for policy in policies:
            cache = kind(policy, room, per_token, plan.half_life)
            yield (budget, policy.name), replay(trace, cache, plan.machine, plan.prefix)


def _summary(outcomes: Sequence[Outcome]) -> Row:
    row: Row = {"n": len(outcomes)}
    for name in Outcome.__dataclass_fields__:
        values = [getattr(outcome, name) for outcome in outcomes]
        row |= {name: sum(values) / len(values), f"{name}_ci": mean_interval(values), f"{name}s": values}
    return row


def compare(rows: Sequence[Row]) -> list[Row]:
    """Hit rates as multiples of those in AGAINST, in pairs on the same traces, a row for each (trace, budget).

    Every (top_k, seed) is one pair. `ratio` is the mean of theirs, `lowest` the least; `target` is what issue and
    paper claim of PGDSF, and it `holds` if the interval's lower end (the mean, without one) reaches it.
    """
    found = []
    table = {(row["trace"], row["budget"], row["policy"], row["top_k"]): row for row in rows}
    for trace, budget, policy, against in product(
        dict.fromkeys(row["trace"] for row in rows),
        dict.fromkeys(row["budget"] for row in rows),
        dict.fromkeys(row["policy"] for row in rows),
        AGAINST,
    ):
        pairs = [
            one / other if other else 1.0
            for (kind, share, name, top_k), row in table.items()
            if (kind, share, name) == (trace, budget, policy) and (trace, budget, against, top_k) in table
            for one, other in zip(
                row["hit_rates"], table[trace, budget, against, top_k]["hit_rates"], strict=True
            )
        ]
        if pairs and policy != against:
            found.append(
                {"trace": trace, "budget": budget, "policy": policy, "against": against}
                | _verdict(pairs, AGAINST[against])
            )
    return found


def _verdict(ratios: Sequence[float], target: float) -> Row:
    mean, interval = sum(ratios) / len(ratios), mean_interval(ratios)
    holds = (interval[0] if interval else mean) >= target
    return {
        "ratio": mean,
        "ratio_ci": interval,
        "lowest": min(ratios),
        "pairs": len(ratios),
        "target": target,
        "holds": holds,
    }


def _settings(request: StoreRequest, plan: Plan) -> Row:
    settings = asdict(request) | {"profile": plan.machine.profile.to_json()}
    return settings | {"output": str(request.output)}


def _title(plan: Plan) -> str:
    reuse = (
        "values serve behind the same documents only" if plan.prefix else "values serve anywhere in a prompt"
    )
    return f"{plan.documents:,} {plan.lengths}, {plan.retrievals:,} retrievals, {plan.seeds} seeds; {reuse}"
