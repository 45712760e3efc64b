"""The Settings tab: saved settings apply at once and after a restart; invalid ones are not saved."""

import pytest

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

import gradio as gr
from serverless import built

from ragblend.app.settings import Settings
from ragblend.ui.page_context import PageContext
from ragblend.ui.tab_settings import SettingsTab


class Tab:
    """The tab over a home without a model."""

    def __init__(self, services):
        self.workspaces = services.workspaces
        with gr.Blocks(), gr.Tab() as tab:
            self.tab = SettingsTab(PageContext(services), tab)

    @property
    def shown(self):
        """The form's values by their names, as it is filled when the tab is opened."""
        filled = {name: self.tab.fill()[field] for name, field in self.tab._form.items()}
        return {name: each["value"] if isinstance(each, dict) else each for name, each in filled.items()}

    @property
    def in_file(self):
        return Settings.read(self.workspaces.home.settings, environment={})

    def save(self, **changes):
        """What is said."""
        *_, last = self.tab.save(*(self.shown | changes).values())
        return last[self.tab.outcome]


@pytest.fixture
def tab(tmp_path):
    with built(tmp_path, Tab) as (made, _):
        yield made


@pytest.fixture
def reranker(tmp_path):
    """A folder that looks like one, as far as it is looked at before it is used."""
    folder = tmp_path / "reranker"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return str(folder)


def test_saved_settings_apply_at_once_and_after_a_restart(tab, reranker) -> None:
    wanted = {
        "device": "cpu", "search": "vectors", "method": "random", "top_k": 3, "chunk_tokens": 96,
        "max_new_tokens": 48, "temperature": 0.5, "ocr_language": "greek", "skip": "*.bak, drafts",
    }  # fmt: skip
    assert "Saved" in tab.save(**wanted, reranker=f" {reranker} ", mode="manual", ratio=30)
    for settings in (tab.workspaces.settings, tab.in_file):
        assert {name: getattr(settings, name) for name in wanted} == wanted
        assert (settings.reranker, settings.ratio) == (reranker, 0.3)
    assert tab.shown.items() >= {**wanted, "reranker": reranker, "mode": "manual", "ratio": 30}.items()
    tab.save(mode="auto")
    assert tab.workspaces.settings.ratio == tab.in_file.ratio == tab.shown["mode"] == "auto"


def test_saving_what_is_shown_changes_nothing(tab) -> None:
    before = tab.workspaces.settings
    assert "Saved" in tab.save()
    assert tab.workspaces.settings == tab.in_file == before


@pytest.mark.parametrize(("field", "missing"), [("reranker", "/no/such/reranker"), ("device", "cuda")])
def test_what_is_missing_is_not_saved(tab, monkeypatch, field, missing) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = tab.workspaces.settings
    assert missing in tab.save(top_k=3, **{field: missing})
    assert tab.workspaces.settings == before
    assert (getattr(tab.in_file, field), tab.in_file.top_k) == (getattr(before, field), before.top_k)


def test_emptied_fields_mean_no_reranker_and_the_fastest_device(tab, reranker) -> None:
    tab.save(reranker=reranker, device="cpu")
    assert "Saved" in tab.save(reranker=" ", device="")
    for settings in (tab.workspaces.settings, tab.in_file):
        assert not (settings.reranker or settings.device)
    assert (tab.shown["reranker"], tab.shown["device"]) == ("", "")
