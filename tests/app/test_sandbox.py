"""The sandbox: whatever a parser does ends in a named error, and the next call works."""

import os
import platform
import signal
import struct
import subprocess
import sys
from pathlib import Path

import hostile_work
import pytest
from waiting import until

from ragblend.app import linux, system
from ragblend.app.library.sandbox import run_in_sandbox
from ragblend.app.linux import PROCESSORS, landlock_version
from ragblend.kvstore.errors import Cancelled, OversizedDocumentError, UnreadableDocumentError

PATH = Path("/somewhere/a.pdf")
PYTHONPATH = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def goes_on():
    yield
    assert run_in_sandbox(hostile_work.process_id, PATH) != os.getpid()


def is_alive(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_each_file_has_a_process_of_its_own_and_all_have_one_parent():
    assert run_in_sandbox(hostile_work.process_id, PATH) != run_in_sandbox(hostile_work.process_id, PATH)
    parents = {run_in_sandbox(hostile_work.parent_id, PATH) for _ in range(2)}
    assert len(parents) == 1 and os.getpid() not in parents


def test_modules_are_imported_once_for_all_files():
    assert run_in_sandbox(hostile_work.modules, PATH) == []
    assert run_in_sandbox(hostile_work.modules, PATH, imports=["colorsys"]) == ["colorsys"]
    assert run_in_sandbox(hostile_work.modules, PATH) == ["colorsys"]


ALLOWED = {
    "read the document", "discard what is written", "start a thread", "import a package", "import more of Python",
}  # fmt: skip


@pytest.mark.skipif(
    landlock_version() < 6 or platform.machine() not in PROCESSORS,
    reason="this kernel takes fewer rights away",
)
def test_a_parser_may_read_its_document_and_nothing_else(tmp_path, monkeypatch):
    """It had all rights of the user. The files are in a folder that modules are imported from, as a script's is."""
    os.kill(run_in_sandbox(hostile_work.parent_id, PATH), signal.SIGKILL)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("document.pdf", "id_ed25519"):
        (tmp_path / name).write_text("secret")
    found = run_in_sandbox(
        hostile_work.attempts, tmp_path / "document.pdf", str(tmp_path / "id_ed25519"), imports=["pypdf"]
    )
    assert {what for what, outcome in found.items() if outcome == "done"} == ALLOWED
    assert set(found.values()) <= {"done", "PermissionError"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "document.pdf": "secret",
        "id_ed25519": "secret",
    }


def test_a_kernel_without_landlock_reads_documents_too(tmp_path, monkeypatch):
    monkeypatch.setattr(linux, "landlock_version", lambda: 0)
    monkeypatch.setattr(linux, "PROCESSORS", {})
    (tmp_path / "a.txt").write_text("x")
    assert os.waitpid(system.fork(lambda: linux.restrict_process([]) or (tmp_path / "b").touch()), 0)[1] == 0
    assert (tmp_path / "b").exists()


def test_another_system_takes_no_right_away(monkeypatch):
    """macOS has no prctl, without which no document was read."""
    monkeypatch.setattr(linux, "IS_LINUX", False)
    monkeypatch.setattr(linux, "_libc", None)
    linux.restrict_process([])
    assert linux.landlock_version() == 0


@pytest.mark.parametrize(
    ("version", "files", "tcp", "scopes"),
    [(1, 0x1FFF, 0, 0), (2, 0x3FFF, 0, 0), (3, 0x7FFF, 0, 0), (4, 0x7FFF, 3, 0), (5, 0xFFFF, 3, 0), (7, 0xFFFF, 3, 3)],
)  # fmt: skip
def test_each_kernel_is_asked_for_what_it_knows(version, files, tcp, scopes):
    """A kernel refuses all if it is asked for a right that it does not know."""
    assert struct.unpack("QQQ", linux.ruleset_attributes(version)) == (files, tcp, scopes)


@pytest.mark.parametrize(("work", "how"), [("crash", "SIGSEGV"), ("leave", "exit code 0")])
def test_parser_crash_is_a_named_error(work, how):
    with pytest.raises(UnreadableDocumentError, match=rf"a\.pdf: the parser crashed \({how}\)"):
        run_in_sandbox(getattr(hostile_work, work), PATH)


def test_memory_is_bounded():
    with pytest.raises(OversizedDocumentError, match=r"a\.pdf: it needs more than 64 MiB of memory"):
        run_in_sandbox(hostile_work.swallow, PATH, memory_bytes=64 * 2**20)


def test_stuck_parser_is_killed():
    with pytest.raises(OversizedDocumentError, match=r"a\.pdf: page 3 of 7 took more than 1 seconds"):
        run_in_sandbox(hostile_work.hang, PATH, page_timeout_s=1.0)


def test_caller_can_cancel_at_any_time():
    """Also while the work does not ask."""
    told = []

    def leave(done, total):
        if done:
            told.append(done)
            raise Cancelled("left")

    with pytest.raises(Cancelled):
        run_in_sandbox(hostile_work.spin, PATH, on_page=leave)
    until(lambda: not is_alive(told[0]))


def test_killed_idle_subprocess_is_replaced():
    idle = run_in_sandbox(hostile_work.parent_id, PATH)
    os.kill(idle, signal.SIGKILL)
    until(lambda: not is_alive(idle))
    assert run_in_sandbox(hostile_work.parent_id, PATH) != idle


def test_subprocess_ends_with_its_caller():
    code = (
        "import hostile_work; from pathlib import Path; from ragblend.app.library.sandbox import run_in_sandbox\n"
        "run_in_sandbox(hostile_work.spin, Path('a'), on_page=lambda done, _: done and print(done, flush=True))"
    )
    command, environment = [sys.executable, "-c", code], os.environ | PYTHONPATH
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        parser = int(caller.stdout.readline())
        caller.kill()
    until(lambda: not is_alive(parser))


def test_the_callers_script_is_not_run_again(tmp_path):
    """As multiprocessing does, which would ingest for ever where a script has no `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(
        "import hostile_work; from pathlib import Path; from ragblend.app.library.sandbox import run_in_sandbox\n"
        "print('once', run_in_sandbox(hostile_work.process_id, Path('a')) > 0)"
    )
    (tmp_path / "queue.py").write_text("raise SystemError('imported from where the user is')")
    command, environment = [sys.executable, "-P", tmp_path / "script.py"], os.environ | PYTHONPATH
    assert subprocess.check_output(command, env=environment, cwd=tmp_path, text=True) == "once True\n"
