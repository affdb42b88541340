"""Calls of the application without a socket: the same checks and the same answers as over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


@dataclass(slots=True)
class Answer:
    """One complete answer."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    """POST a JSON body. Cancelling this cancels the call, as a client does that leaves."""
    sent, answer, parts = False, Answer(), []
    gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(_scope(path, len(body), headers), receive, send)
    answer.body = b"".join(parts)
    return answer


def _scope(path: str, length: int, headers: Sequence[tuple[bytes, bytes]]) -> Scope:
    own: list[tuple[bytes, bytes]] = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*own, *headers],
        "client": None,
        "server": None,
    }
    return scope
