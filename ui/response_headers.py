"""Security headers of every response; adds nonces and our assets to Gradio's own page so that it works with them."""

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

# Gradio draws `gr.HTML` through templates that it compiles, hence 'unsafe-eval'. Documents could smuggle in scripts and
# event handlers in attributes: inline scripts need the nonce, which no document can know, and such handlers never run.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
    "worker-src 'self' blob:; manifest-src 'self'; form-action 'self'; base-uri 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none, a browser gives the password form the origin "null"
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    # Identifies this process, so that an open page notices when the server was restarted.
    "x-ragblend-start": secrets.token_hex(8),
}
SCRIPT_TAG = re.compile(rb"<script(?=[\s>])")
FOREIGN_META = re.compile(rb"\s*<meta\b[^>]*(?:og:|twitter:)[^>]*>")
MANIFEST = re.compile(rb"<link rel=\"manifest\"[^>]*>")
HEAD = (
    b'<link rel="manifest" href="/ragblend/manifest.webmanifest"/>'
    b'<link rel="icon" type="image/svg+xml" href="/ragblend/icon.svg"/>'
    b'<link rel="stylesheet" href="/ragblend/style.css"/>'
    b'<script src="/ragblend/page.js" defer></script>'
)


class ResponseRewriter:
    """A `send` that completes headers; HTML is held back until it is complete, everything else is streamed."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._nonce = secrets.token_urlsafe(16)
        self._start: Message | None = None
        self._body = bytearray()
        self.started = self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = self._complete(message)
            if headers.get("content-type", "").startswith("text/html"):
                self._start = message
                return
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
            if self._start is not None:
                self._body += message.get("body", b"")
                if self.ended:
                    await self._send_page(self._start)
                return
        await self._send(message)

    async def end(self) -> None:
        """End a response that broke off after its start."""
        if self.started and not self.ended:
            await self({"type": "http.response.body", "body": b""})

    def _complete(self, message: Message) -> MutableHeaders:
        headers = MutableHeaders(raw=message.setdefault("headers", []))
        for name, value in SECURITY_HEADERS.items():
            headers[name] = value
        headers["content-security-policy"] = CONTENT_SECURITY_POLICY.format(nonce=self._nonce)
        for name in ("access-control-allow-origin", "access-control-allow-credentials"):
            if name in headers:
                del headers[name]
        return headers

    async def _send_page(self, start: Message) -> None:
        page = with_assets(bytes(self._body), self._nonce)
        headers = MutableHeaders(raw=start["headers"])
        headers["content-length"] = str(len(page))
        headers["cache-control"] = "no-store"  # a nonce may be used once only
        self._start = None
        await self._send(start)
        await self._send({"type": "http.response.body", "body": page})


def with_assets(page: bytes, nonce: str) -> bytes:
    """Gradio's page with our style, script and icon, a nonce in each script, and without links to other sites."""
    page = FOREIGN_META.sub(b"", page)
    page = MANIFEST.sub(b"", page)
    if b"<gradio-app" in page:
        page = page.replace(b"</head>", HEAD + b"</head>", 1)
    return SCRIPT_TAG.sub(b'<script nonce="' + nonce.encode() + b'"', page)
