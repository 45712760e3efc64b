"""CacheBlend's Figure 8 (EuroSys'25, section 4) on this model and these questions.

    python -m benchmarks.figures --limit 2 --output figures

Whether the tokens whose stored keys and values deviate most in one layer are those of the next.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import typer
from torch import Tensor

from ragblend.app.bench import cli as product
from ragblend.app.bench.plots import figure_of
from ragblend.app.bench.prefilling import check_extra, stored
from ragblend.app.bench.quality import build_prompt
from ragblend.app.bench.records import make_folder, write_json
from ragblend.app.bench.sources import Source, read
from ragblend.app.cli import main
from ragblend.app.cli_common import Cli, command
from ragblend.engine.plan import Plan
from ragblend.engine.selection import Evidence, Policy

app = typer.Typer(name="figures", rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Everything(Policy):
    """Computes every row over the stored KV, and notes how far each token's KV is from what was stored."""

    name: str = field(default="everything", kw_only=True)
    fixed_ratio: float | None = field(default=1.0, kw_only=True)
    deviations: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def rows(self, plan: Plan, *more: Any) -> Tensor:
        return torch.arange(plan.tokens, device=plan.token_ids.device)

    def narrows(self, plan: Plan, layer: int) -> bool:
        return True

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        """Keeps all. deviations[layer]: (C,) float32, L1 over heads and sizes of K and V, of the candidates."""
        pairs = ((evidence.new_keys, evidence.old_keys), (evidence.new_values, evidence.old_values))
        chosen = plan.candidates.nonzero().squeeze(1)
        apart = [
            (new[:, chosen].float() - old[:, chosen].float()).abs().sum(dim=(0, 2)) for new, old in pairs
        ]
        self.deviations[evidence.layer] = (apart[0] + apart[1]).cpu()
        return evidence.rows


@command(app, "figures")
def figures(cli: Cli, source: Source, output: product.Output = product.OUTPUT) -> None:
    """Measure, and write figures.json and rank_correlation.png."""
    from ragblend.engine.engine import Engine

    check_extra()
    questions = read(replace(source, home=cli.home, limit=source.limit or 2)).questions
    folder = make_folder(output)
    engine, found = Engine.open(**product.engine_arguments(cli)), []
    for question in questions:
        everything = Everything()
        with stored(engine, question.passages):
            engine.prefill(build_prompt(engine, question, 1), method=everything)
        found.append(correlations([everything.deviations[layer] for layer in sorted(everything.deviations)]))
    results = {"prompts": len(found), "rank_correlations": found}
    write_json(folder / "figures.json", results)
    figure = figure_of(7.0, 4.2)
    axes = figure.subplots()
    for values in found:
        axes.plot(range(1, len(values) + 1), values, alpha=0.5)
    axes.set(xlabel="layer and the one after it", ylabel="Spearman's rank correlation of KV deviation")
    figure.savefig(folder / "rank_correlation.png", dpi=120)
    cli.result(results, f"wrote figures.json and rank_correlation.png to {folder}")


def correlations(layers: Sequence[Tensor]) -> list[float]:
    """Of neighbouring layers' ranks. In layer 0 only rounding deviates, so it is left out."""
    from scipy.stats import spearmanr

    return [float(spearmanr(*pair).statistic) for pair in pairwise(layers[1:])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], app, "python -m benchmarks.figures"))
