"""`ragblend mcp`: the library as tools for assistants, over standard input and output, or over HTTP."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.app.cli.ask import Collection
from ragblend.app.cli.common import AnswerOptions, Cli, option
from ragblend.app.extras import check_installed


@dataclass(frozen=True)
class McpOptions:
    """Where assistants find it, if they do not start it themselves."""

    http: bool = option(
        False, "Listen at http://127.0.0.1:PORT/mcp (streamable HTTP), until Ctrl-C.", "--http"
    )
    port: int = option(8001, "Port, with --http. 0: any.", min=0, max=65535)
    host: str = option("127.0.0.1", "Address to listen at; beyond this machine the owner's key is needed.")
    allow_host: list[str] | None = option(None, "A further host name that it answers to; may be repeated.")


def mcp(cli: Cli, answering: AnswerOptions, asked: McpOptions, collection: Collection = None) -> None:
    """Give assistants on this machine your documents to search, ask and read (MCP); they start it themselves."""
    check_installed("Tools for assistants", ("mcp",), "mcp")
    with cli.open_collection(collection, **vars(answering)) as workspace:
        from ragblend.app.answering.conversation import Conversations
        from ragblend.app.assistants import talk, tools_over

        workspaces = workspace.workspaces
        server = tools_over(Conversations(workspaces), workspaces)
        with contextlib.suppress(KeyboardInterrupt):  # which is how it is meant to end
            if asked.http:
                _listen(cli, server, asked, workspaces.home.root)
            elif cli.shared is None:
                server.run("stdio")
            else:
                talk(server, cli.terminal)


def _listen(cli: Cli, server: Any, asked: McpOptions, root: Path) -> None:
    from ragblend.app.assistants import over_http
    from ragblend.app.serve.front import Rules
    from ragblend.app.serve.keys import Door, Keys
    from ragblend.app.serve.listening import UvicornServer, check_reach, listening

    keys = Keys(root)
    check_reach(asked.host, asked.allow_host, keys)
    with listening(asked.host, asked.port, asked.allow_host) as (address, at):
        door = Door(Rules(address), keys, not address.is_private)
        url = f"{address.url}mcp"
        said = {"url": url}, f"Assistants find the library at {url}"
        running = UvicornServer(over_http(server, door), lambda: cli.result(*said))

        def stop() -> None:
            running.should_exit = True

        with cli.terminal.stopping(stop):
            running.run([at])
