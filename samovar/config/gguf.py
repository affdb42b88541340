"""Reads the header of a GGUF file (versions 2 and 3, split files too): metadata and tensor directory, no weights.

Written for files nobody vouches for. Every count, length and offset is compared with what is left of the file before
anything is allocated, Python's integers do not overflow, and whatever is wrong becomes a one-line `CheckpointError`.
It does not know what the metadata means; `config.gguf_config` does.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

from samovar.config.gguf_types import GGML_TYPES, GGMLType
from samovar.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ELEMENTS = 1 << 22
"""Most entries of one array: sixteen times the largest vocabulary in use."""
MAX_VALUE_BYTES = 1 << 27
"""Most bytes of one string or array."""
MAX_NESTED_ELEMENTS = 1 << 16
"""Most entries of all arrays of arrays together; no known model writes any."""
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 16
MAX_SPLITS = 10_000

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ARRAY_CODES = {struct_code: struct_code for struct_code in "BbHhIifQqd"} | {"?": "B"}
_WINDOW = 1 << 20
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """A string array of a GGUF file: one bytes object and the places where its entries start, decoded when asked for.

    A vocabulary of 260,000 tokens costs its bytes plus 2 MB. `raw` gives an entry's bytes unchanged; text that is not
    UTF-8 is decoded with U+FFFD in place of what is wrong.
    """

    __slots__ = ("_blob", "_starts")

    def __init__(self, blob: bytes, starts: array[int]) -> None:
        self._blob = blob
        self._starts = starts
        """Where each entry's 8-byte length stands in `_blob`, and where the last entry ends."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of entry `index` (not negative)."""
        return self._blob[self._starts[index] + 8 : self._starts[index + 1]]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One entry, or a list of them."""
        if isinstance(index, slice):
            return [self.raw(i).decode("utf-8", "replace") for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.raw(index % len(self)).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        blob, starts = self._blob, self._starts
        for i in range(len(starts) - 1):
            yield blob[starts[i] + 8 : starts[i + 1]].decode("utf-8", "replace")

    def find(self, text: str) -> int | None:
        """Index of the first entry equal to `text`, or None; a byte search, not a walk over the entries."""
        key = text.encode("utf-8")
        needle, at = _U64.pack(len(key)) + key, -1
        while (at := self._blob.find(needle, at + 1)) >= 0:
            index = bisect_right(self._starts, at) - 1
            if self._starts[index] == at:
                return index
        return None


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory. `shape` is in row-major order, as torch writes it (the file has it reversed).

    `offset` counts from the start of `file`; the `nbytes` from there are known to lie inside it.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says before its weights. `files` has one path, or all parts of a split file in order.

    `metadata` values are int, float, bool, str, `StringArray`, `array.array` of numbers, or lists (bools, nested).
    """

    files: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    alignment: int


class _Reader:
    """Takes values off the front of one file; refuses to go beyond its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.window, self.start, self.cursor = b"", 0, 0
        self.nested_left = MAX_NESTED_ELEMENTS

    @property
    def position(self) -> int:
        return self.start + self.cursor

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, count: int, what: str) -> None:
        """Check that `count` more bytes are in the file."""
        if count > self.size - self.position:
            left = self.size - self.position
            raise self.fail(
                f"truncated or damaged GGUF header: {what} needs {count} bytes, {left} are left in the file"
            )

    def fill(self, count: int) -> None:
        """Move the window so that `count` bytes (already checked) are in it."""
        if len(self.window) - self.cursor >= count:
            return
        self.start, self.cursor = self.position, 0
        self.file.seek(self.start)
        self.window = self.file.read(max(count, _WINDOW))
        if len(self.window) < count:
            raise self.fail("the file became shorter while it was read")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.fill(count)
        self.cursor += count
        return self.window[self.cursor - count : self.cursor]

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.take(size, what))[0]

    def string(self, what: str, most: int) -> bytes:
        length = self.number("Q", what)
        if length > most:
            raise self.fail(f"{what} claims {length} bytes, the limit is {most}")
        return self.take(length, what)

    def name(self, what: str) -> str:
        raw = self.string(what, MAX_NAME_BYTES)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None
        if not text or not text.isprintable():
            raise self.fail(f"{what} is empty or has control characters: {text[:40]!r}")
        return text

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], f"metadata {key!r}")
        if kind == _STRING:
            return self.string(f"metadata {key!r}", MAX_VALUE_BYTES).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.list_of(key, depth + 1)
        raise self.fail(f"metadata {key!r} has unknown value type {kind}")

    def list_of(self, key: str, depth: int) -> Any:
        what = f"metadata array {key!r}"
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} is nested deeper than {MAX_ARRAY_DEPTH} levels")
        kind, count = self.number("I", what), self.number("Q", what)
        smallest = struct.calcsize("<" + _SCALARS[kind]) if kind in _SCALARS else {_STRING: 8, _ARRAY: 12}.get(kind)
        if smallest is None:
            raise self.fail(f"{what} has unknown entry type {kind}")
        if count > MAX_ELEMENTS or count * smallest > MAX_VALUE_BYTES:
            raise self.fail(
                f"{what} claims {count} entries, the limit is {min(MAX_ELEMENTS, MAX_VALUE_BYTES // smallest)}"
            )
        self.need(count * smallest, what)
        if depth > 1 or kind == _ARRAY:
            self.nested_left -= count + 1
            if self.nested_left < 0:
                raise self.fail(f"{what}: more than {MAX_NESTED_ELEMENTS} entries in nested arrays")
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            return [self.list_of(key, depth + 1) for _ in range(count)]
        return self.numbers(_SCALARS[kind], count * smallest, what)

    def numbers(self, code: str, nbytes: int, what: str) -> array[Any] | list[bool]:
        values: array[Any] = array(_ARRAY_CODES[code])
        values.frombytes(self.take(nbytes, what))
        if sys.byteorder == "big":
            values.byteswap()
        return [bool(v) for v in values] if code == "?" else values

    def strings(self, count: int, what: str) -> StringArray:
        """Walk over the length prefixes only, then keep the whole stretch as one bytes object."""
        first = self.position
        starts = array("Q", bytes(8 * (count + 1)))
        unpack, window, cursor = _U64.unpack_from, self.window, self.cursor
        for i in range(count):
            starts[i] = self.start + cursor - first
            if cursor + 8 > len(window):
                self.cursor = cursor
                self.need(8, what)
                self.fill(8)
                window, cursor = self.window, 0
            cursor += 8 + unpack(window, cursor)[0]
            if cursor > len(window):
                self.skip_to(self.start + cursor, first, what)
                window, cursor = self.window, 0
        self.cursor = cursor
        starts[count] = self.position - first
        if starts[count] > MAX_VALUE_BYTES:
            raise self.fail(f"{what} is larger than {MAX_VALUE_BYTES} bytes")
        self.file.seek(first)
        return StringArray(self.file.read(self.position - first), starts)

    def skip_to(self, position: int, first: int, what: str) -> None:
        """Go on behind the window; `position` comes from a length in the file and is checked here."""
        if position > self.size:
            raise self.fail(f"truncated or damaged GGUF header: an entry of {what} ends behind the end of the file")
        if position - first > MAX_VALUE_BYTES:
            raise self.fail(f"{what} is larger than {MAX_VALUE_BYTES} bytes")
        self.start, self.cursor, self.window = position, 0, b""


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """The header of a GGUF file; of all parts if `path` is any part of a split file (`-00001-of-00003.gguf`).

    Raises `CheckpointError` for a file that is missing, truncated, damaged or hostile.
    """
    first = Path(path)
    header = _read_one(first)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= MAX_SPLITS:
        raise CheckpointError(f"{first}: split.count is {count!r}")
    if count <= 1:
        return header
    files = split_files(first)
    if len(files) != count:
        raise CheckpointError(
            f"{first}: is one of {count} parts, but is not named -0000N-of-{count:05d}.gguf; rename the parts"
        )
    return _join(files, [_read_one(file) for file in files])


def split_files(path: Path) -> list[Path]:
    """All parts of the split file that `path` is one of, in order; `[path]` when its name is not of that form."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[3]) <= MAX_SPLITS:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _join(files: list[Path], parts: list[GGUFHeader]) -> GGUFHeader:
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        said = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if said != (number, len(files)):
            raise CheckpointError(
                f"{files[number]}: should be part {number} of {len(files)}, but says {said[0]} of {said[1]}"
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{files[number]}: tensor {min(twice)!r} is already in an earlier part")
        tensors.update(part.tensors)
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{files[0]}: the parts should have {expected} tensors together, they have {len(tensors)}"
        )
    return GGUFHeader(tuple(files), parts[0].version, parts[0].metadata, tensors, parts[0].alignment)


def _read_one(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            return _parse(_Reader(path, file))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(reader: _Reader) -> GGUFHeader:
    if reader.size < 24:
        raise reader.fail(f"is {reader.size} bytes long, too short for a GGUF file")
    if (magic := reader.take(4, "the magic number")) != MAGIC:
        raise reader.fail(f"is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        raise reader.fail(
            f"GGUF version {version} (0x{version:08x}) is not supported; versions 2 and 3, little-endian, are"
        )
    num_tensors, num_keys = reader.number("Q", "the tensor count"), reader.number("Q", "the metadata count")
    for what, count, most, smallest in (
        ("tensors", num_tensors, MAX_TENSORS, 24),
        ("metadata keys", num_keys, MAX_METADATA_KEYS, 13),
    ):
        if count > most:
            raise reader.fail(f"claims {count} {what}, the limit is {most}")
        reader.need(count * smallest, f"a directory of {count} {what}")
    metadata = _parse_metadata(reader, num_keys)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, not {alignment!r}")
    return GGUFHeader((reader.path,), version, metadata, _parse_tensors(reader, num_tensors, alignment), alignment)


def _parse_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = reader.name(f"metadata key {i}")
        if key in metadata:
            raise reader.fail(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.number("I", f"metadata {key!r}"), key)
    return metadata


def _parse_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int, int]] = {}
    for i in range(count):
        name = reader.name(f"the name of tensor {i}")
        if name in entries:
            raise reader.fail(f"tensor {name!r} appears twice")
        num_dims = reader.number("I", f"tensor {name!r}")
        if num_dims > MAX_DIMENSIONS:
            raise reader.fail(f"tensor {name!r} claims {num_dims} dimensions, the limit is {MAX_DIMENSIONS}")
        dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims, f"tensor {name!r}"))
        number, offset = reader.number("I", f"tensor {name!r}"), reader.number("Q", f"tensor {name!r}")
        entries[name] = (dims[::-1], *_storage(reader, name, dims, number), offset)
    start = -(-reader.position // alignment) * alignment
    _check_ranges(
        reader, start, {name: (offset, nbytes) for name, (_, _, nbytes, offset) in entries.items()}, alignment
    )
    return {
        name: GGUFTensor(name, shape, kind, reader.path, start + offset, nbytes)
        for name, (shape, kind, nbytes, offset) in entries.items()
    }


def _storage(reader: _Reader, name: str, dims: tuple[int, ...], number: int) -> tuple[GGMLType, int]:
    kind = GGML_TYPES.get(number)
    if kind is None:
        raise reader.fail(f"tensor {name!r} has unknown type number {number}")
    row = dims[0] if dims else 1
    if 0 in dims or row % kind.block_size:
        raise reader.fail(
            f"tensor {name!r} of type {kind.name} has dimensions {dims}; rows must be blocks of {kind.block_size}"
        )
    nbytes = row // kind.block_size * kind.block_bytes
    for dim in dims[1:]:
        nbytes *= dim
    if nbytes > reader.size:
        raise reader.fail(f"tensor {name!r} with dimensions {dims} needs {nbytes} bytes, the file has {reader.size}")
    return kind, nbytes


def _check_ranges(reader: _Reader, start: int, ranges: dict[str, tuple[int, int]], alignment: int) -> None:
    """Every tensor aligned, inside the file, and overlapping no other."""
    end, previous = 0, ""
    for name, (offset, nbytes) in sorted(ranges.items(), key=lambda item: item[1]):
        if offset % alignment:
            raise reader.fail(f"tensor {name!r} starts at offset {offset}, not a multiple of the alignment {alignment}")
        if start + offset + nbytes > reader.size:
            raise reader.fail(
                f"truncated or damaged: tensor {name!r} ends at byte {start + offset + nbytes} of {reader.size}"
            )
        if offset < end:
            raise reader.fail(f"tensors {previous!r} and {name!r} overlap")
        end, previous = offset + nbytes, name
