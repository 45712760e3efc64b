"""Serves the page: Gradio behind our middleware, by uvicorn; temporary files are in the home and deleted at exit."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp

from ragblend.app.serve.listening import UvicornServer, owning, temporary_files_in
from ragblend.app.serve.request_checks import MIB, Address, Rules
from ragblend.app.services import AppServices
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.ui import views
from ragblend.ui.login import PageLogin, load_or_create_secret
from ragblend.ui.password import read_password
from ragblend.ui.routes import add_routes
from ragblend.ui.security import UPLOAD_PATH, SecurityMiddleware

if TYPE_CHECKING:
    from ragblend.ui.page_context import PageContext

PORTS_TRIED = 20
GRADIO_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_MCP_SERVER": "False",
    "GRADIO_SHARE": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def open_login(home: Path, address: Address, end_sessions: bool = False) -> PageLogin:
    """The login with its launch token, and with the password if other machines can reach the page.

    end_sessions: log all browsers out. Raises UsageError if a password is needed and there is none.
    """
    password = None if address.is_loopback else read_password(home)
    if not address.is_loopback and password is None:
        raise UsageError(
            f"Serving the page at {address.host}: other machines can reach it there, so it needs a password. Set one "
            "with `ragblend ui --set-password`, or run without --host."
        )
    return PageLogin(address.port, password, secret=load_or_create_secret(home / "ui-secret", end_sessions))


def build_app(context: "PageContext", rules: Rules, login: PageLogin) -> ASGIApp:
    """The page with its middleware as one ASGI application. Call it inside `gradio_environment`."""
    import gradio as gr

    from ragblend.ui.page import build_page
    from ragblend.ui.request_filter import RequestFilter
    from ragblend.ui.theme import page_theme

    page = build_page(context)
    page.queue(api_open=False, default_concurrency_limit=8)
    outer = FastAPI(openapi_url=None)
    add_routes(outer, context.services)
    mounted = gr.mount_gradio_app(
        outer,
        page,
        path="/",
        server_name="127.0.0.1",
        server_port=rules.address.port,
        footer_links=[],
        blocked_paths=[
            str(context.services.workspaces.home.root / name)
            for name in ("kv", "chroma", "models", "originals")
        ],
        max_file_size=rules.max_upload_bytes,
        show_error=False,
        enable_monitoring=False,
        theme=page_theme(),
        app_kwargs={"openapi_url": None},
    )
    # As `launch` sets them: otherwise Gradio does not check which files a call names, and makes pictures public.
    page.has_launched = page.is_running = True
    return SecurityMiddleware(RequestFilter(mounted, page), rules, login)


@contextlib.contextmanager
def gradio_environment(home: Path) -> Iterator[Path]:
    """Set Gradio's environment variables, with a private upload folder in the home that is deleted afterwards."""
    folder = home / "ui"
    variables = {**GRADIO_ENVIRONMENT, "GRADIO_TEMP_DIR": str(folder)}
    before = {name: os.environ.get(name) for name in variables}
    with temporary_files_in(folder):
        os.environ.update(variables)
        try:
            yield folder
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def write_landing(folder: Path, url: str) -> Path:
    """Write a file that redirects to the page: the browser gets its path, so that no process list shows the token."""
    path = folder / "open.html"
    replace_durably(path, views.login.landing(url))
    return path


def serve(
    services: AppServices,
    address: Address,
    listener: socket.socket,
    login: PageLogin,
    on_ready: Callable[[Path], None],
    max_upload_bytes: int = 512 * MIB,
) -> None:
    """Serve until Ctrl-C. on_ready is called when the page answers, with a folder that is deleted at the end."""
    from ragblend.ui.page_context import PageContext

    rules = Rules(address, UPLOAD_PATH, max_upload_bytes)
    root = services.workspaces.home.root
    with owning(services, "ragblend ui"), gradio_environment(root) as folder:
        context = PageContext(services)
        app = build_app(context, rules, login)

        def ready() -> None:
            context.startup.begin(services)
            on_ready(folder)

        UvicornServer(app, ready, grace_s=1).run([listener])
