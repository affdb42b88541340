"""SafetensorsCheckpoint: the tensors of a safetensors folder, read with plain positioned reads."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from samovar.config.safetensors_header import read_safetensors_folder
from samovar.errors import CheckpointError
from samovar.weights.checkpoint import Checkpoint, TensorInfo

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""Safetensors dtype -> torch dtype. F4 packs two weights a byte and has no torch dtype of its own here."""


class SafetensorsCheckpoint(Checkpoint):
    """A folder of safetensors files, single or sharded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._entries = read_safetensors_folder(folder)
        for entry in self._entries.values():
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}, which cannot be read"
                )
        self.tensors = {
            name: TensorInfo(e.shape, e.dtype, e.nbytes, DTYPES[e.dtype], (e.file.name, e.offset))
            for name, e in self._entries.items()
        }

    def read_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """See `Checkpoint`. Nothing is converted, so it is one read."""
        self._copy_rows(name, first, target)

    def _copy_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        entry, dtype = self._entries[name], DTYPES[self._entries[name].dtype]
        offset = entry.offset + first * prod(entry.shape[1:]) * dtype.itemsize
        if target.numel() == 0:
            return
        if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            self._read_bytes(entry.file, offset, target.view(-1).view(torch.uint8))
            return
        rows = torch.empty(target.shape, dtype=dtype)
        self._read_bytes(entry.file, offset, rows.view(-1).view(torch.uint8))
        target.copy_(rows)
