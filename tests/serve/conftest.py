"""Fixtures of the server's tests: homes with tiny models, and one server per test file."""

import pytest
from servers import serving

from ragblend.app.serve.service import Limits


@pytest.fixture(scope="module")
def home_of(tmp_path_factory, judged):
    return lambda: judged(tmp_path_factory.mktemp("served") / "home")


@pytest.fixture(scope="module")
def served(home_of, tiny_folder):
    with serving(home_of(), tiny_folder, Limits(answer_s=120)) as found:
        yield found


@pytest.fixture(scope="module")
def caller(home_of, caller_folder):
    """A server whose model calls tools."""
    with serving(home_of(), caller_folder) as found:
        yield found
