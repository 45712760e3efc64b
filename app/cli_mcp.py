"""`ragblend mcp`: the library as tools for assistants, over standard input and output."""

import contextlib

from ragblend.app.cli_ask import Collection
from ragblend.app.cli_common import Answering, Cli
from ragblend.app.extras import check_installed


def mcp(cli: Cli, answering: Answering, collection: Collection = None) -> None:
    """Give assistants on this machine your documents to search, ask and read (MCP); they start it themselves."""
    check_installed("Tools for assistants", ("mcp",), "mcp")
    with cli.open_collection(collection, **vars(answering)) as workspace:
        from ragblend.app.assistants import talk, tools_over
        from ragblend.app.conversation import Conversations

        workspaces = workspace.workspaces
        server = tools_over(Conversations(workspaces), workspaces)
        with contextlib.suppress(KeyboardInterrupt):  # which is how it is meant to end
            if cli.shared is None:
                server.run("stdio")
            else:
                talk(server, cli.terminal)
