"""Who may ask the server, and for what: keys, each with collections of its own. Of a key only its hash is kept."""

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from ragblend.app.serve.errors import ApiError
from ragblend.app.serve.front import Rules, refuse
from ragblend.kvstore.errors import SettingsError, UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.lock import WriterLock

PREFIX = "rb-"
FILE_NAME = "api-keys.json"
OPEN_PATHS = ("/healthz",)
LOCK_S = 10.0  # how long to wait for who changes the keys, which takes milliseconds


@dataclass(frozen=True)
class Client:
    """Who asks. collections: what it may ask about; (): all, it is the owner.

    The first collection is the salt of its KV, and where text of its prompts becomes passages.
    digest: of its key; "" where it has none.
    """

    name: str
    collections: tuple[str, ...] = ()
    digest: str = field(default="", compare=False)

    @property
    def is_owner(self) -> bool:
        return not self.collections


OWNER = Client("owner")


class Keys:
    """The keys of one home. What another process adds or removes holds from the next request on."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILE_NAME
        self._seen: tuple[int, int] | None = None
        self._is_used = False
        self._clients: dict[str, Client] = {}

    def add(self, client: Client) -> str:
        """A new key, which is shown this once. Raises UsageError for a name that is taken, SettingsError."""
        key = PREFIX + secrets.token_urlsafe(32)
        with self._changing() as known:
            if client.name in {each.name for each in known.values()}:
                raise UsageError(
                    f"There is a key {client.name!r} already; remove it first, or choose another name."
                )
            known[_digest(key)] = client
        return key

    def remove(self, name: str) -> None:
        """Raises UsageError where there is none of that name, SettingsError."""
        if name not in self.names():
            raise UsageError(f"There is no key {name!r}; `ragblend keys` lists them.")
        with self._changing() as known:
            for digest in [digest for digest, client in known.items() if client.name == name]:
                del known[digest]

    def clients(self) -> list[Client]:
        """Raises SettingsError for a file that cannot be read."""
        return list(self._read().values())

    def names(self) -> list[str]:
        return [client.name for client in self.clients()]

    def client(self, key: str) -> Client | None:
        """Whose key that is. Looked up by its hash, so how long it takes says nothing about keys that are near."""
        return self._read().get(_digest(key))

    @property
    def is_used(self) -> bool:
        """Whether there is a key, or was since this began: the last one's end, or its file's, opens nothing."""
        self._is_used = self._is_used or bool(self._read())
        return self._is_used

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Client]]:
        """The keys as they are now, for the block to change: until written, nobody else changes them."""
        with WriterLock(self.path.with_suffix(".lock"), LOCK_S) as lock, lock.hold():
            self._seen = None
            known = dict(self._read())
            yield known
            self._write(known)

    def _read(self) -> dict[str, Client]:
        try:
            found = self.path.stat()
            seen = found.st_mtime_ns, found.st_ino
            if seen != self._seen:
                self._clients = _parsed(json.loads(self.path.read_text(encoding="utf-8")))
                self._seen = seen
        except FileNotFoundError:
            self._seen, self._clients = None, {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"Reading the keys in {self.path}: {error}. Remove the file and make new keys."
            ) from error
        return self._clients

    def _write(self, clients: dict[str, Client]) -> None:
        values = [
            {"sha256": digest, "name": client.name, "collections": client.collections}
            for digest, client in clients.items()
        ]
        replace_durably(self.path, json.dumps({"keys": values}, indent=1))


@dataclass(frozen=True)
class Door:
    """Who may pass, and whose request it is. needs_key: whether somebody without one may not be the owner."""

    rules: Rules
    keys: Keys
    needs_key: bool

    def client(self, scope: Scope) -> Client:
        """Raises ApiError for one that may not pass."""
        if (refusal := refuse(scope, self.rules)) is not None:
            raise ApiError(*refusal, "refused")
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else ""
        found = self.keys.client(given) if given else None
        if found is not None:
            return found
        if scope["path"] in OPEN_PATHS or not (self.needs_key or self.keys.is_used):
            return OWNER
        raise ApiError(
            401, "A key is needed: `Authorization: Bearer KEY`, of `ragblend keys add`.", "invalid_api_key"
        )


def _parsed(value: Any) -> dict[str, Client]:
    clients = (
        Client(str(each["name"]), tuple(map(str, each["collections"])), str(each["sha256"]))
        for each in value["keys"]
    )
    return {client.digest: client for client in clients}


def _digest(key: str) -> str:
    """A key has 256 random bits, so it needs no slow hash."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
