"""`ragblend ui` and `up`: serve the web page, on this machine only unless a password is set."""

import contextlib
import getpass
import sys
import threading
import webbrowser
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.app.cli.common import UNENCRYPTED, Cli, option
from ragblend.app.cli.ingest import note_left_out
from ragblend.app.cli.models import install_default
from ragblend.app.extras import check_installed
from ragblend.app.home import absolute
from ragblend.engine.model.checkpoints import DEFAULT, DEFAULT_PACKAGE
from ragblend.kvstore.errors import UsageError

MIB = 1 << 20
# Imported by name: the app must not import the ui package, which is above it.
PAGE_MODULE, PASSWORD_MODULE = "ragblend.ui.serving", "ragblend.ui.password"


@dataclass(frozen=True)
class PageOptions:
    """Where the page is served, and how."""

    port: int = option(7860, "Port; if it is taken, one of the next. 0: any.", min=0, max=65515)
    host: str = option("127.0.0.1", "Address to listen at; beyond this machine a password is needed.")
    allow_host: list[str] | None = option(
        None, "A further host name that the page answers to; may be repeated.", advanced=True
    )
    max_upload_mib: int = option(512, "The largest file that may be uploaded, in MiB.", min=1, advanced=True)
    browser: bool = option(True, "Open the page in a browser.", "--browser/--no-browser")
    new_link: bool = option(
        False, "Log out every browser that used the old link.", "--new-link", advanced=True
    )
    set_password: bool = option(
        False, "Ask for the page's password, save its hash, and exit.", "--set-password"
    )


def up(
    cli: Cli,
    options: PageOptions,
    folder: Annotated[Path | None, typer.Argument(help="Files or a folder to ask about.")] = None,
) -> int:
    """Everything in one command: install the offline demo if there is no model, then serve the page and read FOLDER."""
    if folder is not None and not folder.exists():
        raise UsageError(f"Reading {folder}: it does not exist. Name an existing folder or file.")
    check_page()
    if options.set_password:
        return _set_password(cli)
    with cli.open() as workspace:
        model = workspace.settings.model
    if model == DEFAULT and find_spec(DEFAULT_PACKAGE) is None:
        install_default(cli)
    return serve_page(cli, options, folder)


def ui(cli: Cli, options: PageOptions) -> int:
    """Serve the page: fill the library, chat about it, and see why it is fast."""
    cli.open().close()  # wrong options are refused before the page is loaded
    check_page()
    if options.set_password:
        return _set_password(cli)
    return serve_page(cli, options)


def check_page() -> None:
    """Raise UsageError if the page's packages are not installed."""
    check_installed("The page", ("gradio", "nh3", "watchfiles"), "ui")


def serve_page(cli: Cli, options: PageOptions, folder: Path | None = None) -> int:
    """Serve the page until it is interrupted. folder: read in the background, into the default collection."""
    serving: Any = import_module(PAGE_MODULE)
    from ragblend.app.serve.listening import listening
    from ragblend.app.services import AppServices

    with (
        AppServices.open(cli.home, **cli.overrides) as services,
        listening(options.host, options.port, options.allow_host, serving.PORTS_TRIED) as (address, listener),
    ):
        login = serving.open_login(services.workspaces.home.root, address, options.new_link)
        link = f"{address.url}?token={login.token}"

        def ready(landing_folder: Path) -> None:
            services.start()
            if folder is not None:
                queued = services.jobs.add([absolute(folder)], services.settings.collection)
                note_left_out(cli, dict(queued.failed), dict(queued.skipped))
            cli.result({"url": link, "port": address.port}, f"RAGBlend is at {link}")
            cli.note("Keep that link to yourself. Ctrl-C ends the page.")
            if not address.is_loopback:
                cli.note(UNENCRYPTED)
            if options.browser:
                landing = serving.write_landing(landing_folder, link).as_uri()
                threading.Thread(target=webbrowser.open, args=(landing,), daemon=True).start()

        with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop it
            serving.serve(services, address, listener, login, ready, options.max_upload_mib * MIB)
    return 0


def _set_password(cli: Cli) -> int:
    if sys.stdin.isatty():
        first, second = getpass.getpass("Password of the page: "), getpass.getpass("Repeat it: ")
        if first != second:
            cli.note("The two passwords differ. Nothing was changed.")
            return 1
    else:
        first = sys.stdin.readline().rstrip("\n")
    import_module(PASSWORD_MODULE).save_password(cli.create_home().root, first)
    cli.result({"ok": True}, "Saved. `ragblend ui --host ADDRESS` asks for it.")
    return 0
