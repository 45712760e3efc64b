"""Scenario: a store in folders without read or write permission, used by a user who is not root."""

import os
from pathlib import Path

from fault_values import demand, key_of, put, version_read

from ragblend.kvstore.errors import RagBlendError
from ragblend.kvstore.store import KVStore

_NOBODY = 65534


def use_without_permission(folder: str, mode: int, part: str) -> list[str]:
    """Open and use a store whose `part` has `mode`; the named errors that came, anything else is a failure."""
    root = Path(folder) / "kv"
    with KVStore.open(root, 1 << 20) as store:
        for number in range(2):
            put(store, number)
    if os.geteuid() == 0:
        for path in [Path(folder), *Path(folder).rglob("*")]:
            os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
    target = root if part == "." else root / part
    os.chmod(target, mode)
    try:
        said = _use(root)
    finally:
        os.chmod(target, 0o600 if part == "index/cache.db" else 0o700)
    with KVStore.open(root, 1 << 20) as store:
        version_read(store, 0, {0})
        problems = store.check()
        demand(problems == [], "check() once permitted again:", problems)
    return said


def _use(root: Path) -> list[str]:
    said: list[str] = []
    try:
        store = KVStore.open(root, 1 << 20)
    except RagBlendError as error:
        return [f"open: {type(error).__name__}: {error}"]
    with store:
        version_read(store, 0, {0, None})
        for name, call in {
            "put": lambda: put(store, 5),
            "delete": lambda: store.delete([key_of(1)]),
            "check": store.check,
            "gc": store.gc,
        }.items():
            try:
                call()
            except RagBlendError as error:
                said.append(f"{name}: {type(error).__name__}: {error}")
    return said
