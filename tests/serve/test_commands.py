"""Commands forwarded to the process that has the home open: same output, and no access for other users."""

import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest
from waiting import SOON_S, until

from ragblend import __version__
from ragblend.app import remote
from ragblend.app.cli.common import FORWARDED, Cli
from ragblend.app.cli.main import main
from ragblend.app.remote import SOCKET_NAME, JsonChannel, connect
from ragblend.app.serve.commands import CommandListener, RemoteTerminal
from ragblend.app.services import AppServices
from ragblend.app.system import listen_in
from ragblend.app.workspace import Workspaces
from ragblend.engine.model.device import pick_device
from ragblend.kvstore.errors import LibraryError

LIGHT = "The lighthouse of Skarholm was built in 1888 by Marta Lind. "
FERRY = "The ferry Marigold leaves the pier at seven and takes forty minutes. "
# Times, and what a process says that would end before the work behind its answer.
OF_THE_MOMENT = ("first token after", "for the next question")
QUESTION = "Who built the lighthouse?"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def home(home_of, tiny_folder, tmp_path_factory):
    home, folder = home_of(), tmp_path_factory.mktemp("documents")
    home.chmod(0o700)
    (home / "settings.toml").write_text(f'model = "{tiny_folder}"\ndevice = "cpu"\nmax_new_tokens = 4\n')
    (folder / "lighthouse.md").write_text(LIGHT * 2)
    assert main(["ingest", str(folder), "--home", str(home)]) == 0
    return home


@contextmanager
def owned(home):
    """The home, open in this process as a server has it open; who opens it a second time meanwhile fails."""
    with AppServices.open(home) as services, CommandListener(services), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspaces, "open", None)
        yield services


@pytest.fixture
def told(home, capsys):
    """What a command says with --json, and its notes without the times."""

    def run(*arguments, code=0):
        assert main([*map(str, arguments), "--home", str(home), "--json"]) == code
        said = capsys.readouterr()
        [line] = said.out.splitlines()
        value = json.loads(line)
        for name in ("timings", "controller"):
            value.pop(name, None)
        return value, [
            line for line in said.err.splitlines() if not any(word in line for word in OF_THE_MOMENT)
        ]

    return run


def test_a_forwarded_question_has_the_same_output(home, told) -> None:
    def asked():
        refused = told("ask", " ", code=2), told("ask", QUESTION, "--collection", "no", code=2)
        return told("ask", QUESTION), *refused

    alone = asked()
    with owned(home):
        sent = asked()
    assert sent == alone
    assert sent[0][0]["answer"] and sent[0][0]["tokens"]["generated"] == 4


def test_options_hold_for_one_command_only(home, told, monkeypatch) -> None:
    with owned(home) as services:
        before = services.settings
        assert told("ask", QUESTION, "--max-new-tokens", "2", "--method", "full")[0]["method"] == "full"
        monkeypatch.setenv("RAGBLEND_MAX_NEW_TOKENS", "3")
        assert told("ask", QUESTION)[0]["tokens"]["generated"] == 3
        assert services.settings == before


def test_the_hosts_default_device_may_be_named(home, told) -> None:
    """The page writes the default as an empty text, which was refused as another device than the one it stands for."""
    with owned(home) as services:
        services.workspaces.change(device="")
        assert told("ask", QUESTION, "--device", str(pick_device(None)))[0]["answer"]


def test_settings_that_the_host_cannot_have_are_refused(home, told, monkeypatch) -> None:
    with owned(home):
        for options, words in (
            (("--model", "owner/other"), ("model", "owner/other")),
            (("--dtype", "float16"), ("dtype", "float16")),
            (("--device", "cuda"), ("device", "cuda")),
        ):
            error = told("ask", QUESTION, *options, code=2)[0]["error"]
            assert all(
                word in error["message"] for word in (*words, f"Process {os.getpid()}", "run this again")
            )
        monkeypatch.setenv("RAGBLEND_KV_CODEC", "int8")
        assert "kv_codec" in told("ask", QUESTION, code=2)[0]["error"]["message"]


def test_choosing_a_model_says_that_the_host_keeps_its_own(home, capsys) -> None:
    settings = (home / "settings.toml").read_text()
    with AppServices.open(home) as services, CommandListener(services):
        for name, is_said in (("default", True), ("default", False)):
            assert main(["models", "use", name, "--home", str(home)]) == 0
            assert ("has this home open goes on with" in capsys.readouterr().out) == is_said
    (home / "settings.toml").write_text(settings)


def test_documents_are_ingested_and_removed_by_the_host(home, told, tmp_path, monkeypatch) -> None:
    (tmp_path / "ferry.txt").write_text(FERRY)
    monkeypatch.chdir(tmp_path)
    with owned(home) as services:
        assert told("ingest", "ferry.txt")[0]["added"] == [str(tmp_path / "ferry.txt")]
        assert told("ingest", "~$report.docx", code=1)[0]["failed"][0]["path"] == str(
            tmp_path / "~$report.docx"
        )
        assert told("ingest", "none.txt", code=1)[0]["failed"][0]["type"] == "DocumentNotFoundError"
        assert services.workspaces.library.find("default", "ferry.txt").passages == 1
        assert told("ask", "When does the ferry leave?")[0]["sources"][0]["document"] == "ferry.txt"
        assert [each["path"] for each in told("docs", "rm", "ferry.txt")[0]["removed"]] == [
            str(tmp_path / "ferry.txt")
        ]
        assert told("ask", "When does the ferry leave?")[0]["sources"] == []
        told("ingest", "ferry.txt", "--collection", "boats")
        told("collections", "rm", "boats")
        assert services.workspaces.names() == ["default"]


def test_relative_paths_are_those_of_the_callers_folder(home, tmp_path, monkeypatch) -> None:
    """They were resolved in the server's folder, and another document was removed."""
    caller, server, empty = (tmp_path / name for name in ("caller", "server", "empty"))
    for folder, text in ((caller, FERRY), (server, LIGHT)):
        (folder / "notes").mkdir(parents=True)
        (folder / "notes" / "same.txt").write_text(text)
    empty.mkdir()
    monkeypatch.chdir(server)

    def typed(folder, *words):
        environment = os.environ | {"HOME": str(caller), "RAGBLEND_COLLECTION": "typed"}
        process = as_process(home, *words, "--json", cwd=folder, env=environment)
        out, notes = process.communicate(timeout=SOON_S)
        assert out, notes
        return json.loads(out)

    with owned(home):
        for folder, path in (
            (caller, "notes/same.txt"), (caller / "notes", "same.txt"), (empty, "~/notes/same.txt"),
        ):  # fmt: skip
            typed(caller, "ingest", str(tmp_path))
            gone = typed(folder, "docs", "rm", path)["removed"]
            assert [each["path"] for each in gone] == [str(caller / "notes" / "same.txt")]
        for command in (("docs", "rm"), ("digest",)):
            assert "there is none" in typed(empty, *command, "notes/same.txt")["error"]["message"]
        typed(caller, "collections", "rm", "typed")


def test_a_removed_collection_is_no_longer_watched(home, told, tmp_path) -> None:
    """It came back with the next change in its folder."""
    pytest.importorskip("watchfiles")
    (tmp_path / "ferry.txt").write_text(FERRY)
    with owned(home) as services:
        told("ingest", tmp_path / "ferry.txt", "--collection", "boats")
        services.watching.start()
        services.watching.add(tmp_path, "boats")
        kept = services.watching.add(tmp_path, "others")
        told("collections", "rm", "boats")
        assert [each.id for each in services.watching.folders()] == [kept.id]
        assert [t.name for t in threading.enumerate()].count("ragblend-watch") == 1
        services.watching.remove(kept.id)


def as_process(home, *arguments, leaving_s=remote.INTERRUPTED_S, **more):
    """A command as somebody types it."""
    code = (
        "import sys; from ragblend.app import remote; from ragblend.app.cli import main; "
        f"remote.INTERRUPTED_S = {leaving_s}; sys.exit(main.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments, "--home", str(home)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes, **more)


def test_a_forwarded_chat_is_saved_by_the_host(home, told) -> None:
    """Python decodes bytes that are not UTF-8 as lone surrogates, which no tokenizer accepts."""
    with owned(home) as services:
        assert told("ask", f"{QUESTION} \udce9")[0]["answer"]
        process = as_process(home, "chat", "--json", encoding="utf-8", errors="surrogateescape")
        out, notes = process.communicate(f"{QUESTION}\nAnd when? \udce9\n\n", timeout=SOON_S)
        assert process.returncode == 0, notes
        answers = [json.loads(line) for line in out.splitlines()]
        assert len(answers) == 2 and notes.count("\n> ") == 3 and "Saved." in notes
        said = services.chats.messages(answers[0]["chat"])
        assert [each.text for each in said if each.role == "user"] == [QUESTION, "And when? ?"]


def test_ctrl_c_cancels_the_answer_in_the_host(home) -> None:
    with owned(home) as services:
        process = as_process(home, "ask", QUESTION, "--max-new-tokens", "1800")
        assert process.stdout.read(1), process.communicate()
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=SOON_S)
        assert process.returncode == 1 and notes.endswith("Interrupted: the answer is incomplete.\n")
        with services.workspaces.first.engine.runtime.queue.turn():
            pass


def test_forwarding_a_command_imports_nothing_heavy(home) -> None:
    words = "import sys; from ragblend.app.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    with owned(home):
        command = [sys.executable, "-c", words, "ask", QUESTION, "--home", str(home)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "transformers", "chromadb", "numpy", "httpx", "fastapi", "tokenizers"}
    assert imported & heavy == set() and "ragblend.app.remote" in imported


# --- strangers


def request(**more):
    empty = {name: {} for name in ("arguments", "environment", "shown")}
    return {"command": "ask", "folder": "/", "is_terminal": False} | empty | more


@contextmanager
def stranger(folder, greeting=b"", answer=lambda connection: None):
    """Something that listens where a server would. Gives what it was sent before it answers."""
    got, path, listener = [], folder / SOCKET_NAME, listen_in(folder, SOCKET_NAME)

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.sendall(greeting)
                got.append(connection.recv(1 << 20))
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield got
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        path.unlink()


def is_found(folder):
    channel = connect(folder)
    if channel is not None:
        channel.close()
    return channel is not None


@pytest.fixture
def folder(tmp_path):
    folder = (
        tmp_path / ("a home with a name that is longer than the address of a socket may be, " * 2).strip()
    )
    folder.mkdir(mode=0o700)
    return folder


GREETING = json.dumps({"ragblend": __version__, "pid": 1}).encode() + b"\n"


@pytest.mark.parametrize("what", ["nothing", "file", "link", "loose socket", "loose home", "left by a kill"])
def test_sockets_that_others_could_replace_are_not_used(folder, tmp_path, what) -> None:
    """A link may lead to another home, and others may replace what they can write."""
    with stranger(folder, GREETING) as got:
        assert is_found(folder)
        other = tmp_path / "other"
        other.mkdir(mode=0o700)
        if what == "file":
            (other / SOCKET_NAME).touch(0o600)
        elif what == "link":
            (other / SOCKET_NAME).symlink_to(folder / SOCKET_NAME)
        elif what == "loose socket":
            (folder / SOCKET_NAME).chmod(0o666)
            other = folder
        elif what == "loose home":
            folder.chmod(0o770)
            other = folder
        elif what == "left by a kill":
            left = socket.socket(socket.AF_UNIX)
            left.bind(str(other / SOCKET_NAME))
            (other / SOCKET_NAME).chmod(0o600)
            left.close()
        assert not is_found(other)
    assert b"".join(got) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_socket_gets_nothing(folder) -> None:
    """A socket that another user owns, or has put into a folder that was open to others."""
    with stranger(folder, GREETING):
        os.chown(folder / SOCKET_NAME, 65534, -1)
        assert not is_found(folder)
    for above in folder.parents:
        above.chmod(above.stat().st_mode | 0o011)
    folder.chmod(0o777)
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os.chdir(folder)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET_NAME)
        listener.listen()
        os.write(done, b"x")
        connection, _ = listener.accept()
        with suppress(OSError):  # it has been hung up on already
            connection.sendall(GREETING)
            os._exit(len(connection.recv(100)))
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    os.chown(folder / SOCKET_NAME, 0, -1)  # as if it were ours: only the kernel knows better
    (folder / SOCKET_NAME).chmod(0o600)
    folder.chmod(0o700)
    assert not is_found(folder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "is not RAGBlend"),
        (b'{"hello": 1}\n', "is not RAGBlend"),
        (json.dumps({"ragblend": "0.0.1", "pid": 7}).encode() + b"\n", "Process 7 has the home"),
        (b"", "Process 7, which has the home"),
    ],
)
def test_nothing_is_sent_to_another_version_or_program(folder, capsys, monkeypatch, greeting, words) -> None:
    monkeypatch.setattr(remote, "GREETING_S", SOON_S if greeting else 0.1)
    (folder / "ui-page.lock").write_text('{"pid": 7}')
    with stranger(folder, greeting) as got:
        assert main(["ask", "A secret?", "--home", str(folder)]) == 1
        assert words in capsys.readouterr().err
    assert b"".join(got) == b""


def test_a_host_that_is_killed_is_reported(folder, capsys) -> None:
    with stranger(folder, GREETING, lambda connection: connection.sendall(b'{"out": "The light"}\n')):
        assert main(["ask", QUESTION, "--home", str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == "The light" and "ended while it worked on this" in said.err


def test_a_host_that_ends_before_the_command_is_sent_is_reported(folder) -> None:
    """The broken pipe was taken for that of `ragblend ask | head`: no message, and exit code 0."""
    ours, theirs = socket.socketpair()
    theirs.sendall(GREETING)
    theirs.close()
    with JsonChannel(ours) as channel, pytest.raises(LibraryError, match="ended while it worked on this"):
        remote.run(channel, folder, "ask", {}, sys.stdout)


@pytest.mark.parametrize(("presses", "leaving_s"), [(1, 0.1), (2, 1e6)])
def test_ctrl_c_ends_a_command_whose_host_is_silent(folder, presses, leaving_s) -> None:
    """A socket that gets a timeout while Python reads from it is read again for ever, without handling signals."""
    heard = queue.SimpleQueue()

    def silent(connection):
        connection.sendall(b'{"out": "The light"}\n')
        while said := connection.recv(1 << 16):
            heard.put(json.loads(said))

    with (
        stranger(folder, GREETING, silent),
        as_process(folder, "ask", QUESTION, leaving_s=leaving_s) as process,
    ):
        try:
            assert process.stdout.read(9) == "The light"
            process.send_signal(signal.SIGINT)
            if presses == 2:
                assert heard.get(timeout=SOON_S) == {"interrupt": True}
                process.send_signal(signal.SIGINT)
            assert process.wait(SOON_S) == 1
            assert process.stderr.read() == "Interrupted.\n"
        finally:
            process.kill()


def test_malformed_requests_do_no_harm(home, told) -> None:
    with owned(home):
        for bad in (
            b"", b"{", b"[1]\n", b"\xff\n", b"9" * 5000 + b"\n", json.dumps(request(command="serve")).encode() + b"\n",
            json.dumps(request(arguments={"cli": {"host": 1}})).encode() + b"\n",
            json.dumps({"command": "ask"}).encode() + b"\n",
        ):  # fmt: skip
            channel = connect(home)
            assert channel is not None and channel.receive()["ragblend"] == __version__
            with channel:
                channel._socket.sendall(bad)
                channel._socket.shutdown(socket.SHUT_WR)
                assert "end" not in (channel.receive() or {})
        assert told("ask", QUESTION)[0]["answer"]


def test_listening_continues_after_a_lack_of_file_descriptors(home) -> None:
    """One failed accept ended the listener."""
    failed, accept = [], socket.socket.accept

    def short(listener):
        if not failed:
            failed.append(listener)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "accept", short)
        with owned(home), JsonChannel(socket.socket(socket.AF_UNIX)) as channel:
            channel._socket.connect(str(home / SOCKET_NAME))
            channel.set_timeout(SOON_S)
            assert channel.receive()["pid"] == os.getpid()
    assert failed


def test_output_that_is_longer_than_a_line_may_be_arrives_whole() -> None:
    """It was taken for the end of the process that has the home open."""
    text, found = "\U0001f6a2" * (remote.MAX_BYTES // 8), ""
    here, there = map(JsonChannel, socket.socketpair())
    with here, there:
        terminal = RemoteTerminal(here, request())
        sending = threading.Thread(target=terminal.out.write, args=(text,))
        sending.start()
        while len(found) < len(text):
            found += there.receive()["out"]
        sending.join()
    assert found == text


def test_disconnect_or_shutdown_cancels_command() -> None:
    for leaves in (True, False):
        here, there = map(JsonChannel, socket.socketpair())
        terminal, stopped = RemoteTerminal(here, request()), threading.Event()
        threading.Thread(target=terminal.listen, daemon=True).start()
        block = terminal.stopping(stopped.set)
        block.__enter__()
        there.close() if leaves else terminal.shut_down()
        assert stopped.wait(SOON_S)
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
        with pytest.raises(KeyboardInterrupt):  # whatever comes next
            print("more", file=terminal.out)
        assert terminal.read_line() == ""
        here.close()
        there.close()


def test_a_request_that_comes_while_the_host_closes_is_interrupted(home, monkeypatch) -> None:
    def work(cli: Cli) -> None:
        print("at work", file=cli.out)

    monkeypatch.setitem(FORWARDED, "ask", work)
    with AppServices.open(home) as services:
        commands = CommandListener(services)
        with connect(home) as channel:
            assert channel.receive()["pid"] == os.getpid()
            commands.close()
            channel.send(**request(arguments={"cli": {}}))
            assert channel.receive() == {"failed": ["Cancelled", "Interrupted."]}


def test_closing_the_host_ends_commands_and_removes_the_socket(home) -> None:
    with AppServices.open(home) as services:
        commands = CommandListener(services)
        process = as_process(home, "chat")
        until(lambda: process.stderr.read(1) == ">")
        commands.close()
        assert process.wait(SOON_S) in (0, 1) and not (home / SOCKET_NAME).exists()
        process.communicate()
