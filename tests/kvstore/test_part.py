"""Part: some tokens of a stored value."""

import pytest
import torch

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import CODECS, Part
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore

GEOMETRY = Geometry(2, 3, 8, 8, "float32")
KEY = ChunkKey("a" * 64)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("skipped", "tokens"), [(0, 20), (3, 10), (19, 1)])
def test_a_part_reads_its_tokens_of_the_whole(tmp_path, codec, skipped, tokens):
    torch.manual_seed(0)
    keys, values = ([torch.randn(3, 20, 8) for _ in range(2)] for _ in range(2))
    ids = tuple(range(20))
    with KVStore.open(tmp_path / "kv", 1 << 20) as store:
        store.put(KEY, ChunkKV(ids, 5, GEOMETRY, keys, values), CODECS[codec])
        whole = store.get(KEY, ids)
        reader = store.open_chunk(KEY, ids)
        with Part(reader, skipped, tokens) as part:
            assert part.token_ids == ids[skipped : skipped + tokens] and part.start == 5 + skipped
            for layer in range(2):
                found = torch.empty(3, tokens, 8), torch.empty(3, tokens, 8)
                part.read_layer(layer, *found)
                for of_part, of_whole in zip(found, (whole.keys[layer], whole.values[layer]), strict=True):
                    assert torch.equal(of_part, of_whole[:, skipped : skipped + tokens])
