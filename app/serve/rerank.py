"""`/v1/rerank`, as Jina and vLLM have it: documents by how well they answer a query."""

import math
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import MOST_TEXTS, Body, Count, Items, Text
from ragblend.app.serve.errors import ApiError, json_response
from ragblend.app.serve.service import client_of, is_named, service_of, until_gone
from ragblend.engine.scheduling.queue import Cancel

router = APIRouter(prefix="/v1")


class RerankDocument(Body):
    """A document as an object."""

    text: Text


class RerankBody(Body):
    """`/v1/rerank`. top_n: how many of the best to return; all by default."""

    model: str
    query: Text
    documents: Annotated[Items[Text | RerankDocument], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Count | None = None
    return_documents: bool = True


@router.post("/rerank")
async def rerank(request: Request, body: RerankBody) -> Response:
    """Score each document by the cross-encoder of the settings, from 0 to 1, the best first."""
    service, workspace = service_of(request), service_of(request).app.workspaces.first
    if not service.reranker:
        message = (
            "No reranker is named: set `reranker` in the settings to a cross-encoder's hub id or folder."
        )
        raise ApiError(404, message, "no_reranker", "model")
    if not is_named(body.model, service.reranker, service.app.settings.reranker):
        message = f"There is no model {body.model!r:.100}; the reranker is {service.reranker!r}."
        raise ApiError(404, message, "model_not_found", "model")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]

    def work(stopped: Cancel) -> tuple[list[float], int]:
        encoder = workspace.reranker
        assert encoder is not None, "it is named"
        return encoder.scores(body.query, texts, stopped), encoder.count_tokens([body.query, *texts])

    with service.admission.enter(client_of(request)):
        scores, tokens = await until_gone(request.receive, service.run(work, None))
    best = sorted(range(len(texts)), key=lambda at: -scores[at])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": at, "relevance_score": 1 / (1 + math.exp(-scores[at]))}
        | ({"document": {"text": texts[at]}} if body.return_documents else {})
        for at in best
    ]
    return json_response({"model": service.reranker, "usage": {"total_tokens": tokens}, "results": results})
