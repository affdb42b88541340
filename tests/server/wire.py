"""Reading answers: event streams, metrics, and a raw HTTP client for what SDKs refuse to send."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec

from samovar.server.openai.schema import ChatCompletionChunk, Completion
from tests.server.live import LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def chunks_of(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each `data:` line; checks the framing byte by byte."""
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]
    frames = raw.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    lines = [f for f in frames[:-2] if not f.startswith(b":")]
    assert all(line.startswith(b"data: {") and b"\n" not in line for line in lines)
    return [json.loads(line[6:]) for line in lines]


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, each checked against the published schema."""
    answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(answer.content)
    kind: Any = ChatCompletionChunk if path == CHAT else Completion
    for chunk in chunks:
        if "error" not in chunk:
            record = msgspec.convert(chunk, type=kind)
            assert msgspec.to_builtins(record).keys() == chunk.keys()
    return chunks


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The joined text of one choice."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c.get("text", c.get("delta", {}).get("content", "")) or "" for c in parts)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, its shape and size checked."""
    assert len(answer.content) < 20_000
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    assert body["error"]["code"] == answer.status_code
    assert not re.search(r"0x[0-9a-f]{6,}|Traceback|/site-packages/", body["error"]["message"])
    return dict(body["error"])


def raw_request(server: LiveServer, body: bytes, *, path: str = CHAT, headers: bytes = b"") -> tuple[int, bytes]:
    """(status, body) of a POST made of exactly these bytes."""
    with server.connect() as sock:
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n" % path.encode()
        sock.sendall(head + headers + b"content-length: %d\r\n\r\n" % len(body) + body)
        return read_answer(sock)


def read_answer(sock: Any) -> tuple[int, bytes]:
    """Everything until the server closes -> (status, body)."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    head, _, rest = b"".join(parts).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), rest


def metrics_of(http: httpx.Client) -> dict[str, float]:
    """Sample name with labels -> value."""
    rows = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            rows[
                name.replace('engine="0",', "").replace('model_name="tiny"', "").replace("{}", "").replace(",}", "}")
            ] = float(value)
    return rows
