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
SILENCE_S = 600.0  # timeout of a read, also for the first token: a long prompt may wait for other requests
_TOO_LONG = ("maximum context length", "max_model_len")  # in vLLM's messages


class Completions:
    """The API at a URL. Thread-safe. Failures are ModelServerErrors that name the URL."""

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
    ) -> dict[str, Any]:
        """GET a JSON object from a path, or POST a body to it. Raises as `stream` does.

        session: a router sends requests of one session to one server; silence_s: timeout of each read.
        """
        with closing(self._response_lines(path, body, cancel, session, silence_s)) as lines:
            return self._parse_json(b"".join(lines))

    def stream(
        self, body: dict[str, Any], cancel: Cancel | None = None, session: str | None = None
    ) -> Generator[dict[str, Any]]:
        """The events of a streamed completion; closing the generator ends the request at the server.

        Raises Cancelled, PromptTooLongError, and UsageError for a refused request.
        """
        streamed = body | {"stream": True}
        with closing(self._response_lines("/v1/completions", streamed, cancel, session, SILENCE_S)) as lines:
            for line in lines:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data: "):
                    yield self._parse_event(data)
        raise self._connection_error(has_begun=True)

    def _parse_event(self, data: bytes) -> dict[str, Any]:
        """Parse an event. Raises the error in it: a stream's status is sent before the request is checked."""
        event = self._parse_json(data)
        if "error" in event:
            error = event["error"]  # some proxies send plain text
            raise self._status_error(error.get("code") if isinstance(error, dict) else None, data)
        return event

    def _parse_json(self, data: bytes) -> dict[str, Any]:
        found: Any = None
        with suppress(ValueError):
            found = json.loads(data)
        if not isinstance(found, dict):
            raise ModelServerError(
                f"the server at {self.url} is not vLLM: it sent {data[:80]!r} instead of a JSON object"
            )
        return found

    def _response_lines(
        self,
        path: str,
        body: dict[str, Any] | None,
        cancel: Cancel | None,
        session: str | None,
        silence_s: float,
    ) -> Generator[bytes]:
        """Send a request, and yield the lines of the response. Raises as `stream` does."""
        connection, has_begun = self._connection(), False
        headers = {"Content-Type": "application/json", **_authorization()}
        if session is not None:
            headers[SESSION_HEADER] = session
        try:
            connection.connect()
            connection.sock.settimeout(silence_s)
            with _shut_down_on_cancel(connection.sock, cancel):
                method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
                connection.request(method, self._parts.path + path, content, headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise self._status_error(response.status, response.read(100_000))
                    has_begun = True
                    yield from response
            if cancel is not None and cancel.is_set():
                raise Cancelled("the answer was cancelled")
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host or path
            if cancel is not None and cancel.is_set():
                raise Cancelled("the answer was cancelled") from error
            raise self._connection_error(has_begun, error) from error
        finally:
            connection.close()

    def _connection_error(self, has_begun: bool, error: BaseException | None = None) -> ModelServerError:
        """The named error for an error of the connection. has_begun: whether a part of the response has arrived."""
        details = "" if error is None else f" ({type(error).__name__}: {error})"
        if has_begun:
            return ModelServerError(
                f"the server at {self.url} ended within an answer{details}; its log says why. Ask again"
            )
        return ModelServerError(
            f"no answer from the server at {self.url}{details}. Is vLLM running there, and is that its address?"
        )

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=CONNECT_S)

    def _status_error(self, status: object, body: bytes) -> Exception:
        """The named error for a response with that status."""
        message = _message(body)
        if status in (401, 403):
            return ModelServerError(
                f"the server at {self.url} rejects the API key in the environment variable {KEY_VARIABLE}: {message}"
            )
        if status in (400, 422):
            if any(words in message for words in _TOO_LONG):
                return PromptTooLongError(f"the server at {self.url} refuses the prompt: {message}")
            return UsageError(f"the server at {self.url} refuses the request: {message}")
        return ModelServerError(
            f"the server at {self.url} answers with status {status}: {message}. Is it vLLM?"
        )


def _authorization() -> dict[str, str]:
    """The header with the API key, if one is set. Raises ModelServerError for an invalid key, without showing it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ModelServerError(
            f"the environment variable {KEY_VARIABLE} holds characters that no API key has; set it to the "
            "server's key only"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message(body: bytes) -> str:
    """The message in the body of an error, in any of its forms."""
    try:
        found = json.loads(body)
        return str((found.get("error") or found)["message"])[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode("utf-8", "replace")


@contextmanager
def _shut_down_on_cancel(connected: socket.socket, cancel: Cancel | None) -> Iterator[None]:
    """Shut down the connection when the request is cancelled, so that reading from it ends."""
    if cancel is None:
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_S):
            if cancel.is_set():
                with suppress(OSError):  # the server has closed it
                    # Not SSLSocket's own method, which discards the TLS state that the reading thread uses.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
                return

    watcher = threading.Thread(target=watch, name="ragblend-hang-up", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
