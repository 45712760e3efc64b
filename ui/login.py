"""Login to the page: with the launch token, or from other machines the password; remembered in a signed cookie."""

import hashlib
import hmac
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope

from ragblend.app.serve.request_checks import read_body
from ragblend.kvstore.files import write_durably
from ragblend.kvstore.system import HAS_MODES
from ragblend.ui import views
from ragblend.ui.password import Attempts, matches

COOKIE_SECONDS = 30 * 24 * 3600
FORM_BYTES = 4096
SECRET_BYTES = 32


def load_or_create_secret(path: Path, replace: bool = False) -> bytes:
    """The secret that signs cookies, in a file that only this user can read.

    replace: create a new one, which ends all sessions. One that others could read, or that is incomplete, is replaced.
    """
    with suppress(FileNotFoundError):
        is_private = not HAS_MODES or path.stat().st_mode & 0o077 == 0
        if not replace and is_private and len(stored := path.read_bytes()) == SECRET_BYTES:
            return stored
        path.unlink()
    secret = secrets.token_bytes(SECRET_BYTES)
    write_durably(path, [memoryview(secret)], SECRET_BYTES)
    return secret


@dataclass
class PageLogin:
    """The launch token, the hash of the password if there is one, and the secret that signs cookies.

    The token is new at every start. A cookie stays valid over restarts, until it expires or the password or the secret
    changes.
    """

    port: int
    password_hash: str | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    attempts: Attempts = field(default_factory=Attempts)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    @property
    def cookie_name(self) -> str:
        """A name per port: browsers send a host's cookies to all its ports, and two pages may run on one machine."""
        return f"ragblend_{self.port}"

    def new_cookie(self) -> str:
        """A cookie for a visitor who has logged in."""
        visit = f"{secrets.token_urlsafe(12)}.{int(time.time())}"
        return f"{visit}.{self._signature(visit)}"

    def visitor(self, cookie: str | None) -> str | None:
        """The visitor's name in a cookie; None if we did not sign it, or it is too old."""
        visit, _, signature = (cookie or "").rpartition(".")
        if not secrets.compare_digest(signature.encode(), self._signature(visit).encode()):
            return None
        name, _, since = visit.partition(".")
        return name if time.time() - int(since) <= COOKIE_SECONDS else None

    def _signature(self, visit: str) -> str:
        text = f"{self.password_hash or ''}\n{visit}"
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    async def answer_visitor(self, scope: Scope, receive: Receive) -> Response:
        """Answer a request without a session: log in if the token or the password is right, else 4xx."""
        if scope["path"] == "/login" and scope["method"] == "POST" and self.password_hash:
            form = await read_body(receive, FORM_BYTES)
            return self._check_password(scope, parse_qs(form.decode("utf-8", "replace")))
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        is_get = scope["method"] == "GET"
        is_right = len(tokens) == 1 and secrets.compare_digest(tokens[0].encode(), self.token.encode())
        if scope["path"] == "/" and is_get and is_right:
            return self._start_session()
        if scope["path"] in ("/", "/login") and is_get:
            return HTMLResponse(views.login.page(self.password_hash is not None), 401)
        return PlainTextResponse("Open the page with the link that `ragblend ui` printed.", 401)

    def _check_password(self, scope: Scope, form: dict[str, list[str]]) -> Response:
        client = (scope.get("client") or ("unknown", 0))[0]
        wait_s = self.attempts.wait_s(client)
        if wait_s > 0:
            wait = str(int(wait_s) + 1)
            page = views.login.page(True, f"Too many attempts. Try again in {wait} s.")
            return HTMLResponse(page, 429, {"Retry-After": wait})
        # Before the slow check, so that parallel attempts are all counted.
        self.attempts.note_failure(client)
        if not matches(form.get("password", [""])[0], self.password_hash or ""):
            return HTMLResponse(views.login.page(True, "Wrong password."), 401)
        self.attempts.forget(client)
        return self._start_session()

    def _start_session(self) -> Response:
        response = RedirectResponse("/", 303)
        cookie = self.cookie_name, self.new_cookie()
        response.set_cookie(*cookie, max_age=COOKIE_SECONDS, httponly=True, samesite="lax", path="/")
        return response
