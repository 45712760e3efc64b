"""A store with one of its comparisons taken out: the suite's own oracle must notice, or it proves nothing.

The fsyncs are in test_power.py, the second look in test_interleaving.py. The scenarios here are small, and each is run
whole, to pass, and broken, to fail.
"""

import os

import pytest
from fault_mutations import MUTATIONS, broken
from fault_values import MODEL, OracleError, demand, key_of, put, same, token_ids, value, version_read

from ragblend.kvstore.fingerprint import chunk_key
from ragblend.kvstore.store import KVStore


def flipped_payload(root):
    """One bit of the last layer."""
    with KVStore.open(root, 1 << 20) as store:
        put(store, 1)
        (path,) = (root / "values").glob("*/*")
        with open(path, "r+b") as file:
            file.seek(-10, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-10, os.SEEK_END)
            file.write(bytes([byte ^ 4]))
        version_read(store, 1, {0, None})


def other_token_ids(root):
    """A key that stands for other token ids, as a defect in making keys would give: 'the store compares them'."""
    with KVStore.open(root, 1 << 20) as store:
        put(store, 1)
        demand(
            store.get(key_of(1), token_ids(2)) is None, "a wrong value was served: that of other token ids"
        )


def swapped_files(root):
    """The same token ids under two keys, of two collections; only the key in the file tells them apart."""
    other = chunk_key(MODEL, (1, 2), "another collection", token_ids(1))
    with KVStore.open(root, 1 << 20) as store:
        put(store, 1)
        store.put(other, value(1, 1))
        a, b = (root / "values").glob("*/*")
        one, two = a.read_bytes(), b.read_bytes()
        a.write_bytes(two)
        b.write_bytes(one)
        for key, version in ((key_of(1), 0), (other, 1)):
            found = store.get(key, token_ids(1))
            demand(found is None or same(found, value(1, version)), "a wrong value was served: another key's")


CASES = {
    "no checksum": flipped_payload,
    "no token comparison": other_token_ids,
    "no key comparison": swapped_files,
}


@pytest.mark.parametrize("name", CASES)
def test_without_the_comparison_the_oracle_speaks(tmp_path, name):
    CASES[name](tmp_path / "whole")
    with broken(name), pytest.raises(OracleError, match="wrong value"):
        CASES[name](tmp_path / "broken")
    CASES[name](tmp_path / "whole again")


def test_every_mutation_is_tried():
    assert {*CASES, "no file fsync", "no folder fsync", "no second look"} == set(MUTATIONS)
