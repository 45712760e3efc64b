"""Who may use the page: whoever has the launch token, or, beyond loopback, the password; kept in a session cookie."""

import html
import secrets
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope

from ragblend.ui.password import Attempts, matches

COOKIE_SECONDS = 30 * 24 * 3600
FORM_BYTES = 4096


@dataclass
class Entrance:
    """The launch token, the sessions it opened, and the password if there is one (its hash)."""

    port: int
    password_hash: str | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    attempts: Attempts = field(default_factory=Attempts)
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie_name(self) -> str:
        """Cookies do not tell ports apart, so two pages on one machine need two names."""
        return f"ragblend_{self.port}"

    def knows(self, cookie: str | None) -> bool:
        return cookie is not None and secrets.compare_digest(cookie.encode(), self._session.encode())

    async def receive_visitor(self, scope: Scope, receive: Receive, limit: int) -> Response:
        """What somebody without a session gets: in, if the token or the password is right, else 4xx."""
        if scope["path"] == "/login" and scope["method"] == "POST" and self.password_hash:
            return self._log_in(scope, await _form(receive, min(limit, FORM_BYTES)))
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        if scope["path"] == "/" and scope["method"] == "GET" and given:
            if len(given) == 1 and secrets.compare_digest(given[0].encode(), self.token.encode()):
                return self._let_in()
            return HTMLResponse(page_without_token(self.password_hash is not None), 401)
        if scope["path"] in ("/", "/login") and scope["method"] == "GET":
            return HTMLResponse(page_without_token(self.password_hash is not None), 401)
        return PlainTextResponse("Open the page with the link that `ragblend ui` printed.", 401)

    def _log_in(self, scope: Scope, form: dict[str, list[str]]) -> Response:
        client = (scope.get("client") or ("unknown", 0))[0]
        wait_s = self.attempts.wait_s(client)
        if wait_s > 0:
            headers = {"Retry-After": str(int(wait_s) + 1)}
            return HTMLResponse(
                page_without_token(True, f"Too many attempts. Try again in {int(wait_s) + 1} s."),
                429,
                headers,
            )
        self.attempts.note_failure(
            client
        )  # before the check, which takes a while: many at once count as many
        if not matches(form.get("password", [""])[0], self.password_hash or ""):
            return HTMLResponse(page_without_token(True, "That is not the password."), 401)
        self.attempts.forget(client)
        return self._let_in()

    def _let_in(self) -> Response:
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self.cookie_name, self._session, max_age=COOKIE_SECONDS, httponly=True, samesite="lax", path="/"
        )
        return response


async def _form(receive: Receive, limit: int) -> dict[str, list[str]]:
    body = b""
    while len(body) <= limit:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return parse_qs(body[:limit].decode("utf-8", "replace"))


def page_without_token(asks_password: bool, problem: str = "") -> str:
    """The page for somebody who has no session: how to get in, or where to give the password."""
    note = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    form = (
        '<form method="post" action="/login"><label>Password <input type="password" name="password" '
        'autocomplete="current-password" required autofocus></label><button>Open</button></form>'
    )
    advice = "<p>Open it with the link that <code>ragblend ui</code> printed where it was started.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>RAGBlend</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root{color-scheme:light dark}body{font:16px/1.6 system-ui,sans-serif;max-width:26rem;"
        "margin:18vh auto;padding:0 1rem}label,button{display:block;margin:.6rem 0}input,button{font:inherit;"
        "padding:.45rem .7rem}input{display:block;width:100%;box-sizing:border-box}</style></head>"
        f"<body><h1>RAGBlend</h1><p>This page is private.</p>{note}{form if asks_password else advice}</body></html>"
    )
