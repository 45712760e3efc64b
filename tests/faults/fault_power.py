"""Scenario: the power fails. Of the value files only what was fsynced survives; of the index, whatever there was.

A model of a disk that writes back nothing by itself: a file's bytes become durable when the file is fsynced, names
when their folder is. An image of the disk is built from that and opened. SQLite's own files are taken as they are
(the kernel had written them: the row is there, are the bytes?), or as they were some operations ago (it had not).
"""

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

from fault_model import NUMBERS, Model, Operation, operations
from fault_mutations import broken
from fault_values import demand, version_read

from ragblend.kvstore.store import KVStore

INDEX = ("index/cache.db", "index/cache.db-wal")
_REAL = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink", "write")}


class Disk:
    """What of the folder `root` would survive a power cut now; to be made when everything is synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ids = count()
        self._id_of: dict[int, int] = {}  # inode numbers are used again, ids are not
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int | None]] = {}  # folder -> name -> file id; None is a folder
        for folder, _, names in os.walk(root):
            for name in names:
                self._save(Path(folder, name))
            self._names[folder] = self._listing(folder)

    def _identity(self, inode: int) -> int:
        return self._id_of.setdefault(inode, next(self._ids))

    def _save(self, path: Path) -> None:
        self._bytes[self._identity(path.stat().st_ino)] = path.read_bytes()

    def _listing(self, folder: str) -> dict[str, int | None]:
        return {
            entry.name: None if entry.is_dir() else self._identity(entry.inode())
            for entry in os.scandir(folder)
        }

    def created(self, fd: int) -> None:
        self._id_of[os.fstat(fd).st_ino] = next(self._ids)

    def synced(self, fd: int) -> None:
        status, path = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
        if stat.S_ISDIR(status.st_mode):
            self._names[path] = self._listing(path)
        else:
            self._bytes[self._identity(status.st_ino)] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def image(self, to: Path) -> Path:
        """The disk after the cut: unsynced bytes are zeros, unsynced names are as they were."""
        shutil.rmtree(to, ignore_errors=True)
        self._build(str(self.root), to)
        (to / "index").mkdir(exist_ok=True)
        for name in INDEX:
            shutil.copyfile(self.root / name, to / name)
        return to

    def _build(self, folder: str, to: Path) -> None:
        to.mkdir()
        for name, identity in self._names.get(folder, {}).items():
            if identity is None:
                self._build(os.path.join(folder, name), to / name)
            elif not name.startswith("cache.db"):
                (to / name).write_bytes(self._bytes.get(identity) or self._zeros(folder, name))
                (to / name).chmod(0o600)

    def _zeros(self, folder: str, name: str) -> bytes:
        path = Path(folder, name)
        return bytes(path.stat().st_size if path.exists() else 0)


@contextmanager
def _watched(disk: Disk, before_each: Any) -> Iterator[None]:
    """Tell `disk` of every file made and synced, and call `before_each` before anything changes."""

    def fsync(fd: int) -> None:
        before_each()
        disk.synced(fd)

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        fd: int = _REAL["open"](path, flags, *more, **named)
        if flags & os.O_EXCL:
            disk.created(fd)
        return fd

    def announced(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            before_each()
            return _REAL[name](*arguments, **named)

        return call

    changed = {"open": open_, "fsync": fsync} | {
        name: announced(name) for name in ("replace", "unlink", "write")
    }
    with _in_os(changed):
        yield


@contextmanager
def _in_os(functions: dict[str, Any]) -> Iterator[None]:
    """Put `functions` into the module os meanwhile."""
    before = {name: getattr(os, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(os, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)


def cut(folder: str, steps: int, seed: int, one_in: int, mutation: str | None = None) -> dict[str, int]:
    """Cut the power in and after each of `steps` operations; what was acknowledged must be on the image."""
    here, seeded, totals = Path(folder), random.Random(seed), {"cuts": 0, "inside": 0}
    here.mkdir(parents=True)
    model = Model(capacity=5)
    pending: Operation | None = None
    with broken(mutation), KVStore.open(here / "kv", model.budget_bytes, policy="lru") as store:
        disk = Disk(here / "kv")

        def now_and_then() -> None:
            if seeded.randrange(one_in) == 0:
                _judge(disk, here, model, pending)
                totals["inside"] += 1

        for pending in islice(operations(seed), steps):
            with _watched(disk, now_and_then):
                pending.on(store)
            model.held = model.after(pending)
            _judge(disk, here, model, None)
            totals["cuts"] += 1
    return totals


def _judge(disk: Disk, here: Path, model: Model, pending: Operation | None) -> None:
    with _in_os(_REAL):  # what making and opening the image does is not this disk's
        Model(model.capacity, dict(model.held)).verify(disk.image(here / "image"), pending)


def cut_with_an_older_index(folder: str, steps: int, seed: int) -> dict[str, int]:
    """The index lost its newest commits (synchronous is NORMAL): right values or misses, and a sound store."""
    here, model, kept = Path(folder), Model(capacity=5), 0
    here.mkdir(parents=True)
    history: dict[int, set[int | None]] = {number: {None} for number in range(NUMBERS)}
    older: list[dict[str, bytes]] = []
    with KVStore.open(here / "kv", model.budget_bytes, policy="lru") as store:
        disk = Disk(here / "kv")
        for operation in islice(operations(seed), steps):
            with _watched(disk, lambda: None):
                operation.on(store)
            history[operation.number].add(operation.version)
            older.append({name: (here / "kv" / name).read_bytes() for name in INDEX})
            for files in older[-5:-1]:
                image = disk.image(here / "image")
                for name, data in files.items():
                    (image / name).write_bytes(data)
                kept += _right_or_missed(image, model.budget_bytes, history)
    return {"images": 4 * steps, "kept": kept}


def _right_or_missed(image: Path, budget_bytes: int, history: dict[int, set[int | None]]) -> int:
    with KVStore.open(image, budget_bytes, policy="lru") as store:
        problems = store.check()
        demand(problems == [], "check() after a power cut:", problems)
        found = [version_read(store, number, permitted) for number, permitted in history.items()]
    return len(found) - found.count(None)
