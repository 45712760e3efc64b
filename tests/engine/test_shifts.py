"""What is added to rows that stay stored, against sums by hand over transformers' own KV."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benches import chat, chunk_places, largest_error, make_prompt, make_text

from ragblend.engine.selection import METHODS, Policy, Shift, kernel, policy_named
from ragblend.engine.selection.evidence import Change
from ragblend.engine.selection.probe import Probe
from ragblend.engine.selection.shift import shift_of

TEXTS = [make_text(seed, words=20) for seed in range(4)]
FORMS = ("chunk", "common", "mix")  # and "linear", which has a test of its own


@pytest.fixture
def stored(bench):
    bench.engine.encode(TEXTS)
    return bench


def turned(vector, position, inv_freq):
    """A key (D,) of half-split pairs turned by so many tokens, pair by pair as complex numbers."""
    half, vector = inv_freq.numel(), vector.double()
    angles = position * inv_freq.double()
    numbers = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag])


def expected_shift(form, chunk, changes, strength):
    """changes: {chunk: [vectors]} of the computed rows."""
    everything = [vector for vectors in changes.values() for vector in vectors]
    strength *= len(everything) / (len(everything) + 1.5 * everything[0].numel())
    common = sum(everything) / len(everything)
    own = changes.get(chunk, [])
    if form == "common":
        return strength * common
    if form == "chunk":
        return strength * sum(own) / len(own) if own else torch.zeros_like(common)
    return strength * (sum(own) + 16 * common) / (len(own) + 16) if own else strength * common


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_stay_are_shifted_by_the_mean_change(stored, monkeypatch, form):
    """Layer 1: there what the computed rows get is full prefill's own KV, so the sums need nothing of ours."""
    chosen = []
    rows = Probe.rows
    monkeypatch.setattr(Probe, "rows", lambda *a: chosen.append(rows(*a)) or chosen[-1])
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    reused = stored.engine.prefill(prompt, method="reuse").cache
    found = stored.engine.prefill(prompt, method=f"probe:shift={form},strength=0.5", ratio=0.6).cache
    picked = set(chosen[-1].tolist())
    truth_keys, truth_values = stored.kv(prompt.token_ids)[1]
    stale_keys, stale_values = reused.span(1, 0, len(prompt.token_ids))
    decoder = stored.engine._resources.decoder
    inv_freq = decoder.ropes[decoder.layer_types[1]]
    places = list(enumerate(chunk_places(prompt)))
    size = 2 * inv_freq.numel()
    for head in range(2):
        keys, values = {}, {}
        for number, (start, stop) in places:
            for row in picked & set(range(start, stop)):
                change = (truth_keys[head, row] - stale_keys[head, row]).double()
                change[:size] = turned(change[:size], -row, inv_freq)
                keys.setdefault(number, []).append(change)
                values.setdefault(number, []).append(truth_values[head, row] - stale_values[head, row])
        for number, (start, stop) in places:
            left = [row for row in range(start, stop) if row not in picked]
            for row in left[:2] + left[-2:]:
                by = expected_shift(form, number, keys, 0.5)
                by[:size] = turned(by[:size], row, inv_freq)
                assert (
                    largest_error(found.span(1, row, row + 1)[0][head, 0], stale_keys[head, row] + by) < 1e-3
                )
                by = expected_shift(form, number, values, 0.5)
                assert (
                    largest_error(found.span(1, row, row + 1)[1][head, 0], stale_values[head, row] + by)
                    < 1e-3
                )
    unselected = [r for _, (a, b) in places for r in range(a, b) if r not in picked]
    assert (
        largest_error(found.span(1, 0, len(prompt.token_ids))[1][:, unselected], stale_values[:, unselected])
        > 0.01
    )


def test_the_linear_form_is_ridge_regression_on_the_computed_rows(stored, monkeypatch):
    """Layer 1 again, where full prefill says what the change is; by least squares in double precision."""
    chosen, rows = [], Probe.rows
    monkeypatch.setattr(Probe, "rows", lambda *a: chosen.append(rows(*a)) or chosen[-1])
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    tokens = len(prompt.token_ids)
    reused = stored.engine.prefill(prompt, method="reuse").cache
    found = stored.engine.prefill(prompt, method="probe:shift=linear,strength=0.5", ratio=0.6).cache
    truth, stale = stored.kv(prompt.token_ids)[1], reused.span(1, 0, tokens)
    decoder = stored.engine._resources.decoder
    inv_freq = decoder.ropes[decoder.layer_types[1]]
    places = chunk_places(prompt)
    chunk = {row: number for number, (start, stop) in enumerate(places) for row in range(start, stop)}
    picked = [row for row in chosen[-1].tolist() if row in chunk]
    left = [row for row in chunk if row not in picked][::7]

    def turned_row(vector, row, sign):
        out, size = vector.double(), 2 * inv_freq.numel()
        out[:size] = turned(out[:size], sign * row, inv_freq)
        return out

    size, trusted = stale[0].shape[-1], []
    for head, kind in ((0, 0), (1, 0), (0, 1), (1, 1)):  # keys and values alone say what becomes of them

        def held(row, head=head, kind=kind):
            own = stale[kind][head, row]
            return own.double() if kind else turned_row(own, row, -1)

        spread = torch.stack([torch.stack([held(row, h) for row in picked]) for h in (0, 1)]).std()

        def features(row, spread=spread, held=held):
            place = row - places[chunk[row]][0]
            where = torch.tensor([1 / (1 + place), math.log1p(place) / 6, row / tokens], dtype=torch.float64)
            return torch.cat([held(row), 3 * spread * where])

        def change(row, head=head, kind=kind):
            by = truth[kind][head, row] - stale[kind][head, row]
            return by.double() if kind else turned_row(by, row, -1)

        def mean(number, change=change):
            own = [change(row) for row in picked if chunk[row] == number]
            common = sum(change(row) for row in picked) / len(picked)
            return (sum(own) + 16 * common) / (len(own) + 16) if own else common

        centre = sum(features(row) for row in picked) / len(picked)
        system = torch.stack([features(row) - centre for row in picked])
        wanted = torch.stack([change(row) - mean(chunk[row]) for row in picked])
        ridge = 4 * (size + 3) / len(picked) * float((system**2).sum(0).mean()) + 1e-6
        damped = torch.cat([system, math.sqrt(ridge) * torch.eye(size + 3, dtype=torch.float64)])
        right = torch.cat([wanted, torch.zeros(size + 3, size, dtype=torch.float64)])
        weights = torch.linalg.lstsq(damped, right).solution
        scales = (system**2).sum(0) + ridge
        typical = sum(float((each**2 / scales).sum()) for each in system) / len(picked)
        strength = 0.5 * len(picked) / (len(picked) + 1.5 * size)
        for row in left:
            away = float(((features(row) - centre) ** 2 / scales).sum()) / typical
            trust = 1 / (1 + 8 * max(0.0, away - 1))
            trusted.append(trust)
            shift = strength * (mean(chunk[row]) + trust * ((features(row) - centre) @ weights))
            shift = shift if kind else turned_row(shift, row, 1)
            now, before = found.span(1, row, row + 1)[kind][head, 0], stale[kind][head, row]
            assert largest_error(now, before + shift) < 1e-3
            assert largest_error(now, before) > 1e-3
    assert min(trusted) < 0.5 < max(trusted) == 1


@pytest.mark.parametrize("most", [768, 12])
def test_the_kernel_form_is_kernel_ridge_regression_on_the_computed_rows(stored, monkeypatch, most):
    """Layer 1, in double precision and one pair of rows at a time; of too many computed rows some are learnt from."""
    monkeypatch.setattr(kernel, "MOST_LEARNT", most)
    chosen, rows = [], Probe.rows
    monkeypatch.setattr(Probe, "rows", lambda *a: chosen.append(rows(*a)) or chosen[-1])
    prompt = stored.engine.tokenize(make_prompt(TEXTS))
    tokens = len(prompt.token_ids)
    reused = stored.engine.prefill(prompt, method="reuse").cache
    found = stored.engine.prefill(prompt, method="probe:shift=kernel,strength=0.5", ratio=0.6).cache
    truth, stale = stored.kv(prompt.token_ids)[1], reused.span(1, 0, tokens)
    decoder = stored.engine._resources.decoder
    inv_freq = decoder.ropes[decoder.layer_types[1]]
    chunk = {row: n for n, span in enumerate(chunk_places(prompt)) for row in range(*span)}
    picked = [row for row in chosen[-1].tolist() if row in chunk]
    left = [row for row in chunk if row not in picked][::7]
    if most < len(picked):
        picked = [picked[round(place * (len(picked) - 1) / (most - 1))] for place in range(most)]

    def held(kv, row, kind):
        """(heads, D), keys turned back to position 0."""
        if kind:
            return kv[1][:, row].double()
        size, out = 2 * inv_freq.numel(), kv[0][:, row].double()
        for head in out:
            head[:size] = turned(head[:size], -row, inv_freq)
        return out

    def features(row):
        parts = []
        for kind in (0, 1):
            known = torch.stack([held(stale, each, kind) for each in picked])
            mean = known.mean(0)
            parts.append((held(stale, row, kind) - mean).flatten() / (known - mean).square().mean().sqrt())
        return torch.cat(parts)

    feature = {row: features(row) for row in {*picked, *left}}

    def squared(one, other):
        return float((feature[one] - feature[other]).square().sum())

    pairs = [squared(a, b) for a in picked for b in picked if a != b]
    typical = sum(pairs) / len(pairs)

    def alike(one, other):
        near = 2 * math.exp(-abs(one - other) / 128) if chunk[one] == chunk[other] else 0
        return (1 + near) / math.sqrt(1 + squared(one, other) / (0.25 * typical))

    system = torch.tensor([[alike(a, b) for b in picked] for a in picked], dtype=torch.float64)
    system += 0.3 * torch.eye(len(picked), dtype=torch.float64)
    strength = 0.5 * len(picked) / (len(picked) + stale[0].shape[-1] / 2)
    for kind in (0, 1):
        changes = torch.stack([held(truth, row, kind) - held(stale, row, kind) for row in picked])
        weights = torch.linalg.solve(system, changes.flatten(1))
        for row in left:
            likeness = torch.tensor([alike(row, each) for each in picked], dtype=torch.float64)
            shift = strength * (likeness @ weights).view(2, -1)
            for head in (0, 1):
                by = shift[head]
                if not kind:
                    by[: 2 * inv_freq.numel()] = turned(by[: 2 * inv_freq.numel()], row, inv_freq)
                now, before = found.span(1, row, row + 1)[kind][head, 0], stale[kind][head, row]
                assert largest_error(now, before + by) < 1e-3
                assert largest_error(now, before) > 1e-4


@pytest.mark.parametrize("form", [*FORMS, "linear", "kernel"])
def test_an_exact_chunk_is_never_shifted(stored, form):
    prompt = chat(stored, TEXTS)
    reused = stored.engine.prefill(prompt, method="reuse").cache
    found = stored.engine.prefill(prompt, method=f"probe:shift={form}", ratio=0.5)
    start, stop = chunk_places(prompt)[0]
    for layer in range(reused.geometry.layers):
        for a, b in zip(reused.span(layer, start, stop), found.cache.span(layer, start, stop), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_where_there_is_nothing_to_choose_nothing_is_shifted(stored, ratio):
    prompt = make_prompt(TEXTS)
    plain = stored.engine.prefill(prompt, method="reuse" if ratio == 0 else "recompute").logits
    found = stored.engine.prefill(prompt, method="probe-shift", ratio=ratio)
    assert largest_error(found.logits, plain) < 1e-4
    assert found.report.probe_rows == 0


class Probing(Policy):
    """Shifts rows of which it was told nothing, in many goes."""

    def rows(self, plan, probed=None):
        chosen = plan.always.clone()
        chosen[::2] = True
        return chosen.nonzero().squeeze(1)

    def corrects(self, plan):
        return True

    def correct(self, plan, change):
        return Shift(torch.zeros_like(change.stored_keys), torch.ones_like(change.stored_values))


def test_a_shift_is_there_before_the_first_row_looks(llama, monkeypatch):
    """Rows in several goes: the first must attend to what the change of the last one says."""
    import ragblend.engine.work as work

    llama.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    whole = llama.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits
    monkeypatch.setattr(work, "BATCH_ROWS", 8)
    assert torch.equal(llama.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits, whole)
    assert largest_error(llama.engine.prefill(prompt, method="reuse").logits, whole) > 1e-2


def test_rows_of_an_earlier_probe_are_not_shifted(llama, monkeypatch):
    """They are right already."""
    llama.engine.encode(TEXTS)
    prompt = llama.engine.tokenize(make_prompt(TEXTS))
    seen, rows = [], Probe.rows
    monkeypatch.setattr(Probe, "rows", lambda *a: seen.append(a) or rows(*a))
    shifted = llama.engine.prefill(prompt, method="probe:passes=2,shift=common", ratio=0.6).cache
    done = seen[-1][2].computed.nonzero().squeeze(1)
    truth = llama.kv(prompt.token_ids)[1]
    assert done.numel() > 3
    for found, expected in zip(shifted.span(1, 0, len(prompt.token_ids)), truth, strict=True):
        assert largest_error(found[:, done], expected[:, done]) < 1e-4


def test_shifts_are_listed():
    assert METHODS["probe-shift"].corrects and policy_named("probe:shift=none").shift == "none"


def made_up_change(key_size=8, value_size=8, dtype=torch.float32):
    """(plan, change): two chunks behind five rows, 30 of 100 rows computed, changes that hang on what is stored."""
    generator = torch.Generator().manual_seed(3)
    plan = SimpleNamespace(
        tokens=110,
        token_ids=torch.zeros(110, dtype=torch.long),
        spans=[SimpleNamespace(start=5, stop=65), SimpleNamespace(start=65, stop=105)],
    )
    rows = torch.randperm(100, generator=generator)[:30].sort().values + 5
    stored = [torch.randn(2, 100, size, generator=generator).to(dtype) for size in (key_size, value_size)]
    mixed = [
        part.float() @ torch.randn(part.shape[-1], part.shape[-1], generator=generator) for part in stored
    ]
    changes = [part[:, rows - 5] * 0.3 + 0.5 for part in mixed]
    change = Change(
        layer=0,
        rows=rows,
        keys=changes[0],
        values=changes[1],
        start=5,
        stop=105,
        stored_keys=stored[0],
        stored_values=stored[1],
        still=lambda keys, positions: keys,
    )
    return plan, change


@pytest.mark.parametrize(("form", "error"), [("linear", 0.02), ("kernel", 0.02)])
def test_bfloat16_says_what_float32_says(form, error):
    plan, change = made_up_change(dtype=torch.bfloat16)
    wide = replace(change, stored_keys=change.stored_keys.float(), stored_values=change.stored_values.float())
    short, exact = shift_of(form, 0.8, plan, change), shift_of(form, 0.8, plan, wide)
    assert short.keys.dtype == torch.bfloat16
    for found, wanted in ((short.keys, exact.keys), (short.values, exact.values)):
        assert wanted.norm() > 1
        assert (found.float() - wanted).norm() < error * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_oracle_puts_the_truth_in_whatever_the_dtype(dtype):
    plan, change = made_up_change(dtype=dtype)
    truth = [torch.randn(2, 110, 8).to(dtype) for _ in ("keys", "values")]
    cache = SimpleNamespace(
        span=lambda layer, start, stop: (truth[0][:, start:stop], truth[1][:, start:stop])
    )
    policy = policy_named("transplant").given(cache, METHODS["heads"])
    policy._chosen[:] = [change.rows]
    shift, at = policy.correct(plan, change), change.rows - change.start
    for added, stored, true in zip(
        (shift.keys, shift.values), (change.stored_keys, change.stored_values), truth, strict=True
    ):
        assert largest_error(stored[:, at].float() + added[:, at], true[:, change.rows].float()) < 1e-6


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_a_row_much_larger_than_all_others_leaves_numbers(size):
    """Some models have them; in bfloat16 its square rounds off more than its distance to its like."""
    plan, change = made_up_change(dtype=torch.bfloat16)
    change.stored_keys[:, change.rows[:2] - change.start] = size
    change.stored_keys[:, 90] = size
    shift = shift_of("kernel", 0.8, plan, replace(change, known={}))
    assert shift.keys.isfinite().all() and shift.values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_rows_that_are_all_alike_tell_no_distance(dtype):
    """A passage of one word again and again, and other rows beside it."""
    plan, change = made_up_change(dtype=dtype)
    for part in (change.stored_keys, change.stored_values):
        part[:, change.rows - change.start] = part[:, :1].clone()
    shift = shift_of("kernel", 0.8, plan, change)
    assert shift.keys.isfinite().all() and shift.values.isfinite().all()


def test_far_from_all_computed_rows_nothing_is_shifted():
    plan, change = made_up_change()
    change.stored_keys[:, 95] = 1e4
    shift = shift_of("kernel", 0.8, plan, change)
    assert 95 + change.start not in change.rows
    assert shift.keys[:, 95].norm() < 0.01 * shift.keys.norm(dim=(0, 2)).median()


def test_of_one_computed_row_nothing_is_learnt():
    plan, change = made_up_change()
    alone = replace(change, rows=change.rows[:1], keys=change.keys[:, :1], values=change.values[:, :1])
    assert shift_of("kernel", 0.8, plan, alone) is None
    two = replace(change, rows=change.rows[:2], keys=change.keys[:, :2], values=change.values[:, :2])
    assert shift_of("kernel", 0.8, plan, two).keys.isfinite().all()


def test_keys_may_be_wider_than_values():
    plan, change = made_up_change(key_size=8, value_size=4)
    shift = shift_of("kernel", 0.8, plan, change)
    assert shift.keys.shape == change.stored_keys.shape and shift.values.shape == change.stored_values.shape
    assert shift.keys.norm() > 1 and shift.values.norm() > 1


def test_values_narrower_than_keys():
    """The two have regressions of their own then; each says what it says beside others of its size."""
    plan, change = made_up_change(key_size=8, value_size=4)
    found = shift_of("linear", 0.8, plan, change)
    keys_alone = replace(change, values=change.keys, stored_values=change.stored_keys)
    values_alone = replace(change, keys=change.values, stored_keys=change.stored_values)
    torch.testing.assert_close(found.keys, shift_of("linear", 0.8, plan, keys_alone).keys)
    torch.testing.assert_close(found.values, shift_of("linear", 0.8, plan, values_alone).values)
