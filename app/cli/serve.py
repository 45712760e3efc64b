"""`ragblend serve` and `keys`: OpenAI's, Ollama's and Anthropic's APIs, on this machine only unless there is a key."""

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ragblend.app.cli.common import UNENCRYPTED, Cli, command, option, typer_callback
from ragblend.app.extras import check_installed
from ragblend.kvstore.errors import UsageError

MIB = 1 << 20
keys = typer.Typer(name="keys")


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, and its limits."""

    port: int = option(8000, "Port. 0: any.", min=0, max=65535)
    host: str = option("127.0.0.1", "Address to listen at; beyond this machine a key is needed.")
    allow_host: list[str] | None = option(
        None, "A further host name that it answers to; may be repeated.", advanced=True
    )
    allow_origin: list[str] | None = option(
        None,
        "A web site whose pages may use it (CORS), as https://app.example; may be repeated.",
        advanced=True,
    )
    max_upload_mib: int = option(512, "The largest file that may be uploaded, in MiB.", min=1, advanced=True)
    max_requests: int = option(
        64, "Most requests running and waiting; more are refused with 429.", min=1, advanced=True
    )
    timeout: float = option(600.0, "Most seconds for an answer, waiting included.", min=0.1, advanced=True)
    hang: float = option(
        600.0,
        "End the process with status 75 if the device makes no progress for so many seconds.",
        min=1,
        advanced=True,
    )


def serve(cli: Cli, options: ServerOptions) -> None:
    """Serve OpenAI's, Ollama's and Anthropic's APIs, reranking, and the library with its documents."""
    cli.open().close()  # wrong options are refused before anything is loaded
    check_installed("The server", ("fastapi", "python_multipart", "uvicorn", "watchfiles"), "serve")
    from ragblend.app.serve.keys import Keys
    from ragblend.app.serve.listening import check_origins, listening, require_key_if_reachable
    from ragblend.app.serve.listening import serve as run
    from ragblend.app.serve.service import Limits
    from ragblend.app.services import AppServices

    with AppServices.open(cli.home, **cli.overrides) as services:
        api_keys = Keys(services.workspaces.home.root)
        require_key_if_reachable(options.host, options.allow_host, api_keys)
        origins = check_origins(options.allow_origin, api_keys)
        with listening(options.host, options.port, options.allow_host) as (address, socket):
            needs_no_key = address.is_private and not api_keys.clients()

            def ready() -> None:
                url = f"{address.url}v1"
                shown = f"OpenAI's API is at {url}; Ollama's and Anthropic's at {address.url.rstrip('/')}"
                cli.result({"url": url, "port": address.port}, shown)
                cli.note(
                    "No API key is set: any program on this machine can use the server. Add one with "
                    "`ragblend keys add NAME`."
                    if needs_no_key
                    else "Clients need an API key; `ragblend keys add NAME` makes one."
                )
                if not address.is_loopback:
                    cli.note(UNENCRYPTED)

            limits = Limits(options.max_requests, answer_s=options.timeout, hang_s=options.hang)
            with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop it
                upload_bytes = options.max_upload_mib * MIB
                run(services, address, socket, api_keys, ready, limits, upload_bytes, origins)


def list_keys(cli: Cli, context: typer.Context) -> None:
    """List the server's API keys by name, with the collections that they may use; `add NAME` makes one."""
    if context.invoked_subcommand is not None:
        return
    rows: list[dict[str, Any]] = [
        {"name": each.name, "owner": each.is_owner, "collections": list(each.collections)}
        for each in _keys(cli).clients()
    ]
    lines = [f"{row['name']:<24} {', '.join(row['collections']) or 'all (owner)'}" for row in rows]
    cli.result({"keys": rows}, "\n".join(lines) or "No keys yet. Run `ragblend keys add NAME`.")


# `ragblend keys` without a subcommand lists them.
keys.callback(invoke_without_command=True)(typer_callback(list_keys))


@command(keys, "add")
def add_key(
    cli: Cli,
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    collection: Annotated[
        list[str] | None,
        typer.Option(help="A collection that it may use; may be repeated (default: one of its own)."),
    ] = None,
    owner: Annotated[
        bool, typer.Option("--owner", help="It may use all collections, and read /metrics.")
    ] = False,
) -> None:
    """Make an API key, and show it once. Keys without a common collection never share KV."""
    from ragblend.app.serve.keys import OWNER, Client

    if owner and collection:
        raise UsageError(
            "--owner may use every collection, --collection limits it to one; give one of the two"
        )
    api_keys = _keys(cli)
    with cli.open() as workspace:
        workspaces = workspace.workspaces
        if not collection and not owner and name in workspaces.names():
            raise UsageError(
                f"There is a collection {name!r}, which other keys may use. Choose another name for the key, or "
                f"share it with --collection {name}"
            )
        if name == OWNER.name or name in api_keys.names():
            raise UsageError(f"There is a key {name!r} already. Choose another name.")
        for each in () if owner else collection or [name]:
            if each not in workspaces.names():
                workspaces.create(each)
    client = Client(name, () if owner else tuple(collection or [name]))
    key = api_keys.add(client)
    cli.result({"name": name, "key": key, "collections": list(client.collections)}, key)
    cli.note("It is not shown again: only its hash is kept.")


@command(keys, "rm")
def remove_key(cli: Cli, name: Annotated[str, typer.Argument(help="Whose key.")]) -> None:
    """Revoke a key at once; its collection stays (`ragblend collections rm`)."""
    _keys(cli).remove(name)
    cli.result({"removed": name}, f"removed the key {name}")


def _keys(cli: Cli) -> Any:
    from ragblend.app.serve.keys import Keys

    return Keys(cli.create_home().root)
