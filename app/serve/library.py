"""`/v1/rag/ask` and `/v1/documents`: questions about the library, and its documents, treated as by the page."""

import asyncio
import re
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Query, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.answering.answer import Answer
from ragblend.app.answering.answer_stream import AnswerStream
from ragblend.app.answering.chats import ChatMessage
from ragblend.app.answering.conversation import AskOptions
from ragblend.app.database import now
from ragblend.app.library.documents import Document
from ragblend.app.library.job_store import FileJob
from ragblend.app.library.uploads import safe_name
from ragblend.app.serve.bodies import AskBody
from ragblend.app.serve.errors import ApiError, json_response
from ragblend.app.serve.keys import Client
from ragblend.app.serve.service import (
    Service,
    client_of,
    collect,
    service_of,
    stream_response,
    until_disconnected,
)
from ragblend.app.services import AppServices
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.threads import in_thread, iterate_in_thread
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import FOLDER_MODE

UPLOAD_PATH = "/v1/documents"
MAX_FILES = 100


class StrictParameters(BaseModel):
    """Parameters of a query or a form. Unknown ones are refused: if a misspelt `collection` were ignored, another one
    would be used.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


async def refuse_query(request: Request) -> None:
    """For routes whose parameters are in the body: raise ApiError (400) if there is a query."""
    for name in request.query_params:
        message = f"{name:.100}: this route's parameters belong in the body, not in the URL"
        raise ApiError(400, message, "unknown_parameter", name)


router = APIRouter(prefix="/v1")
parameters_in_body = [Depends(refuse_query)]


@router.post("/rag/ask", dependencies=parameters_in_body)
async def ask(request: Request, body: AskBody) -> Response:
    """Answer a question about documents, with sources and statistics; streamed, `delta` events come first."""
    service, client = service_of(request), client_of(request)
    named = [each for each in (*(body.collections or ()), body.collection) if each is not None]
    wanted: list[str | None] = [*named] or [None]  # None: the client's first collection
    collections = await in_thread(lambda: [service.check_collection(client, each) for each in wanted])
    options = AskOptions(
        tuple(dict.fromkeys(collections)), body.mode, body.method, body.ratio, body.top_k, body.max_tokens,
        body.temperature, client=client.name,
    )  # fmt: skip
    earlier = [
        ChatMessage(number, 0, each.role, each.content, now()) for number, each in enumerate(body.history)
    ]
    raw_body = await request.body()

    def begin(cancel: Cancel) -> AnswerStream:
        with service.tokenizing(raw_body, cancel):
            return service.app.conversations.answer(body.question, replace(options, cancel=cancel), earlier)

    pieces = _answer(service, client, body, begin)
    if body.stream:
        return await stream_response(request, pieces)
    return json_response((await until_disconnected(request.receive, collect(pieces)))[-1])


async def _answer(
    service: Service, client: Client, body: AskBody, begin: Callable[[Cancel], AnswerStream]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a `delta` for each piece, then the whole answer. Closing the generator cancels the work."""
    arrived, seconds = time.monotonic(), service.allowed_s(body.timeout)
    cancel, started = threading.Event(), list[AnswerStream]()

    def stop() -> None:
        cancel.set()
        for stream in started:
            stream.stop()

    def work(send: Callable[[str], None]) -> Answer:
        try:
            stream = begin(cancel)
        except Cancelled as error:
            raise service.timeout_error(body.timeout) from error
        with stream:
            started.append(stream)
            if cancel.is_set():  # perhaps before `stream` was in the list
                stream.stop()
            for number, piece in enumerate(stream):
                if number == 0 and stream.is_by_model:
                    service.metrics.observe("ttft_seconds", time.monotonic() - arrived)
                send(piece)
        if time.monotonic() >= arrived + seconds:
            raise service.timeout_error(body.timeout)
        return stream.answer

    with service.admission.enter(client):
        timer = asyncio.get_running_loop().call_later(seconds, stop)
        try:
            async with aclosing(iterate_in_thread(work, stop)) as items:
                async for item in items:
                    if isinstance(item, str):
                        yield {"object": "rag.answer.chunk", "delta": item}
                    else:
                        if started[0].is_by_model:
                            service.record_answer(item.report)
                        yield {"object": "rag.answer", **item.to_json(), "model": service.model}
        finally:
            timer.cancel()


class Upload(StrictParameters):
    """The form of an upload."""

    file: Annotated[list[UploadFile], Field(description="One file or several.")]
    collection: str | None = None


@router.post("/documents", status_code=202, dependencies=parameters_in_body)
async def upload(
    request: Request, form: Annotated[Upload, Form(media_type="multipart/form-data")]
) -> Response:
    """Copy files into the home and queue them for ingest; `/v1/documents/jobs` shows their progress."""
    service, client = service_of(request), client_of(request)
    if len(form.file) > MAX_FILES:
        raise ApiError(
            400,
            f"At most {MAX_FILES} files can be uploaded at once, not {len(form.file)}.",
            "too_many_files",
            "file",
        )
    return json_response(
        await in_thread(partial(_queue_files, service, client, form.file, form.collection)), 202
    )


def _queue_files(
    service: Service, client: Client, files: list[UploadFile], collection: str | None
) -> dict[str, Any]:
    """Copy and queue the files. Raises ApiError if none of them can be ingested."""
    name = service.check_collection(client, collection)
    folder = Path(tempfile.mkdtemp(prefix="upload-"))  # inside the home: see `listening.temporary_files_in`
    try:
        paths = []
        for number, each in enumerate(files):
            path = folder / str(number) / safe_name(each.filename or "document")
            path.parent.mkdir(mode=FOLDER_MODE)
            with path.open("wb") as copy:
                shutil.copyfileobj(each.file, copy)
            paths.append(path)
        service.check_collection(client, name)  # raises ApiError if it was removed meanwhile
        added = service.app.jobs.upload(paths, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    folders = re.compile(re.escape(str(folder)) + r"/\d+/")
    failed = [
        {"name": name, "reason": service.hide_paths(folders.sub("", reason))}
        for name, reason in (*added.failed, *added.skipped)
    ]
    if not added.files:
        raise ApiError(
            400, " ".join(f"{each['name']}: {each['reason']}" for each in failed), "invalid_document", "file"
        )
    return {"object": "upload", "collection": name, "queued": added.files, "failed": failed}


class Listing(StrictParameters):
    """Query parameters of a list."""

    collection: str | None = None
    search: Annotated[str, Field(max_length=1000)] = ""
    limit: Annotated[int, Field(ge=1, le=1000)] = 50
    offset: Annotated[int, Field(ge=0, lt=2**31)] = 0

    async def respond(
        self, request: Request, page: Callable[[AppServices, str], tuple[list[dict[str, Any]], int]]
    ) -> Response:
        """Respond with a page of a collection's rows. page(services, collection) returns it, and the total number."""
        service, client = service_of(request), client_of(request)

        def list_rows() -> dict[str, Any]:
            name = service.check_collection(client, self.collection)
            data, total = page(service.app, name)
            return {"object": "list", "collection": name, "total": total, "data": data}

        with service.admission.enter(client):
            return json_response(await in_thread(list_rows))


@router.get("/documents")
async def documents(request: Request, listing: Annotated[Listing, Query()]) -> Response:
    """List the documents of a collection, by name."""

    def page(services: AppServices, name: str) -> tuple[list[dict[str, Any]], int]:
        found = services.workspaces.library.page(name, listing.search, None, listing.offset, listing.limit)
        rows = [_row_json("document", each, "passages", "notes", "updated_at") for each in found.documents]
        return rows, found.total

    return await listing.respond(request, page)


@router.get("/documents/jobs")
async def jobs(request: Request, listing: Annotated[Listing, Query()]) -> Response:
    """List ingest jobs: running ones, then waiting ones, then finished ones."""

    def page(services: AppServices, name: str) -> tuple[list[dict[str, Any]], int]:
        found, total = services.jobs.page(None, listing.search, listing.offset, listing.limit, name)
        fields = ("kind", "added_at", "finished_at", "done", "total")
        return [_row_json("job", job, *fields) for job in found], total

    return await listing.respond(request, page)


@router.delete("/documents/{document_id}", dependencies=parameters_in_body)
async def remove(request: Request, document_id: str) -> Response:
    """Delete a document, with its text, vectors and KV."""
    service, client = service_of(request), client_of(request)

    def remove_document() -> int:
        found = service.app.workspaces.library.documents_with([document_id]).get(document_id)
        removed = []
        if found is not None and (client.is_owner or found.collection in client.collections):
            removed = service.app.jobs.remove([document_id], found.collection)
        if not removed:
            raise ApiError(404, "There is no such document.", "document_not_found", "document_id")
        return sum(each.bytes_freed for each in removed)

    with service.admission.enter(client):
        bytes_freed = await in_thread(remove_document)
    return json_response(
        {"id": document_id, "object": "document", "deleted": True, "bytes_freed": bytes_freed}
    )


def _row_json(kind: str, row: Document | FileJob, *names: str) -> dict[str, Any]:
    """A row's common fields and the named ones, without its path on this machine."""
    fields = {name: getattr(row, name) for name in ("id", "name", "collection", "state", "size", *names)}
    return {"object": kind, **fields, "reason": row.reason.replace(row.path, row.name)}
