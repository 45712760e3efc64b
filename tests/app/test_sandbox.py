"""The sandbox: whatever a parser does ends in a named error, and the next call works."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hostile_work
import pytest
from waiting import until

from ragblend.app.library.sandbox import run_in_sandbox
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


def test_subprocess_is_reused():
    assert run_in_sandbox(hostile_work.process_id, PATH) == run_in_sandbox(hostile_work.process_id, PATH)


@pytest.mark.parametrize(("work", "how"), [("crash", "SIGSEGV"), ("leave", "exit code 0")])
def test_parser_crash_is_a_named_error(work, how):
    with pytest.raises(UnreadableDocumentError, match=rf"a\.pdf: the parser crashed \({how}\)"):
        run_in_sandbox(getattr(hostile_work, work), PATH)


def test_memory_is_bounded():
    with pytest.raises(OversizedDocumentError, match=r"a\.pdf: it needs more than 64 MiB of memory"):
        run_in_sandbox(hostile_work.swallow, PATH, memory_bytes=64 * 2**20)


def test_stuck_parser_is_killed():
    with pytest.raises(OversizedDocumentError, match=r"a\.pdf: page 3 of 7 took more than 1 seconds"):
        run_in_sandbox(hostile_work.hang, PATH, silent_s=1.0)


def test_caller_can_cancel_at_any_time(tmp_path):
    """Also while the work does not ask."""

    def leave(done, total):
        if (tmp_path / "started").exists():
            raise Cancelled("left")

    with pytest.raises(Cancelled):
        run_in_sandbox(hostile_work.spin, PATH, str(tmp_path / "started"), on_page=leave)
    assert not is_alive((tmp_path / "started").read_text())


def test_grown_subprocess_is_not_reused():
    grown = run_in_sandbox(hostile_work.grow, PATH, memory_bytes=2 * 2**30)
    assert run_in_sandbox(hostile_work.process_id, PATH) != grown


def test_killed_idle_subprocess_is_replaced():
    idle = run_in_sandbox(hostile_work.process_id, PATH)
    os.kill(idle, signal.SIGKILL)
    until(lambda: not is_alive(idle))
    assert run_in_sandbox(hostile_work.process_id, PATH) != idle


def test_subprocess_ends_with_its_caller(tmp_path):
    code = (
        "import sys, hostile_work; from pathlib import Path; from ragblend.app.library.sandbox import run_in_sandbox\n"
        "run_in_sandbox(hostile_work.spin, Path('a'), sys.argv[1])"
    )
    started = tmp_path / "started"
    caller = subprocess.Popen([sys.executable, "-c", code, started], env=os.environ | PYTHONPATH)
    until(lambda: started.exists() and started.read_text())
    caller.kill()
    caller.wait()
    until(lambda: not is_alive(started.read_text()))


def test_the_callers_script_is_not_run_again(tmp_path):
    """As multiprocessing does, which would ingest for ever where a script has no `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(
        "import hostile_work; from pathlib import Path; from ragblend.app.library.sandbox import run_in_sandbox\n"
        "print('once', run_in_sandbox(hostile_work.process_id, Path('a')) > 0)"
    )
    (tmp_path / "queue.py").write_text("raise SystemError('imported from where the user is')")
    command, environment = [sys.executable, "-P", tmp_path / "script.py"], os.environ | PYTHONPATH
    assert subprocess.check_output(command, env=environment, cwd=tmp_path, text=True) == "once True\n"
