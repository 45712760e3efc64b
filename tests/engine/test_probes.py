"""Policies that look first, against slow sums over the attention that transformers alone gives."""

import math
import threading
from dataclasses import dataclass, field

import pytest
import tiny_models
import torch
from benches import chunk_places, largest_error, make_prompt, make_text
from transformers import DynamicCache

from ragblend.engine import cache as cache_module
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Kind
from ragblend.engine.prompt import Literal, Prompt
from ragblend.engine.selection import METHODS, policy_named
from ragblend.engine.selection.asking import fresh_rows
from ragblend.engine.selection.probe import Probe
from ragblend.kvstore.errors import Cancelled, UsageError

TEXTS = [make_text(seed, words=20) for seed in range(4)]
ASKING = (
    "a3",
    "a3-heads",
    "prophet",
    "probe",
    "probe-shift:firsts=0,witnesses=0",
    "probe:norm=sum",
    "probe:norm=max,since=0,until=0.5",
)


@pytest.fixture
def stored(bench):
    bench.engine.encode(TEXTS)
    return bench


@pytest.fixture
def seen(monkeypatch):
    """Every (plan, probed) with which a policy that asks was called for its rows."""
    calls = []

    def recorded(rows):
        def record(policy, plan, probed=None):
            calls.append((policy, plan, probed))
            return rows(policy, plan, probed)

        return record

    for asking in {type(METHODS[name.partition(":")[0]]) for name in ASKING}:
        monkeypatch.setattr(asking, "rows", recorded(asking.rows))
    return calls


@torch.inference_mode()
def reference_attention(bench, prompt):
    """Per layer the weights (N, W, T) and queries (N, W, D) of the rows behind the last chunk, by transformers alone.

    They run behind the KV that full reuse leaves, which other tests hold against transformers.
    """
    reused = bench.engine.prefill(prompt, method="reuse").cache
    start = chunk_places(prompt)[-1][1]
    past = DynamicCache()
    for layer in range(reused.geometry.layers):
        keys, values = reused.span(layer, 0, start)
        past.update(keys[None].clone(), values[None].clone(), layer)
    ids = torch.tensor([list(prompt.token_ids[start:])])
    positions = torch.arange(start, start + ids.shape[1])[None]
    out = bench.reference(
        ids, past_key_values=past, position_ids=positions, use_cache=True, output_attentions=True
    )
    return [weights[0] for weights in out.attentions], reused


def reference_scores(name, weights, layers):
    """(T,) by loops over layers, heads and rows, as the papers' sums are written."""
    policy = policy_named(name)
    if name.startswith("probe"):
        norm, first = policy.norm, int(policy.since * layers)
        chosen = range(first, round(policy.until * layers))
    else:
        norm, chosen = "sum", range(layers) if name == "prophet" else [1]
    total = torch.zeros(weights[0].shape[-1])
    for layer in chosen:
        for head in weights[layer]:  # (W, T)
            if norm == "l2":
                of_head = sum(row**2 for row in head).sqrt()
            elif norm == "max":
                of_head = torch.stack(list(head)).max(0).values
            else:
                of_head = sum(head)
            total += of_head / len(weights[layer]) / len(chosen)
    return total


@pytest.mark.parametrize("name", [name for name in ASKING if name != "a3"])
def test_scores_are_those_of_the_equations(stored, seen, name):
    """Also in sliding layers, with grouped heads and where rotations are scaled."""
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    weights, _ = reference_attention(stored, prompt)
    stored.engine.prefill(prompt, method=name, ratio=0.6)
    policy, plan, probed = seen[-1]
    expected = reference_scores(name, weights, plan.layers)
    found = torch.stack(list(probed.scores.values())).mean(0)
    assert largest_error(found[plan.candidates], expected[plan.candidates]) < 1e-4
    assert float(expected[plan.candidates].max()) > 10 * 1e-4  # so that a wrong sum could be told from it
    if name == "a3-heads":
        expected = torch.nn.functional.avg_pool1d(expected[None], 5, 1, 2)[0]
    assert torch.allclose(policy.score(plan, probed), expected, atol=1e-4) or name != "a3-heads"


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("name", ["prophet", "probe"])
def test_soft_caps_and_sinks_are_in_the_scores(bench_for, seen, kind, name):
    bench = bench_for(kind)
    bench.engine.encode(TEXTS)
    prompt = bench.engine.tokenize(make_prompt(TEXTS))
    weights, _ = reference_attention(bench, prompt)
    bench.engine.prefill(prompt, method=name, ratio=0.6)
    _, plan, probed = seen[-1]
    expected = reference_scores(name, weights, plan.layers)
    found = torch.stack(list(probed.scores.values())).mean(0)
    assert largest_error(found[plan.candidates], expected[plan.candidates]) < 1e-4


def test_a3_merges_its_heads_into_one_product(llama, seen):
    """Equations 3 to 5, with queries and keys of layer 1 from transformers' own layers."""
    llama.engine.encode(TEXTS)
    prompt = llama.engine.tokenize(make_prompt(TEXTS))
    layer = llama.reference.model.layers[1].self_attn
    grabbed = {}
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: grabbed.update(kwargs), with_kwargs=True)
    _, reused = reference_attention(llama, prompt)
    hook.remove()
    start, (cos, sin) = chunk_places(prompt)[-1][1], grabbed["position_embeddings"]
    with torch.inference_mode():
        queries = layer.q_proj(grabbed["hidden_states"])[0].unflatten(-1, (4, 16))  # (W, N, D)
    llama.engine.prefill(prompt, method="a3", ratio=0.6)
    policy, plan, probed = seen[-1]
    keys = reused.span(1, 0, start)[0]  # (H, T, D)
    documents = [row for row in range(start) if plan.kinds[row] in (Kind.EXACT, Kind.REUSABLE)]
    expected = torch.zeros(plan.tokens)
    for row in range(queries.shape[0]):
        merged = []
        for key in documents:
            product = 0.0
            for head in range(4):
                query = queries[row, head]
                turned = query * cos[0, row] + torch.cat([-query[8:], query[:8]]) * sin[0, row]
                product += float(turned @ keys[head // 2, key])
            merged.append(product / math.sqrt(4 * 16))
        expected[documents] += torch.tensor(merged).softmax(0)
    pooled = torch.tensor(
        [
            sum(float(expected[i]) for i in range(at - 2, at + 3) if 0 <= i < plan.tokens) / 5
            for at in range(plan.tokens)
        ]
    )
    inner = plan.candidates.nonzero().squeeze(1)
    assert largest_error(policy.score(plan, probed)[inner], pooled[inner]) < 1e-4
    assert float(pooled[inner].max()) > 1e-2


@pytest.mark.parametrize("name", ASKING)
def test_the_best_rows_are_taken_and_no_others(stored, seen, name):
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    report = stored.engine.prefill(prompt, method=name, ratio=0.7).report
    policy, plan, probed = seen[-1]
    scores = policy.score(plan, probed)
    count = round(0.7 * plan.stored_tokens - probed.cost_rows)
    ranked = sorted(plan.candidates.nonzero().squeeze(1).tolist(), key=lambda row: -float(scores[row]))
    chosen = [row for row in policy.rows(plan, probed).tolist() if plan.candidates[row]]
    assert 0 < count < plan.candidate_tokens
    # Scores and not rows: where all layers slide, most are 0 alike.
    assert sorted(scores[chosen].tolist()) == sorted(scores[ranked[:count]].tolist())
    assert len(set(chosen)) == count
    assert report.tokens.recomputed == count
    assert report.probe_rows == fresh_rows(plan).numel()


def test_a_probe_stops_where_it_has_seen_enough(llama, monkeypatch):
    """A3 looks at layer 1 only; what comes after is not computed for it."""
    llama.engine.encode(TEXTS)
    decoder, layers = llama.engine._resources.decoder, []
    run_layer = decoder.run_layer
    monkeypatch.setattr(
        decoder, "run_layer", lambda layer, *args: layers.append(layer) or run_layer(layer, *args)
    )
    llama.engine.prefill(make_prompt(TEXTS), method="a3", ratio=0.6)
    assert layers == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [
        ("probe", [True] * 4, [False] * 4),
        (
            "probe:since=0,until=0.5",
            [True] * 2,
            [False, True, True, True],
        ),  # the last layer was left half way
        ("a3", [True] * 2, [False, True, True, True]),
        ("probe:since=0,until=0.5,passes=2", [True] * 2, [False, True, True, True] + [False] * 4),
    ],
)
def test_what_nothing_can_change_is_computed_once(bench, monkeypatch, name, first, later):
    """The words before the first chunk that is not exact go on after the probe where it left them."""
    bench.engine.encode(TEXTS)
    decoder, begins = bench.engine._resources.decoder, []
    prompt = bench.engine.tokenize(make_prompt(TEXTS))
    bench.engine.prefill(prompt)  # the gate has been run
    start = chunk_places(prompt)[0][0]
    run_layer = decoder.run_layer

    def recorded(layer, hidden, state, *args):
        begins.append(set(range(start)) <= set(state.rows.tolist()))
        assert begins[-1] or int(state.rows[0]) >= start
        return run_layer(layer, hidden, state, *args)

    monkeypatch.setattr(decoder, "run_layer", recorded)
    probed = bench.engine.prefill(prompt, method=name, ratio=0.6)
    assert begins == first + later
    for layer, (keys, values) in enumerate(bench.kv(prompt.token_ids)):
        found_keys, found_values = probed.cache.span(layer, 0, start)
        assert largest_error(found_keys, keys[:, :start]) < 1e-4, f"keys of layer {layer}"
        assert largest_error(found_values, values[:, :start]) < 1e-4, f"values of layer {layer}"


@pytest.mark.parametrize("name", ASKING)
def test_missing_chunks_are_left_out_of_the_probe(fresh, monkeypatch, name):
    """What is not there yet is garbage in the buffers, and 0 times NaN is NaN."""
    fresh.engine.encode([TEXTS[0], TEXTS[2], TEXTS[3]])
    prompt = fresh.engine.tokenize(make_prompt(TEXTS))
    expected = fresh.engine.prefill(prompt, method=name, ratio=0.7)
    fresh.engine.finish_background()
    fresh.engine.store.delete(fresh.engine.encode([TEXTS[1]]).keys[0])
    empty = torch.empty
    monkeypatch.setattr(cache_module.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    found = fresh.engine.prefill(prompt, method=name, ratio=0.7)
    assert found.report.misses == 1
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("name", ASKING)
def test_with_a_missing_chunk_all_rows_computed_are_the_model(fresh, name):
    fresh.engine.encode([TEXTS[0], TEXTS[2], TEXTS[3]])
    prompt = fresh.engine.tokenize(make_prompt(TEXTS))
    expected = fresh.logits(prompt)[-1]
    assert largest_error(fresh.engine.prefill(prompt, method=name, ratio=1.0).logits, expected) < 1e-4


def test_everything_is_loaded_once(llama, monkeypatch):
    """The second pass uses what the probe loaded; loading again would write over what it computed."""
    llama.engine.encode(TEXTS)
    reads, fetched = [], LayerLoader._fetched
    monkeypatch.setattr(
        LayerLoader,
        "_fetched",
        lambda self, span, layer, *a: reads.append((span.start, layer)) or fetched(self, span, layer, *a),
    )
    llama.engine.prefill(make_prompt(TEXTS), method="probe:passes=2", ratio=0.5)
    assert len(reads) == len(set(reads)) == 4 * len(TEXTS)


@pytest.mark.parametrize("name", ["probe", "probe:passes=2", "a3"])
def test_a_probe_can_be_cancelled_between_layers(llama, monkeypatch, name):
    llama.engine.encode(TEXTS)
    decoder, cancel, layers = llama.engine._resources.decoder, threading.Event(), []
    run_layer = decoder.run_layer

    def cancelling(layer, *args):
        layers.append(layer)
        cancel.set()
        return run_layer(layer, *args)

    monkeypatch.setattr(decoder, "run_layer", cancelling)
    with pytest.raises(Cancelled):
        llama.engine.prefill(make_prompt(TEXTS), method=name, ratio=0.5, cancel=cancel)
    assert layers == [0]


def test_two_passes_compute_each_row_once_and_look_again(stored, seen):
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    once = stored.engine.prefill(prompt, method="probe", ratio=0.9).report
    twice = stored.engine.prefill(prompt, method="probe:passes=2", ratio=0.9).report
    policy, plan, probed = seen[-1]
    first = probed.computed.nonzero().squeeze(1).tolist()
    second = [row for row in policy.rows(plan, probed).tolist() if plan.candidates[row]]
    assert probed.passes == 2
    assert first and second and not set(first) & set(second)
    assert twice.tokens.recomputed == len(first) + len(second) < once.tokens.recomputed
    assert twice.recomputed_fraction == pytest.approx(0.9, abs=0.02)


@dataclass(frozen=True)
class TwoSteps(Probe):
    """Computes the stored rows of the first half in a second probe, the others at the end."""

    name: str = field(default="two-steps", kw_only=True)

    def probe_rows(self, plan, probed):
        if probed is None:
            return fresh_rows(plan)
        half = plan.always | (plan.candidates & (torch.arange(plan.tokens) < plan.tokens // 2))
        return half.nonzero().squeeze(1) if probed.passes == 1 else None

    def rows(self, plan, probed=None):
        return ((plan.always | plan.candidates) & ~probed.computed).nonzero().squeeze(1)


def test_rows_that_a_probe_computed_are_there_for_good(stored):
    """Computed in order, in two steps, they are what full prefill gives."""
    prompt = make_prompt(TEXTS)
    prefilled = stored.engine.prefill(prompt, method=TwoSteps(), ratio=0.5)
    assert largest_error(prefilled.logits, stored.logits(prompt)[-1]) < 1e-4


@pytest.mark.parametrize("method", ["probe-shift", "probe", "prophet", "a3"])
def test_a_model_that_shows_no_attention_is_served_without_looking_and_says_so(method, llama, monkeypatch):
    llama.engine.encode(TEXTS)
    asked = llama.engine.prefill(make_prompt(TEXTS), method="cacheblend", ratio=0.5)
    monkeypatch.setattr(llama.engine._resources.decoder, "watches", False)
    prefilled = llama.engine.prefill(make_prompt(TEXTS), method=method, ratio=0.5)
    assert (prefilled.report.method, prefilled.report.ratio, prefilled.report.hits) == ("cacheblend", 0.5, 4)
    assert method in prefilled.report.warning and "cacheblend" in prefilled.report.warning
    assert torch.equal(prefilled.logits, asked.logits) and asked.report.warning is None


def test_long_questions_are_watched_by_their_end(llama, monkeypatch):
    """The weights of a long question would outgrow a layer's KV; goes are cut so that one has all watched rows."""
    import ragblend.engine.fusion as fusion
    import ragblend.engine.work as work

    llama.engine.encode(TEXTS)
    monkeypatch.setattr(work, "BATCH_ROWS", 16)
    monkeypatch.setattr(fusion, "WATCHED_ROWS", 8)
    shown, look = [], Probe.look
    monkeypatch.setattr(
        Probe, "look", lambda self, plan, seen: shown.append(seen.weights.shape[1]) or look(self, plan, seen)
    )
    prompt = make_prompt(TEXTS, suffix="\n\nQuestion: " + make_text(50, words=12))
    llama.engine.prefill(prompt, method="probe", ratio=0.9)
    assert shown == [8, 8, 8]  # layers 1 to 3
    for rows in (5, 16, 17, 23, 24, 25, 40):
        sizes = work._go_sizes(rows, min(8, rows))
        assert sum(sizes) == rows and sizes[-1] >= min(8, rows)


def evenly(rows, count):
    """The middles of `count` equal parts of a list."""
    return [rows[math.floor((part + 0.5) * len(rows) / count)] for part in range(count)] if count else []


@pytest.mark.parametrize(("firsts", "witnesses"), [(0.1, 48), (0.0, 4), (0.3, 0), (0.75, 48)])
def test_witnesses_and_beginnings_are_among_the_chosen(stored, seen, firsts, witnesses):
    """An even sample of all candidates first, then the best of the others, then of what is left the first of chunks."""
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    method = f"probe:shift=kernel,firsts={firsts},witnesses={witnesses}"
    report = stored.engine.prefill(prompt, method=method, ratio=0.7).report
    policy, plan, probed = seen[-1]
    scores, candidates = policy.score(plan, probed), plan.candidates.nonzero().squeeze(1).tolist()
    place = {row: row - start for start, stop in chunk_places(prompt) for row in range(start, stop)}
    count = round(0.7 * plan.stored_tokens - probed.cost_rows)
    wanted = set(evenly(candidates, min(witnesses, count // 4)))
    best = count - len(wanted) - round(count * firsts)
    others = sorted((row for row in candidates if row not in wanted), key=lambda row: -float(scores[row]))
    chosen = {row for row in policy.rows(plan, probed).tolist() if plan.candidates[row]}
    assert wanted <= chosen and len(chosen) == count == report.tokens.recomputed
    # By score: where all layers slide, most are 0 alike.
    by_score = sorted((float(scores[row]) for row in chosen - wanted), reverse=True)
    assert by_score[:best] == [float(scores[row]) for row in others[:best]]
    left = [row for row in candidates if row not in chosen]
    if firsts and len(set(scores[candidates].tolist())) == len(candidates):
        early = chosen - wanted - set(others[:best])
        assert len(early) == round(count * firsts) and max(map(place.get, early)) <= min(map(place.get, left))


@pytest.mark.parametrize("name", ["probe", "probe-shift"])
def test_a_question_that_is_too_long_for_the_budget_is_not_asked(stored, name):
    """The first rows of the chunks are computed then, and what changed there still shifts the others."""
    prompt = make_prompt(TEXTS)
    plain = stored.engine.prefill(prompt, method="heads", ratio=0.1)
    prefilled = stored.engine.prefill(prompt, method=name, ratio=0.1)
    report = prefilled.report
    assert (report.probe_rows, report.recomputed_fraction) == (0, plain.report.recomputed_fraction)
    assert (report.served == plain.report.served) == (name == "probe") and "c" in report.served
    assert torch.equal(prefilled.logits, plain.logits) == (name == "probe")
    assert stored.engine.prefill(prompt, method=name, ratio=0.7).report.probe_rows > 0


def test_of_long_literals_only_the_end_asks(stored, monkeypatch):
    """A conversation without a session is mostly literals: to read them twice would cost more than full prefill."""
    import ragblend.engine.selection.probe as probe

    monkeypatch.setattr(probe, "WATCHED_ROWS", 12)
    prompt = make_prompt(TEXTS)
    long = Prompt(
        [*prompt.segments[:3], Literal("\n\nSo far: " + make_text(60, words=60)), *prompt.segments[3:]]
    )
    tokenized = stored.engine.tokenize(long)
    report = stored.engine.prefill(tokenized, method="probe", ratio=0.6).report
    prefix = len(tokenized.prefix_ids)
    assert report.tokens.fresh > prefix + 60 and prefix < report.probe_rows <= prefix + 12
    everything = stored.engine.prefill(tokenized, method="probe", ratio=1.0)
    assert largest_error(everything.logits, stored.logits(tokenized)[-1]) < 1e-4


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("prob", "did you mean 'probe'"),
        ("prob", "cacheblend-gradual"),
        ("probe:pases=2", "did you mean 'passes'"),
        ("probe:pases=2", "strength=0.8"),
        ("probe:passes", "name=value"),
        ("probe:", "name=value"),
        ("probe:strength=nan", "finite"),
        ("probe:strength=inf", "finite"),
        ("transplant:by=foo", "there are random, heads, epic, a3"),
        ("transplant:by=cacheblend", "before any is computed"),
        ("transplant:by=full", "before any is computed"),
        ("probe:passes=two", "whole number"),
        ("probe:passes=0", "passes at least 1"),
        ("probe:shift=none,norm=l3", "l2, sum, max"),
        ("probe:shift=all", "chunk"),
        ("probe:since=0.9,until=0.2", "since < until"),
        ("a3:kernel=4", "odd"),
        ("a3:heads=some", "merged"),
        ("epic:last_share=1", "last_share"),
        ("cacheblend:measure=both", "values, keys"),
        ("cacheblend:check_layer=-1", "check_layer"),
        ("full:x=1", "none"),
    ],
)
def test_wrong_names_and_parameters_are_named(llama, method, said):
    with pytest.raises(UsageError, match=said):
        llama.engine.prefill(make_prompt(TEXTS), method=method)


def test_parameters_reach_the_policy_and_the_report(llama):
    llama.engine.encode(TEXTS)
    policy = policy_named("probe:passes=2, shift=common,strength=0.25")
    assert (policy.passes, policy.shift, policy.strength) == (2, "common", 0.25)
    report = llama.engine.prefill(make_prompt(TEXTS), method="a3:kernel=1", ratio=0.5).report
    assert report.method == "a3:kernel=1"
    assert METHODS["a3"].kernel == 5


def test_the_oracle_copies_the_truth_at_the_chosen_rows(stored):
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    full = stored.engine.prefill(prompt, method="full").cache
    reused = stored.engine.prefill(prompt, method="reuse").cache
    with pytest.raises(UsageError, match="bench quality"):
        stored.engine.prefill(prompt, method="transplant")
    policy = policy_named("transplant:by=heads").given(full, METHODS["heads"])
    found = stored.engine.prefill(prompt, method=policy, ratio=0.3)
    assert found.report.tokens.recomputed == 0
    start, stop = chunk_places(prompt)[1]
    for layer in range(full.geometry.layers):
        for truth, stale, now in zip(
            full.span(layer, start, stop),
            reused.span(layer, start, stop),
            found.cache.span(layer, start, stop),
            strict=True,
        ):
            assert largest_error(now[:, :3], truth[:, :3]) < 1e-4
            assert torch.equal(now[:, -3:], stale[:, -3:])
    everything = policy.given(full, METHODS["recompute"])
    assert largest_error(stored.engine.prefill(prompt, everything).logits, stored.logits(prompt)[-1]) < 1e-4


def test_epic_takes_the_ends_of_each_chunk(llama):
    llama.engine.encode(TEXTS)
    prompt = llama.engine.tokenize(make_prompt(TEXTS))
    places = chunk_places(prompt)[1:] if _first_is_exact(llama, prompt) else chunk_places(prompt)

    def expected(first, last):
        return sum(min(first + last, stop - start) for start, stop in places)

    for first, last in ((4, 0), (2, 3), (0, 1)):
        report = llama.engine.prefill(prompt, f"epic:first={first},last={last}", ratio=0.9).report
        assert report.tokens.recomputed == expected(first, last)
    for method in ("epic", "heads"):
        assert llama.engine.prefill(prompt, method, ratio=0.3).report.tokens.recomputed > 0
    one, two = (llama.engine.prefill(prompt, method, ratio=0.3).logits for method in ("epic", "heads"))
    assert torch.equal(one, two)


def _first_is_exact(bench, prompt):
    prefix = prompt.token_ids[: prompt.offsets[1]]
    return tuple(prefix) == tuple(bench.engine._resources.canonical_prefix)


def test_tiny_models_cover_what_is_hard():
    assert {"gemma3", "qwen3", "llama-yarn"} <= set(tiny_models.SUPPORTED)
