"""BatchRun: the lines of an OpenAI batch file through the application, many at once, written in their order.

Every line gets exactly one answer line. What is wrong with a line is said there and stops nothing. At most a window of
lines is in memory, however long the files are; of the lines before only a digest of each `custom_id` is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp

from samovar.errors import EngineDeadError
from samovar.server.batch_files import BatchOutput, InputLine
from samovar.server.in_process import Answer, post

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What a line may ask for."""
WINDOW_FACTOR = 4
"""Lines in memory for each request that runs: answers may wait for a slow one before them."""
WINDOW_BYTES = 256 * 1024 * 1024
"""Bytes of lines in memory, if they are many; one line is always taken."""
MAX_CUSTOM_ID = 512
UNAVAILABLE = 503
MOST_FAILURES = 5
"""How often a line is tried again that met a dead engine, or a full queue while nothing else ran."""
FIRST_WAIT, LAST_WAIT = 0.1, 1.0
"""Seconds before a line is tried again: doubled each time, up to the most."""

_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode

RESTART_SECONDS = 600.0
"""How long the engine may take to come back before the run ends."""
POLL_SECONDS = 0.1

Progress = Callable[[int, int], None]
"""(lines answered, bytes of the input done)."""


class LineFault(msgspec.Struct):
    """Why a line has no answer, or what its answer's error is."""

    code: str
    message: str


class LineResponse(msgspec.Struct):
    """The answer of the server to one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """One line of the output. `error` is set if the line was wrong or its answer is an error."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineFault | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A line that can be sent."""

    custom_id: str
    url: str
    body: bytes


class LineReader:
    """Checks lines, one after the other: a `custom_id` may come once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def read(self, line: InputLine) -> Asked | OutputLine:
        """What a line asks for, or the answer that says what is wrong with it."""
        custom_id: str | None = None
        try:
            fields = self._fields(line)
            custom_id = _text(fields, "custom_id", MAX_CUSTOM_ID)
            digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                raise _Wrong(
                    "duplicate_custom_id", f"custom_id {custom_id!r} came in an earlier line; give every line its own"
                )
            self._seen.add(digest)
            return Asked(custom_id, _url(fields), _body(fields))
        except _Wrong as wrong:
            return OutputLine(line.answer_id, custom_id, error=LineFault(wrong.code, f"line {line.number}: {wrong}"))

    def _fields(self, line: InputLine) -> dict[str, msgspec.Raw]:
        if line.is_too_long:
            raise _Wrong("line_too_long", "is longer than a request may be (--max-body-bytes)")
        try:
            line.raw.decode("utf-8")
            return _top_level.decode(line.raw)
        except UnicodeDecodeError as error:
            raise _Wrong("invalid_json", f"is not UTF-8 (byte {error.start})") from None
        except msgspec.ValidationError:
            raise _Wrong("invalid_line", "must be a JSON object with custom_id, method, url and body") from None
        except msgspec.DecodeError as error:
            raise _Wrong("invalid_json", f"is not JSON: {error}") from None
        except RecursionError:
            raise _Wrong("invalid_json", "is nested too deeply") from None


class _Wrong(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _text(fields: dict[str, msgspec.Raw], name: str, longest: int) -> str:
    if name not in fields:
        raise _Wrong("invalid_line", f"{name} is missing")
    try:
        value = msgspec.json.decode(fields[name], type=str)
    except msgspec.DecodeError:
        raise _Wrong("invalid_line", f"{name} must be a string, got {_shown(fields[name])}") from None
    if not 1 <= len(value) <= longest:
        raise _Wrong("invalid_line", f"{name} must have 1 to {longest} characters, got {len(value)}")
    return value


def _shown(raw: msgspec.Raw) -> str:
    return bytes(raw)[:64].decode("utf-8", "replace")


def _url(fields: dict[str, msgspec.Raw]) -> str:
    method, url = _text(fields, "method", 16), _text(fields, "url", 256)
    if method != "POST":
        raise _Wrong("invalid_method", f"method must be POST, got {method!r}")
    if url not in URLS:
        raise _Wrong("invalid_url", f"url must be one of {', '.join(URLS)}, got {url!r}")
    return url


def _body(fields: dict[str, msgspec.Raw]) -> bytes:
    if "body" not in fields:
        raise _Wrong("invalid_line", "body is missing")
    body = bytes(fields["body"])
    try:
        options: dict[str, Any] = _top_level.decode(body)
    except msgspec.DecodeError:
        raise _Wrong("invalid_line", f"body must be an object, got {_shown(fields['body'])}") from None
    for name in ("stream", "background"):
        if bytes(options.get(name, b"false")) not in (b"false", b"null"):
            raise _Wrong("invalid_request", f"body.{name}: a batch has whole answers only; leave it out")
    return body


def _answered(line: InputLine, asked: Asked, request_id: str, answer: Answer) -> OutputLine:
    response = LineResponse(answer.status, request_id, msgspec.Raw(answer.body))
    fault = None if answer.status < 400 else _fault(answer)
    return OutputLine(line.answer_id, asked.custom_id, response, fault)


def _fault(answer: Answer) -> LineFault:
    """The error of an answer, whichever API it is of."""
    error = msgspec.json.decode(answer.body)["error"]
    return LineFault(str(error.get("type") or answer.status), str(error.get("message", "")))


@dataclass(slots=True)
class _Pending:
    """A line in the window. The task is None where no request was needed."""

    line: InputLine
    task: asyncio.Task[OutputLine] | None
    answer: OutputLine | None = None

    @property
    def is_done(self) -> bool:
        return self.task is None or self.task.done()

    def result(self) -> OutputLine:
        if self.task is not None:
            return self.task.result()
        assert self.answer is not None
        return self.answer


class BatchRun:
    """One run over the lines that are left. `is_ready` says whether the engine is there."""

    def __init__(
        self, app: ASGIApp, reader: LineReader, output: BatchOutput, concurrency: int, is_ready: Callable[[], bool]
    ) -> None:
        self.num_answered = 0
        self._app = app
        self._reader = reader
        self._output = output
        self._concurrency = concurrency
        self._is_ready = is_ready
        self._gate = asyncio.Semaphore(concurrency)
        self._num_running = 0
        self._window: deque[_Pending] = deque()
        self._bytes = 0

    async def run(self, lines: Iterator[InputLine], progress: Progress) -> None:
        """Answer every line. When cancelled, or when something fails, what is complete has been written in order."""
        try:
            while self._fill(lines):
                waiting = self._window[0].task
                if waiting is not None:
                    await asyncio.wait([waiting])
                await self._write(progress)
        except asyncio.CancelledError:
            await self._write(progress)
            raise
        finally:
            tasks = [pending.task for pending in self._window if pending.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _fill(self, lines: Iterator[InputLine]) -> bool:
        """Take lines until the window is full; False when all are written."""
        while len(self._window) < WINDOW_FACTOR * self._concurrency and (
            self._bytes < WINDOW_BYTES or not self._window
        ):
            line = next(lines, None)
            if line is None:
                break
            asked = self._reader.read(line)
            if isinstance(asked, OutputLine):
                self._window.append(_Pending(line, None, asked))
            else:
                self._window.append(_Pending(line, asyncio.ensure_future(self._one(line, asked))))
            self._bytes += len(line.raw)
        return bool(self._window)

    async def _one(self, line: InputLine, asked: Asked) -> OutputLine:
        async with self._gate:
            self._num_running += 1
            try:
                return await self._answer(line, asked)
            finally:
                self._num_running -= 1

    async def _answer(self, line: InputLine, asked: Asked) -> OutputLine:
        """One line through the application; again after the engine restarted or while its queue is full."""
        request_id = uuid.uuid4().hex
        headers = [(b"x-request-id", request_id.encode()), (b"anthropic-version", b"2023-06-01")]
        failures, wait = 0, FIRST_WAIT
        while True:
            answer = await post(self._app, asked.url, asked.body, headers)
            if answer.status == UNAVAILABLE:
                # A full queue empties while others are at work; a line that waits for nobody else is told.
                failures += not self._is_ready() or self._num_running == 1
            if answer.status != UNAVAILABLE or failures > MOST_FAILURES:
                return _answered(line, asked, request_id, answer)
            await asyncio.sleep(wait)
            await self._engine_is_back()
            wait = min(2 * wait, LAST_WAIT)

    async def _engine_is_back(self) -> None:
        """Wait for the engine. Raises `EngineDeadError` if it does not come."""
        waited = 0.0
        while not self._is_ready():
            if waited > RESTART_SECONDS:
                raise EngineDeadError(f"the engine was away for {waited:.0f} s; run the same command again to go on")
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    async def _write(self, progress: Progress) -> None:
        """Write the answers at the front of the window that are complete; one wait for the disk for all of them."""
        ready: list[_Pending] = []
        for pending in self._window:
            if not pending.is_done:
                break
            ready.append(pending)
        if not ready:
            return
        answers = [pending.result() for pending in ready]
        writing = asyncio.ensure_future(asyncio.to_thread(self._output.append, [_encode(answer) for answer in answers]))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing  # not to be given up half-way: what is written is what is counted
            self._count(ready, answers)
            raise
        self._count(ready, answers)
        progress(self.num_answered, ready[-1].line.end)

    def _count(self, ready: list[_Pending], answers: list[OutputLine]) -> None:
        for pending in ready:
            self._window.popleft()
            self._bytes -= len(pending.line.raw)
        self.num_answered += len(answers)
        self._output.num_errors += sum(answer.error is not None for answer in answers)
