"""The Settings tab: the form, what a change would cost, and saving it. Wiring only."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from ragblend.app.answering.rerank import find_reranker
from ragblend.app.model_offers import MachineCapacity, measure_machine, offers
from ragblend.app.models import ModelDownload, check_model, local_models, needs_download
from ragblend.app.settings import OCR_LANGUAGES, Cost, Settings, cost_of, save_settings
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.integrations.embeddings import find_embedder
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
from ragblend.ui.tab_compare import METHOD_CHOICES
from ragblend.ui.views import LABELS, problem

AUTO, MANUAL = "auto", "manual"
DRAW_EVERY_S = 0.5
DEVICES = [
    ("Fastest available", ""),
    ("Processor (CPU)", "cpu"),
    ("NVIDIA graphics card (CUDA)", "cuda"),
    ("Apple graphics (MPS)", "mps"),
]
SCAN_LANGUAGES = [("Latin letters, Chinese, Japanese", "default")]
SCAN_LANGUAGES += [(name.replace("-", " ").capitalize(), name) for name in OCR_LANGUAGES if name != "default"]
SEARCH_MODES = [("Meaning and words", "hybrid"), ("Meaning only", "vectors")]
THEMES = [("Same as the system", "system"), ("Light", "light"), ("Dark", "dark")]
SET_THEME = "(name) => { window.ragblend.theme(name); return name; }"
GET_THEME = "() => window.ragblend.keptTheme()"
FIELD_HELP = {
    "model": "default (the offline demo), a folder, a .gguf file, or a hub id, which is downloaded on first use",
    "embedder": "default (bundled, knows English), or a folder or hub id of sentence-transformers. Passages are "
    "embedded anew in the background, while the embedder in use answers.",
    "reranker": "a cross-encoder that sorts the passages found: a folder or a hub id; empty for none",
    "ocr_language": "The letters of scanned pages, which are read with the extra `ocr`.",
    "skip": "Names that are left out when a folder is read, with commas between them; * stands for anything.",
    "method": "Passages were read separately. Re-reading parts of them together makes answers better.",
    "top_k": "How many passages of your documents the model gets to answer from.",
    "chunk_tokens": "Documents are cut into pieces of at most this length; 100 tokens are about 75 English words.",
    "temperature": "0: always the most likely word, so the same question gets the same answer.",
}
SLIDERS = (  # name, element, label, least, most, value, step
    ("ratio", "rb-ratio", "Percent to re-read", 0, 100, 100 * DEFAULT_RATIO, 1),
    ("top_k", "rb-top-k", "Passages per question", 1, 30, 6, 1),
    ("chunk_tokens", "rb-chunk", "Passage length, tokens", 64, 2048, 512, 32),
    ("max_new_tokens", "rb-longest", "Longest answer, tokens", 16, 2048, 256, 16),
    ("temperature", "rb-temperature", "Temperature (variety of words)", 0, 2, 0, 0.05),
)


def _form() -> dict[str, Any]:
    """The fields by the settings' names, in the order in which callbacks get their values."""
    modes = [("Manual", MANUAL), ("Automatic", AUTO)]
    return {
        "model": gr.Textbox(
            "default", label="Model", elem_id="rb-model", max_lines=1, info=FIELD_HELP["model"]
        ),
        "device": gr.Dropdown(DEVICES, value="", label="Device", elem_id="rb-device"),
        "search": gr.Dropdown(SEARCH_MODES, value="hybrid", label="Search by", elem_id="rb-search"),
        "embedder": gr.Textbox(
            "default", label="Embedder", elem_id="rb-embedder", max_lines=1, info=FIELD_HELP["embedder"]
        ),
        "reranker": gr.Textbox(
            "", label="Reranker", elem_id="rb-reranker", max_lines=1, info=FIELD_HELP["reranker"]
        ),
        "ocr_language": gr.Dropdown(
            SCAN_LANGUAGES,
            value="default",
            label="Scans are in",
            elem_id="rb-scans",
            info=FIELD_HELP["ocr_language"],
        ),
        "skip": gr.Textbox(
            "", label="Files to skip", elem_id="rb-skip", max_lines=2, info=FIELD_HELP["skip"]
        ),
        "method": gr.Dropdown(
            METHOD_CHOICES,
            value=DEFAULT_METHOD,
            label="Reuse method",
            elem_id="rb-method",
            info=FIELD_HELP["method"],
        ),
        "mode": gr.Radio(modes, value=MANUAL, label="Share to re-read", elem_id="rb-ratio-mode"),
    } | {
        name: gr.Slider(
            least,
            most,
            value=value,
            step=step,
            label=label,
            elem_id=element,
            info=FIELD_HELP.get(name),
            interactive=True,
        )
        for name, element, label, least, most, value, step in SLIDERS
    }


class SettingsTab:
    """Lays the tab out and connects it; the form is filled whenever the tab is opened."""

    def __init__(self, context: PageContext, tab: gr.Tab) -> None:
        self._services = context.services
        self._machine: MachineCapacity | None = None
        self._download: ModelDownload | None = None
        with gr.Row(elem_id="rb-settings"):
            with gr.Column(min_width=300):
                self._picker = gr.Dropdown([], value=None, label="Choose a model", elem_id="rb-model-choice")
                self._form = _form()
            with gr.Column(min_width=300):
                theme = gr.Radio(THEMES, value="system", label="Theme", elem_id="rb-theme")
                self._meaning = html_component("rb-ratio-meaning", has_buttons=False)
                # Messages are below the button, so that they do not move it away from under the mouse. The result of
                # saving has its own component, because the cost of a change may arrive after it.
                save = gr.Button("Save", variant="primary", elem_id="rb-save", scale=0)
                self.outcome = html_component("rb-saved", has_buttons=False)
                self._stop = gr.Button(
                    "Stop the download", size="sm", elem_id="rb-stop-download", visible=False, scale=0
                )
                self._cost = html_component("rb-cost", has_buttons=False)
                measure = gr.Button("Measure this device", size="sm", elem_id="rb-measure", scale=0)
                self._measured = html_component("rb-measured", has_buttons=False)
        fields, cost_outputs = list(self._form.values()), [self._form["ratio"], self._meaning, self._cost]
        one_by_one = QUEUED_CALL | {"concurrency_limit": 1}
        save.click(self.save, fields, [self.outcome, self._stop, self._cost], **one_by_one)
        self._stop.click(self.stop_download, None, None, **DIRECT_CALL)
        measure.click(self.measure, None, [self._measured], **one_by_one)
        tab.select(None, None, self.outcome, js=CLEAR_MESSAGE)
        tab.select(self.fill, None, [*fields, self._picker, self._meaning, self._cost], **DIRECT_CALL)
        tab.select(None, None, theme, js=GET_THEME)
        theme.input(None, theme, theme, js=SET_THEME)
        picked = [self._form["model"], *cost_outputs]
        self._picker.input(self.pick, [self._picker, *fields], picked, **DIRECT_CALL)
        for field in fields:
            field.input(self.price, fields, cost_outputs, trigger_mode="always_last", **DIRECT_CALL)

    def fill(self) -> Updates:
        settings, form = self._services.workspaces.settings, self._form
        is_manual = not isinstance(settings.ratio, str)
        share = settings.ratio if is_manual else DEFAULT_RATIO
        unconverted = ("model", "search", "ocr_language", "skip", "top_k", "chunk_tokens", "temperature")
        return {
            **{form[name]: getattr(settings, name) for name in unconverted},
            form["max_new_tokens"]: settings.answer_tokens,
            form["device"]: settings.device or "",
            form["embedder"]: settings.embedder or self._services.workspaces.first.embedder_name,
            form["reranker"]: settings.reranker or "",
            form["method"]: gr.update(choices=method_choices(settings.method), value=settings.method),
            form["mode"]: MANUAL if is_manual else AUTO,
            form["ratio"]: gr.update(value=round(100 * float(share), 2), visible=is_manual),
            self._meaning: _meaning(MANUAL if is_manual else AUTO, float(share)),
            self._picker: gr.update(choices=self._choices(settings), value=settings.model),
            self._cost: "",
        }

    def _choices(self, settings: Settings) -> list[tuple[str, str]]:
        """The models on this machine, the one in use, and some of the hub that would fit."""
        workspaces = self._services.workspaces
        here = local_models(workspaces.home.models)
        try:
            self._machine = self._machine or measure_machine(workspaces.of(settings.collection))
            fitting = offers(self._machine)
        except RagBlendError:  # such as a missing device, which is reported where it is used
            fitting = []
        return views.model_choices(here, fitting, settings.model)

    def pick(self, name: str | None, *values: Any) -> Updates:
        """Put the chosen model into the form; it is downloaded and used when the form is saved."""
        if not name:
            return {self._form["model"]: gr.skip()}
        return {**self.price(name, *values[1:]), self._form["model"]: name}

    def price(self, *values: Any) -> Updates:
        """Show what saving the form would cost."""
        form_values = dict(zip(self._form, values, strict=True))
        mode, ratio = form_values["mode"], form_values["ratio"] / 100
        updates = {
            self._form["ratio"]: gr.update(visible=mode == MANUAL),
            self._meaning: _meaning(mode, ratio),
        }
        try:
            return updates | {self._cost: views.settings.cost(self._changes_and_cost(form_values)[1])}
        except RagBlendError as error:
            return updates | {self._cost: problem(str(error))}

    def _changes_and_cost(self, form_values: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
        workspaces = self._services.workspaces
        before, changes = workspaces.settings, settings_in(form_values)
        if changes["max_new_tokens"] == before.answer_tokens:  # unchanged; the setting may be unset
            changes["max_new_tokens"] = before.max_new_tokens
        if before.embedder is None and changes["embedder"] == workspaces.first.embedder_name:
            changes["embedder"] = None
        for name in ("device", "reranker"):  # "" unsets it; None would leave it unchanged
            changes[name] = changes[name] or (getattr(before, name) and "")
        wanted = before.changed(changes)
        counts = workspaces.count_documents(), workspaces.count_passages()
        return changes, cost_of(before, wanted, *counts, self._profile())

    def _profile(self) -> Any:
        workspaces = self._services.workspaces
        try:
            known = workspaces.first.engine.known_profile
        except RagBlendError:  # the model in use is missing, but another one can be chosen
            return None
        return known.prefill if known is not None else None

    def save(self, *values: Any) -> Iterator[Updates]:
        """Save, after downloading a hub model. Settings that do not work are not saved."""
        from ragblend.engine.model.device import pick_device

        workspaces = self._services.workspaces
        try:
            changes, cost = self._changes_and_cost(dict(zip(self._form, values, strict=True)))
            model = str(changes.get("model", workspaces.settings.model))
            before = workspaces.settings.model
            if model != before:
                check_model(model, workspaces.home.models)
                if needs_download(model):
                    yield from self._download_model(model)
            for name, find in (("embedder", find_embedder), ("reranker", find_reranker)):
                if (wanted := changes[name]) and wanted != getattr(workspaces.settings, name):
                    if needs_download(wanted):
                        yield from self._download_model(wanted)
                    find(wanted)
            if device := changes.get("device"):
                pick_device(device)
            save_settings(workspaces.home.settings, changes)
            workspaces.change(**changes)
            previous_model = before if model != before else None
            queued_files = self._queue_all_documents() if cost.encodes_again else 0
            self._services.jobs.wake()  # passages are embedded in the background if the embedder is new
            updates = {self.outcome: views.settings.saved(queued_files, previous_model), self._cost: ""}
        except RagBlendError as error:
            updates = {self.outcome: problem(str(error))}
        yield updates | {self._stop: gr.update(visible=False)}

    def stop_download(self) -> None:
        if self._download is not None:
            self._download.stop()

    def _download_model(self, model: str) -> Iterator[Updates]:
        """Download a model and show the progress; closing the page stops it."""
        self._download = download = ModelDownload(model)
        try:
            has_ended = False
            while not has_ended:
                progress = views.settings.downloading(
                    model, download.done, download.total, download.seconds_left
                )
                yield {self.outcome: progress, self._stop: gr.update(visible=True)}
                has_ended = download.wait(DRAW_EVERY_S)
        finally:
            download.stop()
            self._download = None

    def measure(self) -> Iterator[Updates]:
        """Measure model and disk, for estimates of full prefill and for the automatic ratio."""
        from ragblend.engine.engine import require_local_engine

        yield {self._measured: problem("Measuring for about a minute; questions wait …", "info")}
        message = problem("Measured. Answers now show how long full prefill would have taken.", "info")
        try:
            require_local_engine(self._services.workspaces.first.engine, "measuring the device").profile()
        except RagBlendError as error:
            message = problem(str(error))
        yield {self._measured: message}

    def _queue_all_documents(self) -> int:
        """Queue every document: those whose recipe has changed are ingested again."""
        workspaces, count = self._services.workspaces, 0
        for name in workspaces.names():
            paths = [document.file for document in workspaces.library.documents(name)]
            if paths:
                count += self._services.jobs.add(paths, name).files
        return count


def method_choices(method: str) -> list[tuple[str, str]]:
    """The methods to choose from, with the current one if the list lacks it: a file or `tune` may add parameters."""
    return METHOD_CHOICES if method in LABELS else [*METHOD_CHOICES, (method, method)]


def settings_in(form_values: dict[str, Any]) -> dict[str, Any]:
    """The settings that the form's values, by field name, stand for."""
    return {
        "model": (form_values["model"] or "").strip() or "default",
        "device": form_values["device"] or None,
        "search": form_values["search"],
        "embedder": (form_values["embedder"] or "").strip() or "default",
        "reranker": (form_values["reranker"] or "").strip(),
        "ocr_language": form_values["ocr_language"] or None,
        "skip": (form_values["skip"] or "").strip(),
        "method": form_values["method"] or None,
        "ratio": AUTO if form_values["mode"] == AUTO else round(form_values["ratio"] / 100, 4),
        "top_k": int(form_values["top_k"]),
        "chunk_tokens": int(form_values["chunk_tokens"]),
        "max_new_tokens": int(form_values["max_new_tokens"]),
        "temperature": float(form_values["temperature"]),
    }


def _meaning(mode: str, ratio: float) -> str:
    if mode == AUTO:
        return views.settings.meaning(
            "The model re-reads as much as it can while stored passages are loaded from the disk, at least "
            f"{DEFAULT_RATIO:.0%}."
        )
    return views.settings.meaning(views.ratio_meaning(ratio))
