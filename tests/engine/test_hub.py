"""Models of the hub, from a server on this machine: downloaded, stopped, resumed, found again."""

import json
import threading

import huggingface_hub.constants
import pytest
from hub_server import serve_hub
from waiting import started

from ragblend.engine.model import hub
from ragblend.engine.model.checkpoints import find_model
from ragblend.kvstore.errors import DownloadStoppedError, ModelNotFoundError

NAME = "anna/tiny"
WEIGHTS = 30_000_000
HELD_AFTER = 12_000_000  # more than a go of the hub's library, which are 10 MiB


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(250)) * (WEIGHTS // 250))
    return folder


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Let the hub's library ask that server, and keep its files apart."""

    def use(server):
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    return use


def test_a_model_is_downloaded_once_then_found_offline(model, use):
    with serve_hub(NAME, model) as server:
        use(server)
        assert hub.is_hub_id(NAME) and hub.local_copy(NAME) is None
        seen = []
        folder = hub.download(NAME, lambda *numbers: seen.append(numbers))
        assert seen[0][0] >= 0 and seen[-1][0] <= WEIGHTS + 4 and seen == sorted(seen)
        assert seen[-1][0] >= WEIGHTS and {total for _, total in seen} == {WEIGHTS + 4}
        assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        asked = len(server.asked)
        assert find_model(NAME) == folder
        assert len(server.asked) == asked


def test_a_stopped_download_is_incomplete_and_resumes(model, use):
    with serve_hub(NAME, model, hold_after=HELD_AFTER) as server:
        use(server)
        arrived, stop, ended = threading.Event(), threading.Event(), []

        def watch(done, total):
            if done > 1_000_000:
                arrived.set()

        def fetch():
            with pytest.raises(DownloadStoppedError, match="kept"):
                hub.download(NAME, watch, stop)
            ended.append(True)

        thread = started(fetch)
        assert arrived.wait(60)
        stop.set()
        server.go_on.set()
        thread.join(60)
        assert ended and hub.local_copy(NAME) is None
        seen = []
        hub.download(NAME, lambda *numbers: seen.append(numbers))
        assert seen[0][0] >= 10_000_000, "the first bytes were fetched again"
        assert hub.local_copy(NAME) is not None


def test_missing_weight_files_are_fetched(model, use):
    """As after a kill between two files: the folder is there, and a part that its index names is not."""
    (model / "model.safetensors").rename(model / "model-1-of-2.safetensors")
    (model / "model-2-of-2.safetensors").write_bytes(b"second")
    parts = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with serve_hub(NAME, model) as server:
        use(server)
        folder = hub.download(NAME)
        assert hub.local_copy(NAME) == folder
        (folder / "model-2-of-2.safetensors").unlink()
        assert hub.local_copy(NAME) is None
        assert (find_model(NAME) / "model-2-of-2.safetensors").read_bytes() == b"second"


@pytest.mark.parametrize("name", ["anna/other", "anna/we ird"])
def test_unknown_hub_models_are_reported_by_name(model, use, name):
    with serve_hub(NAME, model) as server:
        use(server)
        with pytest.raises(ModelNotFoundError, match=name):
            hub.download(name)


@pytest.mark.parametrize(
    "name", ["default", "a/b/c", "/owner/name", "./owner", "owner/x.gguf", "owner/", "tiny"]
)
def test_other_names_are_not_hub_ids(name):
    assert not hub.is_hub_id(name)
