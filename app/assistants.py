"""The library for desktop assistants: four read-only tools of the Model Context Protocol (`ragblend mcp`).

They return JSON: passages carry the document's id, for `read_document`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import Field
from starlette.types import ASGIApp, Receive, Scope, Send

import ragblend
from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.answer_stream import AnswerStream
from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.app.answering.retrieval import check_askable, check_collection
from ragblend.app.answering.retrieval import search as search_passages
from ragblend.app.cli.common import Terminal
from ragblend.app.serve.errors import ApiError, api_error, error_response
from ragblend.app.serve.keys import OWNER, Authenticator
from ragblend.app.serve.service import Admission, Limits
from ragblend.app.workspace import Workspace, Workspaces
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import RagBlendError, UsageError

T = TypeVar("T")
Json = dict[str, Any]
INSTRUCTIONS = (
    "The user's own documents, on this machine. `search` finds passages, `ask` has a small local model answer from "
    "them, `read_document` reads on where a passage ends. Cite documents by their names."
)
PASSAGE_FIELDS = ("document", "document_id", "location", "score", "text")
MAX_CHARACTERS = 20_000  # of a document, in one answer
READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
Question = Annotated[
    str, Field(max_length=10_000, description="In the words of the documents, if you know them.")
]
Collection = Annotated[str | None, Field(description="Which collection; if left out, the default one.")]
Limit = Annotated[int, Field(ge=1, le=50)]
Offset = Annotated[int, Field(ge=0, lt=2**31)]


def build_server(conversations: Conversations, workspaces: Workspaces) -> MCPServer[Any]:
    """The server, not yet running. Errors of the tools are returned to the assistant, and do not end the process."""
    server: MCPServer[Any] = MCPServer(
        "ragblend", instructions=INSTRUCTIONS, version=ragblend.__version__, log_level="WARNING"
    )
    tools = _Tools(conversations, workspaces)
    for tool in (tools.search, tools.ask, tools.list_documents, tools.read_document):
        server.tool(annotations=READ_ONLY)(tool)
    return server


class _Tools:
    """The tools. Their docstrings are what the assistant reads."""

    def __init__(self, conversations: Conversations, workspaces: Workspaces) -> None:
        self._conversations, self._workspaces = conversations, workspaces
        self._library, self._admission = workspaces.library, Admission(Limits())

    async def search(self, question: Question, collection: Collection = None, limit: Limit = 6) -> Json:
        """Find the passages of the user's documents that match a question best."""

        def found() -> Json:
            if not question.strip():
                raise UsageError("The question is empty.")
            passages = search_passages([self._askable(collection)], question, limit)
            return {"passages": [_passage(each) for each in passages]}

        return await self._run(found)

    async def ask(self, question: Question, collection: Collection = None) -> Json:
        """Answer a question from the user's documents by a local model, with the passages that it was given."""
        turns, stopped = list[AnswerStream](), threading.Event()

        def answered() -> Json:
            workspace = self._askable(collection)
            options = AskOptions((workspace.settings.collection,), cancel=stopped)
            turns.append(self._conversations.answer(question, options))
            if stopped.is_set():
                turns[0].stop()
            answer = turns[0].whole()
            notice = {"notice": answer.notice} if answer.notice else {}
            sources = [{"number": each.number, **_passage(each)} for each in answer.sources]
            return {"answer": answer.text, "sources": sources, "citations": list(answer.citations), **notice}

        try:
            return await self._run(answered)
        finally:  # the assistant may have stopped waiting
            stopped.set()
            for turn in turns:
                turn.stop()

    async def list_documents(
        self, collection: Collection = None, words: str = "", offset: Offset = 0, limit: Limit = 50
    ) -> Json:
        """List the user's documents; words: only those whose name or folder has all of them. Also lists collections."""

        def listed() -> Json:
            name = self._collection_name(collection)
            page = self._library.page(name, words, None, offset, limit)
            rows = [
                {"id": each.id, "name": each.name, "state": str(each.state), "passages": each.passages}
                | ({"notes": each.notes} if each.notes else {})
                for each in page.documents
            ]
            names = self._workspaces.names()
            return {"collection": name, "collections": names, "total": page.total, "documents": rows}

        return await self._run(listed)

    async def read_document(
        self,
        document: Annotated[str, Field(description="Its id, or its file's name.")],
        collection: Collection = None,
        offset: Offset = 0,
    ) -> Json:
        """Read a document's text, 20,000 characters at a time; to continue, pass the last `next_offset` as offset."""

        def read() -> Json:
            found = self._library.find(self._askable(collection).settings.collection, document)
            text = "\n\n".join(passage.text for passage in self._library.passages_of(found.id))
            stop = offset + MAX_CHARACTERS
            part = {"id": found.id, "name": found.name, "characters": len(text), "text": text[offset:stop]}
            return part | ({"next_offset": stop} if stop < len(text) else {})

        return await self._run(read)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run a tool in a thread. At most as many run at once as one API key of the server may have requests."""
        try:
            with self._admission.enter(OWNER):
                return await in_thread(work)
        except (ApiError, RagBlendError) as error:
            raise ToolError(str(error)) from error

    def _collection_name(self, collection: str | None) -> str:
        """The given collection, which must exist, or the default one."""
        if collection is not None:
            check_collection(self._library, collection)
        return self._workspaces.settings.collection if collection is None else collection

    def _askable(self, collection: str | None) -> Workspace:
        workspace = self._workspaces.of(self._collection_name(collection))
        check_askable(workspace)
        return workspace


def serve_forwarded(server: MCPServer[Any], terminal: Terminal) -> None:
    """Serve an assistant over the standard input and output of the process that forwarded the command."""

    class Streams:
        """Both streams, with the methods that the transport uses."""

        async def __aiter__(self) -> AsyncIterator[str]:
            with suppress(KeyboardInterrupt):
                while line := await in_thread(terminal.read_line):
                    yield line

        async def write(self, text: str) -> None:
            terminal.out.write(text)

        async def flush(self) -> None:
            pass

    async def serve() -> None:
        terminal_streams: Any = Streams()
        async with stdio_server(terminal_streams, terminal_streams) as streams:
            inner: Any = server._lowlevel_server  # whose own `run` supports only this process's streams
            await inner.run(*streams, inner.create_initialization_options())

    asyncio.run(serve())


def http_app(server: MCPServer[Any], authenticator: Authenticator) -> ASGIApp:
    """The server as a web application at `/mcp`, for holders of the owner's key, or for any program on this machine
    while there is no key.
    """
    # The authenticator checks host names.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(transport_security=security)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and not authenticator.client(scope).is_owner:
                raise ApiError(
                    403, "Assistants need the owner's key: `ragblend keys add NAME --owner`.", "not_owner"
                )
        except (ApiError, RagBlendError) as error:  # a damaged file of keys, say
            await error_response(api_error(error))(scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


def _passage(source: AnswerSource) -> Json:
    return {name: getattr(source, name) for name in PASSAGE_FIELDS}
