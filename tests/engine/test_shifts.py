"""Which rows are shifted, and odd rows; test_shift_forms.py has the formula."""

from dataclasses import replace

import pytest
import torch
from benches import chat, in_turn, largest_error, make_prompt, make_text, of_stored

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.selection import METHODS, Delta, KernelShift, Policy
from ragblend.engine.selection.shift import ShiftContext

TEXTS = [make_text(seed, words=20) for seed in range(4)]


def test_exact_chunks_are_never_shifted(each_stored):
    prompt = chat(each_stored, TEXTS)
    reused = each_stored.engine.prefill(prompt, method="reuse").cache
    found = each_stored.engine.prefill(prompt, method="probe-shift", ratio=0.5)
    start, stop = prompt.places[0]
    for layer in range(reused.geometry.layers):
        for a, b in zip(reused.span(layer, start, stop), found.cache.span(layer, start, stop), strict=True):
            assert torch.equal(a, b)


class Probing(Policy):
    """Shifts rows of which it was told nothing, in many blocks."""

    def rows(self, plan, probed=None):
        chosen = plan.always.clone()
        chosen[::2] = True
        return chosen.nonzero().squeeze(1)

    def corrects(self, plan):
        return True

    def deltas(self, plan, change):
        for start, stop in change.context.chunks:
            keys, values = change.stored(slice(start, stop))
            yield Delta(start, torch.zeros_like(keys), torch.ones_like(values))


def test_kv_is_shifted_before_the_first_block_attends(stored, monkeypatch):
    """Rows in several blocks: the first must attend to what the change of the last one says."""
    import ragblend.engine.fusion as fusion

    prompt = make_prompt(TEXTS)
    whole = stored.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits
    monkeypatch.setattr(fusion, "BLOCK_ROWS", 8)
    assert torch.equal(stored.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits, whole)
    assert largest_error(stored.engine.prefill(prompt, method="reuse").logits, whole) > 1e-2


def made_up_change(key_size=8, value_size=8, dtype=torch.float32):
    """Two chunks behind five rows, 30 of 100 rows computed, changes that hang on what is stored."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(100, generator=generator)[:30].sort().values + 5
    stored = [torch.randn(2, 105, size, generator=generator).to(dtype) for size in (key_size, value_size)]
    mixed = [
        part.float() @ torch.randn(part.shape[-1], part.shape[-1], generator=generator) for part in stored
    ]
    changes = [part[:, rows] * 0.3 + 0.5 for part in mixed]
    return of_stored(*stored, ShiftContext(rows, [(5, 65), (65, 105)], dtype), *changes)


def delta_of(change):
    """Keys and values (H, 105, D) that are added, of all chunks; None if there are none."""
    deltas = list(KernelShift().deltas(change))
    if not deltas:
        return None
    assert [each.start for each in deltas] == [start for start, _ in change.context.chunks]
    behind = (torch.cat([getattr(each, name) for each in deltas], 1) for name in ("keys", "values"))
    return Delta(0, *(torch.nn.functional.pad(part, (0, 0, 5, 0)) for part in behind))


@pytest.mark.parametrize(("bench", "ratio"), in_turn((0.1,), (0.3,), (0.7,)), indirect=["bench"])
def test_shifting_chunks_together_equals_one_by_one(each_stored, monkeypatch, ratio):
    """Before an accelerator, where memory between them holds whatever it holds."""
    engine, prompt = each_stored.engine, make_prompt(TEXTS)
    alone = engine.prefill(prompt, method="probe-shift", ratio=ratio).logits
    calls = []
    monkeypatch.setattr(
        "ragblend.engine.selection.shift.shifts_chunks_together", lambda device: calls.append(device) or True
    )
    monkeypatch.setattr("ragblend.engine.selection.shift.padding", lambda count, device: -count % 8)
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        together = engine.prefill(prompt, method="probe-shift", ratio=ratio).logits
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls and largest_error(together, alone) < 1e-4
    assert largest_error(engine.prefill(prompt, method="probe", ratio=ratio).logits, alone) > 1e-3


def test_rows_between_chunks_are_not_shifted(monkeypatch):
    """An exact passage, say, or memory that nothing was written to yet; the chunks get what they get one by one."""
    change = made_up_change()
    middle = change.context.computed[(change.context.computed < 40) | (change.context.computed >= 60)]
    keys, values = change.stored(slice(None))
    keys[:, 45:55] = torch.nan
    parts = [part[:, torch.isin(change.context.computed, middle)] for part in (change.keys, change.values)]
    alone, together = (ShiftContext(middle, [(5, 40), (60, 105)]) for _ in range(2))
    expected = list(KernelShift().deltas(of_stored(keys, values, alone, *parts)))
    monkeypatch.setattr("ragblend.engine.selection.shift.shifts_chunks_together", lambda device: True)
    (found,) = KernelShift().deltas(of_stored(keys, values, together, *parts))
    assert found.start == 5 and found.keys.shape[1] == 100
    for name in ("keys", "values"):
        part = getattr(found, name)
        assert not part[:, 35:55].any()
        for delta in expected:
            at = slice(delta.start - 5, delta.start - 5 + delta.keys.shape[1])
            assert torch.allclose(part[:, at], getattr(delta, name), atol=1e-5)


def with_outliers(size):
    def change(stored, computed):
        for rows in (computed[:2], 95):
            stored[0][:, rows] = size

    return change


def with_equal_rows(stored, computed):
    """As of a passage that repeats one word."""
    for part in stored:
        part[:, computed] = part[:, :1].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [*map(with_outliers, (30.0, 1e3, 1e5)), with_equal_rows])
def test_odd_rows_leave_finite_numbers(odd, dtype):
    """Some models have rows much larger than all others; bfloat16 rounds more off its square than its distance."""
    change = made_up_change(dtype=dtype)
    odd(change.stored(slice(None)), change.context.computed)
    delta = delta_of(change)
    assert delta.keys.isfinite().all() and delta.values.isfinite().all()


@pytest.mark.parametrize(("token", "ratio"), [("=", 0.05), ("-", 0.15), (".", 0.3), ("=", 0.6)])
def test_passages_of_one_repeated_token_are_shifted(fresh_bench_for, token, ratio):
    """What rounding leaves of alike rows is no unit of distance: keys of a million came out, in bfloat16."""
    engine = fresh_bench_for("llama", dtype="bfloat16").engine
    prompt = Prompt([Literal(TEXTS[0]), Chunk(token * 120), Literal(" Question: where?")])
    engine.encode([token * 120])
    full, reused, shifted = (
        engine.prefill(prompt, method=method, ratio=ratio) for method in ("full", "reuse", "probe-shift")
    )
    largest = [max(held.keys.abs().max() for held in each.cache.fused) for each in (reused, shifted)]
    assert largest[1] < 2 * largest[0]
    expected = full.logits.log_softmax(-1)
    kl = [(expected.exp() * (expected - each.logits.log_softmax(-1))).sum() for each in (reused, shifted)]
    assert kl[1] < kl[0]


def test_rows_far_from_all_recomputed_rows_are_not_shifted():
    change = made_up_change()
    assert 100 not in change.context.computed
    change.stored(slice(None))[0][:, 100] = 1e4
    delta = delta_of(change)
    assert delta.keys[:, 100].norm() < 0.01 * delta.keys[:, 5:].norm(dim=(0, 2)).median()


def test_nothing_is_shifted_from_one_recomputed_row():
    change = made_up_change()

    def of_first(count):
        run = replace(change.context, computed=change.context.computed[:count])
        return replace(change, context=run, keys=change.keys[:, :count], values=change.values[:, :count])

    assert delta_of(of_first(1)) is None
    assert delta_of(of_first(2)).keys.isfinite().all()


def test_keys_may_be_wider_than_values():
    change = made_up_change(key_size=8, value_size=4)
    delta = delta_of(change)
    assert delta.keys.shape == (2, 105, 8) and delta.values.shape == (2, 105, 4)
    assert delta.keys.norm() > 1 and delta.values.norm() > 1


@pytest.mark.parametrize("name", ["epic", "cacheblend-gradual"])
def test_any_kind_of_policy_may_have_a_shift(stored, name):
    """It changes what is read, and nothing where every row is computed."""
    prompt, shifting = make_prompt(TEXTS), replace(METHODS[name], shift=KernelShift(), name="shifting")
    full = stored.logits(prompt)[-1]
    plain, shifted = (stored.engine.prefill(prompt, method=each, ratio=0.6) for each in (name, shifting))
    if name == "epic":
        assert shifted.report.served == plain.report.served
    assert not torch.equal(shifted.logits, plain.logits)
    assert largest_error(stored.engine.prefill(prompt, method=shifting, ratio=1.0).logits, full) < 1e-4
