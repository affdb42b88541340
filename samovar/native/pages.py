"""Memory in large pages, for weights: a step reads all of them, and every page is an address to be looked up."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

from samovar.native.abi import ALIGNMENT

LARGE_PAGE = 2 << 20
"""What Linux maps at once where it may, on x86-64 and on arm64 with small base pages."""
ROOM = 64 << 20
"""Reserved at once; what is not used of it is never touched, and takes no memory."""


class Pages:
    """Hands out memory, piece after piece of the same large pages. A room is given back with the last of its pieces."""

    def __init__(self) -> None:
        self._room: weakref.ref[NDArray[np.uint8]] | None = None
        self._next = 0

    def take(self, count: int) -> NDArray[np.uint8]:
        """`count` zero bytes at a multiple of `ALIGNMENT`."""
        room = None if self._room is None else self._room()
        if room is None or self._next + count > len(room):
            room = _reserve(max(count, ROOM))
            self._room, self._next = weakref.ref(room), -room.ctypes.data % LARGE_PAGE
        piece = room[self._next : self._next + count]
        self._next += -(-count // ALIGNMENT) * ALIGNMENT
        return piece


def _reserve(count: int) -> NDArray[np.uint8]:
    """Fresh memory that holds `count` bytes from a multiple of `LARGE_PAGE` on; the system is asked for large pages."""
    size = -(-count // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would have small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: small pages, as everywhere else
            pass
    return np.frombuffer(memory, np.uint8)
