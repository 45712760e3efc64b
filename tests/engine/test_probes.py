"""Policies by attention, against slow sums over the attention of transformers alone."""

import math
import threading

import pytest
import torch
from benches import SUFFIX, in_turn, largest_error, make_prompt, make_text, pairs
from transformers import DynamicCache

from ragblend.engine import cache as cache_module
from ragblend.engine.plan import TokenKind
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt
from ragblend.engine.selection import ATTENTION_FREE, ByAttention, by_attention
from ragblend.engine.selection.base import Attention, fresh_rows
from ragblend.kvstore.errors import Cancelled

TEXTS = [make_text(seed, words=20) for seed in range(4)]
GUIDED = ("a3", "prophet", "qcfuse", "probe", "probe-shift")
SEEING_ALL = "qcfuse:digest_ratio=1"


@pytest.fixture
def seen(monkeypatch):
    """Every (policy, plan, probed) with which an attention-guided policy was called for its rows."""
    calls, rows = [], ByAttention.rows

    def recorded(policy, plan, probed=None):
        calls.append((policy, plan, probed))
        return rows(policy, plan, probed)

    monkeypatch.setattr(ByAttention, "rows", recorded)
    return calls


def reference_run(bench, prompt, seen_rows, **asked):
    """transformers' output for the rows behind the last chunk, and the cache of full reuse, of which these rows see
    `seen_rows` of what is before them.
    """
    reused = bench.engine.prefill(prompt, method="reuse").cache
    start = prompt.places[-1][1]
    past = DynamicCache()
    for layer in range(reused.geometry.layers):
        keys, values = reused.span(layer, 0, start)
        past.update(keys[None, :, seen_rows].clone(), values[None, :, seen_rows].clone(), layer)
    ids = torch.tensor([list(prompt.token_ids[start:])])
    positions = torch.arange(start, start + ids.shape[1])[None]
    return bench.reference(ids, past_key_values=past, position_ids=positions, use_cache=True, **asked), reused


@torch.inference_mode()
def reference_attention(bench, prompt):
    """Per layer the weights (N, W, T) and queries (N, W, D) of the rows behind the last chunk, by transformers alone.

    They run behind the KV that full reuse leaves, which other tests hold against transformers.
    """
    out, reused = reference_run(bench, prompt, slice(None), output_attentions=True)
    return [weights[0] for weights in out.attentions], reused


def reference_scores(name, weights, layers):
    """(T,) by loops over layers, heads and rows, as the papers' sums are written."""
    first = {"prophet": 0, SEEING_ALL: layers - 3}.get(name, layers // 4)
    chosen = range(first, layers)
    total = torch.zeros(weights[0].shape[-1])
    for layer in chosen:
        for head in weights[layer]:  # (W, T)
            of_head = sum(row**2 for row in head).sqrt() if name == "probe" else sum(head)
            total += of_head / len(weights[layer]) / len(chosen)
    return total


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *pairs(("prophet", "probe"), always=("probe",)),
        ("gemma2", "prophet"),
        ("gpt-oss", "probe"),
        ("llama", SEEING_ALL),
        ("gemma2", SEEING_ALL),
        ("gpt-oss", SEEING_ALL),
    ],
)
def test_scores_follow_the_papers_equations(stored_for, seen, kind, name):
    """Also in sliding layers, with grouped heads, soft caps and sinks, and where rotations are scaled."""
    stored = stored_for(kind)
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    weights, _ = reference_attention(stored, prompt)
    stored.engine.prefill(prompt, method=name, ratio=0.6)
    policy, plan, probed = seen[-1]
    expected = reference_scores(name, weights, plan.layers)
    assert largest_error(policy.scores(probed)[plan.candidates], expected[plan.candidates]) < 1e-4
    assert float(expected[plan.candidates].max()) > 10 * 1e-4  # so that a wrong sum could be told from it


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_probe_does_not_see_rows_without_kv(stored_for, seen, kind):
    """Their keys are zero, and would take attention from the other passages."""
    stored = stored_for(kind)
    texts = [TEXTS[0], make_text(99, words=20), TEXTS[1]]
    prompt = stored.engine.tokenize(Prompt([*(Chunk(text) for text in texts), Literal(SUFFIX)]))
    stored.engine.prefill(prompt, method="probe", ratio=0.6)
    policy, plan, probed = seen[-1]
    (first, start), (_, end) = prompt.places[1], prompt.places[2]
    assert plan.kinds[first] == TokenKind.MISSING == plan.kinds[start - 1]
    rows = [row for row in range(end) if not first <= row < start]
    out, _ = reference_run(stored, prompt, rows, output_attentions=True)
    expected = torch.zeros(plan.tokens)
    expected[[*rows, *range(end, plan.tokens)]] = reference_scores(
        "probe", [weights[0] for weights in out.attentions], plan.layers
    )
    assert largest_error(policy.scores(probed)[plan.candidates], expected[plan.candidates]) < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "qwen3", "granite", "phi3"])
def test_qcfuses_question_sees_only_the_anchors(stored_for, seen, watch_layers, kind):
    """In layers that are scored, too: as transformers sees it where nothing else is in its cache (whose windows go by
    place in it, not by position: of those the scores above tell).
    """
    stored = stored_for(kind)
    prompt = stored.engine.tokenize(Prompt([*(Chunk(text) for text in TEXTS), Literal(SUFFIX)]))
    start = prompt.places[-1][1]
    before = {}
    watch_layers(stored, lambda layer, hidden, *more: before.setdefault(layer, hidden[0]))
    stored.engine.prefill(prompt, method="qcfuse:digest_ratio=0.4", ratio=0.7)
    (_, plan, _) = seen[-1]
    rows = [row for row in range(start) if not plan.candidates[row]]
    for begin, end in prompt.places:
        chunk = list(range(begin, end))
        rows += evenly(chunk, math.ceil(0.4 * len(chunk)))
    rows = sorted(set(rows))
    assert len(rows) < 0.8 * start
    out, _ = reference_run(stored, prompt, rows, output_hidden_states=True)
    for layer in range(plan.layers):
        expected = out.hidden_states[layer][0]
        assert largest_error(before[layer][-len(expected) :], expected) < 1e-4, f"before layer {layer}"


def test_a3_merges_all_heads_into_one_product(stored, seen):
    """Equations 3 to 5, with queries and keys of layer 1 from transformers' own layers."""
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    layer = stored.reference.model.layers[1].self_attn
    grabbed = {}
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: grabbed.update(kwargs), with_kwargs=True)
    _, reused = reference_attention(stored, prompt)
    hook.remove()
    start, (cos, sin) = prompt.places[-1][1], grabbed["position_embeddings"]
    with torch.inference_mode():
        queries = layer.q_proj(grabbed["hidden_states"])[0].unflatten(-1, (4, 16))  # (W, N, D)
    stored.engine.prefill(prompt, method="a3", ratio=0.6)
    policy, plan, probed = seen[-1]
    keys = reused.span(1, 0, start)[0]  # (H, T, D)
    documents = [row for row in range(start) if plan.kinds[row] in (TokenKind.EXACT, TokenKind.REUSABLE)]
    expected = torch.zeros(plan.tokens)
    for row in range(queries.shape[0]):
        merged = []
        for key in documents:
            product = 0.0
            for head in range(4):
                query = queries[row, head]
                rotated = query * cos[0, row] + torch.cat([-query[8:], query[:8]]) * sin[0, row]
                product += float(rotated @ keys[head // 2, key])
            merged.append(product / math.sqrt(4 * 16))
        expected[documents] += torch.tensor(merged).softmax(0)
    padded = torch.nn.functional.pad(expected, (2, 2))
    pooled = torch.stack([padded[at : at + 5].mean() for at in range(plan.tokens)])
    inner = plan.candidates.nonzero().squeeze(1)
    assert largest_error(policy.scores(probed)[inner], pooled[inner]) < 1e-4
    assert float(pooled[inner].max()) > 1e-2


@pytest.mark.parametrize(("kind", "name"), pairs(("a3", "prophet", "qcfuse", "probe"), always=("a3",)))
def test_the_best_scored_rows_are_selected(stored_for, seen, kind, name):
    stored = stored_for(kind)
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    report = stored.engine.prefill(prompt, method=name, ratio=0.7).report
    policy, plan, probed = seen[-1]
    scores = policy.scores(probed)
    count = round(0.7 * plan.stored_tokens - probed.cost_rows)
    ranked = sorted(plan.candidates.nonzero().squeeze(1).tolist(), key=lambda row: -float(scores[row]))
    chosen = [row for row in policy.rows(plan, probed).tolist() if plan.candidates[row]]
    assert 0 < count < plan.candidate_tokens
    # Scores and not rows: where all layers slide, most are 0 alike.
    assert sorted(scores[chosen].tolist()) == sorted(scores[ranked[:count]].tolist())
    assert len(set(chosen)) == count
    assert report.tokens.recomputed == count
    assert report.probe_rows == fresh_rows(plan).numel()


def test_a_probe_stops_after_its_last_scored_layer(stored, watch_layers):
    """A3 looks at layer 1 only; what comes after is not computed for it."""
    layers = []
    watch_layers(stored, lambda layer, *more: layers.append(layer))
    stored.engine.prefill(make_prompt(TEXTS), method="a3", ratio=0.6)
    assert layers == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("bench", "name", "first", "later"),
    in_turn(
        ("probe", [True] * 4, [False] * 4),
        ("a3", [True] * 2, [False, True, True, True]),  # the last layer was left half way
    ),
    indirect=["bench"],
)
def test_rows_before_the_first_reused_chunk_are_computed_once(bench, watch_layers, name, first, later):
    """The words before the first chunk that is not exact go on after the probe where it left them."""
    bench.engine.encode(TEXTS)
    begins, prompt = [], bench.engine.tokenize(make_prompt(TEXTS))
    bench.engine.prefill(prompt)  # the gate has been run
    start = prompt.places[0][0]

    def record(layer, hidden, block, *more):
        begins.append(set(range(start)) <= set(block.rows.tolist()))
        assert begins[-1] or int(block.rows[0]) >= start

    watch_layers(bench, record)
    probed = bench.engine.prefill(prompt, method=name, ratio=0.6)
    assert begins == first + later
    bench.assert_exact(probed.cache, prompt, 0, start)


@pytest.mark.parametrize("name", GUIDED)
def test_missing_chunks_are_left_out_of_the_probe(fresh, monkeypatch, name):
    """What is not there yet is garbage in the buffers, and 0 times NaN is NaN."""
    fresh.engine.encode([TEXTS[0], TEXTS[2], TEXTS[3]])
    prompt = fresh.engine.tokenize(make_prompt(TEXTS))
    expected = fresh.engine.prefill(prompt, method=name, ratio=0.7)
    fresh.engine.finish_background()
    fresh.engine.store.delete([fresh.engine.encode([TEXTS[1]]).keys[0]])
    empty = torch.empty
    monkeypatch.setattr(cache_module.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    found = fresh.engine.prefill(prompt, method=name, ratio=0.7)
    assert found.report.misses == 1
    assert torch.equal(found.logits, expected.logits)
    fresh.engine.finish_background()
    fresh.engine.store.delete([fresh.engine.encode([TEXTS[1]]).keys[0]])
    everything = fresh.engine.prefill(prompt, method=name, ratio=1.0).logits
    assert largest_error(everything, fresh.logits(prompt)[-1]) < 1e-4


@pytest.mark.parametrize("name", ["probe", "a3"])
def test_a_probe_can_be_cancelled_between_layers(stored, watch_layers, name):
    cancel, layers = threading.Event(), []
    watch_layers(stored, lambda layer, *more: (layers.append(layer), cancel.set()))
    with pytest.raises(Cancelled):
        stored.engine.prefill(make_prompt(TEXTS), method=name, ratio=0.5, cancel=cancel)
    assert layers == [0]


@pytest.mark.parametrize("method", ["probe-shift", "probe", "prophet", "qcfuse", "a3"])
def test_models_without_collectable_attention_use_spread_shift_with_a_warning(method, stored, monkeypatch):
    asked = stored.engine.prefill(make_prompt(TEXTS), method=ATTENTION_FREE, ratio=0.5)
    monkeypatch.setattr(stored.engine.runtime.decoder, "shows_attention", False)
    prefilled = stored.engine.prefill(make_prompt(TEXTS), method=method, ratio=0.5)
    assert (prefilled.report.method, prefilled.report.hits) == ("spread-shift", 4)
    assert prefilled.report.ratio == asked.report.ratio == pytest.approx(0.5, abs=0.02)
    assert method in prefilled.report.warning and "spread-shift" in prefilled.report.warning
    assert torch.equal(prefilled.logits, asked.logits) and asked.report.warning is None


def test_only_the_end_of_a_long_question_is_collected(stored, monkeypatch):
    """The weights of a long question would outgrow a layer's KV; blocks are cut so that one has all of them."""
    import ragblend.engine.fusion as fusion

    monkeypatch.setattr(fusion, "BLOCK_ROWS", 16)
    monkeypatch.setattr(fusion, "COLLECTED_ROWS", 8)
    shown, scores = [], ByAttention.layer_scores
    monkeypatch.setattr(
        ByAttention,
        "layer_scores",
        lambda self, plan, seen: shown.append(seen.weights.shape[1]) or scores(self, plan, seen),
    )
    prompt = make_prompt(TEXTS, suffix="\n\nQuestion: " + make_text(50, words=12))
    stored.engine.prefill(prompt, method="probe", ratio=0.9)
    assert shown == [8, 8, 8]  # layers 1 to 3


def evenly(rows, count):
    """The middles of `count` equal parts of a list."""
    return [rows[math.floor((part + 0.5) * len(rows) / count)] for part in range(count)] if count else []


@pytest.mark.parametrize(
    ("bench", "beginnings", "sample"), in_turn((0.2, 48), (0.0, 4), (0.3, 0), (0.75, 48)), indirect=["bench"]
)
def test_calibration_rows_and_beginnings_are_selected(each_stored, seen, monkeypatch, beginnings, sample):
    """An even sample of all candidates first, then the best of the others, then of what is left the first of chunks."""
    prompt = each_stored.engine.tokenize(make_prompt(TEXTS))
    monkeypatch.setattr(by_attention, "BEGINNINGS", beginnings)
    monkeypatch.setattr(by_attention, "CALIBRATION_ROWS", sample)
    report = each_stored.engine.prefill(prompt, method="probe-shift", ratio=0.7).report
    policy, plan, probed = seen[-1]
    scores, candidates = policy.scores(probed), plan.candidates.nonzero().squeeze(1).tolist()
    place = {row: row - start for start, stop in prompt.places for row in range(start, stop)}
    count = round(0.7 * plan.stored_tokens - probed.cost_rows)
    wanted = set(evenly(candidates, min(sample, count // 4)))
    best = count - len(wanted) - round(count * beginnings)
    others = sorted((row for row in candidates if row not in wanted), key=lambda row: -float(scores[row]))
    chosen = {row for row in policy.rows(plan, probed).tolist() if plan.candidates[row]}
    assert wanted <= chosen and len(chosen) == count == report.tokens.recomputed
    # By score: where all layers slide, most are 0 alike.
    by_score = sorted((float(scores[row]) for row in chosen - wanted), reverse=True)
    assert by_score[:best] == [float(scores[row]) for row in others[:best]]
    left = [row for row in candidates if row not in chosen]
    if beginnings and len(set(scores[candidates].tolist())) == len(candidates):
        early = chosen - wanted - set(others[:best])
        assert len(early) == round(count * beginnings) and max(map(place.get, early)) <= min(
            map(place.get, left)
        )


@pytest.mark.parametrize(("bench", "name"), in_turn(("probe",), ("probe-shift",)), indirect=["bench"])
def test_a_probe_beyond_the_budget_is_skipped(each_stored, name):
    """The first rows of the chunks are computed then, and what changed there still shifts the others."""
    prompt = make_prompt(TEXTS)
    plain = each_stored.engine.prefill(prompt, method="epic", ratio=0.1)
    prefilled = each_stored.engine.prefill(prompt, method=name, ratio=0.1)
    report = prefilled.report
    assert (report.probe_rows, report.recomputed_fraction) == (0, plain.report.recomputed_fraction)
    assert (report.served == plain.report.served) == (name == "probe") and "c" in report.served
    assert torch.equal(prefilled.logits, plain.logits) == (name == "probe")
    assert each_stored.engine.prefill(prompt, method=name, ratio=0.7).report.probe_rows > 0


def test_an_expensive_probe_ends_at_half_the_depth(each_stored):
    """A figure's line is found by the lower layers, too; without any probe figures of short prompts were lost."""
    prompt = make_prompt(TEXTS)
    layers = each_stored.engine.runtime.decoder.geometry.layers
    probed = {}
    for ratio in (0.1, 0.25, 0.3, 0.35, 0.4, 0.5, 0.9):
        trace = each_stored.engine.prefill(prompt, method="probe-shift", ratio=ratio).report.trace
        probed[ratio] = len({event.layer for event in trace.events if event.part == "probe"})
    assert probed[0.1] == 0 and probed[0.9] == layers
    assert set(probed.values()) == {0, layers // 2, layers}


def test_only_the_end_of_long_literals_is_probed(each_stored, monkeypatch):
    """A conversation without a session is mostly literals: to read them twice would cost more than full prefill."""
    monkeypatch.setattr(by_attention, "COLLECTED_ROWS", 12)
    prompt = make_prompt(TEXTS)
    long = Prompt(
        [*prompt.segments[:3], Literal("\n\nSo far: " + make_text(60, words=60)), *prompt.segments[3:]]
    )
    tokenized = each_stored.engine.tokenize(long)
    report = each_stored.engine.prefill(tokenized, method="probe", ratio=0.6).report
    prefix = len(tokenized.prefix_ids)
    assert report.tokens.fresh > prefix + 60 and prefix < report.probe_rows <= prefix + 12
    everything = each_stored.engine.prefill(tokenized, method="probe", ratio=1.0)
    assert largest_error(everything.logits, each_stored.logits(tokenized)[-1]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_attention_weights_keep_their_order(dtype):
    """The square of a float16 below 0.0002 is nothing in float16."""
    weights = torch.tensor([[[1e-5, 4e-5, 2e-5, 8e-5]]], dtype=dtype).expand(2, 3, 4)
    scores = by_attention.rooted_squares(None, Attention(0, 0, None, None, 1.0, None, weights))
    assert scores.argsort().tolist() == [0, 2, 1, 3]
    assert torch.allclose(scores, 3**0.5 * weights[0, 0].float(), rtol=0.01)


@pytest.mark.parametrize("method", GUIDED)
def test_aligned_rows_of_attention_choose_the_same_rows(stored, method, monkeypatch):
    """As on a card, whose products want them so; a softmax of rows with gaps between them would copy them twice."""
    prompt, made, softmax = make_prompt(TEXTS), [], torch.softmax
    expected = stored.engine.prefill(prompt, method=method, ratio=0.3)

    def padded(like, shape):
        made.append(shape)
        scores = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=like.dtype)
        scores[..., shape[-1] :] = -torch.inf
        return scores

    def without_gaps(scores, dim, out):
        assert scores.is_contiguous()
        return softmax(scores, dim, out=out)

    monkeypatch.setattr("ragblend.engine.model.attention.padded_scores", padded)
    monkeypatch.setattr(torch, "softmax", without_gaps)
    found = stored.engine.prefill(prompt, method=method, ratio=0.3)
    assert made
    assert found.report.served == expected.report.served
    assert largest_error(found.logits, expected.logits) < 1e-5
