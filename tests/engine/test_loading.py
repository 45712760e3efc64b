"""Models that cannot be loaded: a named error that says what was found and what to do."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from benches import make_prompt

from ragblend import Engine
from ragblend.engine.model import checkpoints as files
from ragblend.engine.model.checkpoints import file_digest
from ragblend.engine.model.convert import _make
from ragblend.kvstore.errors import (
    CorruptModelError,
    ModelNotFoundError,
    StoreFullError,
    TokenizerMissingError,
    UsageError,
)


@pytest.fixture
def broken(model_folder, tmp_path):
    """A copy of a sound model, to break."""
    folder = tmp_path / "broken"
    shutil.copytree(model_folder("llama"), folder)
    return folder


@pytest.fixture
def ask(tmp_path):
    """Asks a model for its answer, as a user would."""

    def ask_(model):
        engine = Engine.open(str(model), home=tmp_path / "home", device="cpu", dtype="float32")
        try:
            return engine.generate(make_prompt(["the harbour"]), max_new_tokens=2)
        finally:
            engine.close()

    return ask_


def test_an_undamaged_copy_answers(broken, ask):
    """Or the tests below prove nothing."""
    assert ask(broken).token_ids


@pytest.fixture
def bars():
    """transformers' progress bars, which these tests have turned off."""
    from transformers.utils import logging

    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


def test_loading_hides_transformers_progress_bars(broken, ask, bars, capfd):
    """`ragblend ask` printed transformers' "Loading weights" among its own messages."""
    from transformers import AutoModelForCausalLM

    ask(broken)
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(str(broken))
    assert "Loading weights" in capfd.readouterr().err, "others' bars were turned off for good"


def test_a_missing_tokenizer_is_reported(broken, ask):
    for file in [*broken.glob("token*"), *broken.glob("special*"), *broken.glob("chat*")]:
        file.unlink()
    with pytest.raises(TokenizerMissingError, match=r"no tokenizer.*copy"):
        ask(broken)


CONFIGS = ["", "{", "[]", "{}", '{"model_type": "no such thing"}']
TOKENIZERS = [None, "", "{", '{"version": "1.0"}', '{"model": {"type": "BPE"}}']
DAMAGES = [
    ("config.json", None, ModelNotFoundError),
    *[("config.json", content, (CorruptModelError, TokenizerMissingError)) for content in CONFIGS],
    *[("tokenizer.json", content, TokenizerMissingError) for content in TOKENIZERS],
    *[("model.safetensors", keep, CorruptModelError) for keep in (None, 0, 4, 100, 20_000, -1)],
]


@pytest.mark.parametrize(("name", "content", "error"), DAMAGES)
def test_damaged_and_missing_files_are_reported(broken, ask, name, content, error):
    """content: what there is instead; a number: how much there is of it; None: nothing."""
    file = broken / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else whole[:content])
    with pytest.raises(error, match="broken"):
        ask(broken)


def test_weights_of_another_shape_are_reported(broken, ask):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 128, "head_dim": 32}))
    with pytest.raises(CorruptModelError, match="broken"):
        ask(broken)


def test_missing_weights_are_reported(broken, ask):
    """transformers fills what it misses with random numbers; an answer from those is worse than an error."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModelError, match="broken"):
        ask(broken)


@pytest.mark.parametrize(
    "name",
    [
        "/no-such-folder",
        "./no-such-folder",
        "no-such-name",
        "folder/missing.gguf",
        "a/b/c",
        "~nobody-of-that-name/a/model",
        "/" + 300 * "long",
    ],
)
def test_unknown_paths_are_reported(ask, name):
    with pytest.raises(ModelNotFoundError, match="there is no model"):
        ask(name)


def test_an_unavailable_hub_id_is_reported(ask, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="hub"):
        ask("nobody/no-such-model")


def test_a_file_that_is_not_gguf_is_reported(ask, tmp_path):
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf"):
        ask(tmp_path / "model.txt")


def test_a_missing_default_model_is_reported(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="not installed; run"):
        ask("default")


# --- GGUF


@pytest.fixture(scope="module")
def bundled():
    return files.find_model("default")


def write(tmp_path, content):
    path = Path(tmp_path) / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)], ids=["empty", "short", "zip"])
def test_a_gguf_that_is_another_kind_of_file(ask, tmp_path, content):
    with pytest.raises(CorruptModelError, match=r"model\.gguf does not begin with GGUF"):
        ask(write(tmp_path, content))
    assert left_over(tmp_path / "home") == []


@pytest.mark.parametrize(
    "content",
    [b"GGUF", b"GGUF" + bytes(100), b"GGUF\x03\x00\x00\x00" + b"\xff" * 64],
    ids=["magic", "zeros", "ones"],
)
def test_a_gguf_of_rubbish(ask, tmp_path, content):
    with pytest.raises(CorruptModelError, match=r"model\.gguf cannot be read"):
        ask(write(tmp_path, content))
    assert left_over(tmp_path / "home") == []


@pytest.mark.parametrize("keep", [24, 400_000])
def test_a_real_gguf_cut_short(ask, tmp_path, bundled, keep):
    with bundled.open("rb") as stream:
        content = stream.read(keep)
    with pytest.raises(CorruptModelError, match=r"model\.gguf"):
        ask(write(tmp_path, content))
    assert left_over(tmp_path / "home") == []


def left_over(home):
    """Folders under models: nothing half converted may stay."""
    return [path.name for path in (home / "models").iterdir() if path.is_dir()]


def test_drafts_of_killed_conversions_are_removed_after_a_day(tmp_path):
    models = tmp_path / "models"
    for name, hours in (("killed", 25), ("at work", 1)):
        (models / f".converting-{name}").mkdir(parents=True)
        (models / f".converting-{name}" / "model.safetensors").write_bytes(bytes(9))
        then = time.time() - 3600 * hours
        os.utime(models / f".converting-{name}", (then, then))
    _make(models / "made", "config.json", lambda draft: (draft / "config.json").write_text("{}"))
    assert {path.name for path in models.iterdir()} == {"made", ".converting-at work"}


def test_a_full_disk_during_conversion_is_reported(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(StoreFullError, match="converted model"):
        _make(tmp_path / "models" / "made", "config.json", lambda draft: None)


def test_files_are_hashed_on_a_full_disk(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_bytes(b"weights")
    monkeypatch.setattr("ragblend.engine.model.checkpoints.replace_durably", full)
    assert file_digest(tmp_path / "file", tmp_path / "ledger.json") == hashlib.sha256(b"weights").hexdigest()


# --- where data lives


def test_an_impossible_home_is_reported(model_folder, tmp_path):
    from ragblend.kvstore.errors import StoreError

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be made"):
        Engine.open(str(model_folder("llama")), home=tmp_path / "file" / "home")


def test_the_environment_variable_sets_the_home(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RAGBLEND_HOME", str(tmp_path / "of the environment"))
    engine = Engine.open(str(model_folder("llama")), device="cpu", dtype="float32")
    assert engine.home == tmp_path / "of the environment"
    assert engine.home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": ""}, "no model"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "tpu"}, "tpu"),
        ({"store_budget_bytes": 0}, "budget"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_invalid_settings_are_refused(model_folder, tmp_path, monkeypatch, options, named):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=named):
        _ = Engine.open(**{"model": str(model_folder("llama")), "home": tmp_path} | options).device


def test_the_gates_verdict_is_saved_and_a_damaged_one_replaced(fresh_bench_for, tmp_path, monkeypatch):
    from ragblend.engine import runtime

    judged, judge = [], runtime.run_gate
    monkeypatch.setattr(runtime, "run_gate", lambda *a: judged.append(1) or judge(*a))
    one = fresh_bench_for("llama", home=tmp_path / "h")
    verdict = one.engine.gate
    one.engine.close()
    assert one.engine.gate == verdict
    assert len(judged) == 1
    one.engine.close()
    (file,) = (tmp_path / "h" / "models").glob("gate-*")
    for number, broken in enumerate(("{", file.read_text().replace('"half"', '"hald"', 1)), start=2):
        file.write_text(broken)  # of another layout keys would be moved as if it were the usual one
        assert one.engine.gate == verdict
        assert len(judged) == number
        one.engine.close()


def test_a_gate_that_failed_to_run_is_run_again(fresh_bench_for, tmp_path, monkeypatch):
    """Out of memory today is no reason to refuse the model for ever."""
    from ragblend.engine.model import gate

    bench = fresh_bench_for("llama", home=tmp_path / "h")
    with monkeypatch.context() as broken:
        broken.setattr(gate, "ChunkEncoder", lambda *a: (_ for _ in ()).throw(MemoryError("no room")))
        assert not bench.engine.gate.passed
    bench.engine.close()
    assert bench.engine.gate.passed
