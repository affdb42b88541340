"""The two files of a batch: lines of requests read one at a time, lines of answers written so that a run can go on.

An answer's `id` is made of its request's place and text. Thus a later run knows which lines are answered, and that they
answer this input and no other. Lines are durable before they count; half a line at the end is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from samovar.errors import ConfigError, SamovarError

LINE_EXTRA = 64 * 1024
"""Bytes that a line may have besides the largest body."""
ID_PREFIX = "batch_req_"
_BEGINNING = b'{"id":"' + ID_PREFIX.encode()
"""How every answer begins: nothing else is ever cut off."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line that is not blank. `end` is where the next one begins in the file."""

    number: int
    raw: bytes
    is_too_long: bool
    end: int

    @property
    def answer_id(self) -> str:
        """The `id` of this line's answer."""
        return ID_PREFIX + hashlib.sha256(b"%d\0%b" % (self.number, self.raw)).hexdigest()[:32]


def check_path(flag: str, path: str) -> None:
    """Raise `ConfigError` for what is not the name of a local file."""
    if "://" in path:
        raise ConfigError(
            f"{flag} {path}: only local files are read and written; download it first, or upload it afterwards"
        )
    if path == "-":
        raise ConfigError(f"{flag} -: a batch can only go on after a stop if it is in files; name one")
    if not path:
        raise ConfigError(f"{flag} is missing; name a file")


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """The input, to read bytes. Raises `ConfigError`."""
    check_path("--input-file", path)
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (closed below; only opening may fail here)
    except OSError as error:
        raise ConfigError(f"--input-file {path}: cannot be read: {error.strerror or error}") from error
    with file:
        yield file


def read_lines(file: BinaryIO, longest: int) -> Iterator[InputLine]:
    """The lines that are not blank; of a line over `longest` bytes only the beginning is kept."""
    number = 0
    while raw := file.readline(longest + 1):
        number += 1
        is_too_long = len(raw.rstrip(b"\r\n")) > longest
        tail = raw
        while is_too_long and not tail.endswith(b"\n") and (tail := file.readline(1 << 20)):
            pass
        text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if text := text.strip(b" \t\r\n"):
            yield InputLine(number, text, is_too_long, file.tell())


class _Answered(msgspec.Struct):
    """What is looked at of a line that is there already."""

    id: str
    error: msgspec.Raw = msgspec.Raw(b"null")


class BatchOutput:
    """The answers, in the input's order. Hold it with `open_output`. `num_errors` counts those that are errors."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = 0
        self.num_errors = 0

    def match(self, lines: Iterator[InputLine]) -> Iterator[InputLine]:
        """The lines of the input that are answered here already; half a line at the end is cut off.

        Raises `ConfigError` if what is there answers something else.
        """
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for at, answer in enumerate(file, 1):
                if not answer.endswith(b"\n"):
                    if answer[: len(_BEGINNING)] != _BEGINNING[: len(answer)]:
                        raise self._stranger(at, "it is no answer of a batch")
                    break
                line = next(lines, None)
                if line is None:
                    raise self._stranger(at, "the input has fewer lines")
                known = _read_answer(answer)
                if known is None or known.id != line.answer_id:
                    raise self._stranger(at, f"it does not answer line {line.number} of the input")
                self.num_errors += bytes(known.error) != b"null"
                self._size += len(answer)
                yield line
        os.ftruncate(self._descriptor, self._size)

    def append(self, lines: list[bytes]) -> None:
        """Write lines and wait until they are on the disk: all of them, or none if it raises `SamovarError`."""
        content = memoryview(b"".join(line + b"\n" for line in lines))
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._descriptor, content[written:], self._size + written)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            reason = f"cannot be written: {error.strerror or error}; free space and run the same command again"
            raise SamovarError(f"--output-file {self._path}: {reason}") from error
        self._size += len(content)

    def _stranger(self, at: int, why: str) -> ConfigError:
        return ConfigError(
            f"--output-file {self._path}: line {at}: {why}; name another file, or start afresh with --overwrite"
        )


def _read_answer(answer: bytes) -> _Answered | None:
    try:
        return msgspec.json.decode(answer, type=_Answered)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@contextmanager
def open_output(path: str, *, overwrite: bool, input_path: str) -> Iterator[BatchOutput]:
    """The output, for this process alone. Raises `ConfigError`."""
    check_path("--output-file", path)
    if Path(path).exists() and Path(input_path).exists() and Path(path).samefile(input_path):
        raise ConfigError(f"--output-file {path}: is the input file; name another one")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"--output-file {path}: cannot be written: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--output-file {path}: another run is writing it; wait for it, or name another file"
            ) from None
        if overwrite:
            os.ftruncate(descriptor, 0)
        yield BatchOutput(path, descriptor)
    finally:
        os.close(descriptor)
