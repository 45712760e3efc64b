"""Servers of a shared store: Redis or Valkey, S3-compatible object storage, a folder that several machines mount.

Credentials come from the environment. `Server` is a few coroutines over names and bytes; `remote.py` knows the content,
and when to use a server.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from ragblend.kvstore.errors import UsageError, install_hint
from ragblend.kvstore.files import FOLDER_MODE
from ragblend.kvstore.places import Place

_WRITING_S = 60.0  # a younger unfinished file may still be written
_CONNECTIONS = 8  # more do not increase the throughput
_MAX_REDIS_BYTES = 512 << 20  # Redis' `proto-max-bulk-len`; a larger value closes the connection
_MAX_OBJECT_BYTES = 5 << 30  # limit of a single upload to S3
# Parts of messages of a full or limited server.
_FULL_MESSAGES = ("EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "os error 28", "os error 122")
NOT_REDIS = "the server there is not Redis"
Head = tuple[bytes, int]  # a value's first bytes, and its size


class Refused(Exception):
    """The server answers, but rejects this value: it is full, or the value is too large."""


class Server(Protocol):
    """A server, used in one event loop. Coroutines raise whatever their library raises if it does not answer."""

    async def peek(self, names: Sequence[str], nbytes: int) -> list[Head | None]:
        """The first bytes of each value, all requested at once; None for an absent one."""

    async def read(self, name: str, start: int, nbytes: int) -> Any:
        """A range of a value's bytes, fewer at its end, none if it is gone."""

    async def write(self, name: str, content: bytes) -> None:
        """Write a value atomically. Raises Refused."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete these values, existing or not."""

    async def check(self) -> None:
        """Send a small request. Raises if the server does not answer."""

    async def sweep(self) -> int:
        """Delete values older than the place's TTL, if the server does not do so itself; returns how many."""

    async def close(self) -> None: ...


def server_at(place: Place) -> Server:
    """The server at a place, not yet connected. Raises UsageError if its library is not installed."""
    try:
        return _Redis(place) if place.scheme.startswith("redis") else _Objects(place)
    except ImportError as error:
        raise UsageError(
            f"a shared store at {place} needs `{install_hint('remote')}` ({error.name} is missing)"
        ) from error


class _Redis:
    """Redis 6 or newer, or Valkey. TLS verifies against the system's authorities, or those of SSL_CERT_FILE."""

    def __init__(self, place: Place) -> None:
        import redis.asyncio as redis
        from redis.backoff import NoBackoff
        from redis.exceptions import ResponseError

        pool = redis.BlockingConnectionPool.from_url(
            str(place), max_connections=_CONNECTIONS, timeout=None, username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"), retry=redis.retry.Retry(NoBackoff(), 1),
        )  # fmt: skip
        self._client, self._ttl_s, self._error = redis.Redis.from_pool(pool), place.ttl_s, ResponseError

    async def peek(self, names: Sequence[str], nbytes: int) -> list[Head | None]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(name)
            pipeline.getrange(name, 0, nbytes - 1)
        answers = await pipeline.execute(raise_on_error=False)
        return [self._head(*pair) for pair in zip(answers[::2], answers[1::2], strict=True)]

    def _head(self, length: Any, content: Any) -> Head | None:
        for answer in (length, content):
            if isinstance(answer, self._error) and "WRONGTYPE" in str(answer):
                return b"", 0  # not a value of ours
            if isinstance(answer, Exception):
                raise answer
        if not (isinstance(length, int) and isinstance(content, bytes)):
            raise ConnectionError(NOT_REDIS)
        return (content, length) if length else None

    async def read(self, name: str, start: int, nbytes: int) -> Any:
        content = await self._client.getrange(name, start, start + nbytes - 1)
        if not isinstance(content, bytes):
            raise ConnectionError(NOT_REDIS)
        return content

    async def write(self, name: str, content: bytes) -> None:
        if len(content) > _MAX_REDIS_BYTES:
            raise Refused
        try:
            await self._client.set(name, content, ex=self._ttl_s)
        except self._error as error:  # full (`maxmemory`), or over another limit
            raise Refused from error

    async def delete(self, names: Sequence[str]) -> None:
        await self._client.delete(*names)

    async def check(self) -> None:
        await self._client.ping()

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        await self._client.aclose()


class _Objects:
    """S3 or a folder, by obstore. A value expires `ttl_s` after it was written, and is then swept."""

    def __init__(self, place: Place) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, S3Store

        self._ttl, self._namespace, self._error = timedelta(seconds=place.ttl_s), place.namespace, BaseError
        self._folder = Path(place.path) if place.scheme == "file" else None
        self._local_store_type = LocalStore
        self._store: Any = None
        if self._folder is None:
            limit = timedelta(seconds=place.timeout_s)
            self._store = S3Store(
                place.where, prefix=place.path.strip("/") or None,
                client_options={
                    "connect_timeout": limit, "timeout": timedelta(hours=1),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={"max_retries": 1, "retry_timeout": limit},
            )  # fmt: skip

    async def _open_store(self) -> Any:
        """obstore's store. Raises OSError if a folder is missing: while a share is not mounted, nothing may be written
        to its mount point, and deletions must not seem to succeed.
        """
        if self._folder is not None:
            await asyncio.to_thread(self._open_folder, self._folder)
        return self._store

    def _open_folder(self, folder: Path) -> None:
        """Open the folder on first use. Raises OSError if it is missing, or if our folder in it is gone later."""
        ours = folder / self._namespace
        if self._store is not None:
            if not ours.is_dir():
                raise OSError(f"{ours} has disappeared: mount it again")
            return
        with suppress(FileExistsError):
            ours.mkdir(FOLDER_MODE)
        self._store = self._local_store_type(folder)

    async def peek(self, names: Sequence[str], nbytes: int) -> list[Head | None]:
        store = await self._open_store()
        return list(await asyncio.gather(*(self._peek(store, name, nbytes) for name in names)))

    async def _peek(self, store: Any, name: str, nbytes: int) -> Head | None:
        try:
            found = await store.get_async(name, options={"range": (0, nbytes)})
        except FileNotFoundError:
            return None
        except self._error:
            if (await store.head_async(name))["size"]:
                raise
            return b"", 0  # an empty value has no range
        if datetime.now(UTC) - found.meta["last_modified"] > self._ttl:
            return None
        return bytes(await found.bytes_async()), found.meta["size"]

    async def read(self, name: str, start: int, nbytes: int) -> Any:
        try:
            return await (await self._open_store()).get_range_async(name, start=start, length=nbytes)
        except FileNotFoundError:
            return b""

    async def write(self, name: str, content: bytes) -> None:
        if len(content) > _MAX_OBJECT_BYTES:
            raise Refused
        try:
            await (await self._open_store()).put_async(name, content, use_multipart=False)
        except self._error as error:
            if any(part in str(error) for part in _FULL_MESSAGES):
                raise Refused from error
            raise

    async def delete(self, names: Sequence[str]) -> None:
        store = await self._open_store()
        await asyncio.gather(*(self._delete(store, name) for name in names))

    async def _delete(self, store: Any, name: str) -> None:
        with suppress(FileNotFoundError):
            await store.delete_async(name)
        if self._folder is not None:
            await asyncio.to_thread(
                _delete_unfinished, [self._folder / f"{name}#1"], time.time() - _WRITING_S
            )

    async def check(self) -> None:
        await self.peek([f"{self._namespace}/check"], 1)

    async def sweep(self) -> int:
        store, count = await self._open_store(), 0
        expired_before = (datetime.now(UTC) - self._ttl).timestamp()
        if self._folder is not None:
            unfinished = self._folder.glob(f"{self._namespace}/*/*/*#*")
            await asyncio.to_thread(_delete_unfinished, unfinished, expired_before)
        async for batch in store.list(self._namespace):
            old = [each["path"] for each in batch if datetime.now(UTC) - each["last_modified"] > self._ttl]
            await self.delete(old)
            count += len(old)
        return count

    async def close(self) -> None:
        """Nothing to close."""


def _delete_unfinished(paths: Iterable[Path], before: float) -> None:
    """Delete what killed writers left in a folder, if it is older: obstore writes to NAME#1, which it neither lists nor
    deletes, and renames it at the end.
    """
    for path in paths:
        with suppress(FileNotFoundError):  # just renamed, or deleted by another machine
            if path.stat().st_mtime < before:
                path.unlink()
