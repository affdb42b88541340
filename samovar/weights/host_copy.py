"""HostCopy: weights moved to host memory and back, so that the device's memory can serve others meanwhile.

Memory is exchanged below the tensors: every tensor and view stays the object it is, so layers, and what was fused from
them, need not hear of it. Only addresses change, which captured graphs would have to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from samovar.errors import ConflictError
from samovar.hardware import cpu
from samovar.weights.plan import layers_of

Progress = Callable[[int, int], None]
"""Called with (bytes moved, bytes in all)."""

BLOCK_BYTES = 256 << 20
"""Host memory is taken in blocks of this size: torch rounds pinned memory up to powers of two."""


class HostCopy:
    """The weights of one model in host memory, pinned for a GPU. The device's memory is free once this is made.

    Raises `ConflictError` if the host has no room; then nothing has changed.
    """

    def __init__(self, model: nn.Module, progress: Progress | None = None) -> None:
        storages = list(_storages(model))
        sizes = [storage.nbytes() for storage in storages]
        total, available = sum(sizes), cpu.memory_bytes()[1]
        if total + BLOCK_BYTES > available:
            raise ConflictError(
                f"the weights take {total >> 20} MiB, but the host has {available >> 20} MiB left: use level 2, which "
                f"reads them from the checkpoint again"
            )
        self.num_bytes = total
        self._parts: list[tuple[torch.UntypedStorage, int, list[torch.Tensor]]] = []
        with torch.inference_mode():
            room = _Room(total, is_pinned=any(storage.device.type == "cuda" for storage in storages))
            for storage, size in zip(storages, sizes, strict=True):
                pieces = room.take(size)
                for piece, source in zip(pieces, _cut(storage, pieces), strict=True):
                    piece.copy_(source)
                self._parts.append((storage, size, pieces))
                if progress is not None:
                    progress(room.num_taken, total)
            for storage in storages:
                storage.resize_(0)

    def restore(self, progress: Progress | None = None) -> None:
        """Bring everything back. After a `torch.OutOfMemoryError` it may be tried again."""
        done = 0
        with torch.inference_mode():
            for storage, size, pieces in self._parts:
                if storage.nbytes() != size:
                    storage.resize_(size)
                    for piece, target in zip(pieces, _cut(storage, pieces), strict=True):
                        target.copy_(piece)
                done += size
                if progress is not None:
                    progress(done, self.num_bytes)


class _Room:
    """Host memory for `total` bytes, given out piece by piece."""

    def __init__(self, total: int, *, is_pinned: bool) -> None:
        self._left, self._is_pinned = total, is_pinned
        self._block = torch.empty(0, dtype=torch.uint8)
        self.num_taken = 0

    def take(self, size: int) -> list[torch.Tensor]:
        """Pieces that together hold `size` bytes."""
        pieces = []
        self.num_taken += size
        while size:
            if not len(self._block):
                count = min(self._left, BLOCK_BYTES)
                self._block = torch.empty(count, dtype=torch.uint8, pin_memory=self._is_pinned)
                self._left -= count
            piece, self._block = self._block[:size], self._block[size:]
            size -= len(piece)
            pieces.append(piece)
        return pieces


def _storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    """The memory of every tensor that the layers of `model` own, once each; not what belongs to others (NumPy, a file)."""
    seen: set[int] = set()
    for layer in layers_of(model):
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _cut(storage: torch.UntypedStorage, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The bytes of a storage, in pieces of these lengths."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.split(whole, [len(piece) for piece in pieces])
