"""The home is private, and has one writing process at a time."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ragblend.app.home import Home, make_private
from ragblend.kvstore.errors import LibraryError, StoreLockedError
from ragblend.kvstore.lock import WriterLock, read_holder, writer_lock

HOLDER = """
import sys
from pathlib import Path
from ragblend.kvstore.lock import writer_lock
with writer_lock(Path(sys.argv[1]), "ragblend ingest letters"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_home_is_made_private(tmp_path):
    old = os.umask(0)
    try:
        home = Home(tmp_path / "a" / "b").create()
    finally:
        os.umask(old)
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
    assert home.paths_open_to_others() == []


def test_files_open_to_others_are_found_and_made_private(tmp_path):
    home = Home(tmp_path / "home").create()
    folder = home.root / "chroma"
    folder.mkdir(mode=0o755)
    (folder / "x").write_text("secret")
    (folder / "x").chmod(0o644)
    assert set(home.paths_open_to_others()) == {folder, folder / "x"}
    make_private(folder)
    assert home.paths_open_to_others() == []


def test_a_file_that_vanishes_while_it_is_made_private(tmp_path, monkeypatch):
    """SQLite's journals come and go: a command whose work was done ended in a FileNotFoundError."""

    def vanish(path, mode):
        path.unlink()
        os.chmod(path, mode)

    (tmp_path / "journal").touch()
    (tmp_path / "journal").chmod(0o644)
    monkeypatch.setattr(Path, "chmod", vanish)
    make_private(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_home_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGBLEND_HOME", str(tmp_path / "env"))
    assert Home.resolve().root == tmp_path / "env"
    assert Home.resolve(tmp_path / "given").root == tmp_path / "given"


def test_home_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LibraryError, match="--home"):
        Home(tmp_path / "file").create()


def test_a_second_writer_is_told_who_holds_the_lock_and_a_killed_one_blocks_nobody(tmp_path):
    lock = tmp_path / "writer.lock"
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError) as caught, writer_lock(lock):
            pytest.fail("two writers at once")
        process.kill()
    assert f"process {process.pid}" in str(caught.value) and "ragblend ingest letters" in str(caught.value)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    with writer_lock(lock, "next"):
        assert read_holder(lock) == json.loads(lock.read_text())
        assert read_holder(lock)["pid"] == os.getpid()
    assert read_holder(lock) is None


def test_a_released_lock_does_not_keep_the_command(tmp_path):
    """It named the document that `docs rm` had removed, or held the question of `ask`, until another one came."""
    with WriterLock(tmp_path / "lock", command="ragblend docs rm divorce.txt") as lock:
        with lock.hold(), lock.hold():
            assert b"divorce" in (tmp_path / "lock").read_bytes()
        assert b"divorce" not in (tmp_path / "lock").read_bytes()


def test_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="inside"), writer_lock(tmp_path / "lock"):
        raise ValueError("inside")
    with writer_lock(tmp_path / "lock"):
        pass
