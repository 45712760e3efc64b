"""The pictures of docs/methods.md: which rows of one prompt each method computes, layer by layer.

    python scripts/method_pictures.py                 # into docs/pictures/, a minute with the bundled SmolLM2

Three short paragraphs of the sample documents, a question that needs all three, and one real prefill a method, watched
from outside. Nothing is drawn by hand; the same code over the same model draws the same pictures.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from ragblend.app.bench.plots import figure_of
from ragblend.app.bench.watching import Watched, overridden, watched
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection import METHODS, Policy, probe
from ragblend.engine.selection.asking import Asking
from ragblend.engine.selection.cacheblend import CacheBlend, deviation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ragblend.engine.engine import Engine
    from ragblend.engine.prompt import Prompt

REPO = Path(__file__).parents[1]
# In so short a prompt 15% would hardly pay for a probe.
RATIO = 0.25
# Document, and how the paragraph begins.
PASSAGES = (
    ("keepers-log-1962.md", "Dunlin in steam again"),
    ("keepers-log-1962.md", "The 15.30 from Thornsay"),
    ("visitor-guide.html", "Most visitors come for Dunlin"),
)
PICTURED = tuple(name for name in METHODS if name != "recompute")  # which would look like `full`
QUESTION = "Who built the locomotive that took the school choir over to Carrowby at last?"


class State(IntEnum):
    """What became of one row in one layer."""

    FRESH = 0  # a literal: computed by every method
    TWICE = 1  # the same, and before that in a probe
    COMPUTED = 2  # a passage's, computed
    EXACT = 3  # stored behind these very tokens, and taken as it is
    MOVED = 4  # stored, and turned to where it stands
    LEFT = 5  # stored, and not turned
    SHIFTED = 6  # stored, turned, and corrected by what changed elsewhere


LABELS = {
    State.FRESH: "fresh: always computed",
    State.TWICE: "fresh, run twice (probe)",
    State.COMPUTED: "passage, computed",
    State.EXACT: "stored, exact as it is",
    State.MOVED: "stored and moved",
    State.LEFT: "stored, not moved",
    State.SHIFTED: "stored, moved, shifted",
}
# Names of ui/assets/style.css are the app's colours; the others differ from them, and from each other, in lightness.
COLOURS = {
    State.FRESH: "--rb-fresh",
    State.TWICE: "#2f4798",
    State.COMPUTED: "--rb-recomputed",
    State.EXACT: "#cfe6e2",
    State.MOVED: "--rb-reused",
    State.LEFT: "--rb-other",
    State.SHIFTED: "#7cc4ba",
}


def main() -> int:
    """Draw every method of the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "pictures")
    parser.add_argument("--home", type=Path, help="where a converted model is kept; a new folder by default")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    probe.PROBE_SHARE = 1.0  # a prompt that fits into a picture is too short to be asked about
    with tempfile.TemporaryDirectory() as folder, opened(given.home or Path(folder)) as (engine, prompt):
        for name in PICTURED:
            path = given.out / f"{name}.png"
            # Without the version of who wrote it, so that equal pictures are equal files.
            picture(engine, prompt, name).savefig(path, dpi=100, metadata={"Software": None})
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    return 0


@contextlib.contextmanager
def opened(home: Path) -> Iterator[tuple["Engine", "Prompt"]]:
    """An engine on the bundled model, and the prompt, its passages stored."""
    from ragblend import Chunk, Engine
    from ragblend.app.bench.prefilling import stored

    texts = [paragraph(*passage) for passage in PASSAGES]
    with contextlib.closing(Engine.open(home=home)) as engine, stored(engine, texts):
        yield engine, engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in texts], QUESTION))


def paragraph(document: str, beginning: str) -> str:
    """The one paragraph of that sample document that begins so."""
    from ragblend.app.readers import read_document
    from ragblend.app.samples import documents_folder

    parts = read_document(documents_folder() / document)
    [found] = [
        text for part in parts for text in part.text.split("\n\n") if text.lstrip().startswith(beginning)
    ]
    return found.strip()


def picture(engine: "Engine", prompt: "Prompt", name: str) -> "Figure":
    """One method over the prompt."""
    policy, scores = scored(METHODS[name])
    policy, seen = watched(policy)
    engine.prefill(prompt, method=policy, ratio=RATIO)
    assert seen.plan is not None
    title = name if policy.fixed_ratio is not None else f"{name}, ratio {100 * RATIO:g}%"
    return draw(title, seen.plan, states(seen, policy), scores[0] if scores else None)


def scored(policy: Policy) -> tuple[Policy, list[Tensor]]:
    """The same policy, and the (T,) scores that it chooses by, once it has run; none if it has no score."""
    scores: list[Tensor] = []

    def score(self: Any, plan: Plan, *more: Any) -> Tensor:
        found: Tensor = type(policy).score(self, plan, *more)  # type: ignore[attr-defined]
        scores.append(found.clone())
        return found

    def narrow(self: Any, plan: Plan, evidence: Any, next_layer: int) -> Tensor:
        found = torch.zeros(plan.tokens)
        found[evidence.rows] = deviation(evidence, self.measure)
        scores.append(found)
        return type(policy).narrow(self, plan, evidence, next_layer)

    asks, blends = isinstance(policy, Asking), isinstance(policy, CacheBlend)
    return overridden(policy, {"score": score} if asks else {"narrow": narrow} if blends else {}), scores


def states(seen: Watched, policy: Policy) -> Tensor:
    """(L, T) int64 of `State`."""
    plan, computed = seen.plan, seen.computed()
    assert plan is not None
    kept = State.LEFT if not policy.moves_keys else State.SHIFTED if policy.corrects(plan) else State.MOVED
    of_kind = {
        Kind.FRESH: State.FRESH,
        Kind.MISSING: State.FRESH,
        Kind.EXACT: State.EXACT,
        Kind.REUSABLE: kept,
    }
    row = torch.tensor([of_kind[Kind(kind)] for kind in plan.kinds.tolist()])
    found = row.repeat(plan.layers, 1)
    found[computed & ~plan.always] = State.COMPUTED
    for rows in seen.probed:
        last = max(layer for layer in range(plan.layers) if policy.watches(plan, layer))
        # What stands before the first row that can change goes on where the probe left it.
        again = rows[(rows >= plan.settled_tokens) & plan.always[rows]]
        found[: last + 1, again] = State.TWICE
    return found


def draw(title: str, plan: Plan, found: Tensor, scores: Tensor | None) -> "Figure":
    """The grid of states, layer 0 at the bottom, and under it the scores."""
    figure = figure_of(9.0, 2.3 if scores is None else 2.8)
    heights = [5.0] if scores is None else [5.0, 1.3]
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    _draw_states(panels[0], plan, found)
    if scores is not None:
        _draw_scores(panels[1], plan, scores, found)
    panels[-1].set_xlabel("tokens of the prompt", fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    figure.legend(
        handles=_patches(found),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=7.5,
        handlelength=1,
        columnspacing=1.2,
    )
    return figure


def _draw_states(axes: "Axes", plan: Plan, found: Tensor) -> None:
    from matplotlib.colors import ListedColormap

    layers, tokens = found.shape
    axes.imshow(
        found.numpy(), cmap=ListedColormap([colour(state) for state in State]), vmin=0, vmax=len(State) - 1,
        origin="lower", aspect="auto", interpolation="nearest", extent=(0, tokens, 0, layers),
    )  # fmt: skip
    for begin, end, label in segments(plan):
        axes.axvline(begin, color="black", linewidth=0.8)
        axes.annotate(
            label,
            ((begin + end) / 2, layers),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    shown = [0, layers // 3, 2 * layers // 3, layers - 1]
    axes.set_yticks([layer + 0.5 for layer in shown], [str(layer) for layer in shown])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("layer", fontsize=8)


def _draw_scores(axes: "Axes", plan: Plan, scores: Tensor, found: Tensor) -> None:
    """A bar for each token that may be chosen, in the colour of what became of it above layer 0.

    Roots, because a few tokens have most of a score, and beside them the others would be flat.
    """
    heights = scores.float().masked_fill(~plan.candidates, 0).sqrt()
    colours = [colour(State(state)) for state in found[1:].amin(0).tolist()]
    axes.bar([at + 0.5 for at in range(plan.tokens)], heights.tolist(), width=1.0, color=colours)
    axes.set_yticks([])
    axes.set_ylabel("score\n(root)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _patches(found: Tensor) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(color=colour(state), label=LABELS[state]) for state in State if bool((found == state).any())
    ]


def segments(plan: Plan) -> list[tuple[int, int, str]]:
    """Where the instructions, each passage and the question begin and end."""
    spans = [(span.start, span.stop, f"passage {number}") for number, span in enumerate(plan.spans, 1)]
    return [(0, spans[0][0], "instructions"), *spans, (spans[-1][1], plan.tokens, "question")]


def colour(state: State) -> str:
    """A state's colour; the app's own are read where they are defined, so that they stay the same."""
    name = COLOURS[state]
    if not name.startswith("--"):
        return name
    style = (REPO / "ui" / "assets" / "style.css").read_text(encoding="utf-8")
    return style.partition(f"{name}: ")[2][:7]  # the first is that of the light page


if __name__ == "__main__":
    raise SystemExit(main())
