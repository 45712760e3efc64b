"""Errors with their HTTP status, and the dialects (OpenAI's API and others) in which they are sent to clients."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from ragblend.integrations.calls import AnswerTimeout
from ragblend.kvstore import errors
from ragblend.kvstore.files import NO_ROOM

log = logging.getLogger("ragblend")
# Exception, HTTP status, error code. The first entry whose exception matches counts.
KNOWN_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
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
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error response. retry_s: when the client may retry; is_final: client libraries should not retry."""

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
        """The JSON that OpenAI's API would return."""
        error_type = ERROR_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


@dataclass(frozen=True)
class Dialect:
    """How an API writes errors and streams. has_json_lines: a stream is lines of JSON, not server-sent events."""

    error: Callable[[ApiError], dict[str, Any]] = ApiError.to_json
    has_json_lines: bool = False


OPENAI = Dialect()


def error_response(error: ApiError, dialect: Dialect = OPENAI) -> Response:
    return json_response(dialect.error(error), error.status, error.headers)


def api_error(error: BaseException, hide_paths: Callable[[str], str] = str) -> ApiError:
    """Convert any error to an ApiError. Unexpected ones show only their class. hide_paths: applied to messages."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in KNOWN_ERRORS:
        if isinstance(error, kind):
            message = hide_paths(str(error)) or "The answer took too long."
            return ApiError(status, message, code, retry_s=5 if status == 503 else None)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return ApiError(507, "The disk is full. Free some space.", "disk_full")
    log.error("a request failed: %s", type(error).__name__)
    log.debug("traceback", exc_info=error)
    message = f"An unexpected error occurred ({type(error).__name__}). Stored data is kept; try again."
    return ApiError(500, message, "internal_error")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")


def encode_json(value: Any) -> bytes:
    """Encode as ASCII JSON, which escapes lone surrogates of a request that it repeats."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
