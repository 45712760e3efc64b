"""Models that cannot be loaded raise a named error with what was found and what to do; and loading at one time."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial

import pytest
import tiny_models
import torch
from benches import make_prompt
from doubles import raising
from safetensors.torch import load_file, save_file
from waiting import at_once, until

from ragblend import Engine
from ragblend.engine.model import checkpoints as files
from ragblend.engine.model.checkpoints import file_digest
from ragblend.engine.model.convert import _create
from ragblend.engine.model.load import load
from ragblend.integrations.embeddings import Embedder
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


def without_tokenizer(folder):
    for file in [*folder.glob("token*"), *folder.glob("special*"), *folder.glob("chat*")]:
        file.unlink()


def with_another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128, "head_dim": 32}))


def without_one_weight(folder):
    """transformers would fill it with random numbers."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_content(name, content):
    """content: of that file instead; a number: its new length; None: removed."""

    def damage(folder):
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else whole[:content])

    return damage


CONFIGS = ["", "{", "[]", "{}", '{"model_type": "no such thing"}']
TOKENIZERS = [None, "", "{", '{"version": "1.0"}', '{"model": {"type": "BPE"}}']
LENGTHS = (None, 0, 4, 100, 20_000, -1)
UNFIT = (CorruptModelError, TokenizerMissingError)
DAMAGES = [
    (without_tokenizer, TokenizerMissingError, "no tokenizer.*copy"),
    (with_another_shape, CorruptModelError, "broken"),
    (without_one_weight, CorruptModelError, "broken"),
    (with_content("config.json", None), ModelNotFoundError, "broken"),
    *[(with_content("config.json", content), UNFIT, "broken") for content in CONFIGS],
    *[(with_content("tokenizer.json", content), TokenizerMissingError, "broken") for content in TOKENIZERS],
    *[(with_content("model.safetensors", keep), CorruptModelError, "broken") for keep in LENGTHS],
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGES)
def test_damaged_and_incomplete_models_are_reported(broken, ask, damage, error, message):
    damage(broken)
    with pytest.raises(error, match=message):
        ask(broken)


PATHS = "/no-such-folder ./no-such-folder no-such-name folder/missing.gguf a/b/c ~nobody-of-that-name/a/model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[(path, "there is no model") for path in [*PATHS.split(), "/" + 300 * "long"]],
        ("nobody/no-such-model", "hub"),
        (__file__, r"not a \.gguf"),
        ("default", "not installed; run"),
    ],
)
def test_missing_models_are_reported(ask, monkeypatch, name, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=message):
        ask(name)


# --- GGUF


@pytest.fixture(scope="module")
def bundled():
    return files.find_model("default")


RUBBISH = [b"GGUF", b"GGUF" + bytes(100), b"GGUF\x03\x00\x00\x00" + b"\xff" * 64]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *[(other, " does not begin with GGUF") for other in (b"", b"GG", b"PK\x03\x04" + bytes(100))],
        *[(rubbish, " cannot be read") for rubbish in RUBBISH],
        *[(keep, "") for keep in (24, 400_000)],
    ],
    ids=["empty", "short", "zip", "magic", "zeros", "ones", "cut at 24", "cut at 400000"],
)
def test_damaged_gguf_files_are_reported_and_leave_nothing(ask, tmp_path, bundled, content, message):
    """content: a number is the length to which the bundled model's file is cut."""
    if isinstance(content, int):
        with bundled.open("rb") as stream:
            content = stream.read(content)
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CorruptModelError, match=rf"model\.gguf{message}"):
        ask(file)
    assert [path for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()] == []


def test_drafts_of_killed_conversions_are_removed_after_a_day(tmp_path):
    models = tmp_path / "models"
    for name, hours in (("killed", 25), ("at work", 1)):
        (models / f".converting-{name}").mkdir(parents=True)
        (models / f".converting-{name}" / "model.safetensors").write_bytes(bytes(9))
        then = time.time() - 3600 * hours
        os.utime(models / f".converting-{name}", (then, then))
    _create(models / "made", "config.json", lambda draft: (draft / "config.json").write_text("{}"))
    assert {path.name for path in models.iterdir()} == {"made", ".converting-at work"}


@pytest.fixture
def full():
    """Raises as a full disk does."""
    return raising(OSError(errno.ENOSPC, "No space left on device"))


def test_a_full_disk_during_conversion_is_reported(tmp_path, monkeypatch, full):
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(StoreFullError, match="converted model"):
        _create(tmp_path / "models" / "made", "config.json", lambda draft: None)


def test_files_are_hashed_on_a_full_disk(tmp_path, monkeypatch, full):
    (tmp_path / "file").write_bytes(b"weights")
    monkeypatch.setattr("ragblend.engine.model.checkpoints.replace_durably", full)
    assert file_digest(tmp_path / "file", tmp_path / "ledger.json") == hashlib.sha256(b"weights").hexdigest()


def test_weights_of_the_same_size_and_modification_time_have_another_digest(tmp_path):
    """As `rsync --inplace` and archives with normalised times leave them: stored KV of the old weights was used."""
    file, ledger = tmp_path / "file", tmp_path / "ledger.json"

    def write(content):
        file.write_bytes(content)
        os.utime(file, (0, 0))
        return file.stat().st_ctime_ns

    before = write(b"weights")
    first = file_digest(file, ledger)
    until(lambda: write(b"trained") != before)  # the clock of a file system has steps
    assert file_digest(file, ledger) == hashlib.sha256(b"trained").hexdigest() != first


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
        ({"fuse": "most"}, "fuse must be one of auto, all"),
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


def test_the_gate_runs_again_with_another_version_of_a_library(fresh_bench_for, tmp_path, monkeypatch):
    """A model that the new version runs otherwise was served by the old verdict."""
    from ragblend.engine import runtime
    from ragblend.engine.model import gate

    judged, judge = [], runtime.run_gate
    monkeypatch.setattr(runtime, "run_gate", lambda *a: judged.append(1) or judge(*a))
    one = fresh_bench_for("llama", home=tmp_path / "h")
    for number, version in enumerate(("5.18.0", "5.20.0"), start=1):
        monkeypatch.setattr(gate.transformers, "__version__", version)
        assert one.engine.gate.passed and len(judged) == number
        one.engine.close()


def test_a_gate_that_failed_to_run_is_run_again(fresh_bench_for, tmp_path, monkeypatch):
    """Out of memory today is no reason to refuse the model for ever."""
    from ragblend.engine.model import gate

    bench = fresh_bench_for("llama", home=tmp_path / "h")
    with monkeypatch.context() as broken:
        broken.setattr(gate, "ChunkEncoder", raising(MemoryError("no room")))
        assert not bench.engine.gate.passed
    bench.engine.close()
    assert bench.engine.gate.passed


# --- models that are loaded at the same time: transformers patches itself for the whole process meanwhile


def test_a_model_with_a_tied_head_is_whole_beside_others_that_load(tmp_path) -> None:
    """`lacks 1 weights (lm_head.weight, ...); fetch it again`, and 503, when the embedder was loaded beside it."""
    folder = tiny_models.save_model("llama", tmp_path / "llama", tie_word_embeddings=True)

    def work(one) -> None:
        for _ in range(6):
            one()

    def model() -> None:
        loaded = load(folder, torch.device("cpu"), "float32").model
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()

    loads = [model, lambda: Embedder(dtype="float32").load()] * 2
    at_once(*(partial(work, one) for one in loads))


IMPORTS = """
import sys, threading, time
from ragblend.engine.model.device import exclusive_model_loading

begun = threading.Event()

class Slow:
    def find_spec(self, name, *_):
        if name == "transformers.dependency_versions_check":  # the first part that the whole imports
            begun.set()
            time.sleep(0.2)

def load():
    with exclusive_model_loading():
        pass

def engine():
    from ragblend.engine.engine import Engine

sys.meta_path.insert(0, Slow())
assert "transformers" not in sys.modules
first, second = [load, engine][::int(sys.argv[1])]
thread = threading.Thread(target=first)
thread.start()
begun.wait()
second()
thread.join()
"""


@pytest.mark.parametrize("order", ["1", "-1"], ids=["embedder first", "engine first"])
def test_the_embedder_may_be_loaded_while_the_engine_is_imported(order) -> None:
    """A server that began over a home with work to do lost its model: `cannot import name 'DynamicCache'`."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, order], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
