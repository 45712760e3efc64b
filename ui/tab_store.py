"""The Store tab: contents, hit rate, budget, check and repair. Wiring only."""

from collections.abc import Iterator
from contextlib import suppress

import gradio as gr

from ragblend.app.library import maintenance
from ragblend.app.progress import silent
from ragblend.app.settings import save_settings
from ragblend.kvstore.errors import RagBlendError
from ragblend.ui import views
from ragblend.ui.page_context import (
    CLEAR_MESSAGE,
    DIRECT_CALL,
    QUEUED_CALL,
    PageContext,
    Updates,
    html_component,
)
from ragblend.ui.views import problem

GIB = 1 << 30
MAX_GIB = 500


class StoreTab:
    """Lays the tab out and connects it; it is drawn again whenever it is opened."""

    def __init__(self, context: PageContext, tab: gr.Tab) -> None:
        self._services, self._context = context.services, context
        with gr.Column(elem_id="rb-store"):
            self.overview = html_component("rb-store-overview", has_buttons=False)
            with gr.Row():
                with gr.Column(scale=3, min_width=300):
                    gr.HTML('<h2 class="rb-section">Hit rate over time</h2>', apply_default_css=False)
                    self.rates = html_component("rb-store-rates", has_buttons=False)
                with gr.Column(scale=2, min_width=300):
                    self.budget = gr.Slider(
                        1,
                        MAX_GIB,
                        value=20,
                        step=1,
                        label="Disk budget, GiB",
                        elem_id="rb-budget",
                        info="The least useful passages are evicted first, and computed again when needed.",
                        interactive=True,
                    )
                    set_budget = gr.Button("Set the budget", size="sm", elem_id="rb-set-budget")
            with gr.Row():
                check = gr.Button("Check everything", elem_id="rb-check", scale=0, min_width=170)
                repair = gr.Button("Repair", elem_id="rb-repair", scale=0, min_width=120)
            self.message = html_component("rb-store-message", has_buttons=False)
        tab.select(None, None, self.message, js=CLEAR_MESSAGE)
        tab.select(self.refresh, None, [self.overview, self.rates, self.budget, self.message], **DIRECT_CALL)
        set_budget.click(self.set_budget, [self.budget], [self.message, self.overview], **DIRECT_CALL)
        check.click(self.check, None, [self.message], **QUEUED_CALL)
        repair.click(self.repair, None, [self.message, self.overview], **QUEUED_CALL)

    def refresh(self) -> Updates:
        try:
            store = self._services.workspaces.first.engine.store
            self._context.note_hit_counts()
            now = max(1, round(store.stats().budget_bytes / GIB))
            return {
                self.overview: self._overview(),
                self.rates: views.store.hit_rates(list(self._context.hit_counts)),
                self.budget: gr.update(value=now, maximum=max(MAX_GIB, now)),
            }
        except RagBlendError as error:
            return {self.message: problem(str(error))}

    def _overview(self) -> str:
        workspaces, token_bytes = self._services.workspaces, None
        engine = workspaces.first.engine
        with suppress(RagBlendError):  # there is no model, or its KV cannot be stored
            token_bytes = engine.token_bytes
        counts = workspaces.count_documents(), workspaces.count_passages()
        return views.store.overview(maintenance.store_stats(engine.store), *counts, token_bytes)

    def set_budget(self, gib: float) -> Updates:
        try:
            changed = {"store_budget_bytes": int(gib * GIB)}
            self._services.workspaces.change(**changed)
            save_settings(self._services.workspaces.home.settings, changed)
            return {self.message: problem("Saved.", "info"), self.overview: self._overview()}
        except RagBlendError as error:
            return {self.message: problem(str(error))}

    def check(self) -> Iterator[Updates]:
        yield {self.message: problem("Reading everything that is stored …", "info")}
        try:
            found = maintenance.check(self._services.workspaces.first)
            yield {self.message: views.store.findings(found)}
        except RagBlendError as error:
            yield {self.message: problem(str(error))}

    def repair(self) -> Iterator[Updates]:
        yield {self.message: problem("Repairing …", "info")}
        workspaces = self._services.workspaces
        try:
            with workspaces.writing():
                # Do not encode here: that would hold the writer lock, maybe for hours. The queue encodes without the
                # lock, and can be paused.
                done = maintenance.repair(workspaces.first, silent, is_cancelled=lambda: True)
            self._services.jobs.wake()
            yield {self.message: views.store.repaired(done), self.overview: self._overview()}
        except RagBlendError as error:
            yield {self.message: problem(str(error))}
