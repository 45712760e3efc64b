"""All routes of the served page: without the token, from other origins, too large, with path traversal."""

import asyncio
import re
import signal
import subprocess
import sys

import httpx
import pytest
from browser import Server
from fronts import PORT, send_raw
from test_security import TRAVERSALS

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

from ragblend.app.serve.front import Address, Rules
from ragblend.app.services import AppServices
from ragblend.kvstore.errors import UsageError
from ragblend.ui.login import PageLogin
from ragblend.ui.page_context import PageContext
from ragblend.ui.security import UPLOAD_PATH
from ragblend.ui.serving import build_app, gradio_environment, open_login

SECRET = "nobody outside may read this"
LIMIT = 100_000


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "home"


@pytest.fixture(scope="module")
def app(home):
    """The real application over real services; it loads nothing, and needs no model."""
    with AppServices.open(home) as services, gradio_environment(home):
        (home / "secret.txt").write_text(SECRET)
        login = PageLogin(PORT, token="right")
        rules = Rules(Address(port=PORT), UPLOAD_PATH, max_upload_bytes=LIMIT)

        async def built():
            return build_app(PageContext(services), rules, login)

        # Outside a loop Gradio makes loops for its locks, and closes none of them.
        with asyncio.Runner() as runner:
            served = runner.run(built())
        yield served, login


@pytest.fixture
def ask(app):
    served, login = app

    async def send(method, path, session=True, **arguments):
        transport = httpx.ASGITransport(app=served, client=("127.0.0.1", 5000), raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://127.0.0.1:{PORT}", timeout=60
        ) as http:
            if session:
                http.cookies.set(login.cookie_name, login.new_cookie())
            return await http.request(method, path, **arguments)

    return send


def endpoints(application):
    """(method, path) of every route of the page and of what is mounted in it, parameters filled with something."""
    found = set()
    todo = [("", application)]
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


async def test_every_endpoint_needs_a_session(app, ask) -> None:
    every = endpoints(app[0]._app.app)
    assert len(every) > 30, every
    for method, path in every:
        answer = await ask(method, path, session=False)
        assert answer.status_code == 401, (method, path, answer.status_code)


async def test_page_and_assets_are_served_with_a_session(ask) -> None:
    page = await ask("GET", "/")
    assert page.status_code == 200
    assert "RAGBlend" in page.text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text)
    for name in ("style.css", "page.js", "icon.svg", "manifest.webmanifest"):
        assert (await ask("GET", f"/ragblend/{name}")).status_code == 200
    assert (await ask("GET", "/theme.css")).status_code == 200
    assert "googleapis" not in (await ask("GET", "/theme.css")).text


def test_no_path_escapes_the_routes(app) -> None:
    answers = {path: send_raw(*app, path) for path in TRAVERSALS}
    assert {path: one for path, one in answers.items() if not 400 <= one[0] < 500 or b"root:" in one[1]} == {}


async def test_files_other_sites_and_api_docs_are_not_served(ask, home) -> None:
    own = (home / name for name in ("secret.txt", "library.sqlite", "chats.sqlite"))
    routes = ("gradio_api/file=", "gradio_api/file/", "file=", "gradio_api/stream/", "gradio_api/deep_link/")
    for target in (*own, "/etc/passwd", "/proc/self/environ"):
        for prefix in routes:
            answer = await ask("GET", f"/{prefix}{target}")
            assert 400 <= answer.status_code < 500, (prefix, target)
            assert SECRET not in answer.text
    others = ("gradio_api/file=http://evil.example/x", "gradio_api/proxy=http://evil.example/x")
    chats = ("1.md", "1.json", "1.sqlite", "x.md", "-1.md", "99999999999999999999.md", "1")
    for path in (*others, "proxy=http://127.0.0.1:22/", *(f"ragblend/chats/{name}" for name in chats)):
        assert 400 <= (await ask("GET", f"/{path}")).status_code < 500, path
    for path in ("docs", "redoc", "openapi.json", "gradio_api/docs", "gradio_api/openapi.json", "monitoring"):
        answer = await ask("GET", f"/{path}")
        assert answer.status_code >= 400 or "swagger" not in answer.text.lower(), path


async def test_requests_from_other_sites_are_refused_by_the_real_page(ask, home) -> None:
    assert 400 <= (await ask("GET", "/config", headers={"host": "evil.example:7860"})).status_code < 500
    files = {"files": ("x.txt", b"x")}
    for path, arguments in (("upload", {"files": files}), ("queue/join", {"json": {}})):
        headers = {"origin": "http://evil.example"}
        answer = await ask("POST", f"/gradio_api/{path}", headers=headers, **arguments)
        assert answer.status_code == 403
    assert list(home.rglob("x.txt")) == []


async def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(ask, home) -> None:
    small = await ask("POST", "/gradio_api/upload", files={"files": ("small.txt", b"x" * 1000)})
    assert small.status_code == 200
    for size in (LIMIT + 1, LIMIT + (2 << 20)):
        large = await ask("POST", "/gradio_api/upload", files={"files": ("large.txt", b"x" * size)})
        assert large.status_code == 413, size
    kept = [
        path
        for path in home.rglob("*")
        if path.is_file() and path.stat().st_size > LIMIT and "sqlite" not in path.name
    ]
    assert kept == []


def test_page_for_other_machines_needs_a_password(home) -> None:
    with pytest.raises(UsageError, match="--set-password"):
        open_login(home, Address("0.0.0.0"))
    assert open_login(home, Address()).password_hash is None


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


def test_gradio_is_imported_in_its_environment_and_not_before() -> None:
    """What it and the hub's library read there, they read as they are imported."""
    code = "import ragblend.ui.serving, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"gradio", "huggingface_hub"} & set(done.stdout.split()) == set()
