"""The Store tab: what is kept, how often it is of use, its budget, check and repair. Wiring only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ragblend.app import upkeep
from ragblend.app.cli_store import stats_value
from ragblend.app.settings_file import save_settings
from ragblend.kvstore.errors import RagBlendError
from ragblend.ui import render_store
from ragblend.ui.context import QUEUED, QUICK, Context, drawn
from ragblend.ui.render_text import problem

Updates = dict[Any, Any]
GIB = 1 << 30
MOST_GIB = 500


@dataclass(frozen=True)
class Parts:
    """The tab's components."""

    overview: gr.HTML
    rates: gr.HTML
    budget: gr.Slider
    set_budget: gr.Button
    check: gr.Button
    repair: gr.Button
    message: gr.HTML


def build(context: Context, tab: gr.Tab) -> Parts:
    """Lay the tab out and connect it; drawn anew whenever it is opened."""
    with gr.Column(elem_id="rb-store"):
        overview = drawn("rb-store-overview", acts=False)
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                gr.HTML('<h4 class="rb-section">Found in the store over time</h4>', apply_default_css=False)
                rates = drawn("rb-store-rates", acts=False)
            with gr.Column(scale=2, min_width=300):
                budget = gr.Slider(
                    1,
                    MOST_GIB,
                    value=20,
                    step=1,
                    label="Budget on the disk, GiB",
                    elem_id="rb-budget",
                    info="What was used least goes first; it is made again when it is needed.",
                    interactive=True,
                )
                set_budget = gr.Button("Set the budget", size="sm", elem_id="rb-set-budget")
        with gr.Row():
            check = gr.Button("Check everything", elem_id="rb-check", scale=0, min_width=170)
            repair = gr.Button("Repair", elem_id="rb-repair", scale=0, min_width=120)
        message = drawn("rb-store-message", acts=False)
    parts = Parts(overview, rates, budget, set_budget, check, repair, message)
    acts = StoreTab(context, parts)
    tab.select(acts.refresh, None, [overview, rates, budget, message], **QUICK)
    set_budget.click(acts.set_budget, [budget], [message, overview], **QUICK)
    check.click(acts.check, None, [message], **QUEUED)
    repair.click(acts.repair, None, [message, overview], **QUEUED)
    return parts


class StoreTab:
    """The callbacks."""

    def __init__(self, context: Context, parts: Parts) -> None:
        self._desk, self._parts, self._context = context.desk, parts, context

    def refresh(self) -> Updates:
        parts = self._parts
        try:
            store = self._workspace.engine.store
            self._context.note_store()
            now = max(1, round(store.stats().budget_bytes / GIB))
            return {
                parts.overview: self._overview(),
                parts.rates: render_store.hit_rates(self._context.history.samples),
                parts.budget: gr.update(value=now, maximum=max(MOST_GIB, now)),
                parts.message: "",
            }
        except RagBlendError as error:
            return {parts.message: problem(str(error))}

    @property
    def _workspace(self) -> Any:
        workspaces = self._desk.workspaces
        return workspaces.of(workspaces.settings.collection)

    def _overview(self) -> str:
        library, names = self._workspace.library, self._desk.workspaces.names()
        documents = sum(sum(library.counts_by_state(name).values()) for name in names)
        passages = sum(library.count_passages(name) for name in names)
        return render_store.overview(stats_value(self._workspace.engine.store), documents, passages)

    def set_budget(self, gib: float) -> Updates:
        try:
            settings = self._desk.workspaces.change(store_budget_bytes=int(gib * GIB))
            save_settings(
                self._desk.workspaces.home.settings, {"store_budget_bytes": settings.store_budget_bytes}
            )
            return {self._parts.message: problem("Kept.", "info"), self._parts.overview: self._overview()}
        except RagBlendError as error:
            return {self._parts.message: problem(str(error))}

    def check(self) -> Iterator[Updates]:
        yield {self._parts.message: problem("Reading everything that is stored …", "info")}
        try:
            yield {self._parts.message: render_store.findings(upkeep.check(self._workspace))}
        except RagBlendError as error:
            yield {self._parts.message: problem(str(error))}

    def repair(self) -> Iterator[Updates]:
        parts = self._parts
        yield {parts.message: problem("Repairing …", "info")}
        try:
            with self._desk.jobs.writing():
                done = upkeep.repair(self._workspace, lambda _: None)
            yield {parts.message: render_store.repaired(done), parts.overview: self._overview()}
        except RagBlendError as error:
            yield {parts.message: problem(str(error))}
