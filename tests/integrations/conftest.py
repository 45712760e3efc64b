"""What the tests of both adapters share: a tiny model on disk, and homes of their own."""

from pathlib import Path

import pytest
import tiny_models

from ragblend.integrations.backend import Backend


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> Path:
    """Another model."""
    return tiny_models.save_model("qwen2", tmp_path_factory.mktemp("models") / "other")


@pytest.fixture
def place(tiny_folder, judged, tmp_path):
    """What says where the tiny model and an empty home are, for either framework's model."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(judged, target_is_directory=True)
    where = {"model": str(tiny_folder), "home": str(tmp_path / "home"), "device": "cpu", "dtype": "float32"}
    yield where
    Backend(**where).engine.close()
    Backend(**where).registry.close()


@pytest.fixture
def passes():
    """Counts a model's forward passes: of an answer of 1,800 tokens that goes on to its end there are 1,800."""
    hooks, seen = [], []

    def watch(backend):
        model = backend.engine.runtime.loaded.model
        hooks.append(model.lm_head.register_forward_pre_hook(lambda *_: seen.append(1)))
        return seen

    yield watch
    for hook in hooks:
        hook.remove()


@pytest.fixture
def stopped():
    """Whether the device has stopped in the middle. It is granted in turn: nobody before goes on."""

    def check(backend, seen):
        with backend.engine.runtime.queue.turn():
            return 0 < len(seen) < 1500

    return check
