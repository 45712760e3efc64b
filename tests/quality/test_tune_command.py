"""`ragblend tune` as a command, on the real engine."""

import json

import pytest

from ragblend.engine.config import DEFAULT_RATIO
from ragblend.engine.selection import METHODS
from ragblend.measuring import tune


@pytest.fixture
def command(model_folder, home, entries, tmp_path, capsys):
    """Runs `ragblend tune` on the real engine; gives the exit code and what it printed."""
    from ragblend.app.cli.main import main

    path = tmp_path / "questions.json"
    more = [entry | {"question": f"{entry['question']} And {n}?"} for n in range(2) for entry in entries]
    path.write_text(json.dumps(more[:6]))  # the fewest

    def run(*arguments):
        where = (
            "--model",
            model_folder,
            "--home",
            home,
            *["--device", "cpu", "--dtype", "float32", "--data"],
            path,
        )
        code = main([str(part) for part in ("tune", *where, *arguments)])
        return code, capsys.readouterr()

    return run


@pytest.fixture
def few(monkeypatch):
    """Fewer candidates than there are: what is tested here is the command."""
    all_of, names = tune.candidates, ("probe-shift", "epic", "random")
    only = {name: METHODS[name] for name in names}
    monkeypatch.setattr(tune, "candidates", lambda methods, *more: all_of(only, *more))
    monkeypatch.setattr(tune, "RATIOS", (0.5,))


def test_tune_measures_saves_and_undoes(command, few, home, model_folder, monkeypatch) -> None:
    from ragblend.app.settings import Settings

    def now():
        settings = Settings.read(home / "settings.toml", {}, {"model": str(model_folder)})
        return settings.method, settings.ratio

    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text('collection = "mine"\n')
    code, printed = command("--most-ratio", "0.9", "--no-save", "--json")
    found = json.loads(printed.out)
    assert code == 0
    assert (found["saved"], found["questions"], found["data"]) == (False, 6, "questions.json")
    assert now() == ("probe-shift", DEFAULT_RATIO)
    assert {row["ratio"] for row in found["rows"] + found["dropped"]} == {None, 0.5, 0.9, DEFAULT_RATIO}
    lowest = min(found["rows"], key=lambda row: row["kl"])
    assert lowest["ratio"] == 0.9
    code, printed = command("--most-ratio", "0.9")
    assert (code, "Saved: " in printed.out) == (0, True)
    assert now() == (found["method"], found["ratio"])
    assert (home / "settings.toml").read_text() == 'collection = "mine"\n'
    monkeypatch.setenv("RAGBLEND_METHOD", "random")
    _, printed = command("--most-ratio", "0.9")
    assert "takes precedence: remove it" in printed.out
    monkeypatch.delenv("RAGBLEND_METHOD")
    command("--undo")
    code, printed = command("--undo", "--json")
    assert json.loads(printed.out) == {
        "undone": {"method": found["method"], "ratio": found["ratio"]},
        "now": None,
    }
    assert now() == ("probe-shift", DEFAULT_RATIO)
    code, printed = command("--undo")
    assert "nothing to undo" in printed.out


def test_a_stopped_tuning_changes_nothing_and_is_resumed(command, few, home, ctrl_c_at) -> None:
    calls = ctrl_c_at(5)
    code, printed = command("--most-ratio", "0.5")
    assert (code, "Nothing was changed" in printed.err) == (1, True)
    assert not (home / "tuned.json").exists()
    code, _ = command("--most-ratio", "0.5")
    assert code == 0
    (journal,) = (home / "tune").glob("quality-*.jsonl")
    records = [json.loads(line) for line in journal.read_text().split("\n") if line]
    keys = [(record["question"], record["method"], record["ratio"]) for record in records]
    assert len(keys) == len(set(keys)) == len(calls) - 1


def test_without_documents_the_samples_are_used(home) -> None:
    from ragblend.app.cli.tune import _documents_or_samples
    from ragblend.app.quality.sources import QuestionSource

    assert _documents_or_samples(QuestionSource(home=home)).name == "samples"
    assert _documents_or_samples(QuestionSource(home=home, docs="x")).docs == "x"


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("foo", (), "method 'foo' is unknown; there are full, "),
        ("probe:foo=1", (), "method 'probe' has no parameter 'foo'"),
        ("probe", ("--minutes", "-3"), "--minutes is -3; "),
        ("probe", ("--minutes", "0"), "--minutes is 0; "),
        ("probe", ("--minutes", "nan"), "--minutes is nan; "),
        ("probe", ("--limit", "3", "--minutes", "1"), "--limit is 3; 6 questions are the fewest"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_opened(
    command, monkeypatch, method, arguments, said
) -> None:
    """The bug: all of it was found out, if at all, after the measuring."""
    from ragblend.engine.engine import Engine

    monkeypatch.setattr(Engine, "open", lambda **_: pytest.fail("opened"))
    monkeypatch.setenv("RAGBLEND_METHOD", method)
    code, printed = command(*arguments)
    assert code == 2
    assert said in printed.err


def test_full_prefill_is_replaced_only_with_save(command, home, monkeypatch) -> None:
    monkeypatch.setattr(tune, "RATIOS", ())
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text('method = "full"\n')
    _, printed = command("--most-ratio", "0")
    assert "is exact" in printed.out
    assert "run the command again with --save" in printed.out
    assert not (home / "tuned.json").exists()
    _, printed = command("--most-ratio", "0", "--save", "--json")
    assert json.loads(printed.out)["saved"] is True
    assert (home / "tuned.json").exists()
