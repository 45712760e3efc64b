"""Triton's kernels equal the plain way: on a CUDA device if there is one, else in Triton's interpreter."""

import pytest
import torch
from benches import largest_error, make_prompt, make_text

from ragblend.engine import kernels

rows_attention = pytest.importorskip("ragblend.engine.kernels.rows_attention", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not kernels.available(DEVICE), reason="Triton does not run here")

TEXTS = [make_text(seed) for seed in range(3)]
# The interpreter is wrong for bfloat16, and a card multiplies float32 in fewer bits.
DTYPES = (torch.float16, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)


def scattered(count, tokens, heads=4, key_heads=2, size=32, dtype=DTYPES[0], room=20):
    """Rows, queries, keys and values; beyond the valid tokens the buffers hold NaN."""
    draw = torch.Generator().manual_seed(count)
    rows = torch.randperm(tokens, generator=draw)[:count].sort().values.to(DEVICE)
    query = torch.randn(count, heads, size, generator=draw).to(DEVICE, dtype).transpose(0, 1)
    buffers = [torch.randn(key_heads, tokens + room, size, generator=draw).to(DEVICE, dtype) for _ in "kv"]
    for buffer in buffers:
        buffer[:, tokens:] = torch.nan
    return rows, query, *(buffer[:, :tokens] for buffer in buffers)


@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (3, 40), (77, 300), (300, 300)])
def test_scattered_rows_see_the_keys_up_to_their_positions(count, tokens, window):
    for dtype in DTYPES:
        rows, query, key, value = scattered(count, tokens, dtype=dtype)
        expected = rows_attention.plain(query, key, value, rows, window)
        found = rows_attention.attend(query, key, value, rows, None, window).float()
        assert (found - expected).abs().max() < rows_attention.ALLOWED[dtype]


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(2, 2, 16), (9, 3, 64), (8, 2, 128), (2, 1, 256)])
def test_heads_of_a_group_share_their_keys(heads, key_heads, size):
    rows, query, key, value = scattered(20, 90, heads, key_heads, size)
    expected = rows_attention.plain(query, key, value, rows)
    assert (rows_attention.attend(query, key, value, rows).float() - expected).abs().max() < 0.005


def test_every_tile_gives_the_same_rows():
    rows, query, key, value = scattered(150, 300)
    expected = rows_attention.plain(query, key, value, rows)
    for blocks in {rows_attention.blocks_of(count, 32, True) for count in (1, 100, 1000)}:
        found = rows_attention.attend(query, key, value, rows, None, None, blocks).float()
        assert (found - expected).abs().max() < 0.005, blocks


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [
        (torch.float16, 32, True),
        (torch.float16, 48, False),
        (torch.float16, 8, False),
        (torch.float64, 32, False),
    ],
)
def test_other_heads_and_dtypes_take_the_plain_way(dtype, size, expected):
    assert rows_attention.supports(DEVICE, dtype, size, 2, False) is expected


def test_a_kernel_that_fails_or_is_wrong_is_not_used(caplog):
    def broken():
        raise RuntimeError("out of resource: shared memory")

    assert not kernels.passes(broken, "attention", 0.1) and "shared memory" in caplog.text
    assert not kernels.passes(lambda: float("nan"), "attention", 0.1) and "nan" in caplog.text
    assert kernels.passes(lambda: 0.05, "attention", 0.1)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("method", ["reuse", "cacheblend", "probe-shift", "exact"])
def test_prefill_by_kernels_equals_the_plain_way(fresh_bench_for, kind, method, monkeypatch):
    """On CUDA rows are in one block, and in 16 bits; the interpreter has float32."""
    engine = fresh_bench_for(
        kind, **({"device": "cuda", "dtype": "bfloat16"} if DEVICE.type == "cuda" else {})
    ).engine
    engine.encode(TEXTS)
    decoder, prompt = engine.runtime.decoder, make_prompt(TEXTS)
    told = []
    for by_kernels in (False, True):
        monkeypatch.setattr(decoder, "tiles", False)
        monkeypatch.setattr(decoder, "kernels", by_kernels)
        told.append(engine.prefill(prompt, method=method, ratio=0.3).logits)
    assert largest_error(*told) < (0.05 if DEVICE.type == "cuda" else 1e-4)
