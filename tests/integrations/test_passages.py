"""PassageRegistry: registered passages are found, by other processes too; removed ones leave no trace."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from waiting import SOON_S, at_once

from ragblend.integrations.passages import Passage, PassageRegistry, PassageSpan, node_id_of
from ragblend.kvstore.errors import StoreError, StoreFormatError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import NodeIndex, Scope

HARBOUR = "The harbour was dredged in 1921 by the Ems company, who left the crane behind."
CRANE = "The crane on the north mole lifts nine tonnes and is painted green."

# A process that adds passages in batches of ten, and prints the number of each batch.
ADDER = """
import sys
from pathlib import Path
from ragblend.integrations.passages import Passage, PassageRegistry
home, name, batches = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
registry = PassageRegistry.open(home)
for batch in range(batches):
    numbers = range(batch * 10, batch * 10 + 10)
    registry.add([Passage(f"{name} wrote the passage with the number {n}.", f"{name}-{n}") for n in numbers])
    print(batch, flush=True)
"""


@contextmanager
def adder(home, name, batches):
    """A process that adds passages; it is killed when the test ends."""
    command = [sys.executable, "-c", ADDER, str(home), name, str(batches)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        yield worker
        worker.kill()


@pytest.fixture
def registry(home):
    registry = PassageRegistry.open(home)
    yield registry
    registry.close()


@pytest.fixture
def other(home, registry):
    """Another connection to the same file, by another path, as another process has."""
    home.parent.joinpath("alias").symlink_to(home, target_is_directory=True)
    other = PassageRegistry(home.parent / "alias" / registry.path.name, "default")
    yield other
    other.close()


def names(found):
    return [each.node_id for each in found]


def test_registered_texts_are_found_with_their_spans(home, registry):
    assert not home.exists()  # nothing is opened before it is needed
    assert registry.find(HARBOUR) == []
    assert registry.add([Passage(HARBOUR, "h"), Passage(CRANE, "c")]) == 2
    text = f"1: {CRANE}\n2: {HARBOUR}{CRANE}"
    assert registry.find(text) == [
        PassageSpan(3, 70, "c"),
        PassageSpan(74, 152, "h"),
        PassageSpan(152, 219, "c"),
    ]
    assert registry.find(HARBOUR[:-1]) == registry.find("") == []
    registry.close()
    assert len(registry) == 2  # it is opened again
    bare = Passage(HARBOUR[:50])  # it gets a node id from its text
    assert registry.add([bare, bare]) == 1
    assert registry.find(HARBOUR[:60]) == [PassageSpan(0, 50, node_id_of(bare))]
    assert registry.remove([node_id_of(bare)]) == 1
    assert node_id_of(Passage(HARBOUR, "")) == ""


def test_of_several_nodes_with_one_text_the_smallest_id_is_found(registry):
    assert registry.add([Passage(HARBOUR, "z"), Passage(HARBOUR, "b"), Passage(HARBOUR, "y")]) == 3
    assert names(registry.find(HARBOUR)) == ["b"]
    assert registry.remove(["b", "absent"]) == 1
    assert names(registry.find(HARBOUR)) == ["y"]
    registry.add([Passage(CRANE, "y")])
    assert names(registry.find(HARBOUR + CRANE)) == ["z", "y"]
    assert registry.remove(["z", "y", "z"]) == 2
    assert registry.find(HARBOUR + CRANE) == []
    registry.add([Passage(HARBOUR, "b")])
    assert names(registry.find(HARBOUR)) == ["b"]


def test_a_shorter_passage_is_found_once_the_longer_one_is_removed(registry):
    registry.add([Passage(HARBOUR, "whole"), Passage(HARBOUR[:50], "part")])
    assert registry.find(HARBOUR) == [PassageSpan(0, 78, "whole")]
    registry.remove(["whole"])
    assert registry.find(HARBOUR) == [PassageSpan(0, 50, "part")]


@pytest.mark.parametrize(
    "text", ["\U0001f600" * 20, "e\u0301" * 12, "\ud83d\ude00" * 9, "\0" * 30, "abc\ud800" * 5]
)
def test_positions_are_python_characters(registry, text):
    registry.add([Passage(text, "n\udcff\u00e9")])  # a file name that was no UTF-8
    around = f"\U0001f680\U0001f680 {text} \U0001f680"
    assert registry.find(around) == [PassageSpan(3, 3 + len(text), "n\udcff\u00e9")]
    assert registry.find("\U0001f600" * 9 + "e\u0301" * 5 + "\0" * 15 + "\u00e9" * 12) == []


def test_changes_of_another_process_are_noticed(registry, other):
    registry.add([Passage(HARBOUR, "h")])
    assert names(other.find(HARBOUR)) == ["h"]
    registry.add([Passage(CRANE, "c")])
    assert names(other.find(HARBOUR + CRANE)) == ["h", "c"]
    other.remove(["h"])
    assert names(registry.find(HARBOUR + CRANE)) == ["c"]
    other.add([Passage(HARBOUR, "again")])
    assert names(registry.find(HARBOUR + CRANE)) == ["again", "c"]
    other.add([Passage(CRANE[:40], "again")])
    assert names(registry.find(HARBOUR + CRANE)) == ["c"]


def test_only_new_rows_are_read(registry, other, monkeypatch):
    read = []
    since = NodeIndex.registered_since
    monkeypatch.setattr(NodeIndex, "registered_since", lambda *given: read.append(since(*given)) or read[-1])
    registry.add([Passage(f"{n} {HARBOUR}", str(n)) for n in range(50)])
    registry.find(HARBOUR)
    other.add([Passage(CRANE, "c")])
    other.remove(["3"])
    registry.find(HARBOUR)
    registry.find(HARBOUR)
    assert [len(rows) for rows in read] == [50, 1]


def test_a_node_that_the_engine_deletes_is_no_longer_found(home, registry):
    """Registry and engine share a file and the node ids: deleting a node deletes all of it."""
    with NodeIndex.open(registry.path) as nodes:
        registry.add([Passage(HARBOUR, "h"), Passage(CRANE, "c")])
        nodes.put_many(Scope("default", "aa" * 32), [("h", (1, 2), ChunkKey("0" * 64))])
        nodes.delete("default", ["h"])
    assert names(registry.find(HARBOUR + CRANE)) == ["c"]
    assert len(registry) == 1


def test_the_file_holds_no_text_and_deleting_leaves_no_trace(registry):
    registry.add([Passage(HARBOUR, "secret-node"), Passage(HARBOUR, "secret-other"), Passage(CRANE, "kept")])
    with closing(sqlite3.connect(registry.path)) as sql:
        select = "SELECT whole, head, proof FROM Passages WHERE node_id = ?"
        (whole, head, proof) = sql.execute(select, (b"secret-node",)).fetchone()

    def holding(needle):
        return any(needle in file.read_bytes() for file in registry.path.parent.iterdir())

    for encoding in ("utf-8", "utf-16-le", "utf-32-le"):
        assert not holding("harbour".encode(encoding))
    traces = [b"secret-node", b"secret-other", proof]
    traces += [number.to_bytes(8, "big", signed=True) for number in (whole, head)]
    assert all(holding(trace) for trace in traces)
    registry.add([Passage(CRANE, "secret-node")])  # replaced
    assert not holding(proof)
    registry.remove(["secret-node", "secret-other"])
    assert not any(holding(trace) for trace in traces)
    assert names(registry.find(HARBOUR + CRANE)) == ["kept"]


def test_only_the_owner_can_read_the_files(registry):
    before = os.umask(0)
    try:
        registry.add([Passage(HARBOUR, "h")])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in registry.path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("nodes.sqlite", "nodes.sqlite-wal", "nodes.sqlite-shm"), 0o600)
    assert stat.S_IMODE(registry.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("use", "ruin"),
    [
        ("find", b"not a database" * 500),
        ("add", b"SQLite format 3\0" + b"x" * 5000),
        ("len", b"SQLite format 3\0" + b"x" * 5000),
    ],
)
def test_a_ruined_file_is_rebuilt(home, registry, ruin, use, caplog):
    home.mkdir()
    registry.path.write_bytes(ruin)
    if use == "find":
        assert registry.find(HARBOUR) == []
    elif use == "len":
        assert len(registry) == 0
    assert registry.add([Passage(HARBOUR, "h")]) == 1
    assert names(registry.find(HARBOUR)) == ["h"]
    assert caplog.text.count("damaged") == 1
    assert stat.S_IMODE(registry.path.stat().st_mode) == 0o600


def test_a_file_that_replaces_the_open_one_is_used(registry, other):
    registry.add([Passage(HARBOUR, "h")])
    assert names(other.find(HARBOUR)) == ["h"]
    for name in ("", "-wal", "-shm"):
        registry.path.with_name(registry.path.name + name).unlink()
    registry.add([Passage(CRANE, "c")])
    assert names(other.find(HARBOUR + CRANE)) == ["c"]


def write_other_format(registry):
    registry.add([Passage(HARBOUR, "h")])
    registry.close()
    with closing(sqlite3.connect(registry.path)) as sql:
        sql.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (write_other_format, StoreFormatError, r"99.*Remove"),
        (lambda registry: registry.path.mkdir(parents=True), StoreError, r"nodes\.sqlite"),
    ],
    ids=["another format", "a folder in its place"],
)
def test_an_unusable_file_is_a_named_error_but_fails_no_question(registry, spoil, error, message, caplog):
    spoil(registry)
    with pytest.raises(error, match=message):
        registry.add([Passage(HARBOUR, "h")])
    assert registry.find(HARBOUR) == []
    assert "no passages are looked for" in caplog.text


def test_threads_add_find_and_remove_at_once(registry):
    def work(name):
        for n in range(15):
            text = f"{name} wrote the passage with the number {n}."
            assert registry.add([Passage(text, f"{name}-{n}")]) == 1
            assert names(registry.find(f"x {text} y")) == [f"{name}-{n}"]
            if n % 3 == 0:
                assert registry.remove([f"{name}-{n}"]) == 1
                assert registry.find(text) == []

    at_once(*(partial(work, name) for name in "abcdef"))
    assert len(registry) == 60


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted by /proc")
def test_a_home_has_one_open_file_however_many_collections(home, registry):
    def held():
        # One of them is listdir's.
        files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(str(home.resolve()) in os.readlink(file) for file in files if file.is_symlink())

    registry.add([Passage(HARBOUR, "h")])
    alone = held()
    many = [PassageRegistry.open(home, f"key-{n}") for n in range(20)]
    for number, each in enumerate(many):
        each.add([Passage(f"{number} {CRANE}", "c")])
        assert names(each.find(f"{number} {CRANE}")) == ["c"]
    assert held() == alone > 0
    registry.close()
    many[0].close()
    assert names(many[1].find(f"1 {CRANE}")) == ["c"]
    for each in many:
        each.close()
    assert held() == 0


def test_processes_that_open_and_add_at_once_lose_nothing(home, registry):
    with adder(home, "Anna", 12) as anna, adder(home, "Ben", 12) as ben:
        for worker in (anna, ben):
            assert worker.communicate(timeout=SOON_S)[0].split() == [str(n) for n in range(12)]
            assert worker.returncode == 0
    assert len(registry) == 240
    written = [(name, n) for n in range(120) for name in ("Anna", "Ben")]
    text = " ".join(f"{name} wrote the passage with the number {n}." for name, n in written)
    assert names(registry.find(text)) == [f"{name}-{n}" for name, n in written]


@pytest.mark.parametrize("lines", [1, 7])
def test_a_killed_process_loses_nothing_that_it_acknowledged(home, registry, lines):
    registry.add([Passage(HARBOUR, "h")])
    with adder(home, "Anna", 100_000) as worker:
        for _ in range(lines):
            acknowledged = int(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=SOON_S)
    for _ in range(2):
        count = len(registry) - 1
        assert count % 10 == 0  # whole batches
        assert count >= (acknowledged + 1) * 10
        text = " ".join(f"Anna wrote the passage with the number {n}." for n in range(count + 10))
        assert names(registry.find(text)) == [f"Anna-{n}" for n in range(count)]
        registry.close()


def test_a_dropped_registry_learns_nothing_from_prompts_that_are_still_read(home):
    """The next collection of that name would find it."""
    registry, text = PassageRegistry.open(home, "team"), "Who is paid in herrings has no need of a purse."
    PassageRegistry.drop(home, "team")
    assert registry.learn([text]) == [] and registry.add([Passage(text, "node-1")]) == 0
    assert len(PassageRegistry.open(home, "team")) == 0
