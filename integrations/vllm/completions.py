"""HTTP client of vLLM's completions API, for prompts of token ids: one connection per request, named errors."""

import json
import os
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ragblend.engine.scheduling.queue import POLL_S, Cancel
from ragblend.kvstore.errors import Cancelled, ModelServerError, PromptTooLongError, UsageError

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name for it
SESSION_HEADER = "X-Session-ID"  # of vLLM's router (`--policy consistent_hash`)
CONNECT_S = 10.0
SILENCE_S = 600.0  # until the first token: a long prompt may wait for others
_TOO_LONG = ("maximum context length", "max_model_len")  # in vLLM's messages


class Completions:
    """The API at a url from `server_url`. Thread-safe. Failures are ModelServerErrors with the url."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._parts = urlsplit(url)

    def fetch(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        cancel: Cancel | None = None,
        session: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> Any:
        """GET JSON from a path, or POST a body to it. Raises as `stream` does.

        session: a router sends requests of one session to one server.
        """
        with closing(self._answer(path, body, cancel, session, silence_s)) as lines:
            return self._json(b"".join(lines))

    def stream(
        self, body: dict[str, Any], cancel: Cancel | None = None, session: str | None = None
    ) -> Generator[dict[str, Any]]:
        """The events of a streamed completion; closing the generator ends the request at the server.

        Raises Cancelled, PromptTooLongError, and UsageError for a refused request.
        """
        streamed = body | {"stream": True}
        with closing(self._answer("/v1/completions", streamed, cancel, session, SILENCE_S)) as lines:
            for line in lines:
                said = line.removeprefix(b"data: ").strip()
                if said == b"[DONE]":
                    return
                if line.startswith(b"data: "):
                    yield self._event(said)
        raise self._disconnected(begun=True)

    def _event(self, said: bytes) -> dict[str, Any]:
        """Parse an event, and raise its error: a stream's status is sent before the request is checked."""
        event: dict[str, Any] = self._json(said)
        if "error" in event:
            error = event["error"]  # some proxies send plain text
            raise self._refused(error.get("code") if isinstance(error, dict) else None, said)
        return event

    def _json(self, said: bytes) -> Any:
        try:
            return json.loads(said)
        except ValueError as error:
            raise ModelServerError(
                f"what answers at {self.url} is no vLLM: it sent {said[:80]!r} instead of JSON"
            ) from error

    def _answer(
        self,
        path: str,
        body: dict[str, Any] | None,
        cancel: Cancel | None,
        session: str | None,
        silence_s: float,
    ) -> Generator[bytes]:
        """The lines of the answer. Errors of the connection become ModelServerErrors."""
        connection, begun = self._connection(), False
        headers = {"Content-Type": "application/json", **_authorization()}
        if session is not None:
            headers[SESSION_HEADER] = session
        try:
            connection.connect()
            connection.sock.settimeout(silence_s)
            with _disconnecting(connection.sock, cancel):
                method, sent = ("GET", None) if body is None else ("POST", json.dumps(body))
                connection.request(method, self._parts.path + path, sent, headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise self._refused(response.status, response.read(100_000))
                    begun = True
                    yield from response
            if cancel is not None and cancel.is_set():
                raise Cancelled("the answer was cancelled")
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host or path
            if cancel is not None and cancel.is_set():
                raise Cancelled("the answer was cancelled") from error
            raise self._disconnected(begun, error) from error
        finally:
            connection.close()

    def _disconnected(self, begun: bool, error: BaseException | None = None) -> ModelServerError:
        said = "" if error is None else f" ({type(error).__name__}: {error})"
        if begun:
            return ModelServerError(
                f"the server at {self.url} ended within an answer{said}; its log says why. Ask again"
            )
        return ModelServerError(
            f"no answer from the server at {self.url}{said}. Is vLLM running there, and is that its address?"
        )

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=CONNECT_S)

    def _refused(self, status: object, body: bytes) -> Exception:
        said = _message(body)
        if status in (401, 403):
            return ModelServerError(
                f"the server at {self.url} rejects the API key in the environment variable {KEY_VARIABLE}: {said}"
            )
        if status in (400, 422):
            if any(words in said for words in _TOO_LONG):
                return PromptTooLongError(f"the server at {self.url} refuses the prompt: {said}")
            return UsageError(f"the server at {self.url} refuses the request: {said}")
        return ModelServerError(f"the server at {self.url} answers with status {status}: {said}. Is it vLLM?")


def _authorization() -> dict[str, str]:
    """Raises ModelServerError for a key that is not valid in a header, without showing it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ModelServerError(
            f"{KEY_VARIABLE} in the environment holds characters that no API key has; set it to the server's key only"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message(said: bytes) -> str:
    """The message of an error, in any of its forms."""
    try:
        found = json.loads(said)
        return str((found.get("error") or found)["message"])[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return said[:200].decode("utf-8", "replace")


@contextmanager
def _disconnecting(connected: socket.socket, cancel: Cancel | None) -> Iterator[None]:
    """Shut down the connection when the request is cancelled, so that its reader sees the end."""
    if cancel is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if cancel.is_set():
                with suppress(OSError):  # it has ended by itself
                    # Not SSLSocket's own method, which takes the connection from under its reader.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
                return

    watcher = threading.Thread(target=watch, name="ragblend-hang-up", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
