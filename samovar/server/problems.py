"""Errors as HTTP answers: one table from exception class to status and type, one body shape for every route.

Texts are cut to a bounded length and made encodable; an exception that is not ours never shows its text to a client.
"""

from __future__ import annotations

import logging
import uuid

import msgspec

from samovar.errors import (
    ConflictError,
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    SamovarError,
    TooLargeError,
    ValidationError,
)
from samovar.server.openai.schema import ErrorDetail, ErrorResponse

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200

_logger = logging.getLogger(__name__)


class RequestError(SamovarError):
    """An answer that only HTTP knows: wrong key, wrong method, no such route."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class ChoiceFailedError(SamovarError):
    """The engine gave up one choice; the other requests go on."""


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFoundError, 404, "NotFoundError"),
    (TooLargeError, 413, "RequestTooLargeError"),
    (ConflictError, 409, "ConflictError"),
    (ValidationError, 400, "BadRequestError"),
    (OverloadedError, 503, "ServiceUnavailableError"),
    (EngineDeadError, 503, "ServiceUnavailableError"),
    (ChoiceFailedError, 500, "InternalServerError"),
)


def error_of(failure: BaseException) -> ErrorResponse:
    """Exception -> body; `error.code` is the HTTP status."""
    if isinstance(failure, RequestError):
        return _body(failure.status, failure.kind, str(failure))
    for kind, status, name in TABLE:
        if isinstance(failure, kind):
            return _body(status, name, str(failure), getattr(failure, "parameter", None))
    incident = uuid.uuid4().hex[:12]
    _logger.error("incident %s: unexpected error", incident, exc_info=failure)
    return _body(500, "InternalServerError", f"internal error; the server's log has the details under {incident}")


def _body(status: int, kind: str, message: str, parameter: str | None = None) -> ErrorResponse:
    param = None if parameter is None else _clean(parameter, MAX_PARAM_CHARS)
    return ErrorResponse(
        error=ErrorDetail(message=_clean(message, MAX_MESSAGE_CHARS), type=kind, param=param, code=status)
    )


def _clean(text: str, limit: int) -> str:
    """At most `limit` characters, none of which UTF-8 cannot hold."""
    if len(text) > limit:
        text = text[: limit - 4] + " ..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_error(failure: BaseException) -> tuple[int, bytes]:
    """Exception -> (HTTP status, JSON body)."""
    response = error_of(failure)
    return response.error.code, msgspec.json.encode(response)
