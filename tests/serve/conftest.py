"""Fixtures of the server's tests: homes with tiny models, and one server per test file."""

import pytest
from servers import serving

from ragblend.app.serve.service import Limits


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
