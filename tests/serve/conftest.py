"""Homes, tiny models, and one server for a file's tests."""

import sys
from pathlib import Path

import pytest

# importlib mode puts no folder of tests on the path
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parent))

import tiny_models
from servers import serving

from ragblend.app.serve.service import Limits


@pytest.fixture(scope="session")
def judged(tmp_path_factory):
    """Where the gate's verdict on the tiny models is kept, so that it is made once a session."""
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random model of four layers, which never ends an answer by itself."""
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models") / "llama", is_endless=True)


@pytest.fixture(scope="module")
def home_of(tmp_path_factory, judged):
    def make():
        home = tmp_path_factory.mktemp("home")
        (home / "models").symlink_to(judged, target_is_directory=True)
        return home

    return make


@pytest.fixture(scope="module")
def served(home_of, tiny_folder):
    with serving(home_of(), tiny_folder, Limits(answer_s=120)) as found:
        yield found
