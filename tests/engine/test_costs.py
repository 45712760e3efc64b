"""What the store is told that a token costs: from the measured profile, comparable with what was stored before it."""

import pytest

from ragblend.engine.config import EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.resources import Resources
from ragblend.kvstore.profile import PrefillProfile

GRID = PrefillProfile.of(
    "made up", (0, 1000), (256, 512, 1024), lambda cached, new: new * (1 + cached / 1000) + 256
)


@pytest.fixture
def resources(tmp_path, monkeypatch):
    monkeypatch.setattr(Resources, "profile_path", tmp_path / "profile.json")
    return Resources(EngineConfig(), tmp_path)


def test_without_a_profile_all_tokens_cost_the_same(resources):
    assert resources._cost(0, 512) == resources._cost(4000, 10) == 1.0


def test_with_one_a_token_costs_what_it_takes_as_a_multiple_of_a_usual_one(resources):
    DeviceProfile("made up", GRID, ()).save(resources.profile_path)
    assert resources._cost(0, 512) == 1.0
    assert resources._cost(0, 256) == pytest.approx((2.0) / (1.5))
    assert resources._cost(1000, 512) == pytest.approx((2 + 0.5) / 1.5)
