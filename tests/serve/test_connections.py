"""Connections: half-sent requests use up nothing, and other sites' pages are admitted by name only."""

import socket
from contextlib import ExitStack, contextmanager

import pytest
from servers import running, serving
from waiting import SOON_S, until

from ragblend.app.cli.main import main
from ragblend.app.serve.connections import ConnectionLimits
from ragblend.app.serve.keys import Client, Keys

HALF = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx-more: "
APP, EVIL = "https://app.example", "https://evil.example"


@contextmanager
def half_sent(port, count, sent=HALF):
    """So many connections that each sent the begin of a request."""
    with ExitStack() as held:
        found = []
        for _ in range(count):
            found.append(held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SOON_S)))
            found[-1].sendall(sent)
        yield found


def is_closed(connection):
    """Whether the server has closed it, with or without an answer."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def sends_in_vain(connection):
    """Whether one more byte of the header does not arrive any more."""
    try:
        connection.sendall(b"a")
    except ConnectionError:
        return True
    return False


@pytest.fixture(scope="module")
def few(home_of, tiny_folder):
    """A server of few connections."""
    limits = ConnectionLimits(total=16, per_address=12, header_s=3600)
    with serving(home_of(), tiny_folder, connections=limits) as found:
        yield found


@pytest.mark.parametrize("part", ["", "header", "body"])
def test_half_sent_requests_make_room_for_whole_ones(few, part) -> None:
    """374 of them used up the process's files: no request was answered for more than a minute."""
    body = few.raw(
        "POST", "/v1/chat/completions", {"model": "", "messages": [{"role": "user", "content": "Hi."}]}
    )
    sent = {"": b"", "header": HALF, "body": body[:-3]}[part]
    with half_sent(few.port, 60, sent) as connections, few.client(None) as client:
        for _ in range(3):
            assert client.get("/healthz", headers={"connection": "close"}).status_code == 200
        until(lambda: sum(map(is_closed, connections)) >= 60 - 12)
    until(few.is_free)


def test_running_requests_are_not_closed_to_make_room(few) -> None:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 300,
        "stream": True,
    }
    with few.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with half_sent(few.port, 60):
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_header_that_is_never_whole_times_out(home_of, tiny_folder) -> None:
    """Each byte restarted the timeout, so that a connection with half a header stayed open."""
    with serving(home_of(), tiny_folder, connections=ConnectionLimits(header_s=2)) as served:
        whole = f"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{served.port}\r\n\r\n".encode()
        for sent in (b"", HALF, whole + HALF):
            with half_sent(served.port, 1, sent) as [connection]:
                until(lambda at=connection: sends_in_vain(at))
        served.chat()

        def slow(*_):  # a whole request may take longer than a header
            hook.remove()
            with half_sent(served.port, 1) as [connection]:
                until(lambda: sends_in_vain(connection))

        hook = served.engine.runtime.loaded.model.lm_head.register_forward_pre_hook(slow)
        assert served.chat(max_tokens=2).status_code == 200


def test_limits_fit_into_the_files_that_a_process_may_open(monkeypatch) -> None:
    def fitting(files):
        monkeypatch.setattr("ragblend.app.serve.connections.open_file_limit", lambda: files)
        found = ConnectionLimits().within_file_limit
        return found.total, found.per_address

    assert [fitting(files) for files in (10**6, 1024, 400, 100)] == [
        (512, 384),
        (512, 384),
        (208, 156),
        (16, 12),
    ]
    assert ConnectionLimits(total=20, per_address=9).within_file_limit.per_address == 9


def test_pages_of_allowed_sites_may_send_requests(home_of, tiny_folder) -> None:
    with serving(home_of(), tiny_folder, origins=(APP,)) as served, served.client() as client:
        body = {"model": "", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        for origin, status in ((APP, 200), (EVIL, 403)):
            told = {"origin": origin, "sec-fetch-site": "cross-site"}
            answer = client.post("/v1/chat/completions", json=body, headers=told)
            assert answer.status_code == status
            refused = client.get("/v1/models", headers=told | {"authorization": "Bearer wrong"})
            first = client.options("/v1/chat/completions", headers=told | preflight)
            assert (first.status_code == 200) == (origin == APP)
            for each in (answer, refused, first):
                named = each.headers.get("access-control-allow-origin")
                assert named == (APP if origin == APP else None)
        assert refused.status_code == 403


def test_no_other_site_is_allowed_by_default(served) -> None:
    with served.client() as client:
        answer = client.options("/v1/models", headers={"origin": APP, "access-control-request-method": "GET"})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "ftp://app.example", "null", "*"])
def test_wrong_origins_are_refused_at_the_start(home_of, origin, capfd) -> None:
    assert main(["serve", "--home", str(home_of()), "--allow-origin", origin]) == 2
    assert f"--allow-origin '{origin}'" in capfd.readouterr().err


def test_the_command_allows_origins(home_of) -> None:
    home = home_of()
    Keys(home).add(Client("chief"))
    with running(home, "--allow-origin", "*") as (told, _):
        import httpx

        preflight = {"origin": APP, "access-control-request-method": "POST"}
        answer = httpx.options(f"{told['url']}/chat/completions", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
