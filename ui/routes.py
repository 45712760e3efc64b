"""The page's own routes beside Gradio's: its assets, the export of conversations, and the download of documents."""

import re
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ragblend.app.services import AppServices
from ragblend.kvstore.errors import RagBlendError

UNSAFE_IN_NAMES = re.compile(r"[^\w .-]+")
LARGEST_ID = 2**53


class PageAssets(StaticFiles):
    """Style, script and icon. Browsers check for a newer version whenever the page is opened."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


def add_routes(app: FastAPI, services: AppServices) -> None:
    """Add the routes before Gradio is mounted at /."""

    @app.get("/ragblend/chats/{chat_id:int}.{kind}")
    def chat(chat_id: int, kind: str) -> Response:
        if chat_id > LARGEST_ID or kind not in ("md", "json"):
            return PlainTextResponse("There is no such conversation.", 404)
        try:
            return _exported(services, chat_id, kind)
        except RagBlendError as error:
            return PlainTextResponse(str(error), 404)

    @app.get("/ragblend/documents/{document_id}")
    def document(document_id: str) -> Response:
        """Download a document's file, unless something else, such as a link, has replaced it since it was read."""
        found = services.workspaces.library.documents_with([document_id]).get(document_id)
        if found is None or not found.facts.fit(found.file):
            return PlainTextResponse(
                "The library has no such document, or its file has changed since it was read.", 404
            )
        return FileResponse(found.file, filename=found.name, media_type="application/octet-stream")

    app.mount("/ragblend", PageAssets(directory=Path(__file__).parent / "assets"))


def _exported(services: AppServices, chat_id: int, kind: str) -> Response:
    chats = services.chats
    stem = UNSAFE_IN_NAMES.sub("", chats.get(chat_id).title).strip(" .")[:60] or "conversation"
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(stem)}.{kind}"}
    if kind == "json":
        return JSONResponse(chats.export_json(chat_id), headers=headers)
    return PlainTextResponse(chats.export_markdown(chat_id), media_type="text/markdown", headers=headers)
