"""The store's eviction policies on made-up traces, and what the store's bookkeeping costs.

python -m benchmarks.store --policies lru,pgdsf       # hit rates, byte hit rates, simulated TTFT
python -m benchmarks.store --overhead 100000          # lookups, admission and opening with so many chunks
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.store_replay import (
    POLICIES,
    Machine,
    Outcome,
    PolicyCache,
    TreeCache,
    default_profile,
    oracle,
    replay,
)
from benchmarks.store_traces import LENGTHS, Trace, check_kind, make_trace
from ragblend.app.bench.cli import OUTPUT, Output, finish
from ragblend.app.bench.quality import Progress
from ragblend.app.bench.records import make_folder, write_json
from ragblend.app.bench.summary import mean_interval
from ragblend.app.bench.table import Column, Table, ends, number, share, table_of, text
from ragblend.app.bench.variants import parse_choices, parse_counts
from ragblend.app.cli import main
from ragblend.app.cli_common import Cli, command
from ragblend.app.cli_progress import progress_bar
from ragblend.engine.controller import DeviceProfile
from ragblend.kvstore.errors import UsageError

app = typer.Typer(name="store", rich_markup_mode=None, pretty_exceptions_enable=False)
Row = dict[str, Any]
TRACES = "zipf:0.7,zipf:0.9,zipf:1.1,mmlu,drift"
REUSES = ("anywhere", "prefix")
AGAINST = {"lru": 1.05, "gdsf": 1.0, "gdsf-size": 1.0}  # the hit rate to reach, as a multiple of theirs
OUTCOMES: tuple[Column, ...] = (
    ("top-k", text("top_k")), ("budget", lambda row: f"{row['budget']}%"), ("policy", text("policy")),
    ("hit rate", share("hit_rate")), ("interval", lambda row: ends(row["hit_rate_ci"], 3)),
    ("byte hit rate", share("byte_hit_rate")), ("TTFT ms", number("ttft_ms", 0)),
)  # fmt: skip
COMPARED: tuple[Column, ...] = (
    ("trace", text("trace")), ("budget", lambda row: f"{row['budget']}%"), ("policy", text("policy")),
    ("against", text("against")), ("hit rate as a multiple", number("ratio", 3)),
    ("interval", lambda row: ends(row["ratio_ci"], 3)), ("target", number("target", 2)), ("holds", text("holds")),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to replay; prefix: stored KV serves behind the same prefix only, not anywhere."""

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


@command(app, "store")
def store(
    cli: Cli,
    traces: Annotated[str, typer.Option(help="mmlu, drift, zipf:EXPONENT.")] = TRACES,
    top_k: Annotated[str, typer.Option(help="How many documents a request.")] = "1,3,5",
    budgets: Annotated[str, typer.Option(help="Percent of the corpus that fits.")] = "4,8,16,32,64",
    policies: Annotated[str, typer.Option(help="Eviction policies.")] = ",".join(POLICIES),
    lengths: Annotated[str, typer.Option(help="documents, or passages cut at 512.")] = "documents",
    reuse: Annotated[str, typer.Option(help="Stored KV serves anywhere, or behind one prefix.")] = "anywhere",
    documents: Annotated[int, typer.Option(min=10, help="How many there are.")] = 1_000,
    retrievals: Annotated[int, typer.Option(min=40, help="Documents retrieved in all requests.")] = 6_000,
    seeds: Annotated[int, typer.Option(min=1, help="How many traces of each kind.")] = 3,
    half_life: Annotated[float, typer.Option(min=1, help="Retrievals until one counts half.")] = 4_096,
    profile: Annotated[Path | None, typer.Option(help="Measured prefill times; else an estimate.")] = None,
    bytes_per_token: Annotated[int, typer.Option(min=1, help="KV of one token.")] = 23_040,
    load_mb_per_s: Annotated[float, typer.Option(min=0.001, help="How fast KV is loaded.")] = 1_000,
    overhead: Annotated[int | None, typer.Option(min=100, help="Instead: bookkeeping, of N chunks.")] = None,
    output: Output = OUTPUT,
) -> None:
    """Replay made-up traces through the store's eviction policies, and write store.json."""
    if overhead is not None:
        from benchmarks.store_overhead import overhead_table, report_overhead

        row = report_overhead(overhead)
        finish(cli, [overhead_table(row)], row, {})
        return
    if max(parse_counts(budgets, "--budgets")) > 100:
        raise UsageError("--budgets: more than 100 percent of the corpus")
    if max(parse_counts(top_k, "--top-k")) > min(documents // 10, retrievals // 40):
        raise UsageError("--top-k: give 10 --documents and 40 --retrievals for each of the largest")
    found = DeviceProfile.read(profile) if profile is not None else None
    if profile is not None and found is None:
        raise UsageError(f"there is no profile at {profile}; `ragblend doctor --profile` makes one")
    measured = default_profile() if found is None else found.prefill
    plan = Plan(
        kinds=tuple(dict.fromkeys(check_kind(kind.strip()) for kind in traces.split(","))),
        top_k=parse_counts(top_k, "--top-k"),
        budgets=parse_counts(budgets, "--budgets"),
        policies=parse_choices(policies, "--policies", tuple(POLICIES)),
        lengths=_one(lengths, "--lengths", LENGTHS),
        prefix=_one(reuse, "--reuse", REUSES) == "prefix",
        documents=documents,
        retrievals=retrievals,
        seeds=seeds,
        half_life=half_life,
        machine=Machine(measured, bytes_per_token, load_mb_per_s * 1e3),
    )
    folder = make_folder(output)
    with progress_bar("replaying") as progress:
        rows = run(plan, progress)
    results = {"rows": rows, "comparisons": compare(rows), "settings": {"profile": asdict(measured)}}
    write_json(folder / "store.json", results)
    finish(cli, tables(results), results, {"json": str(folder / "store.json")})


def _one(given: str, option: str, choices: Sequence[str]) -> str:
    found = parse_choices(given, option, choices)
    if len(found) != 1:
        raise UsageError(f"{option} takes one of {', '.join(choices)}")
    return found[0]


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

    Every (top_k, seed) is one pair. `ratio` is the mean of theirs, `lowest` the least; `target` is what RAGCache's
    paper claims of PGDSF, and it `holds` if the interval's lower end (the mean, without one) reaches it.
    """
    pairs: dict[tuple[Any, ...], list[float]] = {}
    rates = {(row["trace"], row["budget"], row["top_k"], row["policy"]): row["hit_rates"] for row in rows}
    for (*case, policy), own in rates.items():
        for against in AGAINST:
            theirs = rates.get((*case, against), []) if policy != against else []
            pairs.setdefault((*case[:2], policy, against), []).extend(
                one / other if other else 1.0 for one, other in zip(own, theirs, strict=False)
            )
    names = ("trace", "budget", "policy", "against")
    named = {key: dict(zip(names, key, strict=True)) for key, found in pairs.items() if found}
    return [row | _verdict(pairs[key], AGAINST[key[3]]) for key, row in named.items()]


def _verdict(ratios: Sequence[float], target: float) -> Row:
    mean, around = sum(ratios) / len(ratios), mean_interval(ratios)
    found = {"ratio": mean, "ratio_ci": around, "lowest": min(ratios), "pairs": len(ratios), "target": target}
    return found | {"holds": (around[0] if around else mean) >= target}


def tables(results: Row) -> list[Table]:
    """One of outcomes a trace, then how the hit rates compare, then where the milliseconds come from."""
    rows, about = results["rows"], results["settings"]["profile"]["about"]
    found = [
        table_of(f"{trace}: means over the seeds", OUTCOMES, [row for row in rows if row["trace"] == trace])
        for trace in dict.fromkeys(row["trace"] for row in rows)
    ]
    note = f"Times are simulated. Prefill: {about}."
    return [*found, table_of("Over top-k and seeds", COMPARED, results["comparisons"], note)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], app, "python -m benchmarks.store"))
