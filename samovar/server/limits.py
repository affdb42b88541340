"""One connection: what it may send before anything reads it (header bytes, header count, body bytes), and its framing.

Headers are counted in the protocol, below the application, because the parser keeps all of them. Bodies are counted
as they arrive; a declared content-length is only a reason to refuse early.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from samovar.errors import TooLargeError
from samovar.server.error_shapes import encode_error_for
from samovar.server.problems import RequestError

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128


class BodyLimit:
    """Raises `TooLargeError` from `receive` once a body is over `most` bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        is_too_long = declared.isdigit() and int(declared[:20]) > self._most
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            if is_too_long:
                raise self._refusal()
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> TooLargeError:
        return TooLargeError(f"the body is over {self._most} bytes (--max-body-bytes); send less")


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits for the head of a request, and with what uvicorn leaves out.

    A head over its limits is answered 431, what is no HTTP 400, and neither gets into the answer to an earlier request.
    `Upgrade` is ignored, as RFC 9110 section 7.8 has it for servers that do not switch. HTTP/1.0 gets no chunks.
    """

    url = b""
    _header_bytes = 0
    _refusal: bytes | None = None
    """The last answer of this connection: given when all earlier ones are complete. Nothing is read after it is set."""
    _is_resuming = False
    """True while a new parser reads what the application has been told already."""

    def on_message_begin(self) -> None:
        """A new request: count from zero."""
        if not self._is_resuming:
            self._header_bytes = 0
            super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the connection has been refused."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self._refuse(RequestError(400, "BadRequestError", "the request is not valid HTTP/1.1"))

    def _feed(self, data: bytes) -> bytes:
        """Parse; returns what stands behind a request that asked for another protocol and is answered in this one."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._refusal is None and self.scope["method"] != "CONNECT":
                self._resume()
            return rest
        return b""

    def _resume(self) -> None:
        """Go on with a new parser behind the head of this request: the old one would not read the body."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name in framing]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_resuming = True
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *lines, b"\r\n"]))
        self._is_resuming = False

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        if not self._is_resuming and self._take(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self._is_resuming and self._take(len(name) + len(value) + 4):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless refused."""
        if self._is_resuming or self._refusal is not None:
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            # uvicorn makes the cycle and has no setting for its class; nothing of it has run yet.
            self.cycle.__class__ = _UntilClose

    def on_body(self, body: bytes) -> None:
        """Part of the body, unless refused."""
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End of the request, unless refused, or unless its body comes with the next parser."""
        if self._refusal is None and (not self.parser.should_upgrade() or self.scope["method"] == "CONNECT"):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, or give the connection's last answer."""
        is_last = not self.pipeline
        super().on_response_complete()
        if self._refusal is not None and is_last:
            self._give(self._refusal)

    def _take(self, size: int) -> bool:
        if self._refusal is not None:
            return False
        self._header_bytes += size
        headers: list[Any] = self.headers
        if self._header_bytes <= MAX_HEADER_BYTES and len(headers) < MAX_HEADERS:
            return True
        message = f"the headers are over {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} fields; send fewer"
        self._refuse(RequestError(431, "BadRequestError", message))
        return False

    def _refuse(self, error: RequestError) -> None:
        """Read no more; answer `error` after the answers that are due, and close."""
        path = self.url.partition(b"?")[0].decode("latin-1").removeprefix(self.root_path)
        status, body = encode_error_for(path, error)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self._refusal = f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        newest: RequestResponseCycle | None = self.cycle
        if newest is None or newest.response_complete:
            self._give(self._refusal)
        elif newest.more_body and self.pipeline:
            self.pipeline.popleft()  # the body of the newest is what broke, and it has not been started
        elif newest.more_body:
            self._give(b"" if newest.response_started else self._refusal)

    def _give(self, last: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(last)
            self.transport.close()


class _UntilClose(RequestResponseCycle):
    """The answer to an HTTP/1.0 request: where its length is not known, its end is the end of the connection."""

    is_open_ended = False

    async def send(self, message: Any) -> None:
        """Send a part of the answer, without chunk marks."""
        if message["type"] == "http.response.start":
            self.is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self.is_open_ended:
                self.chunked_encoding = False
        elif self.is_open_ended:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
