"""Deliberately broken stores: one line of kvstore is removed, to show that the oracle notices."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from ragblend.kvstore import files, store, system

Mutation = tuple[Callable[..., Any], str, str]
MUTATIONS: dict[str, Mutation] = {
    "no file fsync": (files._write_new, "os.fsync(fd)", "pass"),
    "no folder fsync": (system.sync_folder, "os.fsync(fd)", "pass"),
    "no second look": (store.KVStore._open, "missing = path\n", "return None\n"),
}


def _code_of(function: Callable[..., Any], source: str) -> CodeType:
    """The code object of `function` as `source` has it; line numbers are of no use and left alone."""
    found = [
        constant
        for constant in compile(source, inspect.getfile(function), "exec").co_consts
        if isinstance(constant, CodeType) and constant.co_name == function.__name__
    ]
    assert len(found) == 1, function
    return found[0]


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """The store with that line taken out, whoever has imported the function; None breaks nothing."""
    if name is None:
        yield
        return
    function, old, new = MUTATIONS[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"the mutation {name!r} no longer fits {function.__qualname__}"
    whole = function.__code__
    function.__code__ = _code_of(function, source.replace(old, new))
    try:
        yield
    finally:
        function.__code__ = whole
