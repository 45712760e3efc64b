"""RAGBlend without what only POSIX has, as on Windows, where this has not run: its second ways."""

import os
import queue
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import SOON_S

from ragblend.app.system import connect_in, is_same_user, listen_in

FOLDER, REPOSITORY = Path(__file__).parent, Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def as_on_windows(*command):
    """Run Python with what `hidden/sitecustomize.py` names hidden; returns its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER / "hidden"), str(REPOSITORY)])}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_story_of_a_home(tmp_path) -> None:
    assert as_on_windows(FOLDER / "home_story.py", tmp_path).splitlines()[-1] == "byte locks"


def test_a_parser_is_limited_and_ends_with_its_caller() -> None:
    told = as_on_windows(
        "-m", "pytest", "-q", REPOSITORY / "tests/app/test_sandbox.py", "-k", "bounded or ends_with"
    )
    assert "2 passed" in told


@pytest.fixture
def without_unix_sockets(monkeypatch):
    monkeypatch.delattr(socket, "AF_UNIX")


def test_only_who_knows_the_token_is_answered(without_unix_sockets, tmp_path) -> None:
    """The port may be asked by every user of the machine."""
    found = queue.Queue()
    with listen_in(tmp_path, "socket") as listener:
        port, _ = (tmp_path / "socket").read_text().split()
        (tmp_path / "guess").write_text(f"{port} {'00' * 32}")

        def answer():
            for _ in range(2):
                with listener.accept()[0] as connection:
                    found.put(is_same_user(connection, tmp_path / "socket"))

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)
            connect_in(tmp_path, "socket", SOON_S).close()
            with pytest.raises(PermissionError):
                connect_in(tmp_path, "guess", SOON_S)
            answered.result()
    assert [found.get(), found.get()] == [True, False]


def test_a_program_that_took_the_port_is_told_nothing(without_unix_sockets, tmp_path) -> None:
    """It gets random bytes and a hash of its own, from which the token cannot be told."""
    with listen_in(tmp_path, "socket") as listener, ThreadPoolExecutor(1) as pool:

        def echo():
            with listener.accept()[0] as connection:
                while heard := connection.recv(64):
                    connection.sendall(heard)

        echoed = pool.submit(echo)
        with pytest.raises(PermissionError):
            connect_in(tmp_path, "socket", SOON_S)
        echoed.result()
    assert os.stat(tmp_path / "socket").st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "80", "x y", "80 zz"])
def test_a_damaged_file_is_no_listener(without_unix_sockets, tmp_path, text) -> None:
    (tmp_path / "socket").write_text(text)
    with pytest.raises(OSError, match="has no port and token"):
        connect_in(tmp_path, "socket", SOON_S)
