"""Draws the pictures of docs/methods.md: which rows of one prompt each method computes, layer by layer.

    python -m benchmarks.method_pictures                 # into docs/pictures/, a minute with the bundled SmolLM2

Three short paragraphs of the sample documents, a question that needs all three, and one real prefill per method, which
is recorded. Nothing is drawn by hand; the same code and model give the same pictures.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.common import DOCS, REPO, AnyHome, open_engine, run
from ragblend.engine.plan import Plan, TokenKind
from ragblend.engine.selection import METHODS, AfterLayer, ByAttention, Evidence, Policy, by_attention
from ragblend.measuring.plots import new_figure
from ragblend.measuring.prefilling import prompt_of, temporarily_stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt

# In so short a prompt, a probe would use up most of 15%.
RATIO = 0.25
# Document, and how the paragraph begins.
PASSAGES = (
    ("keepers-log-1962.md", "Dunlin in steam again"),
    ("keepers-log-1962.md", "The 15.30 from Thornsay"),
    ("visitor-guide.html", "Most visitors come for Dunlin"),
)
# The methods left out would look like `full`, `prefix` and `probe-shift`.
PICTURED_METHODS = tuple(name for name in METHODS if name not in ("recompute", "exact", "auto"))
QUESTION = "Who built the locomotive that took the school choir over to Carrowby at last?"


class RowState(IntEnum):
    """How one row was obtained in one layer."""

    FRESH = 0  # a literal: computed by every method
    PROBED = 1  # a literal that was also computed in a probe
    COMPUTED = 2  # a passage's row, recomputed
    EXACT = 3  # stored after exactly these tokens, and reused unchanged
    ROTATED = 4  # stored, and rotated to its position
    NOT_ROTATED = 5  # stored, and not rotated
    SHIFTED = 6  # stored, rotated, and corrected by changes of other rows


# Text and colour of each state. A name is one of the app's colours in ui/assets/style.css; all colours differ in
# lightness.
LEGEND = {
    RowState.FRESH: ("fresh: always computed", "--rb-fresh"),
    RowState.PROBED: ("fresh, run twice (probe)", "#2f4798"),
    RowState.COMPUTED: ("passage, computed", "--rb-recomputed"),
    RowState.EXACT: ("stored, exact as it is", "#cfe6e2"),
    RowState.ROTATED: ("stored and moved", "--rb-reused"),
    RowState.NOT_ROTATED: ("stored, not moved", "--rb-other"),
    RowState.SHIFTED: ("stored, moved, shifted", "#7cc4ba"),
}


def main(out: Path = DOCS / "pictures", home: AnyHome = None) -> None:
    """Draw every method; without --home in a new one."""
    out.mkdir(parents=True, exist_ok=True)
    by_attention.PROBE_SHARE = 1.0  # a prompt that fits into a picture is too short for a probe
    with open_engine(home=home) as engine, temporarily_stored(engine, texts := paragraphs()):
        prompt = prompt_of(engine, texts, QUESTION)
        for name in PICTURED_METHODS:
            path = out / f"{name}.png"
            # Without matplotlib's version, so that equal pictures are equal files.
            picture(engine, prompt, name).savefig(path, dpi=100, metadata={"Software": None})
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def paragraphs() -> list[str]:
    """The paragraphs of PASSAGES."""
    from ragblend.app.library.readers import read_document
    from ragblend.app.samples import documents_folder

    texts = []
    for document, beginning in PASSAGES:
        parts = read_document(documents_folder() / document).parts
        paragraphs = [text.strip() for part in parts for text in part.text.split("\n\n")]
        texts += [text for text in paragraphs if text.startswith(beginning)]
    assert len(texts) == len(PASSAGES), texts
    return texts


def picture(engine: "Engine", prompt: "Prompt", name: str) -> "Figure":
    """Draw one method."""
    policy, scores = recording_scores(METHODS[name])
    policy, run_record = recording(policy)
    engine.prefill(prompt, method=policy, ratio=RATIO)
    assert run_record.plan is not None
    title = name if policy.fixed_ratio is not None else f"{name}, ratio {100 * RATIO:g}%"
    return draw(title, run_record.plan, row_states(run_record, policy), scores[0] if scores else None)


@dataclass
class RecordedRun:
    """What a recorded policy did. steps: (first layer, ascending rows that are computed from that layer on)."""

    plan: Plan | None = None
    steps: list[tuple[int, Tensor]] = field(default_factory=list)
    probed: list[Tensor] = field(default_factory=list)

    def computed(self) -> Tensor:
        """(L, T) bool: the rows that each layer computed, stored rows of a probe included."""
        assert self.plan is not None, "the policy has not run"
        computed = torch.zeros(self.plan.layers, self.plan.tokens, dtype=torch.bool)
        ends = [layer for layer, _ in self.steps[1:]] + [self.plan.layers]
        for (begin, rows), end in zip(self.steps, ends, strict=True):
            computed[begin:end, rows] = True
        for rows in self.probed:
            computed[:, rows[~self.plan.always[rows].cpu()]] = True
        return computed


def recording(policy: Policy) -> tuple[Policy, RecordedRun]:
    """The policy as an instance of a recording subclass, and the record that its run fills in."""
    run_record = RecordedRun()

    def rows(self: Policy, plan: Plan, *more: Any) -> Tensor:
        found: Tensor = type(policy).rows(self, plan, *more)
        # Starts a new record: a request that lost a chunk begins again.
        run_record.plan, run_record.steps = plan, [(0, found.cpu())]
        return found

    def narrow(self: Policy, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        kept = type(policy).narrow(self, plan, evidence, next_layer)
        run_record.steps.append((next_layer, kept.cpu()))
        return kept

    def probe_rows(self: Any, plan: Plan, *more: Any) -> Tensor | None:
        found: Tensor | None = type(policy).probe_rows(self, plan, *more)
        if found is not None:
            run_record.probed.append(found.cpu())
        return found

    return with_methods(policy, {"rows": rows, "narrow": narrow, "probe_rows": probe_rows}), run_record


def with_methods(policy: Policy, overrides: dict[str, Any]) -> Policy:
    """The policy with some methods overridden."""
    made: Policy = object.__new__(type(f"Recorded{type(policy).__name__}", (type(policy),), overrides))
    made.__dict__.update(policy.__dict__)  # frozen, so not by assignment
    return made


def recording_scores(policy: Policy) -> tuple[Policy, list[Tensor]]:
    """The policy, and a list that gets the (T,) scores it selects by when it runs; empty if it has no scores."""
    scores: list[Tensor] = []

    def of_tokens(self: Any, *shown: Any) -> Tensor:
        found: Tensor = type(policy).scores(self, *shown)  # type: ignore[attr-defined]
        scores.append(found.clone())
        return found

    def narrow(self: Any, plan: Plan, evidence: Any, next_layer: int) -> Tensor:
        scores.append(torch.zeros(plan.tokens))
        scores[-1][evidence.rows] = self.deviation(evidence)
        return type(policy).narrow(self, plan, evidence, next_layer)

    attends, blends = isinstance(policy, ByAttention), isinstance(policy, AfterLayer)
    return with_methods(
        policy, {"scores": of_tokens} if attends else {"narrow": narrow} if blends else {}
    ), scores


def row_states(run_record: RecordedRun, policy: Policy) -> Tensor:
    """(L, T) int64 of `RowState`."""
    plan, computed = run_record.plan, run_record.computed()
    assert plan is not None
    kept = (
        RowState.NOT_ROTATED
        if not policy.moves_keys
        else RowState.SHIFTED
        if policy.corrects(plan)
        else RowState.ROTATED
    )
    of_kind = dict.fromkeys(TokenKind, RowState.FRESH) | {
        TokenKind.EXACT: RowState.EXACT,
        TokenKind.REUSABLE: kept,
    }
    row = torch.tensor([of_kind[TokenKind(kind)] for kind in plan.kinds.tolist()])
    found = row.repeat(plan.layers, 1)
    found[computed & ~plan.always] = RowState.COMPUTED
    for rows in run_record.probed:
        last = policy.attention_layers(plan).stop - 1
        # Rows before the first one that can change are not computed again after the probe.
        again = rows[(rows >= plan.settled_tokens) & plan.always[rows]]
        found[: last + 1, again] = RowState.PROBED
    return found


def draw(title: str, plan: Plan, found: Tensor, scores: Tensor | None) -> "Figure":
    """Draw the grid of states, layer 0 at the bottom, and the scores below it."""
    from matplotlib.patches import Patch

    figure = new_figure(9.0, 2.3 if scores is None else 2.8)
    heights = [5.0] if scores is None else [5.0, 1.3]
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    _draw_states(panels[0], plan, found)
    if scores is not None:
        _draw_scores(panels[1], plan, scores, found)
    panels[-1].set_xlabel("tokens of the prompt", fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    shown = [state for state in RowState if bool((found == state).any())]
    patches = [Patch(color=colour(state), label=LEGEND[state][0]) for state in shown]
    where: dict[str, Any] = {
        "loc": "outside lower center",
        "ncols": 5,
        "handlelength": 1,
        "columnspacing": 1.2,
    }
    figure.legend(handles=patches, frameon=False, fontsize=7.5, **where)
    return figure


def _draw_states(axes: "Axes", plan: Plan, found: Tensor) -> None:
    """Draw states, with lines and labels for the instructions, each passage and the question."""
    from matplotlib.colors import ListedColormap

    layers, tokens = found.shape
    axes.imshow(
        found.numpy(), cmap=ListedColormap([colour(state) for state in RowState]), vmin=0, vmax=len(RowState) - 1,
        origin="lower", aspect="auto", interpolation="nearest", extent=(0, tokens, 0, layers),
    )  # fmt: skip
    spans = [(span.start, span.stop, f"passage {number}") for number, span in enumerate(plan.spans, 1)]
    ends = [(0, spans[0][0], "instructions"), *spans, (spans[-1][1], plan.tokens, "question")]
    for begin, end, label in ends:
        axes.axvline(begin, color="black", linewidth=0.8)
        place: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points"}
        axes.annotate(label, ((begin + end) / 2, layers), ha="center", fontsize=8, **place)
    shown = [0, layers // 3, 2 * layers // 3, layers - 1]
    axes.set_yticks([layer + 0.5 for layer in shown], [str(layer) for layer in shown])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("layer", fontsize=8)


def _draw_scores(axes: "Axes", plan: Plan, scores: Tensor, found: Tensor) -> None:
    """Draw a bar for each candidate token, in the colour of its state above layer 0.

    Heights are square roots: a few tokens have most of the score, and the rest would be invisible.
    """
    heights = scores.float().masked_fill(~plan.candidates, 0).sqrt()
    colours = [colour(RowState(state)) for state in found[1:].amin(0).tolist()]
    axes.bar([at + 0.5 for at in range(plan.tokens)], heights.tolist(), width=1.0, color=colours)
    axes.set_yticks([])
    axes.set_ylabel("score\n(root)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def colour(state: RowState) -> str:
    """A state's colour; the app's colours are read from its style sheet."""
    name = LEGEND[state][1]
    if not name.startswith("--"):
        return name
    style = (REPO / "ui" / "assets" / "style.css").read_text(encoding="utf-8")
    return style.partition(f"{name}: ")[2][:7]  # the first definition is that of the light theme


if __name__ == "__main__":
    run(main, __doc__)
