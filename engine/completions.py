"""OpenAI's completions interface as vLLM serves it, for prompts of token ids: a connection a request, named errors."""

import json
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ragblend.kvstore.errors import Cancelled, ModelServerError, PromptTooLongError, UsageError

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name for it
SESSION_HEADER = "X-Session-ID"  # vLLM's router's (`--policy consistent_hash`)
CONNECT_S = 10.0
SILENCE_S = 600.0  # before a token: a long prompt behind others
POLL_S = 0.05
_TOO_LONG = ("maximum context length", "max_model_len")  # in vLLM's words
Stopped = Callable[[], bool]


class Completions:
    """url: as `server_url` gives it. Safe for threads. What goes wrong is a ModelServerError that names the url."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._parts = urlsplit(url)

    def get(self, path: str, stopped: Stopped | None = None) -> Any:
        """The JSON at that path, which is there at once if at all."""
        return self._whole("GET", path, None, stopped, CONNECT_S)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        stopped: Stopped | None = None,
        session: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> Any:
        """What that is answered with, as JSON. Raises Cancelled when stopped() says so, and as `stream` does.

        session: where several servers are behind one url, a router sends what has the same to the same.
        """
        return self._whole("POST", path, body, stopped, silence_s, session)

    def stream(
        self, body: dict[str, Any], stopped: Stopped | None = None, session: str | None = None
    ) -> Generator[dict[str, Any]]:
        """The events of a streamed completion; closing the generator ends the work at the server.

        Raises Cancelled when stopped() says so, PromptTooLongError, UsageError for what the server refuses.
        """
        streamed = body | {"stream": True}
        with closing(self._answer("POST", "/v1/completions", streamed, stopped, SILENCE_S, session)) as lines:
            for line in lines:
                said = line.removeprefix(b"data: ").strip()
                if said == b"[DONE]":
                    return
                if line.startswith(b"data: "):
                    yield self._event(said)
        raise self._gone(begun=True)

    def _whole(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        stopped: Stopped | None,
        silence_s: float,
        session: str | None = None,
    ) -> Any:
        with closing(self._answer(method, path, body, stopped, silence_s, session)) as lines:
            return self._json(b"".join(lines))

    def _event(self, said: bytes) -> dict[str, Any]:
        """Raises what a stream says in the place of a status: its own is sent before the request is looked at."""
        event: dict[str, Any] = self._json(said)
        if "error" in event:
            error = event["error"]  # of some proxies a text
            raise self._refused(error.get("code") if isinstance(error, dict) else None, said)
        return event

    def _json(self, said: bytes) -> Any:
        try:
            return json.loads(said)
        except ValueError as error:
            raise ModelServerError(
                f"what answers at {self.url} is no vLLM: it said {said[:80]!r} in the place of JSON"
            ) from error

    def _answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        stopped: Stopped | None,
        silence_s: float,
        session: str | None,
    ) -> Generator[bytes]:
        """The lines of the answer. Errors of the connection are named here, and nobody else's can get in."""
        connection, begun = self._connection(), False
        headers = {"Content-Type": "application/json", **_authorization()}
        if session is not None:
            headers[SESSION_HEADER] = session
        try:
            connection.connect()
            connection.sock.settimeout(silence_s)
            with _hung_up(connection.sock, stopped):
                connection.request(
                    method, self._parts.path + path, None if body is None else json.dumps(body), headers
                )
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise self._refused(response.status, response.read(100_000))
                    begun = True
                    yield from response
            if stopped is not None and stopped():
                raise Cancelled("the answer was cancelled")
        except (OSError, HTTPException, UnicodeError) as error:  # the last one of a host or path that is none
            if stopped is not None and stopped():
                raise Cancelled("the answer was cancelled") from error
            raise self._gone(begun, error) from error
        finally:
            connection.close()

    def _gone(self, begun: bool, error: BaseException | None = None) -> ModelServerError:
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
                f"the server at {self.url} wants another API key than {KEY_VARIABLE} in the environment has: {said}"
            )
        if status in (400, 422):
            if any(words in said for words in _TOO_LONG):
                return PromptTooLongError(f"the server at {self.url} refuses the prompt: {said}")
            return UsageError(f"the server at {self.url} refuses the request: {said}")
        return ModelServerError(f"the server at {self.url} answers with status {status}: {said}. Is it vLLM?")


def _authorization() -> dict[str, str]:
    """Raises ModelServerError for a key that no header can hold, without showing it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ModelServerError(
            f"{KEY_VARIABLE} in the environment holds characters that no API key has; set it to the server's key alone"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message(said: bytes) -> str:
    """What an error says, in whichever form."""
    try:
        found = json.loads(said)
        return str((found.get("error") or found)["message"])[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return said[:200].decode("utf-8", "replace")


@contextmanager
def _hung_up(connected: socket.socket, stopped: Stopped | None) -> Iterator[None]:
    """Within it, the connection is shut when stopped() says so: whoever reads from it sees its end."""
    if stopped is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if stopped():
                with suppress(OSError):  # it has ended by itself
                    # Not an SSLSocket's own, which takes the connection from under its reader.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
                return

    watcher = threading.Thread(target=watch, name="ragblend-hang-up", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
