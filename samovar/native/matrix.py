"""Packed weights: made from the rows of a checkpoint, held, and unpacked again for tests and embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from samovar.native.abi import ALIGNMENT, PANEL, CMatrix, Format
from samovar.native.library import Library, NativeError, load


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """`count` bytes, aligned as packed weights must be."""
    room = np.empty(count + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + count]


def source_row_bytes(format: Format, cols: int, library: Library | None = None) -> int:
    """Bytes of one row of `cols` weights as a checkpoint stores them."""
    return int((library or load()).functions.samovar_source_row_bytes(format, cols))


def packed_bytes(format: Format, rows: int, cols: int, library: Library | None = None) -> int:
    """Bytes of a packed weight; NativeError if the format cannot hold these sizes."""
    library = library or load()
    count, why = library.checked(library.functions.samovar_packed_bytes, format, rows, cols)
    if count <= 0:
        raise NativeError(why)
    return int(count)


class Matrix:
    """A packed weight of `rows` output and `cols` input features, in memory of its own or at a given `address`.

    `owner` is kept alive with it: whatever owns the memory at `address`.
    """

    def __init__(
        self, format: Format, rows: int, cols: int, address: int | None = None, owner: Any = None,
        library: Library | None = None,
    ) -> None:  # fmt: skip
        self.library = library or load()
        self.format, self.rows, self.cols = format, rows, cols
        self.num_bytes = packed_bytes(format, rows, cols, self.library)
        if address is None:
            owner = aligned_bytes(self.num_bytes)
            address = owner.ctypes.data
        if address % ALIGNMENT:
            raise NativeError(f"a packed weight must stand at a multiple of {ALIGNMENT} bytes, not at {address:#x}")
        self.address, self.owner = address, owner
        self.c = CMatrix(format, rows, cols, 0, address)

    def pack(self, source: NDArray[Any] | int, first_row: int = 0, num_rows: int | None = None) -> Matrix:
        """Pack source rows, an array or their address, to be the rows from `first_row` on (a multiple of 16)."""
        if not isinstance(source, int):
            source = np.ascontiguousarray(source)
            row_bytes = source_row_bytes(self.format, self.cols, self.library)
            if source.nbytes % row_bytes:
                raise NativeError(f"the source has {source.nbytes} bytes, which is no number of rows of {row_bytes}")
            if num_rows is None:
                num_rows = source.nbytes // row_bytes
            elif num_rows * row_bytes > source.nbytes:
                raise NativeError(f"the source has {source.nbytes} bytes, too few for {num_rows} rows of {row_bytes}")
            start = source.ctypes.data
        else:
            start = source
        count = self.rows - first_row if num_rows is None else num_rows
        pack = self.library.functions.samovar_pack
        failed, why = self.library.checked(
            pack, self.format, start, first_row, count, self.rows, self.cols, self.address
        )
        if failed:
            raise NativeError(why)
        return self

    def unpack(self, first_row: int = 0, num_rows: int | None = None) -> NDArray[np.float32]:
        """The weights as float32, [num_rows, cols]."""
        count = self.rows - first_row if num_rows is None else num_rows
        values = np.empty((count, self.cols), dtype=np.float32)
        unpack = self.library.functions.samovar_unpack
        failed, why = self.library.checked(unpack, self.c, first_row, count, values.ctypes.data)
        if failed:
            raise NativeError(why)
        return values


def padded_rows(rows: int) -> int:
    """Rows of a packed weight with the zeros that fill its last panel."""
    return -(-rows // PANEL) * PANEL
