"""`ragblend mcp`: serve the library as MCP tools for assistants, over stdin and stdout, or over HTTP."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.app.cli.ask import Collection
from ragblend.app.cli.common import AnswerOptions, Cli, option
from ragblend.app.extras import check_installed


@dataclass(frozen=True)
class McpOptions:
    """Options for serving over HTTP, to assistants that do not start the command themselves."""

    http: bool = option(
        False, "Listen at http://127.0.0.1:PORT/mcp (streamable HTTP), until Ctrl-C.", "--http"
    )
    port: int = option(8001, "Port, with --http. 0: any.", min=0, max=65535)
    host: str = option("127.0.0.1", "Address to listen at; beyond this machine the owner's key is needed.")
    allow_host: list[str] | None = option(
        None, "A further host name that it answers to; may be repeated.", advanced=True
    )


def mcp(cli: Cli, answering: AnswerOptions, options: McpOptions, collection: Collection = None) -> None:
    """Let assistants on this machine search, ask and read your documents (MCP); they start this command themselves."""
    check_installed("Tools for assistants", ("mcp",), "mcp")
    with cli.open_collection(collection, **vars(answering)) as workspace:
        from ragblend.app.answering.conversation import Conversations
        from ragblend.app.assistants import build_server, serve_forwarded

        workspaces = workspace.workspaces
        server = build_server(Conversations(workspaces), workspaces)
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop it
            if options.http:
                _listen(cli, server, options, workspaces.home.root)
            elif cli.host is None:
                server.run("stdio")
            else:  # the assistant's streams are at the other end of the connection
                serve_forwarded(server, cli.terminal)


def _listen(cli: Cli, server: Any, options: McpOptions, root: Path) -> None:
    from ragblend.app.assistants import http_app
    from ragblend.app.serve.keys import Authenticator, Keys
    from ragblend.app.serve.listening import GRACE_S, UvicornServer, listening, require_key_if_reachable
    from ragblend.app.serve.request_checks import Rules

    keys = Keys(root)
    require_key_if_reachable(options.host, options.allow_host, keys)
    with listening(options.host, options.port, options.allow_host) as (address, listener):
        authenticator = Authenticator(Rules(address), keys, not address.is_private)
        url = f"{address.url}mcp"
        result = {"url": url}, f"Assistants find the library at {url}"
        http_server = UvicornServer(http_app(server, authenticator), lambda: cli.result(*result), GRACE_S)

        def stop() -> None:
            http_server.should_exit = True

        with cli.terminal.stopping(stop):
            http_server.run([listener])
