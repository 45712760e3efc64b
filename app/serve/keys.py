"""API keys of the server, each with its collections. Only a key's hash is stored."""

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from ragblend.app.serve.errors import ApiError
from ragblend.app.serve.request_checks import Rules, reason_to_refuse
from ragblend.kvstore.errors import SettingsError, UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.lock import WriterLock

PREFIX = "rb-"
FILE_NAME = "api-keys.json"
OPEN_PATHS = ("/healthz",)
LOCK_TIMEOUT_S = 10.0  # another process changes the keys within milliseconds


@dataclass(frozen=True)
class Client:
    """A client of the server. collections: those it may use; () means all, for the owner. digest: of its key; ""
    without a key.

    The first collection is the salt of the client's KV, and receives the passages learned from its prompts.
    """

    name: str
    collections: tuple[str, ...] = ()
    digest: str = field(default="", compare=False)

    @property
    def is_owner(self) -> bool:
        return not self.collections


OWNER = Client("owner")


class Keys:
    """The keys of one home, read from the file for each request, because other processes may change them."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILE_NAME
        self._were_found = False

    def add(self, client: Client) -> str:
        """Create and return a key; it cannot be read again. Raises UsageError if the name is taken, SettingsError."""
        key = PREFIX + secrets.token_urlsafe(32)
        with self._editing() as known:
            if client.name in {each.name for each in known.values()}:
                raise UsageError(
                    f"There is a key {client.name!r} already; remove it first, or choose another name."
                )
            known[_digest(key)] = client
        return key

    def remove(self, name: str) -> None:
        """Delete the key of that name. Raises UsageError if there is none, SettingsError."""
        if name not in self.names():
            raise UsageError(f"There is no key {name!r}; `ragblend keys` lists them.")
        with self._editing() as known:
            for digest in [digest for digest, client in known.items() if client.name == name]:
                del known[digest]

    def clients(self) -> list[Client]:
        """The clients that have a key. Raises SettingsError if the file cannot be read."""
        return list(self._read().values())

    def names(self) -> list[str]:
        return [client.name for client in self.clients()]

    def client(self, key: str) -> Client | None:
        """The key's client, or None. The lookup is by hash, so timing reveals nothing about similar keys."""
        return self._read().get(_digest(key))

    @property
    def are_required(self) -> bool:
        """Whether a key exists, or existed since the start: removing the last one must not open the server."""
        self._read()
        return self._were_found

    @contextmanager
    def _editing(self) -> Iterator[dict[str, Client]]:
        """Yield the keys for the block to change, and write them after it; other processes' changes wait meanwhile."""
        with WriterLock(self.path.with_suffix(".lock"), LOCK_TIMEOUT_S) as lock, lock.hold():
            known = self._read()
            yield known
            rows = [
                {"sha256": digest, "name": client.name, "collections": client.collections}
                for digest, client in known.items()
            ]
            replace_durably(self.path, json.dumps({"keys": rows}, indent=1))

    def _read(self) -> dict[str, Client]:
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["keys"]
            clients = [
                Client(str(row["name"]), tuple(map(str, row["collections"])), str(row["sha256"]))
                for row in rows
            ]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"Reading the keys in {self.path}: {error}. Remove the file and make new keys."
            ) from error
        # Set here, because a request with a valid key does not ask whether keys are required.
        self._were_found = self._were_found or bool(clients)
        return {client.digest: client for client in clients}


@dataclass(frozen=True)
class Authenticator:
    """Checks requests and identifies their client. needs_key False: until a key exists, every client is the owner."""

    rules: Rules
    keys: Keys
    needs_key: bool

    def client(self, scope: Scope) -> Client:
        """The client of a request. Raises ApiError for one that is refused."""
        if (refusal := reason_to_refuse(scope, self.rules)) is not None:
            raise ApiError(*refusal, "refused")
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else Headers(scope=scope).get("x-api-key", "")
        found = self.keys.client(given) if given else None
        if found is not None:
            return found
        if scope["path"] in OPEN_PATHS or not (self.needs_key or self.keys.are_required):
            return OWNER
        raise ApiError(
            401,
            "An API key is needed: `Authorization: Bearer KEY`, or `x-api-key: KEY`; `ragblend keys add` makes one.",
            "invalid_api_key",
        )


def _digest(key: str) -> str:
    """A key's SHA-256. A slow hash is not needed, because keys have 256 random bits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
