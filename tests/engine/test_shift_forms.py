"""The shift against its formula: row by row, in double precision, on a layer's true change."""

import math
from dataclasses import dataclass

import pytest
import torch
from benches import in_turn, largest_error, make_prompt, make_text, of_stored

from ragblend.engine.selection import METHODS, shift
from ragblend.engine.selection.shift import KernelShift, ShiftContext

TEXTS = [make_text(seed, words=20) for seed in range(4)]


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
        """compared: by that layer's stored rows, in a run of its own."""
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
