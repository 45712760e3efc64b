"""A vLLM on this machine without a model: the few answers that a client of it needs, over real HTTP."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ragblend.engine.config import DEFAULT_RATIO

MODEL = {
    "weights": "1" * 64,
    "tokenizer": "2" * 64,
    "rope": "{}",
    "geometry": {"layers": 2, "kv_heads": 2, "key_size": 16, "value_size": 16, "dtype": "float32"},
}
ABOUT = {"model": MODEL, "method": "probe-shift", "ratio": DEFAULT_RATIO, "refusal": None}
FUSED = {
    "method": "probe-shift",
    "ratio": 0.15,
    "reused_tokens": 20,
    "recomputed_tokens": 5,
    "missing_tokens": 3,
    "hits": 2,
    "misses": 0,  # else the client encodes behind the answer, and that request is in asked, too
    "recomputed_fraction": 0.2,
    "computed_fraction": 0.4,
    "fused_ms": 7.0,
    "load_ms": 2.0,
    "stall_ms": 1.0,
    "served": [],
}


class Server(ThreadingHTTPServer):
    """What it answers with can be changed between requests; asked: bodies of completions, in order; sessions: what a
    router would have sent these by, and requests for reports.

    answer: token ids of a stream; about: what the connector says (None: there is none); told: the report of the last
    stream; status: (code, text) for completions; breaks: end the connection after so many tokens; hold: wait there
    until the client has gone (`left` is set then); told_status, told_late: the same two for reports; silent: whoever
    asks what the server is waits (`asking` is set then) until he has gone, too;
    encodes: whether a passage that is to be encoded is; fails: an error that the stream says in the place
    of a first token; rivals: further log-probabilities beside a token; alone: those with one passage alone in the
    prompt; exact: the answer of a request that is not fused.
    """

    daemon_threads = True

    def __init__(self, folder, tokenize) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cards: Any = {"data": [{"id": "tiny", "root": str(folder), "max_model_len": 512}]}
        self.tokenize, self.asked, self.sessions = tokenize, list[dict](), list[str | None]()
        self.answer, self.about, self.told = [7, 8, 9], ABOUT, dict(FUSED)
        self.status: tuple[int, str] | None = None
        self.key: str | None = None
        self.breaks: int | None = None
        self.hold: int | None = None
        self.told_status: tuple[int, str] | None = None
        self.told_late = self.silent = False
        self.asking = threading.Event()
        self.left, self.encodes = threading.Event(), True
        self.fails: dict | None = None
        self.most_logprobs, self.alone = 20, dict[str, float]()
        self.rivals: dict[int, dict[str, float]] = {}
        self.exact: list[int] | None = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        self._json(self.server.cards)

    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        if self.path == "/tokenize":
            return self._json({"tokens": server.tokenize(body["prompt"])})
        wish = body.get("kv_transfer_params") or {}
        is_limit_asked = body["prompt"] == [0] and "report" not in wish
        if wish.get("report") != "" and not is_limit_asked:  # else it asks what the server is
            server.sessions.append(self.headers["X-Session-ID"])
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            return self._json({"error": {"message": "Unauthorized"}}, 401)
        if wish.get("report") == "" and server.silent:
            server.asking.set()
            return self._wait()
        if wish.get("report") and server.told_late:
            return self._wait()
        if wish.get("report") and server.told_status:
            code, said = server.told_status
            return self._json({"error": {"message": said}}, code)
        if "report" in wish:
            report = server.about and {"ragblend": server.about | {"report": server.told}}
            return self._json({"kv_transfer_params": report})
        if is_limit_asked:
            limited = {"error": {"message": "20 logprobs are more than 5"}}
            return self._json({}) if server.most_logprobs >= body["logprobs"] else self._json(limited, 400)
        server.asked.append(body)
        if body["max_tokens"] == 1 and "logprobs" in body and not body.get("stream"):
            return self._json({"choices": [{"logprobs": {"top_logprobs": [server.alone]}}]})
        if server.status:
            code, said = server.status
            return self._json({"error": {"message": said}}, code)
        if body.get("stream"):
            try:
                return self._stream(body)
            except ConnectionError:  # it has gone before `hold`: its answer had ended
                self.close_connection = True
                return server.left.set()
        made = {"ragblend": {"missing_tokens": 0 if server.encodes else 9}}
        return self._json({"kv_transfer_params": server.about and made})

    def _stream(self, body):
        server, ids = self.server, self.server.answer
        if (body.get("kv_transfer_params") or {}).get("off") and server.exact is not None:
            ids = server.exact
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if server.fails:
            self._chunk(f"data: {json.dumps({'error': server.fails})}\n\n")
        for number, token_id in enumerate(ids):
            if number == server.breaks:
                self.close_connection = True
                return
            if number == server.hold:
                self._wait()
                return
            is_last = number + 1 == len(ids)
            choice = {"token_ids": [token_id], "finish_reason": "stop" if is_last else None}
            if "logprobs" in body:
                top = {f"token_id:{token_id}": -0.5, "token_id:3": -0.25, "token_id:4": -3.0}
                top |= server.rivals.get(token_id, {})
                choice["logprobs"] = {"token_logprobs": [-0.5], "top_logprobs": [top]}
            self._chunk(f"data: {json.dumps({'choices': [choice]})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _wait(self):
        """Until the client has gone."""
        with suppress(ConnectionError):
            assert self.rfile.read(1) == b"", "the client hangs up, and says nothing"
        self.close_connection = True
        self.server.left.set()

    def _chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _json(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def serve(folder, tokenize):
    server = Server(folder, tokenize)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
