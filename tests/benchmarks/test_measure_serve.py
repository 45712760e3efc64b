"""Requests under load: the document shows the recorded figures, and simulated times are right by hand."""

import json

import pytest

from benchmarks.measure_serve import PAGE, RECORDED, arrivals, page_with, throughput
from benchmarks.serve_simulator import SYSTEMS, Costs, PromptTokens, SimulatedRequest, simulator

COSTS = Costs((0.5, 0.0, 1.0, 0.0, 0.1, 0.0, 0.2), token_s=0.25, error=0.0)
NAMED = {system.name: system for system in SYSTEMS}
PASSAGES = [400, 400, 400]


def asked(at, *numbers, answer_tokens=1):
    return SimulatedRequest(at, tuple((number, PASSAGES[number]) for number in numbers), answer_tokens)


def served(system, *runs, share=2.0):
    """Seconds to the first token, by run."""
    with simulator(NAMED[system], COSTS, PASSAGES, share) as one:
        return [one.run(list(requests)) for requests in runs]


def test_the_document_shows_the_recorded_figures():
    assert page_with(json.loads(RECORDED.read_text(encoding="utf-8"))) == PAGE.read_text(encoding="utf-8")


def test_first_come_first_served():
    [found] = served("full", [asked(0.0, 0), asked(0.5, 1), asked(9.0, 0, 1)])
    one = COSTS.seconds(PromptTokens(400 + 96))
    assert found.ttft_s == pytest.approx([one, 2 * one - 0.5, COSTS.seconds(PromptTokens(800 + 96))])


def test_tokens_are_decoded_between_slices_of_the_next_prompt():
    [found] = served("full", [asked(0.0, 0, answer_tokens=3), asked(0.1, 1)])
    one = COSTS.seconds(PromptTokens(400 + 96))
    assert found.ttft_s == pytest.approx([one, 2 * one - 0.1 + 2 * COSTS.token_s])


def test_a_path_is_computed_once_and_reused():
    first, again = served(
        "exact tree", [asked(0.0, 0, 1)], [asked(0.0, 0, 1), asked(9.0, 0, 2), asked(20.0, 2)]
    )
    assert first.path_tokens == 0 and first.ttft_s == pytest.approx(
        [COSTS.seconds(PromptTokens(896, pieces=3))]
    )
    assert again.path_tokens == 800 + 400
    assert again.ttft_s[0] == pytest.approx(COSTS.seconds(PromptTokens(96, 800)))


def test_ingested_passages_are_fused_except_the_first():
    [found] = served("blend", [asked(0.0, 0, 1, 2)])
    assert found.ttft_s == pytest.approx([COSTS.seconds(PromptTokens(96, 400, 800))])


@pytest.mark.parametrize(
    ("system", "share", "runs", "path_tokens"),
    [
        # One node is learnt for each repeated request.
        ("auto", 2.0, [[(0.0, 0, 1)], [(0.0, 0, 1), (99.0, 2)], [(0.0, 0, 1)]], [400, 400 + 400, 800]),
        # With room for one passage, the repeated request keeps its own.
        ("exact tree", 0.4, [[(0.0, number)] for number in (0, 1, 1, 1, 0)], [0, 0, 0, 400, 0]),
    ],
)
def test_paths_are_learnt_and_kept(system, share, runs, path_tokens):
    found = served(system, *[[asked(*each) for each in run] for run in runs], share=share)
    assert [each.path_tokens for each in found] == path_tokens


def test_fitted_costs_are_recovered():
    draws = [
        PromptTokens(n, p, f, k)
        for n in (50, 300, 900)
        for p in (0, 400)
        for f in (0, 500, 900)
        for k in (1, 3)
    ]
    fitted = Costs.fitted([(each, COSTS.seconds(each)) for each in draws], COSTS.token_s)
    assert fitted.weights == pytest.approx(COSTS.weights, abs=1e-6) and fitted.error < 1e-6


def test_the_throughput_is_where_the_mean_crosses_the_slo():
    assert throughput([(1.0, 2.0), (0.5, 1.0), (2.0, 10.0)], 6.0) == pytest.approx(1.5)
    assert throughput([(0.5, 1.0), (1.0, 2.0)], 6.0) == 1.0


def test_arrivals_have_the_rate():
    at = arrivals(50, 4.0)
    assert at == sorted(at) and len(at) / at[-1] == pytest.approx(4.0)
