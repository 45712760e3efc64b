"""Fixtures of both adapters' tests: a tiny model on disk, and a home for each test."""

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
    """The arguments that open the tiny model on an empty home, in either framework."""
    home = judged(tmp_path / "home")
    where = {"model": str(tiny_folder), "home": str(home), "device": "cpu", "dtype": "float32"}
    yield where
    Backend(**where).engine.close()
    Backend(**where).registry.close()


@pytest.fixture
def passes():
    """Counts a model's forward passes: a whole answer of 1,800 tokens takes 1,800."""
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
    """Whether an answer was stopped early; the device is granted in turn, so no earlier request is still running."""

    def check(backend, seen):
        with backend.engine.runtime.queue.turn():
            return 0 < len(seen) < 1500

    return check
