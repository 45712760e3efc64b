"""What goes wrong, in OpenAI's form: `{"error": {message, type, param, code}}`, and with which status."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from ragblend.integrations.calls import AnswerTimeout
from ragblend.kvstore import errors
from ragblend.kvstore.files import NO_ROOM

log = logging.getLogger("ragblend")
# The first that fits: what was raised, the status, and the code by which programs know it.
KNOWN: tuple[tuple[type[Exception], int, str], ...] = (
    (AnswerTimeout, 504, "timeout"),
    (TimeoutError, 504, "timeout"),
    (errors.PromptTooLongError, 400, "context_length_exceeded"),
    (errors.PromptError, 400, "invalid_prompt"),
    (errors.UnsupportedModelError, 400, "unsupported"),
    (errors.UsageError, 400, "invalid_value"),
    (errors.OversizedDocumentError, 413, "document_too_large"),
    (errors.DocumentError, 400, "invalid_document"),
    (errors.StoreFullError, 507, "disk_full"),
    (errors.StoreLockedError, 503, "busy"),
    (errors.ModelError, 503, "model_unavailable"),
    (errors.DeviceError, 503, "device_failed"),
    (errors.Cancelled, 503, "stopped"),
    (errors.RagBlendError, 500, "internal_error"),
)
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """What a client is answered. retry_s: after how many seconds it may try again; is_final: it need not, although its
    library would.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_s: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_s, self.is_final = retry_s, is_final

    def to_json(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        headers = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.to_json(), self.status, headers)


def api_error(error: BaseException, shown: Callable[[str], str] = str) -> ApiError:
    """Any error as what a client is told: of a fault of ours only its kind. shown: takes out this machine's paths."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in KNOWN:
        if isinstance(error, kind):
            said = shown(str(error))
            return ApiError(
                status, said or "The answer took too long.", code, retry_s=5 if status == 503 else None
            )
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return ApiError(507, "The disk is full. Free some space.", "disk_full")
    log.error("a request failed: %s", type(error).__name__)
    log.debug("where it failed", exc_info=error)
    said = (
        f"Something failed that was not foreseen ({type(error).__name__}). What is stored is kept; try again."
    )
    return ApiError(500, said, "internal_error")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, "application/json")


def encoded(value: Any) -> bytes:
    """JSON in UTF-8, whatever was sent to us: half a surrogate pair is escaped."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
