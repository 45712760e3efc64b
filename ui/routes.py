"""The page's own routes beside Gradio's: its assets, and the export of conversations."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from ragblend.app.services import AppServices
from ragblend.kvstore.errors import RagBlendError

ASSETS = Path(__file__).parent / "assets"
KINDS = {
    "style.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "manifest.webmanifest": "application/manifest+json",
}
UNSAFE = re.compile(r"[^\w .-]+")


def add_routes(app: FastAPI, services: AppServices) -> None:
    """Add the routes before Gradio is mounted at /."""

    @app.get("/ragblend/{name}")
    def asset(name: str) -> Response:
        if name not in KINDS:
            return PlainTextResponse("There is no such file.", 404)
        return FileResponse(ASSETS / name, media_type=KINDS[name], headers={"cache-control": "no-cache"})

    @app.get("/ragblend/chats/{name}")
    def chat(name: str) -> Response:
        number, _, kind = name.partition(".")
        if not (number.isascii() and number.isdigit() and len(number) < 16 and kind in ("md", "json")):
            return PlainTextResponse("There is no such conversation.", 404)
        try:
            return _exported(services, int(number), kind)
        except RagBlendError as error:
            return PlainTextResponse(str(error), 404)


def _exported(services: AppServices, chat_id: int, kind: str) -> Response:
    stem = UNSAFE.sub("", services.chats.get(chat_id).title).strip(" .")[:60] or "conversation"
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(stem)}.{kind}"}
    if kind == "md":
        return PlainTextResponse(
            services.chats.export_markdown(chat_id), media_type="text/markdown", headers=headers
        )
    value: Any = services.chats.export_json(chat_id)
    return JSONResponse(value, headers=headers)
