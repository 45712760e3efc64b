"""Serve the page: Gradio behind our own front, through uvicorn; temporary files inside the home, gone at exit."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp

from ragblend.app.desk import Desk
from ragblend.app.serve.front import MIB, Address, Rules
from ragblend.app.serve.listening import UvicornServer, files_inside, owning
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.ui import views
from ragblend.ui.entrance import Entrance, kept_secret
from ragblend.ui.password import read_password
from ragblend.ui.routes import add_routes
from ragblend.ui.safety import UPLOAD_PATH, Safety

if TYPE_CHECKING:
    from ragblend.ui.context import Context

PORTS_TRIED = 20
GRADIO_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_MCP_SERVER": "False",
    "GRADIO_SHARE": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def open_entrance(home: Path, address: Address, anew: bool = False) -> Entrance:
    """The launch token, and the password where the page can be reached from elsewhere.

    anew: browsers that were let in before need the new link. Raises UsageError without a password where one is needed.
    """
    password = None if address.is_loopback else read_password(password_path(home))
    if not address.is_loopback and password is None:
        raise UsageError(
            f"Serving the page at {address.host}: it could be reached from other machines, so it needs a password. "
            "Set one with `ragblend ui --set-password`, or leave --host away."
        )
    return Entrance(address.port, password, secret=kept_secret(home / "ui-secret", anew))


def build_app(context: "Context", rules: Rules, entrance: Entrance) -> ASGIApp:
    """The page as one ASGI application with everything in front of it. `gradio_environment` must be in force."""
    import gradio as gr

    from ragblend.ui.gate import Gate
    from ragblend.ui.page import build_page
    from ragblend.ui.theme import page_theme

    page = build_page(context)
    page.queue(api_open=False, default_concurrency_limit=8)
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_routes(outer, context.desk)
    mounted = gr.mount_gradio_app(
        outer,
        page,
        path="/",
        server_name="127.0.0.1",
        server_port=rules.address.port,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        blocked_paths=[
            str(context.desk.workspaces.home.root / name) for name in ("kv", "chroma", "models", "originals")
        ],
        max_file_size=rules.max_upload_bytes,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        show_error=False,
        enable_monitoring=False,
        theme=page_theme(),
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    # As after `launch`: only then does Gradio check which files a call names, and keep pictures from becoming public.
    page.has_launched = page.is_running = True
    return Safety(Gate(mounted, page), rules, entrance)


@contextlib.contextmanager
def gradio_environment(home: Path) -> Iterator[Path]:
    """Gradio's settings and its folder for uploads, inside the home, for this user only and gone afterwards."""
    folder = home / "ui"
    names = {**GRADIO_ENVIRONMENT, "GRADIO_TEMP_DIR": str(folder)}
    before = {name: os.environ.get(name) for name in names}
    with files_inside(folder):
        os.environ.update(names)
        try:
            yield folder
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def password_path(home: Path) -> Path:
    return home / "ui-password"


def write_landing(folder: Path, url: str) -> Path:
    """A file that leads to the page: a browser is started with its path, so that no process list shows the token."""
    path = folder / "open.html"
    replace_durably(path, views.entrance.landing(url))
    return path


def serve(
    desk: Desk,
    address: Address,
    at: socket.socket,
    entrance: Entrance,
    on_ready: Callable[[Path], None],
    max_upload_bytes: int = 512 * MIB,
) -> None:
    """Serve until Ctrl-C. on_ready is called once the page answers, with a folder that goes when it ends."""
    from ragblend.ui.context import Context

    rules = Rules(address, UPLOAD_PATH, max_upload_bytes)
    root = desk.workspaces.home.root
    with owning(desk, "ragblend ui"), gradio_environment(root) as folder:
        context = Context(desk)
        app = build_app(context, rules, entrance)

        def ready() -> None:
            context.startup.begin(desk)
            on_ready(folder)

        UvicornServer(app, ready, grace_s=1).run([at])
