"""Settings: file, environment and command line, in that order; nothing unknown and nothing impossible gets in.

What is written is only what was changed, atomically, for this user only.
"""

import pytest

from ragblend.app.settings import KV_CODECS, Settings, save_settings
from ragblend.kvstore.errors import SettingsError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "settings.toml"


def test_each_source_overrides_the_one_before(path):
    path.write_text('model = "file"\nratio = 0.3\ntop_k = 3\n')
    environment = {"RAGBLEND_RATIO": "0.4", "RAGBLEND_TOP_K": "4", "RAGBLEND_HOME": "/x", "OTHER": "1"}
    settings = Settings.read(path, environment, {"top_k": 5, "method": None})
    found = settings.model, settings.ratio, settings.top_k, settings.method
    assert found == ("file", 0.4, 5, "probe-shift")


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("raito = 0.2", {}, ["settings.toml", "'raito'", "'ratio'"]),
        ("[model]\nname = 'x'", {}, ["settings.toml", "model"]),
        ("", {"RAGBLEND_TOPK": "3"}, ["environment", "'topk'", "'top_k'"]),
        ("ratio = 'much'", {}, ["ratio", "'much'", "a number"]),
        ("top_k = 2.5", {}, ["top_k", "whole number"]),
        ("top_k = true", {}, ["top_k", "whole number"]),
        ("model = 3", {}, ["model", "text"]),
        ("ratio = nan", {}, ["ratio", "number"]),
        ("", {"RAGBLEND_TOP_K": "many"}, ["environment", "top_k", "'many'"]),
        ("this is not toml", {}, ["settings.toml", "Correct the file"]),
    ],
)
def test_wrong_settings_name_source_key_and_remedy(path, text, environment, words):
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        Settings.read(path, environment)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 2.0},
        {"ratio": -0.1},
        {"top_k": 0},
        {"chunk_tokens": 3},
        {"ocr_language": "klingon"},
        {"collection": "../up"},
        {"collection": ""},
        {"max_new_tokens": 0},
        {"keep_tokens": 0},
        {"temperature": -1.0},
        {"repetition_penalty": 0.0},
        {"store_budget_bytes": 0},
        {"memory_budget_bytes": -1},
        {"device_budget_bytes": -1},
        {"store_policy": "lrv"},
        {"kv_codec": "int3"},
        {"model": ""},
    ],
)
def test_impossible_values_are_refused(change):
    with pytest.raises(SettingsError, match=next(iter(change))):
        Settings().changed(change)


def test_the_codecs_are_the_stores():
    from ragblend.kvstore.codec import CODECS

    assert set(KV_CODECS) == set(CODECS)


def test_the_bundled_model_ends_with_a_sentence_unless_a_longer_answer_is_wanted(path):
    """What it says after that is invented."""
    bundled, other = Settings.read(path, {}), Settings.read(path, {}, {"model": "owner/large"})
    assert (bundled.answering["max_new_tokens"], bundled.answering["one_sentence"]) == (48, True)
    assert other.answering["max_new_tokens"] == 256 and "one_sentence" not in other.answering
    longer = bundled.changed({"max_new_tokens": 200})
    assert longer.answering["max_new_tokens"] == 200 and "one_sentence" not in longer.answering
    assert "135M" in Settings(model="x/SmolLM2-135M-Instruct-Q8.gguf").style.note and not other.style.note


@pytest.mark.parametrize("name", [None, "", 7, "../up", ["default"]])
def test_invalid_collection_name_is_refused(workspaces, name):
    """None became a collection, and after that nothing could be saved."""
    with pytest.raises(SettingsError, match="collection"):
        workspaces.of(name)
    assert workspaces.names() == ["default"]
    workspaces.create("letters")
    assert workspaces.change(top_k=3).top_k == 3


def test_saved_settings_are_loaded(path):
    save_settings(path, {"top_k": 9, "ratio": "auto", "temperature": 0.5, "model": 'a "quoted"\\name'})
    found = Settings.read(path, environment={})
    assert (found.top_k, found.ratio, found.temperature, found.model) == (9, "auto", 0.5, 'a "quoted"\\name')
    assert path.stat().st_mode & 0o777 == 0o600


def test_comments_and_other_values_stay(path):
    path.write_text("# mine\ntop_k = 3\ndtype = 'float32'\nmethod = 'reuse'  # quick\n")
    save_settings(path, {"top_k": 4, "device": None, "dtype": None})
    assert path.read_text() == "# mine\ntop_k = 4\nmethod = 'reuse'  # quick\n"


@pytest.mark.parametrize(
    "text",
    [
        '"top_k" = 3',
        "'top_k'=3  # quoted",
        'system = "one\u2028two"\ntop_k = 3',
        'system = """\ntop_k = 8\nmodel = x\n"""\ntop_k = 3\n',
        "top_k = 3\r\nmethod = 'reuse'\r\n",
        "\n# nothing\n\n",
    ],
)
def test_whatever_way_a_file_is_written_one_value_changes(path, text):
    path.write_bytes(text.encode())
    before = Settings.read(path, environment={})
    save_settings(path, {"top_k": 4, "temperature": 0.5, "model": "a\u2028b"})
    changed = {"top_k": 4, "temperature": 0.5, "model": "a\u2028b"}
    assert Settings.read(path, environment={}) == before.changed(changed)
    save_settings(path, {"top_k": None})
    assert Settings.read(path, environment={}) == before.changed(changed | {"top_k": Settings.top_k})


@pytest.mark.parametrize("changes", [{"top_k": 0}, {"ratio": 7}, {"nonsense": 1}, {"model": ""}])
def test_invalid_changes_have_no_effect(path, changes):
    path.write_text("top_k = 3\n")
    with pytest.raises(SettingsError):
        save_settings(path, changes)
    assert path.read_text() == "top_k = 3\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_shared_stores_url_is_a_setting_and_its_secrets_are_none(path):
    environment = {"RAGBLEND_REMOTE": "rediss://host:6379/0?ttl_s=60", "RAGBLEND_REMOTE_SALT": "hunter2"}
    settings = Settings.read(path, environment)
    assert settings.remote == "rediss://host:6379/0?ttl_s=60" and "hunter2" not in repr(settings)
    path.write_text('remote = "redis://:hunter2@host/0"\n')
    with pytest.raises(SettingsError, match="environment") as refused:
        Settings.read(path, {})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("method", ["random", "naive", "recompute"])
def test_control_methods_are_refused(open_workspace, method):
    with pytest.raises(SettingsError, match=r"is a control.*docs/methods\.md"):
        open_workspace(method=method).check_engine()
