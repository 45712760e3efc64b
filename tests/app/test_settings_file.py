"""Settings that are written: only what was changed, atomically, for this user only, and never something impossible."""

import pytest

from ragblend.app.settings import Settings, save_settings, with_changes
from ragblend.kvstore.errors import SettingsError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "settings.toml"


def test_what_is_written_is_read_again(path) -> None:
    save_settings(path, {"top_k": 9, "ratio": "auto", "temperature": 0.5, "model": 'a "quoted"\\name'})
    found = Settings.load(path, environment={})
    assert (found.top_k, found.ratio, found.temperature, found.model) == (9, "auto", 0.5, 'a "quoted"\\name')
    assert path.stat().st_mode & 0o777 == 0o600


def test_comments_and_other_values_stay(path) -> None:
    path.write_text("# mine\ntop_k = 3\nmethod = 'reuse'  # quick\n")
    save_settings(path, {"top_k": 4, "device": None})
    assert path.read_text() == "# mine\ntop_k = 4\nmethod = 'reuse'  # quick\n"


def test_none_takes_a_value_out(path) -> None:
    assert with_changes("device = 'cpu'\ntop_k = 3\n", {"device": None, "model": None}) == "top_k = 3\n"


def test_a_name_that_begins_alike_is_another(path) -> None:
    assert with_changes("top_k_more = 1\n", {"top_k": 2}) == "top_k_more = 1\ntop_k = 2\n"


@pytest.mark.parametrize("changes", [{"top_k": 0}, {"ratio": 7}, {"nonsense": 1}, {"model": ""}])
def test_what_is_impossible_changes_nothing(path, changes) -> None:
    path.write_text("top_k = 3\n")
    with pytest.raises(SettingsError):
        save_settings(path, changes)
    assert path.read_text() == "top_k = 3\n"
    assert list(path.parent.iterdir()) == [path]
