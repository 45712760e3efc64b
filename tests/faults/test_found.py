"""What the fault suite found, one small test each."""

import pytest
from fault_values import put, version_read

from ragblend.kvstore.store import KVStore

BUDGET = 1 << 20


@pytest.fixture
def three(root):
    """A closed store of three values."""
    with KVStore.open(root, BUDGET) as store:
        for number in range(3):
            put(store, number)
    return root


def test_a_schema_that_is_not_text_is_a_damaged_index(three):
    """SQLite quotes the damaged name in its message; decoding that raised UnicodeDecodeError out of open()."""
    path = three / "cache.db"
    damaged = path.read_bytes().replace(b"ON Cache(key, raw)", b"ON Cache(k\xd4y, raw)")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with KVStore.open(three, BUDGET) as store:
        assert store.stats().quarantined == 1
        assert [version_read(store, number, {0}) for number in range(3)] == [0, 0, 0]
