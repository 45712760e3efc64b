"""The Settings tab: what may be chosen, what a change costs first, saving it. Wiring only."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gradio as gr

from ragblend.app.model_download import ModelDownload, must_be_fetched
from ragblend.app.reencoding import Cost, cost_of
from ragblend.app.settings_file import save_settings
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import RagBlendError, SettingsError
from ragblend.ui import render_settings
from ragblend.ui.context import QUICK, Context, drawn
from ragblend.ui.render_compare import LABELS
from ragblend.ui.render_text import problem
from ragblend.ui.tab_compare import CHOICES

Updates = dict[Any, Any]
AUTO, MANUAL = "auto", "manual"
DRAW_EVERY_S = 0.5
DEVICES = [("The best there is", ""), ("CPU", "cpu"), ("CUDA", "cuda"), ("Apple (MPS)", "mps")]
THEMES = [("As the system", "system"), ("Light", "light"), ("Dark", "dark")]
SET_THEME = "(name) => { window.ragblend.theme(name); return name; }"
GET_THEME = "() => window.ragblend.keptTheme()"


@dataclass(frozen=True)
class Form:
    """The fields, in the order in which callbacks get them."""

    model: gr.Textbox
    device: gr.Dropdown
    method: gr.Dropdown
    ratio_mode: gr.Radio
    ratio: gr.Slider
    top_k: gr.Slider
    chunk_tokens: gr.Slider
    max_new_tokens: gr.Slider
    temperature: gr.Slider

    @property
    def all(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


def build(context: Context, tab: gr.Tab) -> None:
    """Lay the tab out and connect it; filled anew whenever it is opened."""
    with gr.Row(elem_id="rb-settings"):
        with gr.Column(min_width=300):
            form = _form()
        with gr.Column(min_width=300):
            theme = gr.Radio(THEMES, value="system", label="Theme", elem_id="rb-theme")
            meaning = drawn("rb-ratio-meaning", acts=False)
            # What is said stands below the button, which must not move away from under the mouse; and what became of it
            # apart from what a change costs, which may be said late.
            save = gr.Button("Save", variant="primary", elem_id="rb-save", scale=0)
            outcome = drawn("rb-saved", acts=False)
            stop = gr.Button(
                "Stop the download", size="sm", elem_id="rb-stop-download", visible=False, scale=0
            )
            cost = drawn("rb-cost", acts=False)
            measure = gr.Button("Measure this device", size="sm", elem_id="rb-measure", scale=0)
            measured = drawn("rb-measured", acts=False)
    acts = SettingsTab(context, form, meaning, cost, outcome)
    save.click(acts.save, form.all, [outcome, stop, cost], concurrency_limit=1, show_progress="hidden")
    stop.click(acts.stop_download, None, None, **QUICK)
    measure.click(acts.measure, None, [measured], concurrency_limit=1, show_progress="hidden")
    _connect(acts, form, tab, theme, meaning, cost, outcome)


def _form() -> Form:
    return Form(
        gr.Textbox(
            "default",
            label="Model",
            elem_id="rb-model",
            max_lines=1,
            info="default (bundled), a folder, a .gguf file, or a hub id, which is downloaded on first use",
        ),
        gr.Dropdown(DEVICES, value="", label="Device", elem_id="rb-device"),
        gr.Dropdown(CHOICES, value=DEFAULT_METHOD, label="Method", elem_id="rb-method"),
        gr.Radio(
            [("Chosen by hand", MANUAL), ("What loading hides", AUTO)],
            value=MANUAL,
            label="Share computed again",
            elem_id="rb-ratio-mode",
        ),
        gr.Slider(0, 1, value=DEFAULT_RATIO, step=0.01, label="Share", elem_id="rb-ratio", interactive=True),
        gr.Slider(
            1, 30, value=6, step=1, label="Passages per question", elem_id="rb-top-k", interactive=True
        ),
        gr.Slider(
            64, 2048, value=512, step=32, label="Passage length, tokens", elem_id="rb-chunk", interactive=True
        ),
        gr.Slider(
            16,
            2048,
            value=256,
            step=16,
            label="Longest answer, tokens",
            elem_id="rb-longest",
            interactive=True,
        ),
        gr.Slider(
            0,
            2,
            value=0,
            step=0.05,
            label="Temperature (0: always the likeliest word)",
            elem_id="rb-temperature",
            interactive=True,
        ),
    )


def _connect(
    acts: "SettingsTab",
    form: Form,
    tab: gr.Tab,
    theme: gr.Radio,
    meaning: gr.HTML,
    cost: gr.HTML,
    outcome: gr.HTML,
) -> None:
    tab.select(acts.fill, None, [*form.all, meaning, cost, outcome], **QUICK)
    tab.select(None, None, theme, js=GET_THEME)
    theme.input(None, theme, theme, js=SET_THEME)
    for field in form.all:
        field.input(acts.price, form.all, [form.ratio, meaning, cost], trigger_mode="always_last", **QUICK)


class SettingsTab:
    """The callbacks."""

    def __init__(
        self, context: Context, form: Form, meaning: gr.HTML, cost: gr.HTML, outcome: gr.HTML
    ) -> None:
        self._desk, self._form = context.desk, form
        self._meaning, self._cost, self._outcome = meaning, cost, outcome
        self._download: ModelDownload | None = None

    def fill(self) -> Updates:
        settings, form = self._desk.workspaces.settings, self._form
        by_hand = not isinstance(settings.ratio, str)
        share = settings.ratio if by_hand else DEFAULT_RATIO
        values = {
            name: getattr(settings, name)
            for name in ("model", "top_k", "chunk_tokens", "max_new_tokens", "temperature")
        }
        return {
            **{getattr(form, name): value for name, value in values.items()},
            form.device: settings.device or "",
            form.method: gr.update(choices=with_chosen(settings.method), value=settings.method),
            form.ratio_mode: MANUAL if by_hand else AUTO,
            form.ratio: gr.update(value=share, visible=by_hand),
            self._meaning: _meaning(MANUAL if by_hand else AUTO, float(share)),
            self._cost: "",
            self._outcome: "",
        }

    def price(self, *values: Any) -> Updates:
        """What saving this would cost."""
        mode, ratio = values[3], values[4]
        updates = {self._form.ratio: gr.update(visible=mode == MANUAL), self._meaning: _meaning(mode, ratio)}
        try:
            return updates | {self._cost: render_settings.cost(self._priced(values)[1])}
        except RagBlendError as error:
            return updates | {self._cost: problem(str(error))}

    def _priced(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], Cost]:
        workspaces = self._desk.workspaces
        before, changes = workspaces.settings, chosen(values)
        wanted = before.changed(changes)
        library, names = workspaces.of(before.collection).library, workspaces.names()
        documents = sum(sum(library.counts_by_state(name).values()) for name in names)
        passages = sum(library.count_passages(name) for name in names)
        return changes, cost_of(before, wanted, documents, passages, self._profile())

    def _profile(self) -> Any:
        workspaces = self._desk.workspaces
        known = workspaces.of(workspaces.settings.collection).engine.known_profile
        return known.prefill if known is not None else None

    def save(self, *values: Any) -> Iterator[tuple[str, Any, Any]]:
        """Save, after a hub model is here; what is saved works, or is not saved."""
        workspaces = self._desk.workspaces
        try:
            changes, price = self._priced(values)
            model = str(changes.get("model", workspaces.settings.model))
            if model != workspaces.settings.model:
                check_model(model)
                if must_be_fetched(model):
                    yield from self._fetched(model)
            save_settings(workspaces.home.settings, changes)
            workspaces.change(**changes)
            shown, said = render_settings.saved(self._read_again() if price.encodes_again else 0), ""
        except RagBlendError as error:
            shown, said = problem(str(error)), gr.skip()
        yield shown, gr.update(visible=False), said

    def stop_download(self) -> None:
        if self._download is not None:
            self._download.stop()

    def _fetched(self, model: str) -> Iterator[tuple[str, Any, Any]]:
        """Show a download until it is over; who goes away meanwhile stops it."""
        self._download = now = ModelDownload(model)
        try:
            over = False
            while not over:
                yield (
                    render_settings.downloading(model, now.done, now.total, now.seconds_left),
                    gr.update(visible=True),
                    gr.skip(),
                )
                over = now.wait(DRAW_EVERY_S)
        finally:
            now.stop()
            self._download = None

    def measure(self) -> Iterator[str]:
        """Measure model and disk, for estimates of full prefill and for `auto`."""
        yield problem("Measuring: about a minute, in which questions wait …", "info")
        workspaces = self._desk.workspaces
        try:
            workspaces.of(workspaces.settings.collection).engine.profile()
            yield problem("Measured. From now on answers say what full prefill would have taken.", "info")
        except RagBlendError as error:
            yield problem(str(error))

    def _read_again(self) -> int:
        """Put every document in the queue: those whose recipe no longer holds are read again there."""
        workspaces, count = self._desk.workspaces, 0
        for name in workspaces.names():
            paths = [Path(document.path) for document in workspaces.of(name).library.documents(name)]
            if paths:
                count += self._desk.jobs.add(paths, name).files
        return count


def with_chosen(method: str) -> list[tuple[str, str]]:
    """The methods to choose from: a name with parameters, from a file or from `tune`, is one more."""
    return CHOICES if method in LABELS else [*CHOICES, (method, method)]


def chosen(values: tuple[Any, ...]) -> dict[str, Any]:
    """The form's values as settings."""
    model, device, method, mode, ratio, top_k, chunk, longest, temperature = values
    return {
        "model": str(model).strip() or "default",
        "device": device or None,
        "method": method,
        "ratio": AUTO if mode == AUTO else float(ratio),
        "top_k": int(top_k),
        "chunk_tokens": int(chunk),
        "max_new_tokens": int(longest),
        "temperature": float(temperature),
    }


def check_model(name: str) -> None:
    """A path must exist; whether a hub id does is found when it is loaded. Raises SettingsError."""
    looks_local = name.startswith(("/", "./", "~")) or name.endswith(".gguf")
    if looks_local and not Path(name).expanduser().exists():
        raise SettingsError(
            f"The model {name!r} is not there. Name a folder or .gguf file that exists, or a hub id."
        )


def _meaning(mode: str, ratio: float) -> str:
    if mode == AUTO:
        return (
            '<p class="rb-small">As much is computed again as loading hides on this device, '
            f"{DEFAULT_RATIO:.0%} at least.</p>"
        )
    return f'<p class="rb-small">{render_settings.ratio_meaning(ratio)}</p>'
