"""`/v1/embeddings`, and embedding for the other APIs, by the default collection's embedder."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import EmbeddingBody
from ragblend.app.serve.errors import ApiError, json_response
from ragblend.app.serve.service import client_of, is_named, service_of, until_disconnected
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.embeddings import Embeddings

router = APIRouter(prefix="/v1")


@router.post("/embeddings")
async def embed(request: Request, body: EmbeddingBody) -> Response:
    """Embed texts as unit vectors."""
    vectors, count = await embed_texts(request, body)
    data = [
        {"object": "embedding", "index": number, "embedding": _encode_vector(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    name = service_of(request).embedder
    return json_response({"object": "list", "model": name, "data": data, "usage": usage})


async def embed_texts(request: Request, body: EmbeddingBody) -> tuple[list[Embeddings], int]:
    """Return a vector (E,) for each text, and the number of tokens in all. Raises ApiError for another model or E."""
    service, texts = service_of(request), [body.input] if isinstance(body.input, str) else body.input
    embedder = service.app.workspaces.first.embedder
    if not is_named(body.model, service.embedder, embedder.name):
        message = f"There is no model {body.model!r:.100}; the embedding model is {service.embedder!r}."
        raise ApiError(404, message, "model_not_found", "model")

    def work(cancel: Cancel) -> tuple[list[Embeddings], int]:
        if body.dimensions not in (None, embedder.dimensions):
            message = f"dimensions can only be {embedder.dimensions}."
            raise ApiError(400, message, "invalid_value", "dimensions")
        return embedder.embed_means(texts, cancel), embedder.count_tokens(texts, cancel)

    with service.admission.enter(client_of(request)):
        return await until_disconnected(request.receive, service.run(work, None))


def _encode_vector(vector: "np.ndarray[Any, Any]", encoding: str | None) -> list[float] | str:
    numbers = np.asarray(vector, dtype="<f4")
    return base64.b64encode(numbers.tobytes()).decode("ascii") if encoding == "base64" else numbers.tolist()
