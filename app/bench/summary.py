"""From records to the rows, and to the paired comparisons between methods, that the bench reports."""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from ragblend.app.bench.data import Question
from ragblend.app.bench.intervals import difference_interval, mean_interval, recovery_interval
from ragblend.app.bench.metrics import recovery
from ragblend.app.bench.records import Key, Record
from ragblend.app.bench.variants import Variant

# What a policy has to beat: nothing recomputed, and the two ways to spend the same budget without any
# judgement.
BASELINES = ("reuse", "random", "heads")
Row = dict[str, Any]


def summarise(
    records: dict[Key, Record], questions: Sequence[Question], variants: Sequence[Variant], seed: int
) -> tuple[list[Row], list[Row]]:
    """The rows (one a variant) and the comparisons (one a pair), over exactly these questions.

    Every question must have a record for every variant: the numbers are paired.
    """
    table = {
        variant: [records[(question.digest, variant.method, variant.ratio)] for question in questions]
        for variant in variants
    }
    reuse = table.get(Variant("reuse"))
    rows = [_row(variant, table[variant], reuse, seed) for variant in variants]
    return rows, _comparisons(table, seed)


def _row(variant: Variant, records: list[Record], reuse: list[Record] | None, seed: int) -> Row:
    kl = _column(records, lambda record: record.kl)
    kl_reuse = _column(reuse, lambda record: record.kl) if reuse else None
    row: Row = {"method": variant.method, "ratio": variant.ratio, "n": len(records), "kl": fmean(kl)}
    row["kl_ci"] = mean_interval(kl, seed)
    row |= _means(records)
    row["recovery"] = recovery(fmean(kl), fmean(kl_reuse)) if kl_reuse else None
    row |= _times(records)
    row["recomputed_fraction"] = fmean(record.recomputed_fraction for record in records)
    row["f1_ci"] = mean_interval(_column(records, lambda record: record.f1), seed)
    row["rouge_l_ci"] = mean_interval(_column(records, lambda record: record.rouge_l), seed)
    row["exact_match_ci"] = mean_interval(_column(records, lambda record: record.exact_match), seed)
    row["recovery_ci"] = recovery_interval(kl, kl_reuse, seed) if kl_reuse else None
    row["gold_match"] = fmean(record.gold_match for record in records)
    row["prompt_tokens"] = fmean(record.prompt_tokens for record in records)
    return row


def _means(records: list[Record]) -> Row:
    return {
        "top1": fmean(record.top1 for record in records),
        "exact_match": fmean(record.exact_match for record in records),
        "f1": fmean(record.f1 for record in records),
        "rouge_l": fmean(record.rouge_l for record in records),
    }


def _times(records: list[Record]) -> Row:
    """Medians, as one hiccup must not decide; the speed-up is in pairs, as prompts differ in length."""
    return {
        "ttft_ms": median(record.ttft_ms for record in records),
        "speedup": median(record.full_ttft_ms / record.ttft_ms for record in records),
    }


def _comparisons(table: dict[Variant, list[Record]], seed: int) -> list[Row]:
    """Every method that takes a ratio against the baselines: the controls at its own ratio, and reuse."""
    pairs = [
        (variant, other)
        for variant in table
        if variant.ratio is not None
        for other in (Variant(name, None if name == "reuse" else variant.ratio) for name in BASELINES)
        if other in table and other.method != variant.method
    ]
    return [_comparison(variant, other, table, seed) for variant, other in pairs]


def _comparison(variant: Variant, other: Variant, table: dict[Variant, list[Record]], seed: int) -> Row:
    """`kl_difference` below 0 means that `method` is nearer to full prefill than `against`."""
    kl, kl_other = (_column(table[each], lambda record: record.kl) for each in (variant, other))
    f1, f1_other = (_column(table[each], lambda record: record.f1) for each in (variant, other))
    interval = difference_interval(kl, kl_other, seed)
    return {
        "method": variant.method,
        "against": other.method,
        "ratio": variant.ratio,
        "n": len(kl),
        "kl_difference": fmean(kl) - fmean(kl_other),
        "kl_difference_ci": interval,
        "verdict": _verdict(interval),
        "nearer_on": fmean(a < b for a, b in zip(kl, kl_other, strict=True)),
        "f1_difference": fmean(f1) - fmean(f1_other),
        "f1_difference_ci": difference_interval(f1, f1_other, seed),
    }


def _verdict(interval: tuple[float, float] | None) -> str:
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "undecided"
    return "better" if interval[1] < 0 else "worse"


def _column(records: list[Record], value: Callable[[Record], float]) -> list[float]:
    return [float(value(record)) for record in records]
