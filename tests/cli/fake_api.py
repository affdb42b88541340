"""A server that speaks just enough of the OpenAI API, cutting its answers into pieces of any size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any


@dataclass
class FakeApi:
    """What it answers: `texts` piece by piece, at most `cut` bytes a write. `seen` holds the bodies that came."""

    texts: list[str] = field(default_factory=lambda: ["Hel", "lo", "!"])
    cut: int = 7
    models: list[str] = field(default_factory=lambda: ["fake"])
    api_key: str | None = None
    error_in_stream: str | None = None
    delay: float = 0.0
    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        _, path, _ = head.split("\r\n")[0].split()
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.answer(writer, path, json.loads(body) if body else {}, headers)
        finally:
            self.running -= 1
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """Write the answer to a path."""
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            await self.send(writer, 401, {"error": {"message": "wrong key", "code": 401}})
        elif path == "/v1/models":
            await self.send(writer, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/tokenize":
            await self.send(writer, 200, {"tokens": list(range(1, 1 + len(body["prompt"].split())))})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.seen.append(body)
            await self.complete(writer, body, is_chat="chat" in path)
        else:
            await self.send(writer, 404, {"error": {"message": f"no {path}"}})

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> None:
        """A completion, streamed or not."""
        prompt = json.dumps(body.get("prompt") or body.get("messages"))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self.texts)}
        if body.get("temperature", 0) > 2:
            await self.send(writer, 400, {"error": {"message": "temperature is too high", "code": 400}})
            return
        if not body.get("stream"):
            await asyncio.sleep(self.delay)
            text = "".join(self.texts)
            choice = {"message": {"content": text}} if is_chat else {"text": text}
            choices = [choice | {"finish_reason": "stop"} for _ in range(body.get("n", 1))]
            await self.send(writer, 200, {"choices": choices, "usage": usage})
            return
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}] if is_chat else []
        events += [{"choices": [{"delta": {"content": t}} if is_chat else {"text": t}]} for t in self.texts]
        events.append({"choices": [], "usage": usage})
        if self.error_in_stream is not None:
            events[2:] = [{"error": {"message": self.error_in_stream, "code": 500}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        lines.insert(1, ": a comment\n\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.write_chunks(writer, "".join(lines).encode())

    async def write_chunks(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        """The body in chunks that respect neither lines nor characters."""
        for start in range(0, len(content), self.cut):
            piece = content[start : start + self.cut]
            writer.write(f"{len(piece):x};ext=1\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(self.delay / 100)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def send(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        """A whole JSON answer."""
        content = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def running(api: FakeApi) -> Iterator[FakeApi]:
    """Serve on a free port from a thread of its own."""
    started, loops, stop = Event(), list[asyncio.AbstractEventLoop](), asyncio.Event()

    async def live() -> None:
        loops.append(asyncio.get_running_loop())
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        api.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        me = asyncio.current_task()
        if calls := [task for task in asyncio.all_tasks() if task is not me]:
            await asyncio.wait(calls, timeout=5)

    thread = Thread(target=lambda: asyncio.run(live()))
    thread.start()
    started.wait()
    try:
        yield api
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()
