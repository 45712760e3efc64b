"""Malformed requests, as no ordinary client would send them."""

import asyncio
from urllib.parse import unquote

PORT = 7860


def send_raw(app, login, path: str) -> tuple[int, bytes]:
    """Status and body of one GET with a session, its path byte by byte: clients tidy that of a URL."""
    cookie = f"{login.cookie_name}={login.new_cookie()}".encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "headers": [(b"host", b"127.0.0.1:7860"), (b"cookie", cookie)],
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", PORT),
        "root_path": "",
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
