"""A small HTTP server for files: ranges, cut connections, and the parts of a hub's API that its client uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer(ThreadingHTTPServer):
    """Serves `files` (path -> bytes). `cut_after` ends every body after so many bytes; `requests` is the log.

    `ranges` off ignores Range headers, as simple servers do. `repos` maps "owner/name" to {file: bytes}; files in `hidden`
    are listed but not found.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.repos: dict[str, dict[str, bytes]] = {}
        self.hidden: set[str] = set()
        self.cut_after: int | None = None
        self.chunk_delay = 0.0
        self.ranges = True
        self.status: int | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Answer(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.partition("?")[0]
        if self.server.status is not None:
            self._send(self.server.status, b"", {}, body)
        elif path in self.server.files:
            self._send(200, self.server.files[path], {}, body)
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)) is not None:
            self._api(found[1], found[2], body)
        elif (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
            self._resolve(found[1], found[3], body)
        else:
            self._send(404, b"", {}, body)

    def _api(self, repo: str, kind: str | None, body: bool) -> None:
        files = self.server.repos.get(repo)
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            return
        if kind == "tree":
            content: Any = [
                {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for name, raw in files.items()
            ]
        else:
            content = {"id": repo, "sha": commit_of(files), "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

    def _resolve(self, repo: str, name: str, body: bool) -> None:
        files = self.server.repos.get(repo, {})
        if name not in files or name in self.server.hidden:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        etag = hashlib.sha1(files[name]).hexdigest()
        self._send(200, files[name], {"X-Repo-Commit": commit_of(files), "ETag": f'"{etag}"'}, body)

    def _send(self, status: int, raw: bytes, headers: dict[str, str], body: bool) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is not None and self.server.ranges and status == 200:
            start = int(wanted[1])
            headers = {**headers, "Content-Range": f"bytes {start}-{len(raw) - 1}/{len(raw)}"}
            status, raw = (206, raw[start:]) if start < len(raw) else (416, b"")
            if status == 416:
                headers["Content-Range"] = f"bytes */{len(self.server.files.get(self.path, b''))}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if not body:
            return
        cut = self.server.cut_after
        for at in range(0, len(raw) if cut is None else min(cut, len(raw)), 1 << 16):
            piece = raw[at : at + (1 << 16)] if cut is None else raw[at : min(at + (1 << 16), cut)]
            try:
                self.wfile.write(piece)
            except OSError:
                return
            self.server.sent += len(piece)
            if self.server.chunk_delay:
                threading.Event().wait(self.server.chunk_delay)
        if cut is not None and cut < len(raw):
            self.close_connection = True


@contextmanager
def running() -> Iterator[FileServer]:
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
