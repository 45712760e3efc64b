"""The front of the page: who gets through, by host, origin, session, path and size; and the headers of every answer."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ragblend.kvstore.errors import UsageError
from ragblend.ui.entrance import Entrance
from ragblend.ui.password import FREE_ATTEMPTS, Attempts, hash_password, matches, read_password, save_password
from ragblend.ui.safety import Rules, Safety, split_netloc

PORT = 7860
HOME = f"http://127.0.0.1:{PORT}"


async def echo(request):
    body = await request.body()
    return PlainTextResponse(f"{request.method} {request.url.path} {len(body)}")


async def page(request):
    head = (
        '<meta property="og:image" content="https://example.org/x.png"/><link rel="manifest" '
        'href="/manifest.json" />'
    )
    return HTMLResponse(
        f"<html><head>{head}</head><body><script>1</script><script type='module'>2</script><gradio-app/></body></html>"
    )


async def stream(request):
    async def pieces():
        for number in range(3):
            yield f"{number}\n"

    return StreamingResponse(
        pieces(), media_type="text/event-stream", headers={"access-control-allow-origin": "*"}
    )


def make(rules=None, entrance=None):
    routes = [
        Route("/", page),
        Route("/stream", stream),
        Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    rules = rules or Rules.of("127.0.0.1", PORT, max_upload_bytes=2000, max_body_bytes=1000)
    return Safety(Starlette(routes=routes), rules, entrance or Entrance(PORT, token="right"))


@pytest.fixture
def entrance():
    return Entrance(PORT, token="right")


@pytest.fixture
def ask(entrance):
    """Sends one request; with `session`, as a browser that was let in."""

    def send(method, path, app=None, session=True, client=("127.0.0.1", 5000), **arguments):
        app = app or make(entrance=entrance)

        async def go():
            transport = httpx.ASGITransport(app=app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url=HOME) as http:
                if session:
                    http.cookies.set(entrance.cookie_name, entrance._session)
                return await http.request(method, path, **arguments)

        return asyncio.run(go())

    return send


def test_a_browser_with_a_session_gets_through(ask) -> None:
    assert ask("GET", "/anything").status_code == 200
    assert ask("POST", "/x", content=b"abc", headers={"origin": HOME}).text == "POST /x 3"


SPOOFED_HOSTS = [
    "evil.example",
    "evil.example:7860",
    "127.0.0.1",
    "127.0.0.1:7861",
    "127.0.0.1.evil.example:7860",
    "localhost",
    "localhost:80",
    "localhost.evil.example:7860",
    "0.0.0.0:7860",
    "192.168.1.4:7860",
    "[::1]:1",
    "[fe80::1]:7860",
    "127.0.0.1:7860@evil.example",
    "127.0.0.1:7860.evil.example",
    "127.1:7860",
    "2130706433:7860",
    "",
    "localhost:7860:7860",
    "evil.example#127.0.0.1:7860",
    "LOCALHOST.evil.example:7860",
]


@pytest.mark.parametrize("host", SPOOFED_HOSTS)
def test_a_spoofed_host_is_refused_even_with_a_session(ask, host) -> None:
    """DNS rebinding: the browser believes evil.example is at 127.0.0.1, and sends its name along."""
    assert 400 <= ask("GET", "/anything", headers={"host": host}).status_code < 500


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1:7860", "[::1]:7860", "LocalHost:7860"])
def test_the_loopback_names_are_known(ask, host) -> None:
    assert ask("GET", "/anything", headers={"host": host}).status_code == 200


SPOOFED_ORIGINS = [
    "http://evil.example",
    "https://evil.example:7860",
    "null",
    "http://127.0.0.1",
    "http://127.0.0.1:7861",
    "http://localhost:7860",
    "file://",
    "http://127.0.0.1:7860.evil.example",
    "ftp://127.0.0.1:7860",
    "http://user@127.0.0.1:7860",
    "http://[::1]:7860",
    "chrome-extension://abc",
    "",
    "http://127.0.0.1:07860",
    "data:text/html,x",
    "blob:http://127.0.0.1:7860/x",
    "http://127.0.0.1:7860 http://evil.example",
    "//127.0.0.1:7860",
    "http:127.0.0.1:7860",
    "javascript:1",
]


@pytest.mark.parametrize("origin", SPOOFED_ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_origin_is_refused_even_with_a_session(ask, origin, method) -> None:
    assert ask(method, "/gradio_api/upload", headers={"origin": origin}).status_code == 403


def test_what_another_site_fetches_without_an_origin_is_refused(ask) -> None:
    """Images, frames and forms of GET carry no Origin, but browsers say where they come from."""
    cross = {"sec-fetch-site": "cross-site"}
    assert ask("GET", "/file", headers=cross).status_code == 403
    assert ask("GET", "/file", headers={"sec-fetch-site": "same-site"}).status_code == 403
    assert ask("GET", "/file", headers=cross | {"sec-fetch-mode": "navigate"}).status_code == 403
    assert (
        ask("GET", "/", headers=cross | {"sec-fetch-mode": "navigate"}).status_code == 200
    )  # a link may open the page
    assert ask("GET", "/file", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_nobody_without_a_session_gets_anything(ask) -> None:
    for method, path in [
        ("GET", "/x"),
        ("POST", "/x"),
        ("GET", "/"),
        ("PUT", "/login"),
        ("GET", "/login"),
        ("DELETE", "/x"),
    ]:
        assert ask(method, path, session=False).status_code == 401, (method, path)


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(ask, entrance) -> None:
    answer = ask("GET", "/?token=right", session=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert entrance.knows(answer.cookies[entrance.cookie_name])
    assert "right" not in cookie


@pytest.mark.parametrize(
    "query",
    ["token=wrong", "token=", "token=right&token=right", "token=righ", "token=right%00", "TOKEN=right"],
)
def test_another_token_lets_nobody_in(ask, query) -> None:
    answer = ask("GET", f"/?{query}", session=False)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_the_token_is_good_at_the_front_door_only(ask) -> None:
    assert ask("GET", "/file?token=right", session=False).status_code == 401
    assert ask("POST", "/?token=right", session=False).status_code == 401


def test_a_cookie_of_another_start_or_port_is_nothing(ask, entrance) -> None:
    other = Entrance(PORT + 1, token="right")
    assert not entrance.knows(other._session)
    assert not entrance.knows(None)
    assert not entrance.knows("ü")
    cookie = f"{other.cookie_name}={entrance._session}"
    assert ask("GET", "/x", session=False, headers={"cookie": cookie}).status_code == 401


TRAVERSALS = [
    f"{prefix}{step * depth}{target}"
    for prefix in ("/gradio_api/file=", "/static/", "/assets/", "/ragblend/", "/gradio_api/upload/")
    for step in (
        "../",
        "..%2f",
        "%2e%2e/",
        "%2e%2e%2f",
        "..\\",
        "..%5c",
        "..%255c",
        "....//../",
        "%252e%252e/",
        "./../",
    )
    for depth, target in ((1, "etc/passwd"), (6, "etc/passwd"))
]


def test_there_are_a_hundred_paths_to_try() -> None:
    assert len(set(TRAVERSALS)) == 100


@pytest.mark.parametrize("path", TRAVERSALS)
def test_a_path_with_steps_upwards_is_refused_before_anything_reads_it(path) -> None:
    """Sent as it is: httpx would tidy the path of a URL, so the raw one is put in by hand."""
    assert 400 <= send_raw(make(), path.encode()).status < 500


class send_raw:
    """One GET with a session, its path sent byte by byte."""

    def __init__(self, app, raw_path, cookie=None):
        from urllib.parse import unquote

        entrance = Entrance(PORT, token="right")
        app = Safety(app._app, app._rules, entrance)
        headers = [
            (b"host", b"127.0.0.1:7860"),
            (b"cookie", f"{entrance.cookie_name}={entrance._session}".encode()),
        ]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "headers": headers,
            "path": unquote(raw_path.decode()),
            "raw_path": raw_path,
            "query_string": b"",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", PORT),
            "root_path": "",
        }
        self.status = None

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                self.status = message["status"]

        asyncio.run(app(scope, receive, send))


def test_a_plain_path_passes_where_the_odd_ones_do_not() -> None:
    assert send_raw(make(), b"/gradio_api/file=a..b/c.txt").status == 200


def test_a_body_over_the_limit_is_refused_by_its_length(ask) -> None:
    assert ask("POST", "/x", content=b"a" * 1000).status_code == 200
    assert ask("POST", "/x", content=b"a" * 1001).status_code == 413
    assert ask("POST", "/gradio_api/upload", content=b"a" * 1001).status_code == 200


def test_a_body_that_hides_its_length_is_counted(ask) -> None:
    async def pieces():
        for _ in range(5):
            yield b"a" * 300

    assert ask("POST", "/x", content=pieces()).status_code == 413


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "99999999999999999999"])
def test_a_content_length_that_is_none_is_refused(ask, length) -> None:
    assert ask("POST", "/x", content=b"", headers={"content-length": length}).status_code in (400, 413)


def test_every_answer_has_the_headers_and_none_opens_to_other_origins(ask) -> None:
    for answer in (
        ask("GET", "/x"),
        ask("GET", "/x", session=False),
        ask("GET", "/stream"),
        ask("GET", "/", headers={"host": "evil"}),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http:" not in policy
        assert "https:" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


def test_a_stream_passes_untouched(ask) -> None:
    assert ask("GET", "/stream").text == "0\n1\n2\n"


def test_scripts_of_the_page_get_a_nonce_of_their_own_each_time(ask) -> None:
    first, second = ask("GET", "/"), ask("GET", "/")
    nonce = first.headers["content-security-policy"].split("'nonce-")[1].split("'")[0]
    assert first.text.count(f'<script nonce="{nonce}"') == 3  # its own two, and ours
    assert "example.org" not in first.text
    assert "/ragblend/style.css" in first.text
    assert nonce not in second.text
    assert first.headers["cache-control"] == "no-store"


def test_websockets_are_closed() -> None:
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(make()({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_wildcard_bind_answers_to_addresses_and_to_no_foreign_name() -> None:
    rules = Rules.of("0.0.0.0", PORT, ["nas.lan"])
    assert all(rules.knows(f"{name}:7860") for name in ("192.168.1.4", "[fe80::1]", "nas.lan", "localhost"))
    assert not any(rules.knows(name) for name in ("evil.example:7860", "192.168.1.4:80", "nas.lan"))


@pytest.mark.parametrize(
    ("netloc", "parts"),
    [
        ("a:1", ("a", 1)),
        ("a", ("a", 80)),
        ("[::1]:5", ("[::1]", 5)),
        ("[::1]", ("[::1]", 80)),
        ("a:x", ("a", None)),
    ],
)
def test_host_and_port_are_told_apart(netloc, parts) -> None:
    assert split_netloc(netloc) == parts


# --- the password


@pytest.fixture(scope="module")
def kept():
    return hash_password("correct horse battery")


def test_a_password_is_kept_as_a_salted_hash(kept, tmp_path) -> None:
    assert "correct" not in kept
    assert hash_password("correct horse battery") != kept
    assert matches("correct horse battery", kept)
    assert not matches("correct horse batter", kept)
    save_password(tmp_path / "p", "correct horse battery")
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
    assert matches("correct horse battery", read_password(tmp_path / "p"))
    assert read_password(tmp_path / "none") is None


@pytest.mark.parametrize("damaged", ["", "{}", "[1]", '{"salt": 1, "scrypt": 2}', "x"])
def test_a_damaged_hash_matches_nothing(damaged) -> None:
    assert not matches("", damaged)


def test_a_short_password_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 10"):
        hash_password("short")


def test_the_password_opens_and_a_wrong_one_does_not(ask, kept) -> None:
    entrance = Entrance(PORT, kept, token="right")
    app = make(entrance=entrance)
    wrong = ask("POST", "/login", app, session=False, data={"password": "wrong"})
    assert wrong.status_code == 401
    right = ask("POST", "/login", app, session=False, data={"password": "correct horse battery"})
    assert right.status_code == 303
    assert entrance.knows(right.cookies[entrance.cookie_name])


def test_guesses_are_slowed_down_for_one_client_and_not_for_others(ask, kept) -> None:
    entrance = Entrance(PORT, kept, token="right")
    app = make(entrance=entrance)
    for _ in range(FREE_ATTEMPTS):
        assert ask("POST", "/login", app, session=False, data={"password": "wrong"}).status_code == 401
    limited = ask("POST", "/login", app, session=False, data={"password": "correct horse battery"})
    assert limited.status_code == 429
    assert int(limited.headers["retry-after"]) >= 1
    other = ask("POST", "/login", app, session=False, client=("10.0.0.9", 1), data={"password": "wrong"})
    assert other.status_code == 401


def test_the_wait_doubles_and_ends() -> None:
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for _ in range(FREE_ATTEMPTS - 1):
        attempts.note_failure("a")
    assert attempts.wait_s("a") == 0
    attempts.note_failure("a")
    assert attempts.wait_s("a") == 2
    now[0] = 2.0
    assert attempts.wait_s("a") == 0
    attempts.note_failure("a")
    assert attempts.wait_s("a") == 4
    for _ in range(50):
        attempts.note_failure("a")
    assert attempts.wait_s("a") == 900
    attempts.forget("a")
    assert attempts.wait_s("a") == 0
