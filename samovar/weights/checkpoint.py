"""Checkpoint: named tensors of a model on disk, readable in parts, whatever the file format."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from samovar.config.description import ModelDescription
from samovar.errors import CheckpointError

CHUNK_WEIGHTS = 1 << 18
"""Weights converted at a time: intermediates stay in the CPU's cache, and no large temporary ever exists."""

STEPS_PER_PIECE = 8
"""Conversions that one thread does in a row."""

Shard = tuple[int, int]
"""(which, of how many) equal parts along an axis."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as stored. `dtype_name` is the format's own word ("BF16", "Q4_K").

    `dtype` is what `read` returns (float32 for block formats); `place` orders tensors as they lie on disk.
    """

    shape: tuple[int, ...]
    dtype_name: str
    nbytes: int
    dtype: torch.dtype
    place: tuple[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some rows of one copy: `target` gets what begins at row `first`; `column` is (axis, shard) when a later axis is cut."""

    name: str
    target: torch.Tensor
    first: int
    column: tuple[int, Shard] | None


class Checkpoint(ABC):
    """Tensors by Hugging Face name. Reading copies; nothing stays mapped. Close it, or use it as a context manager."""

    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drops_pages = False
        """Tell the system to forget what was read, so that a large file does not push everything else out of memory."""
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, name: str, *, axis: int | None = None, shard: Shard = (0, 1)) -> torch.Tensor:
        """Tensor `name`, or its part `shard` along `axis`, in the dtype of `tensors[name]`, on the CPU."""
        shape = self.shape_of(name, axis=axis, shard=shard)
        target = torch.empty(shape, dtype=self.tensors[name].dtype)
        self.read_into(name, target, axis=axis, shard=shard)
        return target

    def shape_of(self, name: str, *, axis: int | None = None, shard: Shard = (0, 1)) -> tuple[int, ...]:
        """Shape of what `read` returns; `CheckpointError` if the tensor does not exist or does not divide."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return sharded_shape(name, self.tensors[name].shape, axis, shard)

    def read_into(self, name: str, target: torch.Tensor, *, axis: int | None = None, shard: Shard = (0, 1)) -> None:
        """Fill `target` (any device, float dtypes converted) with `name` or a part of it, a few rows at a time.

        A part along axis 0 reads only its own rows. A scalar also fills a target of shape [1].
        """
        for piece in self.pieces(name, target, axis=axis, shard=shard):
            self.copy(piece)

    def pieces(self, name: str, target: torch.Tensor, *, axis: int | None = None, shard: Shard = (0, 1)) -> list[Piece]:
        """The work of `read_into` in parts that any threads may `copy` in any order."""
        shape = self.shape_of(name, axis=axis, shard=shard)
        if tuple(target.shape) != (shape or (1,)) and tuple(target.shape) != shape:
            raise CheckpointError(f"{name}: layer holds {tuple(target.shape)}, checkpoint gives {shape}")
        if target.dim() == 0:
            target = target.view(1)
        first = shape[0] * shard[0] if axis == 0 else 0
        rows = self._rows_at_once(name, self.tensors[name].shape or (1,)) * STEPS_PER_PIECE
        column = (axis, shard) if axis else None
        parts = torch.split(target, rows) if target.shape[0] else ()
        return [Piece(name, part, first + rows * i, column) for i, part in enumerate(parts)]

    def copy(self, piece: Piece) -> None:
        """Fill one piece."""
        info = self.tensors[piece.name]
        whole = info.shape or (1,)
        first = piece.first
        for part in torch.split(piece.target, self._rows_at_once(piece.name, whole)):
            if piece.column is None:
                self._copy_rows(piece.name, first, part)
            else:
                axis, (which, _) = piece.column
                rows = torch.empty((part.shape[0], *whole[1:]), dtype=info.dtype)
                self._copy_rows(piece.name, first, rows)
                part.copy_(rows.narrow(axis, part.shape[axis] * which, part.shape[axis]))
            first += part.shape[0]

    def read_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """Fill `target` (contiguous, on the CPU, dtype of `tensors[name]`) with the rows of `name` from `first` on."""
        for part in torch.split(target, self._rows_at_once(name, self.tensors[name].shape or (1,))):
            self._copy_rows(name, first, part)
            first += part.shape[0]

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape and, as `read` gives them, the same values."""
        one, two = self.tensors[first], self.tensors[second]
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        shape = one.shape or (1,)
        step = min(self._rows_at_once(first, shape), self._rows_at_once(second, shape))
        for row in range(0, shape[0], step):
            rows = [torch.empty((min(step, shape[0] - row), *shape[1:]), dtype=one.dtype) for _ in range(2)]
            self._copy_rows(first, row, rows[0])
            self._copy_rows(second, row, rows[1])
            if not torch.equal(*rows):
                return False
        return True

    def _rows_at_once(self, name: str, shape: tuple[int, ...]) -> int:
        """How many entries along axis 0 to convert together."""
        if len(shape) < 2:
            return max(1, shape[0])
        return max(1, CHUNK_WEIGHTS // max(1, torch.Size(shape[1:]).numel()))

    @abstractmethod
    def _copy_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """Fill `target` with the entries of `name` from `first` on along axis 0, all others whole."""

    def _read_bytes(self, file: Path, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer` (contiguous uint8 on the CPU) from `offset` of `file`."""
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._open(file), [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{file}: became shorter while it was read (at byte {offset + done})")
                done += count
            if self.drops_pages and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._open(file), offset, done, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._files[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._files[file]

    def close(self) -> None:
        """Close the files; reading afterwards opens them again."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sharded_shape(name: str, shape: tuple[int, ...], axis: int | None, shard: Shard) -> tuple[int, ...]:
    """Shape of one of `shard[1]` equal parts along `axis`; scalars are never split."""
    which, count = shard
    if axis is None or not shape or count == 1:
        return shape
    if not 0 <= which < count or not 0 <= axis < len(shape):
        raise CheckpointError(f"{name}: part {which} of {count} along axis {axis} does not exist in shape {shape}")
    if shape[axis] % count:
        raise CheckpointError(f"{name}: axis {axis} of shape {shape} does not divide into {count} equal parts")
    return (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def open_checkpoint(description: ModelDescription, *, blocks: Container[str] = ()) -> Checkpoint:
    """The tensors of a described checkpoint; headers are read and checked again, no weights yet.

    `blocks` names tensors of a GGUF file that are wanted as they are stored.
    """
    from samovar.weights.gguf import GGUFCheckpoint
    from samovar.weights.safetensors import SafetensorsCheckpoint

    if description.format == "gguf":
        return GGUFCheckpoint(description.path, blocks=blocks)
    if description.format == "safetensors":
        return SafetensorsCheckpoint(description.path)
    raise CheckpointError(f"{description.path}: load_format is dummy, there are no weights to open")
