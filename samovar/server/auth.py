"""Who may call what: every route needs a key except the probes, an admin route needs an operator.

Decided on the path that the router sees. An operator is whoever has an admin key; without admin keys, whoever reaches
the second listener, which is on the loopback address only. The public port never serves an admin route without a key.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.server.error_shapes import encode_error_for
from samovar.server.exchange import Exchange
from samovar.server.keys import ANYONE, CALLER, KeyRing, caller_of
from samovar.server.problems import RequestError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})

_REMEDY = "start the server with --admin-api-key KEY, or with --admin-port PORT and call that port from this machine"


def routed_path(scope: Scope) -> str:
    """The decoded path without the proxy's prefix: exactly what the router matches."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/"):
        return path[len(prefix) :]
    return path


class RequireKey:
    """Answers 401 unless the request carries a key of the ring, and notes whose it is. `is_private`: second listener."""

    def __init__(self, app: ASGIApp, ring: KeyRing, *, is_private: bool = False) -> None:
        self._app = app
        self._ring = ring
        self._needs_key = ring.has_admins if is_private else ring.has_users

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._ring.find(scope)
            path = routed_path(scope)
            if caller is None and self._needs_key and path not in OPEN_PATHS:
                status, body = encode_error_for(path, no_valid_key())
                headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
                await Exchange(scope, receive, send).reply(status, body, headers)
                return
            scope[CALLER] = ANYONE if caller is None else caller
        await self._app(scope, receive, send)


def no_valid_key() -> RequestError:
    """What a caller without a key is told."""
    return RequestError(401, "AuthenticationError", "give a valid key: Authorization: Bearer KEY")


def check_operator(scope: Scope, ring: KeyRing, *, is_private: bool) -> None:
    """Raise `RequestError` unless this request comes from an operator."""
    caller = caller_of(scope)
    if caller.is_admin:
        return
    if ring.has_admins:
        if caller is ANYONE:
            raise no_valid_key()
        raise RequestError(403, "PermissionDeniedError", "this route needs an admin key; the key given is a user's")
    if not is_private:
        raise RequestError(403, "PermissionDeniedError", f"admin routes are closed on this port; {_REMEDY}")
    _refuse_browsers(scope)


def _refuse_browsers(scope: Scope) -> None:
    """Where no key is asked for, a web page open on this machine must not be able to call.

    Pages that send something say their origin; pages that read something under a name of their own that was made to
    lead here (DNS rebinding) have that name in the host header.
    """
    for name, value in scope["headers"]:
        if name in (b"origin", b"sec-fetch-site"):
            raise RequestError(
                403, "PermissionDeniedError", "admin routes without a key are not for browsers; use --admin-api-key"
            )
        if name == b"host" and not _is_local(value.decode("latin-1")):
            raise RequestError(403, "PermissionDeniedError", "call the admin port as 127.0.0.1 or localhost")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
