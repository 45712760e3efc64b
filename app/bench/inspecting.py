"""A few prompts, looked into: what the report shows token by token, and CacheBlend's Figures 6 to 8 on this model.

For each prompt, once: every row computed over the stored KV, which gives every token's deviation in every layer. For
each method: which tokens it computes, and how far the attention of the last rows is from full prefill's. One line a
measurement is kept as soon as it is there, so that a stopped run goes on.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.data import Question
from ragblend.app.bench.prefilling import stored
from ragblend.app.bench.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from ragblend.engine.engine import Engine
    from ragblend.engine.prompt import Prompt

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)  # of Figure 6
LAYERS_SHOWN = (0.1, 0.5, 0.9)  # of Figure 7, as parts of the depth
QUANTILES = 101
Key = tuple[str, str, str, float | None]  # question, what, method, ratio
Progress = Callable[[int, int], None]


class Notebook:
    """An append-only file of measurements by key; the first of a key counts, and what a kill cut off is left out."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        if fresh:
            path.unlink(missing_ok=True)
        self.values: dict[Key, Any] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                key, value = json.loads(line)
                self.values.setdefault(tuple(key), value)
            except (ValueError, TypeError):
                continue

    def add(self, key: Key, value: Any) -> None:
        """Keep one; it is on the disk afterwards. The leading newline ends a line that a kill cut off."""
        assert key not in self.values, key
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([key, value])}\n")
            file.flush()
            os.fsync(file.fileno())
        self.values[key] = value


@dataclasses.dataclass(frozen=True)
class Look:
    """One prompt as the report shows it: its tokens, how each could be served, and what each variant did."""

    question: Question
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]  # of `engine.plan.Kind`
    shares: dict[Variant, tuple[float, ...]]


def inspect(
    engine: "Engine",
    questions: Sequence[Question],
    variants: Sequence[Variant],
    notebook: Notebook,
    build: Callable[[Question], "Prompt"],
    progress: Progress | None = None,
) -> list[Look]:
    """Measure what the notebook does not have yet, and show it."""
    fused = fused_variants(variants)
    wanted = {question: _wanted(question, fused) for question in questions}
    pending = [
        (question, [key for key in keys if key not in notebook.values]) for question, keys in wanted.items()
    ]
    total, done = sum(len(keys) for _, keys in pending), 0
    for question, keys in pending:
        if not keys:
            continue
        with stored(engine, question.passages):
            for key, value in _measure(engine, build(question), keys):
                notebook.add(key, value)
                done += 1
                if progress is not None:
                    progress(done, total)
    return [_look(question, fused, notebook) for question in questions]


def fused_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Those that take stored KV and compute a part of it again: no modes, no oracles, nothing that reads it all."""
    from ragblend.engine.selection import policy_named

    def fits(variant: Variant) -> bool:
        if variant.mode is not None or getattr(variant, "oracle", False):
            return False
        fixed = policy_named(variant.method).fixed_ratio
        return fixed is None or fixed < 1

    return [variant for variant in variants if fits(variant)]


def _wanted(question: Question, fused: Sequence[Variant]) -> list[Key]:
    """The deviations, every variant's tokens, and every method with a ratio at those of Figure 6."""
    digest = question.digest
    grid = [
        Variant(method, ratio)
        for method in dict.fromkeys(v.method for v in fused if v.ratio is not None)
        for ratio in RATIOS
    ]
    shown: list[Key] = [(digest, "tokens", each.method, each.ratio) for each in fused]
    figure: list[Key] = [
        (digest, "attention", each.method, each.ratio) for each in dict.fromkeys([*fused, *grid])
    ]
    return [(digest, "deviation", "", None), *shown, *figure]


def _measure(engine: "Engine", prompt: "Prompt", keys: Sequence[Key]) -> Iterator[tuple[Key, Any]]:
    """One prefill that computes everything, and one for each variant that is still wanted."""
    from ragblend.app.bench.watching import Everything, attention_deviation, last_rows_attention, watched
    from ragblend.engine.selection import policy_named

    with last_rows_attention() as attention:
        everything = Everything()
        engine.prefill(prompt, method=everything)
        reference = dict(attention)
        for key in keys:
            if key[1] == "deviation":
                yield key, _deviation(engine, prompt, everything)
        for variant in dict.fromkeys(
            Variant(method, ratio) for _, what, method, ratio in keys if what != "deviation"
        ):
            attention.clear()
            policy, seen = watched(policy_named(variant.method))
            engine.prefill(prompt, **(variant.arguments | {"method": policy}))
            values = {
                "tokens": [round(share, 3) for share in seen.shares().tolist()],
                "attention": attention_deviation(dict(attention), reference),
            }
            for key in keys:
                if (key[2], key[3]) == (variant.method, variant.ratio):
                    yield key, values[key[1]]


def _deviation(engine: "Engine", prompt: "Prompt", everything: Any) -> dict[str, Any]:
    """The tokens, their kinds, and of their deviations the quantiles in some layers and the ranks' correlations.

    The correlations are of layers 1 and 2, 2 and 3, ...: in layer 0 only rounding deviates.
    """
    from itertools import pairwise

    layers = [everything.deviations[layer] for layer in sorted(everything.deviations)]
    shown = sorted({round(part * (len(layers) - 1)) for part in LAYERS_SHOWN} | {min(1, len(layers) - 1)})
    enough = layers[0].numel() > 1
    return {
        "tokens": token_texts(engine, prompt.token_ids),
        "kinds": everything.plans[0].kinds.tolist(),
        "layers": len(layers),
        "quantiles": {str(layer): _quantiles(layers[layer]) for layer in shown} if enough else {},
        "correlations": [spearman(*pair) for pair in pairwise(layers[1:])] if enough else [],
    }


def _quantiles(deviation: "Tensor") -> list[float]:
    """From the least to the most, relative to the mean; all 0 where nothing deviates (layer 0 does not)."""
    import torch

    mean = float(deviation.double().mean())
    steps = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    found = torch.quantile(deviation.double(), steps)
    return [round(value / mean, 4) if mean > 0 else 0.0 for value in found.tolist()]


def spearman(first: "Tensor", second: "Tensor") -> float | None:
    """Rank correlation of two (C,) vectors; None where one of them is constant."""
    import torch

    def ranks(values: "Tensor") -> "Tensor":
        _, group, counts = torch.unique(values.double(), return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        return (ends - (counts.double() - 1) / 2)[group]  # equal values share their mean rank

    stacked = torch.stack([ranks(first), ranks(second)])
    if bool((stacked == stacked[:, :1]).all(dim=1).any()):
        return None
    return round(float(torch.corrcoef(stacked)[0, 1]), 4)


def token_texts(engine: "Engine", token_ids: Sequence[int]) -> list[str]:
    """Each token's text. A character made of several tokens stands at the last of them, the others are empty."""
    texts: list[str] = []
    held: list[int] = []
    for token in token_ids:
        held.append(token)
        text = engine.tokenizer.decode(held)
        whole = "\ufffd" not in text or len(held) > 4
        texts.append(text if whole else "")
        held = [] if whole else held
    return texts


def _look(question: Question, fused: Sequence[Variant], notebook: Notebook) -> Look:
    found = notebook.values[question.digest, "deviation", "", None]
    shares = {
        variant: tuple(notebook.values[question.digest, "tokens", variant.method, variant.ratio])
        for variant in fused
    }
    return Look(question, tuple(found["tokens"]), tuple(found["kinds"]), shares)


def figures(questions: Sequence[Question], variants: Sequence[Variant], notebook: Notebook) -> dict[str, Any]:
    """The numbers of the three figures, means over the prompts: what the pictures draw and `quality.json` holds."""
    digests = [question.digest for question in questions]
    deviations = [notebook.values[digest, "deviation", "", None] for digest in digests]
    of_attention = [
        (Variant(key[2], key[3]), value)
        for key, value in notebook.values.items()
        if key[1] == "attention" and key[0] in digests
    ]
    methods = {variant.method for variant in fused_variants(variants)}
    points = {
        variant: [value for each, value in of_attention if each == variant and value is not None]
        for variant, _ in of_attention
        if variant.method in methods
    }
    return {
        "prompts": len(digests),
        "attention_deviation": [
            {
                "method": variant.method,
                "ratio": variant.ratio,
                "value": sum(values) / len(values),
                "n": len(values),
            }
            for variant, values in sorted(
                points.items(), key=lambda each: (each[0].method, each[0].ratio or 0)
            )
            if values
        ],
        "kv_deviation_quantiles": {
            layer: [sum(column) / len(column) for column in zip(*rows, strict=True)]
            for layer in (deviations[0]["quantiles"] if deviations else {})
            if (rows := [each["quantiles"][layer] for each in deviations if layer in each["quantiles"]])
        },
        "rank_correlations": [each["correlations"] for each in deviations if each["correlations"]],
    }
