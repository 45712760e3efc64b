"""Faults that are not the disk's: budgets, formats, permissions, clocks, moved homes, network file systems."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from fault_values import key_of, put, token_ids, version_read

from ragblend.kvstore import files
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.store import KVStore

BUDGET = 1 << 20


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        *((part, mode) for part in (".", "values") for mode in (0o500, 0o000)),
        ("quarantine", 0o500),
        ("index/cache.db", 0o400),
    ],
)
def test_a_folder_without_permission(lab, open_folder, part, mode):
    """Named errors at most, for somebody who is not root; and once permitted again, nothing is lost."""
    said = lab.run(
        "fault_refusal:use_without_permission", 250, folder=open_folder / "home", mode=mode, part=part
    )
    assert all("Error: " in line for line in said)
    if (part, mode) == (".", 0o000):
        assert "Check" in said[0]


@pytest.fixture
def open_folder():
    """A folder that others than root can reach; pytest's own are its owner's alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if not all(parent.stat().st_mode & 0o001 for parent in Path(folder).parents):
            pytest.skip("the folder for temporary files is not everybody's")
        yield Path(folder)


def test_a_home_that_moved(root, tmp_path):
    with KVStore.open(root, BUDGET) as store:
        for number in range(3):
            put(store, number)
    shutil.move(root, tmp_path / "elsewhere with a blank")
    shutil.copytree(tmp_path / "elsewhere with a blank", tmp_path / "copy")
    for place in ("elsewhere with a blank", "copy"):
        with KVStore.open(tmp_path / place, BUDGET) as store:
            assert [version_read(store, number, {0}) for number in range(3)] == [0, 0, 0]
            assert store.check() == []
            put(store, 3)
    assert not root.exists()


def test_a_store_that_was_removed_while_open(root):
    with KVStore.open(root, BUDGET) as store:
        put(store, 1)
        shutil.rmtree(root)
        assert store.get(key_of(1), token_ids(1)) is None
        with pytest.raises(StoreError):
            put(store, 2)
        assert not root.exists()
    with KVStore.open(root, BUDGET) as store:
        put(store, 1)


MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:5 / /users rw - nfs4 server:/users rw,vers=4.2
31 30 8:1 / /users/local rw shared:1 - ext4 /dev/sda1 rw
32 22 0:50 / /mnt/my\040share rw - cifs //server/share rw
33 22 0:51 / /mnt/ssh rw - fuse.sshfs me@there:/ rw
34 22 8:2 / /mnt/usb rw - fuseblk /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/users/me/.local/share", "nfs4"),
        ("/users/local/me", None),
        ("/mnt/my share/kv", "cifs"),
        ("/mnt/ssh", "fuse.sshfs"),
        ("/mnt/usb/kv", None),
        ("/userswork", None),
    ],
)
def test_network_file_systems_are_known(tmp_path, folder, kind):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert files.network_file_system(tmp_path.joinpath(folder), tmp_path / "mountinfo") == kind
    assert files.network_file_system(tmp_path.joinpath(folder), tmp_path / "not there") is None


def test_a_network_file_system_is_warned_about_once(root, tmp_path, monkeypatch, caplog):
    (tmp_path / "mountinfo").write_text(f"22 1 0:5 / {tmp_path} rw - nfs server:/ rw\n")
    monkeypatch.setattr(files.network_file_system, "__defaults__", (tmp_path / "mountinfo",))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with KVStore.open(root, BUDGET) as store:
                put(store, 1)
    assert [record.getMessage().count("network file system (nfs)") for record in caplog.records] == [1]
