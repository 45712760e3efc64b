"""What the tests of both adapters share: a tiny model on disk, and homes of their own."""

import sys
from pathlib import Path

import pytest

# importlib mode puts no folder of tests on the path
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import tiny_models

from ragblend.integrations.backend import Backend


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random model of four layers, which never ends an answer by itself."""
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models") / "llama", is_endless=True)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> Path:
    """Another model."""
    return tiny_models.save_model("qwen2", tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="session")
def caller_folder(tmp_path_factory) -> Path:
    """A model whose chat template has tools."""
    folder = tmp_path_factory.mktemp("models") / "caller"
    return tiny_models.save_model("llama", folder, is_endless=True, template=tiny_models.TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def judged(tmp_path_factory) -> Path:
    """Where the gate's verdict on the tiny model is kept, so that it is made once a session."""
    return tmp_path_factory.mktemp("judged")


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
