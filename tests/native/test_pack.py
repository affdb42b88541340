"""Packing is a rearrangement: what is unpacked equals the dequantized source bit for bit, for every format and size."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from samovar.native.abi import Format
from samovar.native.library import NativeError, load
from samovar.native.matrix import Matrix, aligned_bytes, packed_bytes, source_row_bytes
from tests.native.random_blocks import (
    BLOCK_BYTES,
    FLAT,
    HALVES,
    PLAIN,
    SUPER,
    WEIGHT_FORMATS,
    block_of,
    expected_values,
    random_source,
)  # fmt: skip

SHAPES = [(1, 1), (16, 2), (37, 3), (48, 1), (5, 7)]
"""Rows, and columns in blocks (odd numbers of plain ones)."""


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit; any NaN equals any other."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def cols_of(format: Format, blocks: int) -> int:
    """Columns of so many blocks; for plain formats not a multiple of anything."""
    return block_of(format) * blocks if block_of(format) > 1 else 19 * blocks


@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_unpacked_equals_dequantized(format: Format, rows: int, blocks: int) -> None:
    rng, cols = np.random.default_rng(rows * 100 + blocks), cols_of(format, blocks)
    source = random_source(format, rows, cols, rng)
    assert source.shape[1] == source_row_bytes(format, cols)
    matrix = Matrix(format, rows, cols).pack(source)
    assert same_bits(matrix.unpack(), expected_values(format, source, cols))
    last = rows - 1
    assert same_bits(matrix.unpack(last, 1), expected_values(format, source[last:], cols))


@pytest.mark.parametrize("format", [*FLAT, *SUPER], ids=lambda format: format.name)
def test_any_bytes_at_all(format: Format) -> None:
    """Scales may be infinite, NaN, denormal, or minus zero: every float16 number occurs."""
    rows, cols = 32, 2048 if format in SUPER else 32 * 64
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (rows * cols // block_of(format), BLOCK_BYTES[format]), dtype=np.uint8)
    for at in HALVES[format]:
        blocks[:, at : at + 2] = rng.integers(0, 65536, (len(blocks), 1)).astype(np.uint16).view(np.uint8)
    source = blocks.reshape(rows, -1)
    with np.errstate(all="ignore"):
        assert same_bits(Matrix(format, rows, cols).pack(source).unpack(), expected_values(format, source, cols))


def test_every_half_is_converted_exactly() -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    matrix = Matrix(Format.F16, 256, 256).pack(values.view(np.uint8).reshape(256, 512))
    assert same_bits(matrix.unpack(), values.astype(np.float32).reshape(256, 256))


@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
def test_parts_make_the_same_whole(format: Format) -> None:
    rows, cols = 70, cols_of(format, 2)
    source = random_source(format, rows, cols, np.random.default_rng(7))
    whole, parts = Matrix(format, rows, cols).pack(source), Matrix(format, rows, cols)
    for first, count in ((32, 16), (48, 22), (0, 32)):
        parts.pack(source[first : first + count], first, count)
    assert same_bits(whole.unpack(), parts.unpack())


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, *FLAT, Format.Q2_K, Format.Q6_K], ids=lambda f: f.name)
def test_in_place_where_the_sizes_agree(format: Format) -> None:
    """Formats that take no more room than their source may be packed where the source stands."""
    rows, cols = 64, 512
    source = random_source(format, rows, cols, np.random.default_rng(11))
    assert packed_bytes(format, rows, cols) == source.nbytes
    room = aligned_bytes(source.nbytes)
    room[:] = source.reshape(-1)
    matrix = Matrix(format, rows, cols, address=room.ctypes.data, owner=room).pack(room.ctypes.data)
    assert same_bits(matrix.unpack(), expected_values(format, source, cols))


def test_padding_rows_are_zeros_whatever_stood_there() -> None:
    """Kernels compute padding rows too: what is left in memory must not make them NaN."""
    for format in WEIGHT_FORMATS:
        cols = cols_of(format, 1)
        source = random_source(format, 3, cols, np.random.default_rng(13))
        room = aligned_bytes(packed_bytes(format, 3, cols))
        room[:] = 255
        Matrix(format, 3, cols, address=room.ctypes.data, owner=room).pack(source)
        padded = Matrix(format, 16, cols, address=room.ctypes.data, owner=room).unpack(3, 13)
        assert not padded.any(), format.name


@pytest.mark.parametrize(
    ("format", "rows", "cols", "words"),
    [
        (Format.Q4_0, 16, 48, "48 columns"),
        (Format.Q4_K, 16, 128, "blocks of 256"),
        (Format.KV_I8, 16, 64, "format 31"),
        (Format.Q8_0, 0, 32, "0 rows"),
        (Format.F32, 4, -1, "-1 columns"),
    ],
)
def test_sizes_that_cannot_be(format: Format, rows: int, cols: int, words: str) -> None:
    with pytest.raises(NativeError, match=words):
        packed_bytes(format, rows, cols)


@pytest.mark.parametrize(("first", "count"), [(8, 8), (0, 17), (-16, 16), (32, 16), (0, 48), (16, -1)])
def test_rows_that_are_no_whole_panels(first: int, count: int) -> None:
    matrix = Matrix(Format.F32, 40, 4)
    source = np.zeros((48, 4), dtype=np.float32)
    with pytest.raises(NativeError, match="whole panels"):
        matrix.pack(source.ctypes.data, first, count)


def test_rows_outside_are_not_unpacked() -> None:
    matrix = Matrix(Format.F32, 4, 4).pack(np.zeros((4, 4), dtype=np.float32))
    with pytest.raises(NativeError, match="4 rows"):
        matrix.unpack(2, 3)


def test_refusals_need_no_room_for_words() -> None:
    functions = load().functions
    assert functions.samovar_packed_bytes(Format.Q4_0, 16, 31, None, 0) == 0
    assert functions.samovar_source_row_bytes(Format.KV_I8, 32) == 0
    short = ctypes.create_string_buffer(8)
    assert functions.samovar_packed_bytes(Format.Q4_0, 16, 31, short, 8) == 0
    assert short.value == b"31 colu"


def test_plain_columns_are_padded_to_groups() -> None:
    assert packed_bytes(Format.BF16, 16, 33) == 16 * 64 * 2
    assert packed_bytes(Format.I8, 16, 33) == 16 * 64 + 64
    assert packed_bytes(Format.F32, 16, 33) == 16 * 33 * 4
    assert {packed_bytes(format, 17, 64) for format in PLAIN} == {32 * 64 * 4, 32 * 64 * 2}
