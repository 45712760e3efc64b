"""The shift: which rows are shifted, odd rows, and its formula."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from benches import chat, in_turn, largest_error, make_prompt, make_text, of_stored

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.selection import METHODS, Delta, Policy, shift
from ragblend.engine.selection.shift import KernelShift, ShiftContext

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


# --- against its formula: row by row, in double precision, on a layer's true change


@dataclass(frozen=True)
class LayerOne:
    """Layer 1 of a prompt: there the computed rows get full prefill's own KV, so that the sums need nothing of ours.

    truth, stale, found: keys and values (heads, tokens, D) as full prefill has them, as stored, and shifted.
    known: as stored in the layer by which rows are compared, this one or layer 0; inv_freq, known_inv_freq: of the two.
    chunk: of each row that is of a chunk, its number; picked: the computed ones among them.
    """

    truth: tuple[torch.Tensor, torch.Tensor]
    stale: tuple[torch.Tensor, torch.Tensor]
    found: tuple[torch.Tensor, torch.Tensor]
    known: tuple[torch.Tensor, torch.Tensor]
    inv_freq: torch.Tensor
    known_inv_freq: torch.Tensor
    tokens: int
    chunk: dict[int, int]
    starts: list[int]
    picked: list[int]

    def left(self):
        """The rows of chunks that were not computed."""
        return [row for row in self.chunk if row not in self.picked]

    def held(self, row, kind, kv=None):
        """(heads, D): a row's stored keys (kind 0), un-rotated to position 0, or values (1)."""
        own = (self.stale if kv is None else kv)[kind][:, row]
        return own.double() if kind else rotated(own, -row, self.inv_freq)

    def compared(self, row, kind):
        own = self.known[kind][:, row].double()
        return own if kind else rotated(own, -row, self.known_inv_freq)

    def change(self, row, kind):
        return self.held(row, kind, self.truth) - self.held(row, kind)

    def assert_shifted(self, row, kind, by):
        """by (heads, D): what is to have been added to the row's keys, un-rotated to position 0, or to its values."""
        by = by if kind else rotated(by, row, self.inv_freq)
        for now, before, added in zip(self.found[kind][:, row], self.stale[kind][:, row], by, strict=True):
            assert largest_error(now, before + added) < 1e-3

    def assert_moved(self, row, kind, by_more_than):
        for now, before in zip(self.found[kind][:, row], self.stale[kind][:, row], strict=True):
            assert largest_error(now, before) > by_more_than


def rotated(vectors, position, inv_freq):
    """Keys (..., D) of half-split pairs rotated by so many tokens, pair by pair as complex numbers."""
    half, vectors = inv_freq.numel(), vectors.double()
    angles = position * inv_freq.double()
    pairs = torch.complex(vectors[..., :half], vectors[..., half : 2 * half])
    numbers = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag, vectors[..., 2 * half :]], dim=-1)


@pytest.fixture
def shifted(bench, monkeypatch):
    """The LayerOne of four texts behind each other, 60% computed."""
    bench.engine.encode(TEXTS)

    def prefilled(compared_by):
        chosen, policy = [], type(METHODS["probe-shift"])
        rows = policy.rows
        monkeypatch.setattr(policy, "rows", lambda *a: chosen.append(rows(*a)) or chosen[-1])
        prompt = bench.engine.tokenize(make_prompt(TEXTS))
        tokens, places = len(prompt.token_ids), prompt.places
        reused = bench.engine.prefill(prompt, method="reuse").cache
        found = bench.engine.prefill(prompt, method="probe-shift", ratio=0.6).cache
        chunk = {row: number for number, place in enumerate(places) for row in range(*place)}
        decoder = bench.engine.runtime.decoder
        return LayerOne(
            truth=bench.kv(prompt.token_ids)[1],
            stale=reused.span(1, 0, tokens),
            found=found.span(1, 0, tokens),
            known=reused.span(compared_by, 0, tokens),
            inv_freq=decoder.ropes[decoder.layer_types[1]],
            known_inv_freq=decoder.ropes[decoder.layer_types[compared_by]],
            tokens=tokens,
            chunk=chunk,
            starts=[start for start, _ in places],
            picked=[row for row in chosen[-1].tolist() if row in chunk],
        )

    return prefilled


@pytest.mark.parametrize(("bench", "most", "few"), in_turn((768, 256), (768, 0), (12, 0)), indirect=["bench"])
def test_the_shift_is_kernel_ridge_regression_on_recomputed_rows(shifted, monkeypatch, most, few):
    """One pair of rows at a time; of too many computed rows some are learnt from, and of more than few similarity is
    the layer's before."""
    monkeypatch.setattr(shift, "MAX_FITTED_ROWS", most)
    monkeypatch.setattr(shift, "FEW_FITTED", few)
    layer = shifted(compared_by=1 if few else 0)
    picked, left = layer.picked, layer.left()[::7]
    if most < len(picked):
        picked = [picked[int((place + 0.5) * len(picked) / most)] for place in range(most)]

    def features(row):
        parts = []
        for kind in (0, 1):
            known = torch.stack([layer.compared(each, kind) for each in picked])
            mean = known.mean(0)
            parts.append((layer.compared(row, kind) - mean).flatten() / (known - mean).square().mean().sqrt())
        return torch.cat(parts)

    feature = {row: features(row) for row in {*picked, *left}}

    def squared(one, other):
        return float((feature[one] - feature[other]).square().sum())

    pairs = [squared(a, b) for a in picked for b in picked if a != b]
    typical = sum(pairs) / len(pairs)

    def alike(one, other):
        near = 2 * math.exp(-abs(one - other) / 128) if layer.chunk[one] == layer.chunk[other] else 0
        return (1 + near) / math.sqrt(1 + squared(one, other) / (0.25 * typical))

    system = torch.tensor([[alike(a, b) for b in picked] for a in picked], dtype=torch.float64)
    system += 0.3 * torch.eye(len(picked), dtype=torch.float64)
    strength = 0.8 * len(picked) / (len(picked) + layer.stale[0].shape[-1] / 2)
    for kind in (0, 1):
        changes = torch.stack([layer.change(row, kind) for row in picked])
        weights = torch.linalg.solve(system, changes.flatten(1))
        for row in left:
            likeness = torch.tensor([alike(row, each) for each in picked], dtype=torch.float64)
            layer.assert_shifted(row, kind, strength * (likeness @ weights).view_as(changes[0]))
            layer.assert_moved(row, kind, by_more_than=1e-4)


@pytest.mark.parametrize("few", [19, 20])
def test_with_many_recomputed_rows_three_layers_share_similarity(monkeypatch, few):
    """Twenty are computed."""
    monkeypatch.setattr(shift, "FEW_FITTED", few)
    torch.manual_seed(0)
    layers = [(torch.randn(2, 60, 16), torch.randn(2, 60, 16), torch.randn(2, 2, 20, 16)) for _ in range(7)]

    def shifted(run, layer, compared=None):
        """compared: by that layer's stored rows, in a separate run."""
        keys, values, _ = layers[layer if compared is None else compared]
        changes = layers[layer][2]
        [delta] = KernelShift().deltas(of_stored(keys, values, run, *changes, layer=layer))
        return torch.cat([delta.keys, delta.values])

    def new_run():
        return ShiftContext(torch.arange(0, 60, 3), [(0, 60)])

    run = new_run()
    for layer, compared in enumerate([0, 0, 0, 3, 3, 3, 6] if few < 20 else range(7)):
        assert torch.equal(shifted(run, layer), shifted(new_run(), layer, compared)), layer
    run = new_run()  # rows that were narrowed between have a run that begins anywhere
    for layer, compared in zip(range(2, 7), [2, 2, 2, 5, 5] if few < 20 else range(2, 7), strict=True):
        assert torch.equal(shifted(run, layer), shifted(new_run(), layer, compared)), layer


@pytest.mark.parametrize("seed", range(5))
def test_outliers_stay_similar_to_each_other_in_bfloat16(seed):
    """Its square needs more digits than bfloat16 has: rounded to one number, the twins would seem far apart."""
    torch.manual_seed(seed)
    stored = torch.randn(2, 2, 400, 16)
    stored[:, :, 20:22] = 100 * torch.randn(2, 2, 1, 16)
    stored = stored.bfloat16()
    rows = torch.arange(0, 400, 2)
    changes = torch.randn(2, 2, len(rows), 16)

    def shifted(dtype):
        run = ShiftContext(rows, [(0, 400)], dtype)
        [delta] = KernelShift().deltas(of_stored(*stored.to(dtype), run, *changes))
        return delta.keys[:, 21].double()

    exact = shifted(torch.float32)
    assert exact.norm() > 1
    assert largest_error(shifted(torch.bfloat16), exact) < 0.05


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("count", [2, 129, 768])
def test_the_inverse_by_products_is_the_inverse(count, spread):
    """From rows that are all alike (condition 7,700 for 768) to rows that have nothing in common."""
    torch.manual_seed(0)
    rows = spread * torch.randn(count, 8)
    at = torch.arange(count) * 4
    gain = 1 + 2 * (-(at[:, None] - at).abs() / 128).exp()
    system = gain / (1 + torch.cdist(rows, rows) ** 2).sqrt() + 0.3 * torch.eye(count)
    exact = torch.linalg.inv(system.double())
    assert largest_error(shift.inverse_by_products(system).double(), exact) < 1e-3
