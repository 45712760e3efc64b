"""Models: those on disk, suggestions, downloads, choosing one and going back."""

import json
import threading
from pathlib import Path

import pytest
from hub_server import serve_hub

from ragblend.app import models
from ragblend.app.model_offers import GIGABYTE, MachineCapacity, offers
from ragblend.app.models import GATED, SUGGESTIONS, LocalModel, ModelDownload, full_name
from ragblend.kvstore.errors import DownloadStoppedError, ModelNotFoundError
from ragblend.ui import views


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A hub's cache of this test alone: huggingface_hub reads where it is when it is imported."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(tiny_folder, hub_cache, monkeypatch):
    """A hub with one model, which is the whole network."""
    from huggingface_hub import constants

    with serve_hub("anna/tiny", tiny_folder) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        yield server


FAST = {"bytes_a_parameter": 2, "flops_per_s": 1e13, "bytes_per_s": 1e11}
SLOW = {"bytes_a_parameter": 4, "flops_per_s": 1e11, "bytes_per_s": 8e9}


def test_only_models_that_fit_are_offered():
    for free in (3, 4, 6, 8, 12, 40):
        found = offers(MachineCapacity(free * GIGABYTE, **FAST))
        assert 1 <= len(found) <= 3 or free < 3
        assert all(offer.memory_bytes <= free * GIGABYTE for offer in found)
        assert found == sorted(found, key=lambda offer: offer.memory_bytes)
    assert offers(MachineCapacity(1 * GIGABYTE, **FAST)) == []


def test_a_quick_machine_is_offered_the_largest_and_a_slow_one_is_not():
    quick, slow = (offers(MachineCapacity(40 * GIGABYTE, **speed)) for speed in (FAST, SLOW))
    assert quick[0].model is SUGGESTIONS[0] and quick[-1].model is SUGGESTIONS[-1] and len(quick) == 3
    assert slow[-1].model.parameters < 2e9 and slow[-1].first_token_s <= 90
    slowest = offers(MachineCapacity(40 * GIGABYTE, 4, 1e9, 1e8))
    assert [offer.model for offer in slowest] == [SUGGESTIONS[0]], "none is quick: the smallest"
    for found in (quick, slow, slowest):
        (best,) = (offer for offer in found if offer.is_best)
        comfortable = [offer for offer in found if offer.answer_s <= 30]
        assert best is (comfortable or found)[-1 if comfortable else 0]


def test_suggested_models_are_plausible():
    """bfloat16 takes two bytes a parameter; all are free to use, and have room for six passages."""
    for model in SUGGESTIONS:
        assert model.download_bytes == pytest.approx(2 * model.parameters, rel=0.02)
        assert model.licence in {"Apache-2.0", "MIT"} and model.window >= 8192 and model.kv_bytes % 1024 == 0
    assert list(SUGGESTIONS) == sorted(SUGGESTIONS, key=lambda model: model.parameters)
    assert not GATED.keys() & {model.name for model in SUGGESTIONS}


def test_local_models_are_listed(told, home, tiny_folder, hub_cache, tmp_path):
    """Converted ones, .gguf files, the hub's cache; an embedder of that cache is no model to ask."""
    (home / "models" / "tiny-0123-float32").mkdir(parents=True)
    for file in tiny_folder.iterdir():
        (home / "models" / "tiny-0123-float32" / file.name).write_bytes(file.read_bytes())
    (home / "models" / "mine.gguf").write_bytes(b"GGUF" + b"\0" * 96)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.gguf").write_bytes(b"GGUF")
    in_cache(hub_cache, "anna/tiny", tiny_folder)
    in_cache(hub_cache, "anna/embedder", tiny_folder, architectures=["BertModel"])
    rows = told("models", "list", "--folder", tmp_path / "more")["models"]
    kinds = {Path(row["name"]).name: row["kind"] for row in rows}
    assert kinds == {
        "default": "offline demo",
        "tiny": "hub",
        "mine.gguf": ".gguf",
        "other.gguf": ".gguf",
        "tiny-0123-float32": "converted",
    }
    assert [row["name"] for row in rows if row["current"]] == ["default"]
    assert all(row["bytes"] > 0 for row in rows)


def in_cache(cache, name, model, **changes):
    """Lay a model into the hub's cache as its library does."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1" * 40)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    config = json.loads((snapshot / "config.json").read_text()) | changes
    (snapshot / "config.json").write_text(json.dumps(config))


def test_suggestions_need_no_network(told, hub):
    rows = told("models", "suggest")["models"]
    assert told("models", "list") and hub.asked == []
    assert all(row["first_token_s"] > 0 and row["tokens_per_s"] > 0 for row in rows)


def test_failed_download_keeps_the_old_model(cli, hub, home, capfd):
    assert cli("models", "use", "anna/other") == 1
    assert "could not be downloaded from the hub" in capfd.readouterr().err
    assert cli("models", "use", "defualt") == 2
    assert "did you mean 'default'" in capfd.readouterr().err
    assert not (home / "settings.toml").exists()


def test_a_name_may_be_the_last_part_of_one():
    here = [LocalModel("anna/tiny", "hub", 1), LocalModel("/models/mine.gguf", ".gguf", 1)]
    assert full_name("Qwen2.5-0.5B-Instruct", here) == "Qwen/Qwen2.5-0.5B-Instruct"
    assert full_name("mine.gguf", here) == "/models/mine.gguf"
    assert full_name("tiny", [*here, LocalModel("berta/tiny", "hub", 1)]) == "tiny", "it could be either"
    assert full_name("elsewhere/mine", here) == "elsewhere/mine"


def test_changing_the_model_announces_reingesting(cli, hub, documents, capfd):
    assert cli("ingest", documents) == 0
    capfd.readouterr()
    assert cli("models", "use", "anna/tiny") == 0
    assert "3 documents were ingested for default" in capfd.readouterr().out


@pytest.mark.parametrize("first", ["ingest", "ask"])
def test_better_models_are_named_once_in_a_home(cli, documents, hub_cache, capfd, first):
    if first == "ask":
        assert cli("ingest", documents, "--json") == 0
        assert "Larger models of the hub" not in capfd.readouterr().err, "a program is not told"
    assert cli(first, documents if first == "ingest" else "Sky?") == 0
    told = capfd.readouterr().err
    assert "Larger models of the hub" in told and "ragblend models use default" in told
    assert any(model.name in told for model in SUGGESTIONS)
    assert cli("ask", "Sky?") == 0
    assert "Larger models of the hub" not in capfd.readouterr().err


def test_a_picker_offers_each_once_and_what_is_in_use():
    fitting = offers(MachineCapacity(40 * GIGABYTE, **FAST))
    here = [LocalModel("default", "offline demo", 100), LocalModel(fitting[0].model.name, "hub", 100)]
    choices = views.model_choices(here, fitting, "/my/model")
    names = [name for _, name in choices]
    assert names[0] == "/my/model" and len(names) == len(set(names)) == 5
    labels = {name: label for label, name in choices}
    assert "here" in labels["default"] and "here" in labels[fitting[0].model.name]
    assert "to download" in labels[fitting[-1].model.name] and "15.2 GB" in labels[fitting[-1].model.name]


def download_that(monkeypatch, act):
    monkeypatch.setattr(models, "download", act)
    return ModelDownload("anna/model")


@pytest.mark.parametrize("error", [ModelNotFoundError("no such model"), ZeroDivisionError("a bug")])
def test_download_error_is_raised_to_the_waiting_caller(monkeypatch, error):
    """An error of no kind of ours would have passed for a model that is here."""

    def fail(name, progress, stop):
        raise error

    going = download_that(monkeypatch, fail)
    with pytest.raises(type(error), match=str(error)):
        going.wait(60)


def test_download_reports_progress_until_it_ends(monkeypatch):
    come, go_on = threading.Event(), threading.Event()

    def fetch(name, progress, stop):
        progress(25, 100)
        come.set()
        assert go_on.wait(60)

    going = download_that(monkeypatch, fetch)
    assert come.wait(60) and not going.wait(0)
    assert (going.done, going.total) == (25, 100) and going.seconds_left > 0
    go_on.set()
    assert going.wait(60)


def test_stopped_download_reports_the_stop(monkeypatch):
    stopped = threading.Event()

    def fetch(name, progress, stop):
        assert stop.wait(60)
        stopped.set()
        raise ConnectionError("the line was cut")

    going = download_that(monkeypatch, fetch)
    assert going.seconds_left is None
    going.stop()
    with pytest.raises(DownloadStoppedError, match="kept for the next time"):
        going.wait(60)
    assert stopped.wait(60)
    going._thread.join(60)
    with pytest.raises(DownloadStoppedError):
        going.wait(0)
