"""Tiny models on disk, and engines on private homes."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from benches import Bench, Clock
from shared_servers import redis_server, s3_port, shared_of  # noqa: F401
from transformers.utils import logging as transformers_logging

from ragblend import Engine

transformers_logging.disable_progress_bar()
gc.freeze()  # torch and transformers are half a million objects, which each full collection would look through


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Folder of a tiny model by its name in `tiny_models.KINDS`; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save_model(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def bench_for(model_folder, judged, tmp_path_factory):
    """A `Bench` with an engine and its own home; one for each model, dtype and options in a session."""
    made: dict[tuple, Bench] = {}

    def bench(name: str, dtype: str = "float32", **options: Any) -> Bench:
        if (wanted := (name, dtype, *options.items())) not in made:
            home = judged(tmp_path_factory.mktemp(f"bench-{name}") / "home")
            engine = Engine.open(str(model_folder(name)), home=home, device="cpu", dtype=dtype, **options)
            made[wanted] = Bench(name, model_folder(name), engine)
        return made[wanted]

    yield bench
    for held in made.values():
        held.engine.close()


@pytest.fixture
def fresh_bench_for(model_folder, judged, tmp_path):
    """The same, on an empty home (judged, unless a test gives one): for tests that count, break or evict."""
    made: list[Bench] = []

    def bench(name: str = "llama", **options: Any) -> Bench:
        home = options.pop("home", None) or judged(tmp_path / f"home{len(made)}")
        arguments = {"home": home, "device": "cpu", "dtype": "float32"} | options
        made.append(Bench(name, model_folder(name), Engine.open(str(model_folder(name)), **arguments)))
        return made[-1]

    yield bench
    for held in made:
        held.engine.close()


@pytest.fixture(params=tiny_models.SUPPORTED)
def bench(request, bench_for):
    """Every supported kind of model in turn."""
    return bench_for(request.param)


@pytest.fixture
def llama(bench_for):
    return bench_for("llama")


@pytest.fixture(scope="session")
def tokenizer():
    """That of the models which add no begin token, where no engine is needed."""
    return tiny_models.make_tokenizer(adds_bos=False)


@pytest.fixture
def own_tokenizer(tokenizer):
    """A copy, whose template may be replaced."""
    return copy.deepcopy(tokenizer)


@pytest.fixture
def stored(llama, request):
    """The llama, whose store has the passages of the module's TEXTS."""
    llama.engine.encode(request.module.TEXTS)
    return llama


@pytest.fixture
def each_stored(bench, request):
    """Every supported kind of model in turn, whose store has the passages of the module's TEXTS."""
    bench.engine.encode(request.module.TEXTS)
    return bench


@pytest.fixture
def stored_for(bench_for, request):
    """stored_for(kind): its bench, whose store has the passages of the module's TEXTS."""

    def stored(kind):
        bench_for(kind).engine.encode(request.module.TEXTS)
        return bench_for(kind)

    return stored


@pytest.fixture
def fresh(fresh_bench_for):
    """A llama on an empty home."""
    return fresh_bench_for("llama")


@pytest.fixture
def engine(fresh):
    """Its engine."""
    return fresh.engine


@pytest.fixture
def clock(monkeypatch):
    """The scheduler's clock, which stands still until a test sets it."""
    found = Clock()
    monkeypatch.setattr("ragblend.engine.scheduling.queue.time", found)
    return found


@pytest.fixture
def watch_layers(monkeypatch):
    """watch_layers(bench, seen): seen(layer, hidden, block, cache, ...) is called before each layer of that model."""

    def watch(bench, seen):
        decoder = bench.engine.runtime.decoder
        run_layer = decoder.run_layer

        def watched(*given):
            seen(*given)
            return run_layer(*given)

        monkeypatch.setattr(decoder, "run_layer", watched)

    return watch
