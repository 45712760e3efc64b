"""`/v1/rerank`, as in Jina's API and vLLM's: scores documents by how well they answer a query."""

import math
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import MAX_TEXTS, Body, Count, Items, NonEmptyText
from ragblend.app.serve.errors import ApiError, json_response
from ragblend.app.serve.service import client_of, is_named, service_of, until_disconnected
from ragblend.engine.scheduling.queue import Cancel

router = APIRouter(prefix="/v1")


class RerankDocument(Body):
    """A document as an object."""

    text: NonEmptyText


class RerankBody(Body):
    """`/v1/rerank`. top_n: how many of the best to return; all by default."""

    model: str
    query: NonEmptyText
    documents: Annotated[Items[NonEmptyText | RerankDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Count | None = None
    return_documents: bool = True


@router.post("/rerank")
async def rerank(request: Request, body: RerankBody) -> Response:
    """Score the documents from 0 to 1 with the cross-encoder of the settings; the best come first."""
    service = service_of(request)
    if not service.reranker:
        message = (
            "No reranker is named: set `reranker` in the settings to a cross-encoder's hub id or folder."
        )
        raise ApiError(404, message, "no_reranker", "model")
    if not is_named(body.model, service.reranker, service.app.settings.reranker):
        message = f"There is no model {body.model!r:.100}; the reranker is {service.reranker!r}."
        raise ApiError(404, message, "model_not_found", "model")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]

    def work(cancel: Cancel) -> tuple[list[float], int]:
        encoder = service.app.workspaces.first.reranker
        assert encoder is not None, "the settings name one"
        return encoder.scores(body.query, texts, cancel), encoder.count_tokens([body.query, *texts])

    with service.admission.enter(client_of(request)):
        scores, tokens = await until_disconnected(request.receive, service.run(work, None))
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": 1 / (1 + math.exp(-scores[index]))}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in best
    ]
    return json_response({"model": service.reranker, "usage": {"total_tokens": tokens}, "results": results})
