"""Errors as Anthropic's clients read them: one table from HTTP status to type, one body shape."""

from __future__ import annotations

import msgspec

from samovar.errors import ValidationError
from samovar.server.anthropic.schema import ErrorBody, ErrorResponse, ThreadDetails
from samovar.server.problems import error_of

TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""HTTP status -> `error.type`. Loading, full queues and a dead engine are all 503: retry later."""


class NoThreadsError(ValidationError):
    """The request wants its conversation kept. Anthropic's SDK reads the details and sends all messages instead."""


def error_of_failure(failure: BaseException) -> tuple[int, ErrorResponse]:
    """Exception -> (HTTP status, body). Texts are bounded and never those of an unexpected exception."""
    detail = error_of(failure).error
    kind = TYPES.get(detail.code, "invalid_request_error" if detail.code < 500 else "api_error")
    message = detail.message
    if detail.param and not message.startswith(detail.param):
        message = f"{detail.param}: {message}"
    body = ErrorBody(type=kind, message=message)
    if isinstance(failure, NoThreadsError):
        body.details = ThreadDetails()
    return detail.code, ErrorResponse(error=body)


def encode_error(failure: BaseException) -> tuple[int, bytes]:
    """Exception -> (HTTP status, JSON body)."""
    status, response = error_of_failure(failure)
    return status, msgspec.json.encode(response)


def error_frame(failure: BaseException) -> bytes:
    """The event that tells of a failure inside a stream."""
    return b"event: error\ndata: " + encode_error(failure)[1] + b"\n\n"
