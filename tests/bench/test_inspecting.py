"""Looking into prompts: what is watched is what the engine really does, and watching changes none of it."""

import random

import pytest
import torch

from ragblend.app.bench import quality
from ragblend.app.bench.data import load_questions
from ragblend.app.bench.inspecting import (
    RATIOS,
    Notebook,
    figures,
    fused_variants,
    inspect,
    spearman,
    token_texts,
)
from ragblend.app.bench.prefilling import stored
from ragblend.app.bench.prompt_page import counts, token_states
from ragblend.app.bench.variants import Variant
from ragblend.app.bench.watching import Everything, attention_deviation, last_rows_attention, watched
from ragblend.engine.plan import Kind
from ragblend.engine.selection import METHODS

VARIANTS = (Variant("full"), Variant("reuse"), Variant("heads", 0.3), Variant("cacheblend-gradual", 0.5))


@pytest.fixture
def questions(data_file):
    return load_questions(data_file)


@pytest.fixture
def prompt(engine, questions):
    with stored(engine, questions[0].passages):
        yield quality.build_prompt(engine, questions[0], 5)


@pytest.fixture
def notebook(tmp_path):
    return Notebook(tmp_path / "inspected.jsonl")


def look(engine, questions, notebook, **more):
    return inspect(
        engine, questions, VARIANTS, notebook, lambda each: quality.build_prompt(engine, each, 5), **more
    )


@pytest.mark.parametrize("method", [name for name, policy in METHODS.items() if policy.fixed_ratio is None])
def test_the_shares_that_are_watched_are_what_the_report_says_was_spent(engine, prompt, method) -> None:
    policy, seen = watched(METHODS[method])
    through = engine.prefill(prompt, method=policy, ratio=0.4)
    plainly = engine.prefill(prompt, method=method, ratio=0.4)
    assert torch.equal(through.logits, plainly.logits)  # watching changes nothing
    assert through.report.method == method
    stored_tokens = seen.plan.kinds >= Kind.EXACT
    shares = seen.shares()
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


def test_every_tokens_deviation_is_that_of_full_prefill_from_the_store(engine, prompt) -> None:
    everything = Everything()
    whole = engine.prefill(prompt, method=everything)
    reused = engine.prefill(prompt, method="reuse")
    full = engine.prefill(prompt, method="full")
    assert torch.allclose(whole.logits, full.logits, atol=1e-4)
    candidates = everything.plans[0].candidates.nonzero().squeeze(1)
    assert sorted(everything.deviations) == [0, 1, 2, 3]
    for layer, found in everything.deviations.items():
        apart = 0
        for new, old in zip(
            full.cache.span(layer, 0, 10_000), reused.cache.span(layer, 0, 10_000), strict=True
        ):
            apart = apart + (new[:, candidates] - old[:, candidates]).abs().sum(dim=(0, 2))
        assert torch.allclose(found, apart, atol=1e-3)
    assert everything.deviations[0].max() < 1e-3 < everything.deviations[1].min()


def test_what_the_last_rows_look_at_is_what_transformers_says(engine, prompt) -> None:
    from transformers import AutoModelForCausalLM

    with last_rows_attention(rows=3) as seen:
        engine.prefill(prompt, method="full")
    model = AutoModelForCausalLM.from_pretrained(
        engine.model_name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        plain = model(torch.tensor([prompt.token_ids]), output_attentions=True).attentions
    assert sorted(seen) == [0, 1, 2, 3]
    for layer, weights in seen.items():
        assert torch.allclose(weights.float(), plain[layer][0, :, -3:], atol=1e-3)
    seen.clear()
    engine.prefill(prompt, method="full")
    assert seen == {}  # after the block nothing is watched


def test_attention_deviation_is_0_at_ratio_1_and_falls_on_the_way_there(engine, prompt) -> None:
    with last_rows_attention() as seen:
        engine.prefill(prompt, method="full")
        reference = dict(seen)
        apart = []
        for ratio in (0.0, 0.5, 1.0):
            seen.clear()
            engine.prefill(prompt, method="random", ratio=ratio)
            apart.append(attention_deviation(dict(seen), reference))
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] < 1e-3 < apart[0] < 2**0.5
    assert attention_deviation({}, reference) is None


def test_a_window_hides_what_is_before_it() -> None:
    from ragblend.app.bench.watching import _weights

    query, key = torch.randn(4, 2, 8), torch.randn(2, 9, 8)
    weights = _weights(query, key, None, 3)
    assert weights.shape == (4, 2, 9)
    assert (weights > 0).int()[0].tolist() == [[0] * 5 + [1, 1, 1, 0], [0] * 6 + [1, 1, 1]]
    assert torch.allclose(weights.float().sum(-1), torch.ones(4, 2), atol=1e-2)


@pytest.mark.parametrize("stop", [1, 7])
def test_a_stopped_look_goes_on_and_measures_nothing_twice(engine, questions, notebook, stop) -> None:
    steps = []

    def stops(done, total):
        steps.append((done, total))
        if len(steps) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(engine, questions[:2], notebook, progress=stops)
    assert list(engine.store.keys()) == []
    kept = dict(Notebook(notebook.path).values)
    assert len(kept) == stop
    again, steps = Notebook(notebook.path), []
    looks = look(engine, questions[:2], again, progress=lambda *step: steps.append(step))
    total = 2 * (1 + 3 + 3 + 2 * len(RATIOS) - 2)  # 0.3 and 0.5 are among the figure's ratios
    assert len(again.values) == total
    assert steps[-1] == (total - stop, total - stop)
    assert kept.items() <= again.values.items()
    assert len([line for line in notebook.path.read_text().splitlines() if line]) == total
    assert looks == look(engine, questions[:2], Notebook(notebook.path))


def test_a_cut_off_line_is_measured_again(engine, questions, notebook) -> None:
    whole = look(engine, questions[:1], notebook)
    notebook.path.write_text(notebook.path.read_text().rstrip()[:-5] + "\nnull\n[1]\n")
    assert look(engine, questions[:1], Notebook(notebook.path)) == whole


def test_a_look_has_every_token_with_its_text_and_kind(engine, questions, notebook) -> None:
    (found,) = look(engine, questions[:1], notebook)
    prompt = quality.build_prompt(engine, questions[0], 5)
    assert "".join(found.tokens) == engine.tokenizer.decode(prompt.token_ids)
    assert len(found.tokens) == len(found.kinds) == len(prompt.token_ids)
    assert set(found.kinds) == {Kind.FRESH, Kind.EXACT, Kind.REUSABLE}
    assert list(found.shares) == fused_variants(VARIANTS) == list(VARIANTS[1:])
    reuse = token_states(found.kinds, found.shares[Variant("reuse")])
    assert set(reuse) == {"f", "e", "0"}
    gradual = token_states(found.kinds, found.shares[Variant("cacheblend-gradual", 0.5)])
    assert len(set(gradual) & set("123456789")) > 2  # dropped layer by layer


def test_characters_of_several_tokens_stand_at_their_last_one(engine) -> None:
    ids = engine.tokenizer("lamp ☂ over é", add_special_tokens=False)["input_ids"]
    texts = token_texts(engine, ids)
    assert "".join(texts) == "lamp ☂ over é"
    assert len(texts) == len(ids)
    assert "\ufffd" not in "".join(texts)


def test_states_and_their_counts() -> None:
    states = token_states((0, 1, 2, 3, 3, 3, 3), (1, 1, 0, 0, 1 / 30, 0.5, 1))
    assert states == ["f", "m", "e", "0", "0", "4", "9"]
    assert counts("".join(states)) == "2 reused, 2 recomputed, 1 fresh, 1 exact as stored, 1 missing"


def test_figures_hold_means_over_the_prompts(engine, questions, notebook) -> None:
    look(engine, questions[:2], notebook)
    found = figures(questions[:2], VARIANTS, notebook)
    points = {(each["method"], each["ratio"]): each for each in found["attention_deviation"]}
    assert {method for method, _ in points} == {"reuse", "heads", "cacheblend-gradual"}
    assert {ratio for method, ratio in points if method == "heads"} == set(RATIOS)
    assert {each["n"] for each in points.values()} == {2}
    assert points["heads", 0.5]["value"] < points["reuse", None]["value"]
    for values in found["kv_deviation_quantiles"].values():
        assert values == sorted(values)
        assert len(values) == 101
    assert [len(prompt) for prompt in found["rank_correlations"]] == [2, 2]


def test_rank_correlation_by_hand_and_against_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 300.0])) == 1
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])) == -1
    assert spearman(torch.ones(3), torch.tensor([3.0, 2.0, 1.0])) is None
    draw = random.Random(0)
    pairs = [[float(draw.randint(0, 9)) for _ in range(50)] for _ in range(2)]
    expected = scipy.spearmanr(*pairs).statistic
    assert spearman(*(torch.tensor(values) for values in pairs)) == pytest.approx(expected, abs=1e-4)
