"""`ragblend ui`: the page, on this machine only unless a password was set."""

import contextlib
import getpass
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.app.cli_common import Cli
from ragblend.app.extras import check_installed

MIB = 1 << 20
# By name: the page stands above the app, and imports run down only.
PAGE = "ragblend.ui.serving"


def ui(
    cli: Cli,
    port: Annotated[
        int, typer.Option(help="Port; if it is taken, one of the next. 0: any.", min=0, max=65515)
    ] = 7860,
    host: Annotated[
        str, typer.Option(help="Address to listen at; beyond this machine a password is needed.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further host name that the page answers to; may be repeated.")
    ] = None,
    max_upload_mib: Annotated[
        int, typer.Option(help="The largest file that may be uploaded, in MiB.", min=1)
    ] = 512,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    new_link: Annotated[
        bool, typer.Option("--new-link", help="Shut out every browser that was let in until now.")
    ] = False,
    set_password: Annotated[
        bool, typer.Option("--set-password", help="Ask for the page's password, keep its hash, and end.")
    ] = False,
) -> int:
    """Serve the page: a library to fill, a chat over it, and a look at why it is fast."""
    cli.open().close()  # what it was given is refused before the page is loaded
    check_installed("The page", ("gradio", "nh3"), "ui")
    serving: Any = import_module(PAGE)
    if set_password:
        return _set_password(cli, serving)
    from ragblend.app.desk import Desk

    with Desk.open(cli.home, model=cli.model, device=cli.device, dtype=cli.dtype) as desk:
        address = serving.Address(host, serving.free_port(host, port), tuple(allow_host or ()))
        entrance = serving.open_entrance(desk.workspaces.home.root, address, new_link)
        link = f"{address.url}?token={entrance.token}"

        def ready(folder: Path) -> None:
            desk.start()
            cli.result({"url": link, "port": address.port}, f"RAGBlend is at {link}")
            cli.note("Keep that link to yourself. Ctrl-C ends the page.")
            if not address.is_loopback:
                cli.note(
                    "It is served without encryption: put a proxy with TLS before it on a network you do not trust."
                )
            if browser:
                _open_browser(serving.write_landing(folder, link))

        with contextlib.suppress(KeyboardInterrupt):  # which is how it is meant to end
            serving.serve(desk, address, entrance, ready, max_upload_mib * MIB)
    return 0


def _open_browser(landing: Path) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(landing.as_uri(),), daemon=True).start()


def _set_password(cli: Cli, serving: Any) -> int:
    from ragblend.app.home import Home

    home = Home.resolve(cli.home).create()
    if sys.stdin.isatty():
        first, second = getpass.getpass("Password of the page: "), getpass.getpass("Once more: ")
        if first != second:
            cli.note("The two are not the same. Nothing was changed.")
            return 1
    else:
        first = sys.stdin.readline().rstrip("\n")
    serving.save_password(serving.password_path(home.root), first)
    cli.result({"ok": True}, "Kept. `ragblend ui --host ADDRESS` asks for it.")
    return 0
