"""Access to the page: host, origin, session, path and size; response headers; login and password."""

import asyncio
import time

import httpx
import pytest
from fronts import PORT, send_raw
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ragblend.app.serve.errors import ApiError
from ragblend.app.serve.front import Address, Rules, refuse, split_netloc
from ragblend.app.serve.keys import Authenticator, Client, Keys
from ragblend.app.serve.listening import check_reach
from ragblend.kvstore.errors import UsageError
from ragblend.ui.login import COOKIE_SECONDS, PageLogin, load_or_create_secret
from ragblend.ui.password import FREE_ATTEMPTS, Attempts, hash_password, matches, read_password, save_password
from ragblend.ui.security import UPLOAD_PATH, SecurityMiddleware

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


def make(rules=None, login=None):
    routes = [
        Route("/", page),
        Route("/stream", stream),
        Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    rules = rules or Rules(Address(port=PORT), UPLOAD_PATH, max_upload_bytes=2000, max_body_bytes=1000)
    return SecurityMiddleware(Starlette(routes=routes), rules, login or PageLogin(PORT, token="right"))


@pytest.fixture
def login():
    return PageLogin(PORT, token="right")


@pytest.fixture
def ask(login):
    """Sends one request; with `session`, as a browser that was let in."""

    def send(method, path, app=None, session=True, client=("127.0.0.1", 5000), **arguments):
        app = app or make(login=login)

        async def go():
            transport = httpx.ASGITransport(app=app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url=HOME) as http:
                if session:
                    http.cookies.set(login.cookie_name, login.new_cookie())
                return await http.request(method, path, **arguments)

        return asyncio.run(go())

    return send


SPOOFED_HOSTS = [
    "evil.example", "evil.example:7860", "127.0.0.1", "127.0.0.1:7861", "127.0.0.1.evil.example:7860",
    "localhost", "localhost:80", "localhost.evil.example:7860", "0.0.0.0:7860", "192.168.1.4:7860",
    "[::1]:1", "[fe80::1]:7860", "127.0.0.1:7860@evil.example", "127.0.0.1:7860.evil.example", "127.1:7860",
    "2130706433:7860", "", "localhost:7860:7860", "evil.example#127.0.0.1:7860",
    "LOCALHOST.evil.example:7860",
]  # fmt: skip


def test_a_spoofed_host_is_refused_even_with_a_session(ask) -> None:
    """DNS rebinding: the browser believes evil.example is at 127.0.0.1, and sends its name along."""
    for host in SPOOFED_HOSTS:
        assert 400 <= ask("GET", "/anything", headers={"host": host}).status_code < 500, host
    for host in ("localhost:7860", "127.0.0.1:7860", "[::1]:7860", "LocalHost:7860"):
        assert ask("GET", "/anything", headers={"host": host}).status_code == 200, host
    found = [split_netloc(netloc) for netloc in ("a:1", "a", "[::1]:5", "[::1]", "a:x")]
    assert found == [("a", 1), ("a", 80), ("[::1]", 5), ("[::1]", 80), ("a", None)]


SPOOFED_ORIGINS = [
    "http://evil.example", "https://evil.example:7860", "null", "http://127.0.0.1", "http://127.0.0.1:7861",
    "http://localhost:7860", "file://", "http://127.0.0.1:7860.evil.example", "ftp://127.0.0.1:7860",
    "http://user@127.0.0.1:7860", "http://[::1]:7860", "chrome-extension://abc", "",
    "http://127.0.0.1:07860", "data:text/html,x", "blob:http://127.0.0.1:7860/x",
    "http://127.0.0.1:7860 http://evil.example", "//127.0.0.1:7860", "http:127.0.0.1:7860", "javascript:1",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_origin_is_refused_even_with_a_session(ask, method) -> None:
    for origin in SPOOFED_ORIGINS:
        assert ask(method, "/gradio_api/upload", headers={"origin": origin}).status_code == 403, origin
    assert ask("POST", "/x", content=b"abc", headers={"origin": HOME}).text == "POST /x 3"


def test_cross_site_requests_without_origin_are_refused(ask) -> None:
    """Images, frames and forms of GET carry no Origin, but browsers say where they come from."""
    cross = {"sec-fetch-site": "cross-site"}
    assert ask("GET", "/file", headers=cross).status_code == 403
    assert ask("GET", "/file", headers={"sec-fetch-site": "same-site"}).status_code == 403
    assert ask("GET", "/file", headers=cross | {"sec-fetch-mode": "navigate"}).status_code == 403
    # A link may open the page.
    assert ask("GET", "/", headers=cross | {"sec-fetch-mode": "navigate"}).status_code == 200
    assert ask("GET", "/file", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_requests_without_a_session_are_refused(ask) -> None:
    for asked in ("GET /x", "POST /x", "GET /", "PUT /login", "GET /login", "DELETE /x"):
        assert ask(*asked.split(), session=False).status_code == 401, asked


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(ask, login) -> None:
    answer = ask("GET", "/?token=right", session=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert login.visitor(answer.cookies[login.cookie_name])
    assert "right" not in cookie


def test_only_the_right_token_at_the_root_logs_in(ask) -> None:
    queries = [
        "token=wrong",
        "token=",
        "token=right&token=right",
        "token=righ",
        "token=right%00",
        "TOKEN=right",
    ]
    for asked in (*(f"GET /?{query}" for query in queries), "GET /file?token=right", "POST /?token=right"):
        answer = ask(*asked.split(), session=False)
        assert answer.status_code == 401, asked
        assert "set-cookie" not in answer.headers


def test_cookie_of_another_home_or_port_is_invalid(ask, login) -> None:
    other = PageLogin(PORT + 1, token="right")
    for cookie in (other.new_cookie(), None, "", ".", "..", "ü", "a.1.b", login.new_cookie()[:-1]):
        assert login.visitor(cookie) is None, cookie
    cookie = f"{other.cookie_name}={login.new_cookie()}"
    assert ask("GET", "/x", session=False, headers={"cookie": cookie}).status_code == 401


def test_cookie_is_valid_until_the_secret_or_password_changes(tmp_path, monkeypatch):
    path = tmp_path / "ui-secret"
    first = PageLogin(PORT, secret=load_or_create_secret(path))
    cookie = first.new_cookie()
    assert path.stat().st_mode & 0o777 == 0o600
    again = PageLogin(PORT, secret=load_or_create_secret(path))
    assert again.token != first.token
    assert again.visitor(cookie)
    assert PageLogin(PORT, "a password's hash", secret=load_or_create_secret(path)).visitor(cookie) is None
    later = time.time() + COOKIE_SECONDS + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert again.visitor(cookie) is None
    monkeypatch.undo()
    assert PageLogin(PORT, secret=load_or_create_secret(path, anew=True)).visitor(cookie) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_could_read_or_that_is_cut_off_is_replaced(tmp_path) -> None:
    path = tmp_path / "ui-secret"
    kept = load_or_create_secret(path)
    assert load_or_create_secret(path) == kept
    path.chmod(0o640)
    replaced = load_or_create_secret(path)
    assert replaced != kept
    path.write_bytes(replaced[:5])
    assert len(load_or_create_secret(path)) == len(kept)


def test_errors_are_logged_in_one_line_without_the_request(ask, login, caplog) -> None:
    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("payload" * 1000)

    answer = ask("POST", "/x", SecurityMiddleware(failing, Rules(Address(port=PORT)), login), content=b"x")
    assert answer.content == b""  # ended, not broken off
    (record,) = caplog.records
    assert record.getMessage() == "POST /x failed: ValueError"
    assert record.exc_info is None


FOLDERS = ("/gradio_api/file=", "/static/", "/assets/", "/ragblend/", "/gradio_api/upload/")
STEPS = (
    "../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "..%255c", "....//../", "%252e%252e/", "./../",
)  # fmt: skip
TRAVERSALS = [f"{folder}{step * depth}etc/passwd" for folder in FOLDERS for step in STEPS for depth in (1, 6)]


def test_path_traversal_is_refused(login) -> None:
    assert len(set(TRAVERSALS)) == 100
    answers = {path: send_raw(make(login=login), login, path)[0] for path in TRAVERSALS}
    assert {path: status for path, status in answers.items() if not 400 <= status < 500} == {}
    assert send_raw(make(login=login), login, "/gradio_api/file=a..b/c.txt")[0] == 200


def test_a_body_over_the_limit_is_refused_by_its_length_or_when_it_is_counted(ask) -> None:
    async def pieces():
        for _ in range(5):
            yield b"a" * 300

    assert ask("POST", "/x", content=pieces()).status_code == 413
    assert ask("POST", "/x", content=b"a" * 1000).status_code == 200
    assert ask("POST", "/x", content=b"a" * 1001).status_code == 413
    assert ask("POST", "/gradio_api/upload", content=b"a" * 1001).status_code == 200


def test_invalid_content_length_is_refused(ask) -> None:
    for length in ("-1", "abc", "1e9", "99999999999999999999"):
        assert ask("POST", "/x", content=b"", headers={"content-length": length}).status_code in (400, 413)


def test_every_answer_has_the_headers_and_none_opens_to_other_origins(ask) -> None:
    """A stream passes untouched but for them."""
    assert ask("GET", "/stream").text == "0\n1\n2\n"
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
    rules = Rules(Address("0.0.0.0", PORT, ("nas.lan",)))
    assert all(rules.knows(f"{name}:7860") for name in ("192.168.1.4", "[fe80::1]", "nas.lan", "localhost"))
    assert not any(
        rules.knows(name) for name in ("evil.example:7860", "192.168.1.4:80", "evil.lan", "nas.lan:x")
    )


def test_behind_a_proxy_a_key_is_needed(tmp_path) -> None:
    """It listens where only this machine's programs reach it, and the proxy brings everybody."""
    keys = Keys(tmp_path)
    check_reach("127.0.0.1", None, keys)
    for host, names in (("127.0.0.1", ["docs.example"]), ("0.0.0.0", None)):
        with pytest.raises(UsageError, match="needs a key"):
            check_reach(host, names, keys)
    keys.add(Client("ada", ("ada",)))
    check_reach("127.0.0.1", ["docs.example"], keys)


def test_removing_the_last_key_keeps_the_server_closed(tmp_path) -> None:
    keys = Keys(tmp_path)
    authenticator = Authenticator(Rules(Address("127.0.0.1", PORT)), keys, needs_key=False)
    scope = {
        "method": "GET",
        "path": "/v1/models",
        "raw_path": b"",
        "headers": [(b"host", b"127.0.0.1:%d" % PORT)],
    }
    assert authenticator.client(scope).is_owner, "nobody has made one"
    keys.add(Client("ada", ("ada",)))
    for end in (lambda: keys.remove("ada"), keys.path.unlink):
        with pytest.raises(ApiError, match="An API key is needed"):
            authenticator.client(scope)
        end()
    with pytest.raises(ApiError, match="An API key is needed"):
        authenticator.client(scope)


def test_allowed_host_works_behind_a_proxy() -> None:
    rules = Rules(Address("127.0.0.1", PORT, ("Docs.example", "nas.lan:8443")))
    assert all(rules.knows(name) for name in ("docs.example", "docs.example:443", "nas.lan:8443"))
    assert not any(
        rules.knows(name) for name in ("nas.lan", f"nas.lan:{PORT}", "127.0.0.1", "docs.example.evil")
    )

    def refused(origin):
        headers = [(b"host", b"docs.example"), (b"origin", origin)]
        return refuse({"method": "POST", "path": "/", "raw_path": b"/", "headers": headers}, rules)

    assert refused(b"https://docs.example") is None
    assert refused(b"https://docs.example:8443") is not None, "another program on that host"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (b"docs.example", b"http://[", 403),
        (b"docs.example", b"https://docs.example:99999999999999", 403),
        (b"docs.example:" + b"1" * 5000, b"https://docs.example", 421),
    ],
)
def test_invalid_host_and_origin_are_refused(host, origin, status) -> None:
    """And no error of ours: they were, before anybody was asked for a password."""
    rules = Rules(Address("127.0.0.1", PORT, ("docs.example",)))
    headers = [(b"host", host), (b"origin", origin)]
    assert refuse({"method": "POST", "path": "/", "raw_path": b"/", "headers": headers}, rules)[0] == status


# --- the password


@pytest.fixture(scope="module")
def kept():
    return hash_password("correct horse battery")


def test_a_password_is_kept_as_a_salted_hash(kept, tmp_path) -> None:
    assert "correct" not in kept
    assert hash_password("correct horse battery") != kept
    assert matches("correct horse battery", kept)
    assert not matches("correct horse batter", kept)
    assert read_password(tmp_path) is None
    save_password(tmp_path, "correct horse battery")
    assert (tmp_path / "ui-password").stat().st_mode & 0o777 == 0o600
    assert matches("correct horse battery", read_password(tmp_path))
    for damaged in ("", "{}", "[1]", '{"salt": 1, "scrypt": 2}', "x"):
        assert not matches("", damaged)
    with pytest.raises(UsageError, match="at least 10"):
        hash_password("short")
    piped = b"correct horse caf\xe9".decode(errors="surrogateescape")
    with pytest.raises(UsageError, match="UTF-8"):
        hash_password(piped)
    assert not matches(piped, kept)


def test_the_password_opens_and_guesses_are_slowed_down_for_one_client_and_not_for_others(ask, kept) -> None:
    login = PageLogin(PORT, kept, token="right")
    app = make(login=login)
    right = ask("POST", "/login", app, session=False, data={"password": "correct horse battery"})
    assert right.status_code == 303
    assert login.visitor(right.cookies[login.cookie_name])
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
    for _ in range(1100):  # in eleven days
        attempts.note_failure("a")
    assert attempts.wait_s("a") == 900
    attempts.forget("a")
    assert attempts.wait_s("a") == 0


def test_old_failed_attempts_are_forgotten() -> None:
    """An IPv6 network has more addresses than there is memory."""
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for number in range(1000):
        now[0] += 100.0
        attempts.note_failure(str(number))
    assert len(attempts._failures) == 865
