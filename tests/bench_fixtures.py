"""Fixtures: a tiny random Llama with its own tokenizer on the real engine, and a few questions."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

TEXT = (
    "the tramway keeper rang a bell when low tide left the causeway dry and the engine named Dunlin burned sawdust "
    "until its boiler sang over marsh and harbour while children counted lamps along every crossing in winter rain"
)
WORDS = TEXT.split()


def some_text(seed, words):
    """Different words for every seed, the same for the same one."""
    return " ".join(WORDS[(seed * 7 + place * (seed + 3)) % len(WORDS)] for place in range(words))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Four layers, a byte-level vocabulary, weights large enough that passages really change each other."""
    import tiny_models

    return tiny_models.save_model("llama", tmp_path_factory.mktemp("model") / "llama")


@contextmanager
def opened(model_folder, home):
    from ragblend import Engine

    engine = Engine.open(
        model=str(model_folder), home=home, device="cpu", dtype="float32", collection="bench"
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(model_folder, judged, home):
    """The real engine over the tiny model, closed afterwards."""
    with opened(model_folder, judged(home)) as engine:
        yield engine


@pytest.fixture(scope="session")
def shared_engine(model_folder, judged, tmp_path_factory):
    """The same for all tests that do not count what is stored."""
    with opened(model_folder, judged(tmp_path_factory.mktemp("shared") / "home")) as engine:
        yield engine


@pytest.fixture
def entries():
    """Four questions of three passages each, in the file's format."""
    return [
        {
            "ctxs": [{"title": f"page {q}{c}", "text": some_text(3 * q + c, 40)} for c in range(3)],
            "question": f"What did the keeper do on day {q}?",
            "answers": ["rang a bell", f"day {q}"],
        }
        for q in range(4)
    ]


@pytest.fixture
def data_file(entries, tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.fixture
def questions(data_file):
    from ragblend.measuring.data import load

    return load(data_file).questions


@pytest.fixture
def asked(monkeypatch):
    """Every (prompt, options) that a framework's adapter has the engine answer; the answers stay the engine's."""
    from ragblend.integrations.calls import PreparedCall

    found, generate = [], PreparedCall.generate

    def listening(self, on_text=None):
        prompt = self.make_prompt()
        found.append((prompt, self.call.arguments))
        return generate(replace(self, make_prompt=lambda: prompt), on_text)

    monkeypatch.setattr(PreparedCall, "generate", listening)
    return found


@pytest.fixture
def ctrl_c_at(monkeypatch):
    """Has it pressed at that record; gives what was asked of all."""
    from ragblend.measuring import quality

    record, calls = quality.record_of, []

    def at(number):
        def interrupted(*arguments):
            calls.append(arguments)
            if len(calls) == number:
                raise KeyboardInterrupt
            return record(*arguments)

        monkeypatch.setattr(quality, "record_of", interrupted)
        return calls

    return at


@pytest.fixture
def bench(model_folder, home, tmp_path):
    """`ragblend bench` as it is typed: bench(command, argument, ...) over the tiny model, with `out` for results."""
    from typer.testing import CliRunner

    from ragblend.app.quality.cli import bench_app

    def run(command, *arguments):
        where = ["--model", model_folder, "--home", home, "--device", "cpu", "--dtype", "float32"]
        line = [command, *where, "--output", tmp_path / "out", *arguments]
        return CliRunner().invoke(bench_app, [str(part) for part in line], catch_exceptions=False)

    return run
