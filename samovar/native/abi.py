"""The C interface of libsamovar as ctypes sees it: `native/abi.h` in Python, names and order alike."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from enum import IntEnum

ABI_VERSION = 1
PANEL = 16
"""Rows of a weight that are interleaved."""
GROUP = 32
"""Activations that share a scale when they are quantized to int8."""
ALIGNMENT = 64
"""Of a packed weight, in bytes."""


class Format(IntEnum):
    """How the numbers of a weight, an embedding or a cache are stored."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3
    Q4_0 = 10
    Q4_1 = 11
    Q5_0 = 12
    Q5_1 = 13
    Q8_0 = 14
    Q2_K = 15
    Q3_K = 16
    Q4_K = 17
    Q5_K = 18
    Q6_K = 19
    IQ4_NL = 20
    IQ4_XS = 21
    KV_FP8_E4M3 = 30
    KV_I8 = 31


class Op(IntEnum):
    """Operations; `native/abi.h` says what each one computes from which operands."""

    EMBED = 0
    RMS_NORM = 1
    ADD = 2
    ADD_RMS_NORM = 3
    LINEAR = 4
    GATED_LINEAR = 5
    GATED = 6
    ROPE_WRITE = 7
    ATTENTION = 8
    GATHER_ROWS = 9
    SCALE_CAP = 10
    ARGMAX = 11
    ROPE_TABLE = 12


class Count(IntEnum):
    """Which count of a step an instruction's rows are."""

    TOKENS = 0
    ROWS = 1


class CMatrix(Structure):
    """SamovarMatrix: a packed weight."""

    _fields_ = [
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
    ]


class CInstruction(Structure):
    """SamovarInstruction: one operation, its registers and operands. `input` and `output` are C's `in` and `out`."""

    _fields_ = [
        ("op", c_int32),
        ("rows", c_int32),
        ("input", c_int32 * 4),
        ("output", c_int32 * 2),
        ("i", c_int32 * 10),
        ("f", c_float * 4),
        ("p", c_void_p * 6),
    ]


class CRegister(Structure):
    """SamovarRegister: float32 activations; `stride` in elements."""

    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class CStep(Structure):
    """SamovarStep: what varies from step to step."""

    _fields_ = [
        ("registers", POINTER(CRegister)),
        ("num_registers", c_int32),
        ("num_sequences", c_int32),
        ("counts", c_int64 * len(Count)),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("row_ids", c_void_p),
        ("first_rows", c_void_p),
        ("totals", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int32),
        ("block_size", c_int32),
        ("attends", c_void_p),
        ("argmax_ids", c_void_p),
    ]


FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "samovar_best_isa": (c_char_p, []),
    "samovar_compiled_isas": (c_char_p, []),
    "samovar_abi_version": (c_int32, []),
    "samovar_team_create": (c_void_p, [c_int32, POINTER(c_int32), c_char_p, c_char_p, c_size_t]),
    "samovar_team_destroy": (None, [c_void_p]),
    "samovar_team_isa": (c_char_p, [c_void_p]),
    "samovar_run": (c_int32, [c_void_p, POINTER(CInstruction), c_int32, POINTER(CStep), c_char_p, c_size_t]),
    "samovar_forget": (None, [c_void_p]),
    "samovar_team_report": (
        None,
        [c_void_p, POINTER(c_double), POINTER(c_double), POINTER(c_int64), POINTER(c_int32)],
    ),
    "samovar_team_bytes": (c_int64, [c_void_p]),
    "samovar_packed_bytes": (c_int64, [c_int32, c_int32, c_int32, c_char_p, c_size_t]),
    "samovar_source_row_bytes": (c_int64, [c_int32, c_int32]),
    "samovar_pack": (
        c_int32,
        [c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_char_p, c_size_t],
    ),
    "samovar_unpack": (c_int32, [POINTER(CMatrix), c_int32, c_int32, c_void_p, c_char_p, c_size_t]),
}
"""Every function of the library: what it returns and takes."""


def declare(library: ctypes.CDLL) -> None:
    """Give every function of `library` its types; AttributeError if one is not there."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
