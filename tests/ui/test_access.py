"""Access to the served page: host, origin, session, path and size of requests; headers of responses; login."""

import io
import re
import signal
import time
from urllib.parse import unquote

import httpx
import pytest
from waiting import SOON_S

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

from browser import Server
from serverless import built

from ragblend.app.cli.main import main
from ragblend.app.library.documents import FileFacts
from ragblend.app.library.registry import Library
from ragblend.app.serve.errors import ApiError
from ragblend.app.serve.keys import Authenticator, Client, Keys
from ragblend.app.serve.listening import require_key_if_reachable
from ragblend.app.serve.request_checks import Address, Rules, reason_to_refuse, split_netloc
from ragblend.kvstore.errors import UsageError
from ragblend.ui.login import COOKIE_SECONDS, PageLogin, load_or_create_secret
from ragblend.ui.page_context import PageContext
from ragblend.ui.password import FREE_ATTEMPTS, Attempts, hash_password, matches, read_password, save_password
from ragblend.ui.security import UPLOAD_PATH, SecurityMiddleware
from ragblend.ui.serving import build_app, gradio_environment, open_login

PORT = 7860
HOME = f"http://127.0.0.1:{PORT}"
SECRET = "nobody outside may read this"
LIMIT, BODY_LIMIT = 100_000, 10_000
RULES = Rules(Address(port=PORT), UPLOAD_PATH, max_upload_bytes=LIMIT, max_body_bytes=BODY_LIMIT)
CALL = "/gradio_api/run/predict"
STREAM = "/gradio_api/queue/data?session_hash=nobody"
PASSWORD = "correct horse battery"


class Site:
    """The real page, asked without a server, over a home without a model."""

    def __init__(self, home, app, login, runner):
        self.home, self.app, self.login, self.runner = home, app, login, runner
        (home / "secret.txt").write_text(SECRET)

    def ask(self, method, path, app=None, session=True, client="127.0.0.1", **arguments):
        """Send one request; with `session`, as a browser that is logged in."""

        async def go():
            transport = httpx.ASGITransport(app or self.app, client=(client, 1), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=HOME, timeout=SOON_S) as http:
                if session:
                    http.cookies.set(self.login.cookie_name, self.login.new_cookie())
                return await http.request(method, path, **arguments)

        return self.runner.run(go())

    def ask_raw(self, path):
        """A GET of a path byte by byte: clients tidy that of a URL."""

        async def app(scope, receive, send):
            await self.app({**scope, "path": unquote(path), "raw_path": path.encode()}, receive, send)

        return self.ask("GET", "/", app)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder, login = tmp_path_factory.mktemp("page"), PageLogin(PORT, token="right")
    with built(folder, lambda services: build_app(PageContext(services), RULES, login)) as (app, runner):
        yield Site(folder / "home", app, login, runner)


@pytest.fixture
def ask(site):
    return site.ask


def is_refused(answer):
    return 400 <= answer.status_code < 500


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
        assert is_refused(ask("GET", "/", headers={"host": host})), host
    for host in ("localhost:7860", "127.0.0.1:7860", "[::1]:7860", "LocalHost:7860"):
        assert ask("GET", "/", headers={"host": host}).status_code == 200, host
    found = [split_netloc(netloc) for netloc in ("a:1", "a", "[::1]:5", "[::1]", "a:x")]
    assert found == [("a", 1), ("a", 80), ("[::1]", 5), ("[::1]", 80), ("a", None)]


SPOOFED_ORIGINS = [
    "http://evil.example", "https://evil.example:7860", "null", "http://127.0.0.1", "http://127.0.0.1:7861",
    "http://localhost:7860", "file://", "http://127.0.0.1:7860.evil.example", "ftp://127.0.0.1:7860",
    "http://user@127.0.0.1:7860", "http://[::1]:7860", "chrome-extension://abc", "",
    "http://127.0.0.1:07860", "data:text/html,x", "blob:http://127.0.0.1:7860/x",
    "http://127.0.0.1:7860 http://evil.example", "//127.0.0.1:7860", "http:127.0.0.1:7860", "javascript:1",
]  # fmt: skip


def test_another_origin_is_refused_even_with_a_session(ask, site) -> None:
    file = {"files": {"files": ("foreign.txt", b"x")}}
    for origin in SPOOFED_ORIGINS:
        headers = {"origin": origin}
        for method, path, body in (
            ("POST", UPLOAD_PATH, file),
            ("POST", CALL, {"json": {}}),
            ("GET", "/", {}),
        ):
            assert ask(method, path, headers=headers, **body).status_code == 403, (origin, path)
    assert list(site.home.rglob("foreign.txt")) == []
    assert ask("POST", UPLOAD_PATH, headers={"origin": HOME}, **file).status_code == 200


def test_cross_site_requests_without_origin_are_refused(ask) -> None:
    """Images, frames and forms of GET carry no Origin, but browsers say where they come from."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask("GET", "/", headers=link).status_code == 200, "a link may open the page"
    assert ask("GET", "/", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    for path, headers in (
        ("/", {"sec-fetch-site": "cross-site"}),
        ("/", {"sec-fetch-site": "same-site"}),
        ("/theme.css", link),
    ):
        assert ask("GET", path, headers=headers).status_code == 403, headers


def endpoints(application):
    """(method, path) of every route of the page and of what is mounted in it, parameters filled with something."""
    found, todo = set(), [("", application)]
    while todo:
        prefix, router = todo.pop()
        for route in router.routes:
            path = prefix + getattr(route, "path", "")
            inner = getattr(route, "app", None)
            if hasattr(inner, "routes"):
                todo.append((path.rstrip("/"), inner))
            elif hasattr(route, "original_router"):  # FastAPI's, of a router that was included
                todo.append((prefix, route.original_router))
            for method in getattr(route, "methods", None) or ():
                found.add((method, re.sub(r"\{[^}]*\}", "x", path) or "/"))
    return sorted(found)


def test_every_endpoint_needs_a_session(ask, site) -> None:
    every = endpoints(site.app._app.app)
    assert len(every) > 30, every
    for method, path in (*every, ("GET", "/login"), ("PUT", "/login"), ("DELETE", "/x")):
        assert ask(method, path, session=False).status_code == 401, (method, path)


def test_page_and_assets_are_served_with_a_session(ask) -> None:
    page = ask("GET", "/")
    assert page.status_code == 200
    assert "RAGBlend" in page.text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text)
    kinds = {"style.css": "css", "page.js": "javascript", "icon.svg": "svg", "manifest.webmanifest": "json"}
    for name, kind in kinds.items():
        asset = ask("GET", f"/ragblend/{name}")
        assert kind in asset.headers["content-type"]
        assert asset.headers["cache-control"] == "no-cache"
    assert "googleapis" not in ask("GET", "/theme.css").text


FOLDERS = ("/gradio_api/file=", "/static/", "/assets/", "/ragblend/", "/gradio_api/upload/")
STEPS = (
    "../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "..%255c", "....//../", "%252e%252e/", "./../",
)  # fmt: skip
TRAVERSALS = [f"{folder}{step * depth}etc/passwd" for folder in FOLDERS for step in STEPS for depth in (1, 6)]


def test_path_traversal_is_refused(site) -> None:
    answers = {path: site.ask_raw(path) for path in TRAVERSALS}
    assert len(answers) == 100
    assert [path for path, one in answers.items() if not is_refused(one) or "root:" in one.text] == []
    plain = {"method": "GET", "path": "/a..b/c.txt", "raw_path": b"/a..b/c.txt"}
    assert reason_to_refuse(plain | {"headers": [(b"host", b"127.0.0.1:7860")]}, RULES) is None


def test_files_other_sites_and_api_docs_are_not_served(ask, site) -> None:
    own = (site.home / name for name in ("secret.txt", "library.sqlite", "chats.sqlite"))
    routes = ("gradio_api/file=", "gradio_api/file/", "file=", "gradio_api/stream/", "gradio_api/deep_link/")
    for target in (*own, "/etc/passwd", "/proc/self/environ"):
        for prefix in routes:
            answer = ask("GET", f"/{prefix}{target}")
            assert is_refused(answer) and SECRET not in answer.text, (prefix, target)
    others = ("gradio_api/file=http://evil.example/x", "gradio_api/proxy=http://evil.example/x")
    chats = ("1.md", "1.json", "1.sqlite", "x.md", "-1.md", "99999999999999999999.md", "1")
    docs = ("docs", "redoc", "openapi.json", "gradio_api/docs", "gradio_api/openapi.json", "monitoring")
    exported = [f"ragblend/chats/{name}" for name in chats]
    exported += [f"ragblend/documents/{name}" for name in ("x", "..%2fsecret.txt", "%2fetc%2fpasswd")]
    for path in (*others, *docs, *exported, "proxy=http://127.0.0.1:22/", "ragblend/x.css"):
        assert is_refused(ask("GET", f"/{path}")), path


def test_a_document_is_saved_as_it_was_read_and_only_with_a_session(ask, site, tmp_path) -> None:
    file, secret = tmp_path / "a.html", tmp_path / "secret"
    file.write_text("<script>alert(1)</script>")
    secret.write_text(SECRET)
    found = file.stat()
    with Library(site.home / "library.sqlite") as library:
        document = library.begin("default", str(file))
        library.set_facts(document, FileFacts(found.st_size, found.st_mtime_ns, ""))
    path = f"/ragblend/documents/{document}"
    saved = ask("GET", path)
    assert saved.content == file.read_bytes() and saved.headers["content-disposition"].startswith(
        "attachment"
    )
    assert saved.headers["content-type"] == "application/octet-stream", "a browser must not run it"
    assert is_refused(ask("GET", path, session=False))
    file.unlink()
    file.symlink_to(secret)
    assert is_refused(ask("GET", path)), "not what has taken its place"


def test_a_body_over_the_limit_is_refused_by_its_length_or_when_it_is_counted(ask, site) -> None:
    async def pieces():
        for _ in range(5):
            yield b"a" * (BODY_LIMIT // 4)

    sizes = {"counted": pieces(), "at the limit": b"a" * BODY_LIMIT, "over it": b"a" * (BODY_LIMIT + 1)}
    found = {name: ask("POST", CALL, content=body).status_code for name, body in sizes.items()}
    assert found == {"counted": 413, "at the limit": 422, "over it": 413}
    for size, status in ((BODY_LIMIT + 1, 200), (LIMIT + 1, 413), (LIMIT + (2 << 20), 413)):
        assert ask("POST", UPLOAD_PATH, files={"files": ("a.txt", b"x" * size)}).status_code == status, size
    uploaded = [path.stat().st_size for path in (site.home / "ui").rglob("*") if path.is_file()]
    assert max(uploaded) <= LIMIT
    for length in ("-1", "abc", "1e9", "99999999999999999999"):
        answer = ask("POST", CALL, content=b"", headers={"content-length": length})
        assert answer.status_code in (400, 413), length


def test_every_answer_has_the_headers_and_none_opens_to_other_origins(ask) -> None:
    """A stream is passed on unchanged but for the headers."""
    stream = ask("GET", STREAM)
    assert (
        stream.headers["content-type"].startswith("text/event-stream") and "session_not_found" in stream.text
    )
    for answer in (
        ask("GET", "/x"),
        ask("GET", "/x", session=False),
        stream,
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
    scripts = re.findall(r"<script\b[^>]*", first.text)
    assert len(scripts) > 1 and all(f'nonce="{nonce}"' in script for script in scripts)
    assert "og:image" not in first.text
    assert "/ragblend/style.css" in first.text
    assert nonce not in second.text
    assert first.headers["cache-control"] == "no-store"


def test_websockets_are_closed(site) -> None:
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    site.runner.run(site.app({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_errors_are_logged_in_one_line_without_the_request(ask, site, caplog) -> None:
    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("payload" * 1000)

    answer = ask("POST", "/x", SecurityMiddleware(failing, RULES, site.login), content=b"x")
    assert answer.content == b""  # ended, not broken off
    (record,) = caplog.records
    assert record.getMessage() == "POST /x failed: ValueError"
    assert record.exc_info is None


def test_a_wildcard_bind_answers_to_addresses_and_to_no_foreign_name() -> None:
    rules = Rules(Address("0.0.0.0", PORT, ("nas.lan",)))
    assert all(
        rules.is_own_host(f"{name}:7860") for name in ("192.168.1.4", "[fe80::1]", "nas.lan", "localhost")
    )
    assert not any(
        rules.is_own_host(name) for name in ("evil.example:7860", "192.168.1.4:80", "evil.lan", "nas.lan:x")
    )


def test_behind_a_proxy_a_key_is_needed(tmp_path) -> None:
    """Only local programs can connect, but the proxy forwards everybody's requests."""
    keys = Keys(tmp_path)
    require_key_if_reachable("127.0.0.1", None, keys)
    for host, names in (("127.0.0.1", ["docs.example"]), ("0.0.0.0", None)):
        with pytest.raises(UsageError, match="needs a key"):
            require_key_if_reachable(host, names, keys)
    keys.add(Client("ada", ("ada",)))
    require_key_if_reachable("127.0.0.1", ["docs.example"], keys)


def request(host, origin=None):
    headers = [(b"host", host), *([(b"origin", origin)] if origin is not None else [])]
    return {"method": "POST", "path": "/", "raw_path": b"/", "headers": headers}


def test_removing_the_last_key_keeps_the_server_closed(tmp_path) -> None:
    keys = Keys(tmp_path)
    authenticator = Authenticator(Rules(Address("127.0.0.1", PORT)), keys, needs_key=False)
    scope = request(b"127.0.0.1:7860")
    assert authenticator.client(scope).is_owner, "nobody has made one"
    keys.add(Client("ada", ("ada",)))
    for end in (lambda: keys.remove("ada"), keys.path.unlink, lambda: None):
        with pytest.raises(ApiError, match="An API key is needed"):
            authenticator.client(scope)
        end()


def test_a_revoked_key_that_was_the_only_one_ever_used_is_no_owner(tmp_path) -> None:
    keys = Keys(tmp_path)
    key = keys.add(Client("ada", ("ada",)))
    authenticator = Authenticator(Rules(Address("127.0.0.1", PORT)), Keys(tmp_path), needs_key=False)
    scope = request(b"127.0.0.1:7860")
    scope["headers"].append((b"x-api-key", key.encode()))
    assert authenticator.client(scope).name == "ada"
    keys.remove("ada")
    with pytest.raises(ApiError, match="An API key is needed"):
        authenticator.client(scope)


def test_allowed_host_works_behind_a_proxy() -> None:
    rules = Rules(Address("127.0.0.1", PORT, ("Docs.example", "nas.lan:8443")))
    assert all(rules.is_own_host(name) for name in ("docs.example", "docs.example:443", "nas.lan:8443"))
    assert not any(
        rules.is_own_host(name) for name in ("nas.lan", f"nas.lan:{PORT}", "127.0.0.1", "docs.example.evil")
    )


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (b"docs.example", b"https://docs.example", None),
        (b"docs.example", b"https://docs.example:8443", 403),  # another program on that host
        (b"docs.example", b"http://[", 403),
        (b"docs.example", b"https://docs.example:99999999999999", 403),
        (b"docs.example:" + b"1" * 5000, b"https://docs.example", 421),
    ],
)
def test_origin_must_be_the_allowed_host(host, origin, status) -> None:
    """Invalid origins caused a 500, before any password was asked for."""
    refused = reason_to_refuse(request(host, origin), Rules(Address("127.0.0.1", PORT, ("docs.example",))))
    assert (refused and refused[0]) == status


# --- login


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(ask, site) -> None:
    answer = ask("GET", "/?token=right", session=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert site.login.visitor(answer.cookies[site.login.cookie_name])
    assert "right" not in cookie


def test_only_the_right_token_at_the_root_logs_in(ask) -> None:
    queries = (
        "token=wrong",
        "token=",
        "token=right&token=right",
        "token=righ",
        "token=right%00",
        "TOKEN=right",
    )
    for asked in (*(f"GET /?{query}" for query in queries), "GET /file?token=right", "POST /?token=right"):
        answer = ask(*asked.split(), session=False)
        assert answer.status_code == 401, asked
        assert "set-cookie" not in answer.headers


def test_cookie_of_another_home_or_port_is_invalid(ask, site) -> None:
    other, login = PageLogin(PORT + 1, token="right"), site.login
    for cookie in (other.new_cookie(), None, "", ".", "..", "ü", "a.1.b", login.new_cookie()[:-1]):
        assert login.visitor(cookie) is None, cookie
    cookie = f"{other.cookie_name}={login.new_cookie()}"
    assert ask("GET", "/", session=False, headers={"cookie": cookie}).status_code == 401


def test_cookie_is_valid_until_the_secret_or_password_changes(tmp_path, monkeypatch):
    path = tmp_path / "ui-secret"
    first = PageLogin(PORT, secret=load_or_create_secret(path))
    cookie = first.new_cookie()
    again = PageLogin(PORT, secret=load_or_create_secret(path))
    assert again.token != first.token
    assert again.visitor(cookie)
    assert PageLogin(PORT, "a password's hash", secret=load_or_create_secret(path)).visitor(cookie) is None
    later = time.time() + COOKIE_SECONDS + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert again.visitor(cookie) is None


@pytest.mark.parametrize("change", ["nothing", "ended sessions", "readable by others", "cut off"])
def test_a_secret_is_kept_until_it_is_replaced_or_unsafe(tmp_path, change) -> None:
    path = tmp_path / "ui-secret"
    kept = load_or_create_secret(path)
    if change == "readable by others":
        path.chmod(0o640)
    elif change == "cut off":
        path.write_bytes(kept[:5])
    now = load_or_create_secret(path, replace=change == "ended sessions")
    assert (now == kept) == (change == "nothing")
    assert len(now) == len(kept)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def kept():
    return hash_password(PASSWORD)


def test_a_password_is_kept_as_a_salted_hash(kept, tmp_path) -> None:
    assert "correct" not in kept
    assert hash_password(PASSWORD) != kept
    assert matches(PASSWORD, kept)
    assert not matches("correct horse batter", kept)
    assert read_password(tmp_path) is None
    save_password(tmp_path, PASSWORD)
    assert (tmp_path / "ui-password").stat().st_mode & 0o777 == 0o600
    assert matches(PASSWORD, read_password(tmp_path))
    for damaged in ("", "{}", "[1]", '{"salt": 1, "scrypt": 2}', "x"):
        assert not matches("", damaged)
    with pytest.raises(UsageError, match="at least 10"):
        hash_password("short")
    piped = b"correct horse caf\xe9".decode(errors="surrogateescape")
    with pytest.raises(UsageError, match="UTF-8"):
        hash_password(piped)
    assert not matches(piped, kept)


@pytest.mark.parametrize("command", ["ui", "up"])
def test_page_for_other_machines_needs_a_password(tmp_path, monkeypatch, command) -> None:
    """`ui --set-password` ended in an AttributeError; `up --set-password` served the page without a password."""
    monkeypatch.setattr("ragblend.app.cli.ui.serve_page", lambda *_: 1)
    with pytest.raises(UsageError, match="--set-password"):
        open_login(tmp_path, Address("0.0.0.0"))
    assert open_login(tmp_path, Address()).password_hash is None
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PASSWORD}\n"))
    assert main([command, "--set-password", "--home", str(tmp_path)]) == 0
    assert matches(PASSWORD, open_login(tmp_path, Address("0.0.0.0")).password_hash)


def test_up_names_the_files_that_it_does_not_read(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("ragblend.ui.serving.serve", lambda *given: given[4](tmp_path))
    tool = tmp_path / "tool.exe"
    tool.touch()
    at = ["--port", "0", "--no-browser", "--home", str(tmp_path / "home")]
    assert main(["up", str(tool), *at]) == 0
    assert f"failed   {tool}\n" in capfd.readouterr().err
    assert main(["up", str(tmp_path), *at]) == 0
    assert f"skipped  {tool}: .exe is not supported" in capfd.readouterr().err


def test_the_password_opens_and_guesses_are_slowed_down_for_one_client_and_not_for_others(ask, kept) -> None:
    login = PageLogin(PORT, kept, token="right")

    def guess(password, client="127.0.0.1"):
        app = SecurityMiddleware(None, RULES, login)
        return ask("POST", "/login", app, session=False, client=client, data={"password": password})

    right = guess(PASSWORD)
    assert right.status_code == 303
    assert login.visitor(right.cookies[login.cookie_name])
    assert {guess("wrong").status_code for _ in range(FREE_ATTEMPTS)} == {401}
    limited = guess(PASSWORD)
    assert limited.status_code == 429
    assert int(limited.headers["retry-after"]) >= 1
    assert guess("wrong", client="10.0.0.9").status_code == 401


@pytest.mark.parametrize(
    ("failures", "wait_s"),
    [(FREE_ATTEMPTS - 1, 0), (FREE_ATTEMPTS, 2), (FREE_ATTEMPTS + 1, 4), (55, 900), (1200, 900)],
)
def test_the_wait_doubles_and_ends(failures, wait_s) -> None:
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for _ in range(failures):
        attempts.note_failure("a")
    assert attempts.wait_s("a") == wait_s
    now[0] = wait_s
    assert attempts.wait_s("a") == 0
    attempts.note_failure("a")
    attempts.forget("a")
    assert attempts.wait_s("a") == 0


def test_old_failed_attempts_are_forgotten() -> None:
    """An IPv6 network has more addresses than there is memory."""
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for number in range(1000):
        now[0] += 100.0
        attempts.note_failure(str(number))
    assert len(attempts._failures) < 1000, "a client that failed a day ago is still remembered"


# --- the process


def test_temporary_folder_is_private_and_deleted(tmp_path) -> None:
    left = tmp_path / "ui" / "of a page that was killed"
    left.mkdir(parents=True)
    with gradio_environment(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.is_relative_to(tmp_path)
        assert not left.exists()
    assert not (tmp_path / "ui").exists()


def test_sigterm_ends_the_page_as_ctrl_c_does(tmp_path) -> None:
    """The process ended at once: uploads and the file with the page's token stayed."""
    running = Server(tmp_path / "home")
    assert (running.home / "ui").exists()
    assert running.stop(signal.SIGTERM) == 0
    assert not (running.home / "ui").exists()
