"""Masks and tiled attention against a loop over rows and keys."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ragblend.engine.model import attention
from ragblend.engine.model.attention import position_mask, rows_attention, tiles

TOKENS = 400


def scattered(count, seed=0):
    """`count` ascending positions below TOKENS, the last one among them."""
    chosen = torch.randperm(TOKENS - 1, generator=torch.Generator().manual_seed(seed))[: count - 1]
    return torch.cat([chosen.sort().values, torch.tensor([TOKENS - 1])])


@pytest.mark.parametrize("window", [None, 1, 7, 399, 400, 1000])
def test_masks_are_causal_and_respect_the_window(window):
    rows = scattered(30)
    mask = position_mask(rows, TOKENS, window)
    assert mask.shape == (1, 1, 30, TOKENS)
    for number, row in enumerate(rows.tolist()):
        first = 0 if window is None else max(0, row - window + 1)
        seen = mask[0, 0, number].nonzero().squeeze(1).tolist()
        assert seen == list(range(first, row + 1))


@pytest.mark.parametrize("rows", [scattered(1), scattered(30), scattered(300), torch.arange(TOKENS)])
@pytest.mark.parametrize(
    ("window", "heads", "kv_heads"), [(None, 4, 4), (1, 6, 2), (20, 4, 1), (150, 6, 2), (None, 6, 2)]
)
@pytest.mark.parametrize("way", ["kernel", "packed keys", "products"])
def test_tiles_attend_as_one_dense_mask(rows, window, heads, kv_heads, way, monkeypatch):
    monkeypatch.setattr(attention, "products_are_faster", lambda dtype: way == "products")
    monkeypatch.setattr(attention, "packs_keys", lambda dtype: way == "packed keys")
    random = torch.Generator().manual_seed(1)
    query = torch.randn(1, rows.numel(), heads, 8, generator=random).transpose(
        1, 2
    )  # as the models hand it over
    key = torch.randn(1, kv_heads, TOKENS, 8, generator=random)
    value = torch.randn(1, kv_heads, TOKENS, 12, generator=random)
    blocks = tiles(rows, window, torch.float32)
    found, weights = rows_attention(nn.Module(), query, key, value, None, scaling=0.5, tiles=blocks)
    expected = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(heads // kv_heads, 1),
        value.repeat_interleave(heads // kv_heads, 1),
        attn_mask=position_mask(rows, TOKENS, window),
        scale=0.5,
    ).transpose(1, 2)
    assert weights is None
    assert found.shape == (1, rows.numel(), heads, 12)
    assert torch.allclose(found, expected, atol=1e-5)


def test_packed_keys_make_wide_tiles_with_folded_heads(monkeypatch):
    """Tiles of 64 rows took up to twice as long on a processor with AMX; masks of all rows at once, much memory."""
    monkeypatch.setattr(attention, "packs_keys", lambda dtype: True)
    rows, seen = torch.arange(0, 3000, 2), set()
    blocks = tiles(rows, None, torch.float32)
    assert max(tile.stop - tile.start for tile in blocks) == attention.WIDE_TILE_ROWS

    def attend(query, key, value, **options):
        seen.add(query.shape[1])
        return query

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend)
    query, key = torch.randn(1, 4, len(rows), 8), torch.randn(1, 1, 3000, 8)
    rows_attention(nn.Module(), query, key, key, None, tiles=blocks)
    assert seen == {1}, "queries of all heads that share keys are rows of one"
    assert not any(tile._folds for tile in blocks)


def test_whole_sequences_and_single_rows_need_no_mask(monkeypatch):
    monkeypatch.setattr(attention, "products_are_faster", lambda dtype: True)
    query, key, value = torch.randn(3, 1, 2, 150, 8, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    assert torch.allclose(rows_attention(nn.Module(), query, key, value, None)[0], expected, atol=1e-5)
    last = rows_attention(nn.Module(), query[:, :, -1:], key, value, None)[0]
    assert torch.allclose(last, expected[:, -1:], atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_attention_speed_is_measured_on_one_thread(fails, monkeypatch):
    """By two beside a busy program it was the wrong one, 27 of 40 times, and stayed it while the process lived."""
    before, seen = torch.get_num_threads(), set()

    def kernel(*given):
        seen.add(torch.get_num_threads())
        if fails:
            raise MemoryError
        return given[0]

    monkeypatch.setattr(attention, "_by_kernel", kernel)
    monkeypatch.setattr(attention, "packs_keys", lambda dtype: False)
    torch.set_num_threads(2)
    attention._measured_faster.cache_clear()
    try:
        with pytest.raises(MemoryError) if fails else nullcontext():
            assert not attention.products_are_faster(torch.bfloat16), "a kernel that does nothing is faster"
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        attention._measured_faster.cache_clear()


def test_concurrent_measurements_restore_the_number_of_threads(monkeypatch):
    """One put back what the other had set, and all later threads computed on one core."""
    before, both = torch.get_num_threads(), threading.Barrier(2, timeout=60)

    def slow(*given):
        time.sleep(0.002)
        return given[0]

    monkeypatch.setattr(attention, "_by_kernel", slow)
    monkeypatch.setattr(attention, "_by_products", slow)
    monkeypatch.setattr(attention, "packs_keys", lambda dtype: False)

    def ask():
        both.wait()
        attention.products_are_faster(torch.bfloat16)

    torch.set_num_threads(2)
    try:
        for _ in range(10):
            attention._measured_faster.cache_clear()
            asking = [threading.Thread(target=ask) for _ in range(2)]
            for each in asking:
                each.start()
            for each in asking:
                each.join(60)
            threads = []
            later = threading.Thread(target=lambda threads=threads: threads.append(torch.get_num_threads()))
            later.start()
            later.join(60)
            assert threads == [2]
    finally:
        torch.set_num_threads(before)
        attention._measured_faster.cache_clear()


def test_products_have_few_shapes(monkeypatch):
    """For each of them oneDNN keeps a megabyte: the peak of an answer was 2.3 times its KV."""
    monkeypatch.setattr(attention, "products_are_faster", lambda dtype: True)
    shapes = {
        (tile.stop - tile.start, tile.stop_key) for tile in tiles(torch.arange(8_000), None, torch.float32)
    }
    assert len(shapes) <= 24


def test_rows_around_a_gap_are_in_separate_tiles():
    """A prompt's beginning and its question: the one does not see the passages, and is not multiplied with them."""
    first, last = tiles(torch.cat([torch.arange(30), torch.arange(1380, 1400)]), None, torch.float32)
    assert (first.stop, first.stop_key) == (30, 30) and (last.start, last.stop) == (30, 50)
    assert last.masked_from_key == 1381
    assert not tiles(torch.arange(0), None, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("products", [False, True])
def test_keys_after_the_last_row_are_not_read(products, dtype, monkeypatch):
    """Later rows may not have been computed yet: NaN there must not leak through a mask, nor through the mean of the
    keys, by which products in bfloat16 centre them.
    """
    monkeypatch.setattr(attention, "products_are_faster", lambda dtype: products)
    rows = torch.arange(0, 100, 3)
    key = torch.randn(1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    value = key.clone()
    key[:, :, 100:], value[:, :, 100:] = float("nan"), float("nan")
    query = torch.randn(1, 2, rows.numel(), 8).to(dtype)
    found, _ = rows_attention(nn.Module(), query, key, value, None, tiles=tiles(rows, None, dtype))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("way", ["products", "collected"])
def test_a_bias_that_all_keys_share_costs_no_precision(way):
    """Qwen2.5-1.5B's first layer has scores up to 12,700, which are multiples of 64 in bfloat16."""
    torch.manual_seed(3)
    heads, key_heads, rows, size = 4, 2, 40, 64
    bias = torch.zeros(size)
    bias[-4:] = 400.0
    query = (torch.randn(1, heads, rows, size) + bias / 40).bfloat16()
    key, value = (
        (torch.randn(1, key_heads, rows, size) + bias).bfloat16(),
        torch.randn(1, key_heads, rows, size).bfloat16(),
    )
    positions = torch.arange(rows)
    if way == "products":
        cut = attention.tiles(positions, None, torch.bfloat16)
        found = attention._by_products(query, key, value, None, cut)
    else:
        mask = attention.additive_mask(attention.causal_mask(positions, positions, None), torch.bfloat16)[
            0, 0
        ]
        collector = attention.AttentionCollector(rows, 0, mask, 0, None)
        found = attention._collected(query[0], key[0], value[0], None, collector)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.02
