"""API keys: every route needs one except the three probes, decided on the path that the router sees."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.server.exchange import Exchange
from samovar.server.problems import RequestError, encode_error

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


def routed_path(scope: Scope) -> str:
    """The decoded path without the proxy's prefix: exactly what the router matches."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/"):
        return path[len(prefix) :]
    return path


class RequireKey:
    """Answers 401 unless the request carries one of the keys as a bearer token (or an x-api-key header)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or routed_path(scope) in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        status, body = encode_error(
            RequestError(401, "AuthenticationError", "give a valid key: Authorization: Bearer KEY")
        )
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await Exchange(scope, receive, send).reply(status, body, headers)

    def _is_known(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                value = value[7:].strip()
            elif name != b"x-api-key":
                continue
            digest = hashlib.sha256(value).digest()
            matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all: no early way out to time
            if any(matches):
                return True
        return False
