"""A tuned method is in the settings until another one is given, and can be undone."""

import stat

import pytest

from ragblend.app.settings import Settings
from ragblend.app.tuned import MAX_CHOICES, choice_for, save_choice, tuned_file, undo_choice
from ragblend.engine.config import DEFAULT_RATIO
from ragblend.kvstore.errors import SettingsError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "settings.toml"


@pytest.fixture
def tuned(path):
    save_choice(tuned_file(path), "default", "cacheblend-gradual", 0.05, {"questions": 60})
    return path


def chosen(path, environment=None, **overrides):
    settings = Settings.read(path, environment or {}, overrides)
    return settings.method, settings.ratio


def test_the_choice_of_a_model_is_for_that_model(tuned) -> None:
    assert chosen(tuned) == ("cacheblend-gradual", 0.05)
    assert chosen(tuned, model="other") == ("probe-shift", DEFAULT_RATIO)
    assert chosen(tuned, {"RAGBLEND_MODEL": "other"}) == ("probe-shift", DEFAULT_RATIO)
    tuned.write_text('model = "other"')
    assert chosen(tuned) == ("probe-shift", DEFAULT_RATIO)
    assert chosen(tuned, model="default") == ("cacheblend-gradual", 0.05)


def test_given_method_overrides_tuned_choice_and_ratio(tuned) -> None:
    assert chosen(tuned, method="random") == ("random", DEFAULT_RATIO)
    assert chosen(tuned, {"RAGBLEND_METHOD": "random"}) == ("random", DEFAULT_RATIO)
    tuned.write_text('method = "random"')
    assert chosen(tuned) == ("random", DEFAULT_RATIO)


def test_given_ratio_applies_to_the_tuned_method(tuned) -> None:
    assert chosen(tuned, ratio=0.3) == ("cacheblend-gradual", 0.3)
    assert chosen(tuned, {"RAGBLEND_RATIO": "auto"}) == ("cacheblend-gradual", "auto")


def test_a_method_without_a_ratio_leaves_the_default_one(path) -> None:
    save_choice(tuned_file(path), "default", "reuse", None, {})
    assert chosen(path) == ("reuse", DEFAULT_RATIO)


def test_tuned_choices_are_undone_one_by_one(tuned) -> None:
    file = tuned_file(tuned)
    save_choice(file, "other", "random", 0.5, {})
    save_choice(file, "default", "epic", 0.1, {})
    undone, now = undo_choice(file, "default")
    assert (undone.method, now.method, now.measured) == ("epic", "cacheblend-gradual", {"questions": 60})
    assert chosen(tuned) == ("cacheblend-gradual", 0.05)
    undone, now = undo_choice(file, "default")
    assert (undone.ratio, now) == (0.05, None)
    assert chosen(tuned) == ("probe-shift", DEFAULT_RATIO)
    assert undo_choice(file, "default") is None
    assert choice_for(file, "other").method == "random"


def test_not_more_than_a_few_are_kept_and_only_their_user_may_read_them(path) -> None:
    for number in range(MAX_CHOICES + 3):
        save_choice(tuned_file(path), "default", "epic", number / 100, {})
    assert stat.S_IMODE(tuned_file(path).stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["tuned.json"]
    for _ in range(MAX_CHOICES):
        assert undo_choice(tuned_file(path), "default") is not None
    assert undo_choice(tuned_file(path), "default") is None


@pytest.mark.parametrize("text", ["", "[]", '{"models": {"default": [{"ratio": 1}]}}', '{"models": 3}', "{}"])
def test_a_damaged_file_is_named_with_its_remedy(path, text) -> None:
    tuned_file(path).write_text(text)
    with pytest.raises(SettingsError, match=r"tuned\.json.*Remove the file"):
        Settings.read(path, {})
