"""What is watched is what the engine really does, and watching changes none of it; the figures come out."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.figures import app
from benchmarks.method_pictures import watched
from ragblend.app.bench import quality
from ragblend.app.bench.prefilling import stored
from ragblend.engine.plan import Kind
from ragblend.engine.selection import METHODS


@pytest.fixture
def prompt(engine, questions):
    with stored(engine, questions[0].passages):
        yield quality.build_prompt(engine, questions[0], 5)


@pytest.mark.parametrize("method", [name for name, policy in METHODS.items() if policy.fixed_ratio is None])
def test_the_shares_that_are_watched_are_what_the_report_says_was_spent(engine, prompt, method) -> None:
    policy, seen = watched(METHODS[method])
    through = engine.prefill(prompt, method=policy, ratio=0.4)
    plainly = engine.prefill(prompt, method=method, ratio=0.4)
    assert torch.equal(through.logits, plainly.logits)  # watching changes nothing
    assert through.report.method == method
    stored_tokens = seen.plan.kinds >= Kind.EXACT
    shares = seen.computed().float().mean(0)
    assert shares[seen.plan.always].eq(1).all()
    spent, report = float(shares[stored_tokens].mean()), plainly.report
    if method.startswith("cacheblend"):
        # The check of one layer is a part of a layer, which the report counts and the tokens do not show.
        assert spent == pytest.approx(report.recomputed_fraction, abs=1 / seen.plan.layers)
    elif report.probe_rows:
        # What fresh tokens were run for twice is paid from the ratio as well.
        assert spent == pytest.approx(report.tokens.recomputed / seen.plan.stored_tokens, abs=1e-6)
        assert spent < report.recomputed_fraction
    else:
        assert spent == pytest.approx(report.recomputed_fraction, abs=1e-6)


def test_the_figures_are_written(model_folder, home, tmp_path, data_file) -> None:
    where = ["--model", model_folder, "--home", home, "--device", "cpu", "--dtype", "float32"]
    line = [*where, "--data", data_file, "--output", tmp_path / "out", "--json"]
    done = CliRunner().invoke(app, [str(part) for part in line], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["prompts"] == 2
    assert [len(each) for each in found["rank_correlations"]] == [2, 2]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"figures.json", "rank_correlation.png"}
