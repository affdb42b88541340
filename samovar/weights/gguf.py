"""GGUFCheckpoint: the tensors of a GGUF file under Hugging Face names and in that layout, dequantized on the way.

Block formats are dequantized a few rows at a time, straight into the target; there is never a float32 copy of a weight.
Tensors that are wanted as blocks are given as they are stored.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import torch

from samovar.config.gguf import GGUFTensor, read_gguf_header
from samovar.config.gguf_config import hf_config
from samovar.errors import CheckpointError
from samovar.weights.checkpoint import Checkpoint, TensorInfo
from samovar.weights.dequantize import dequantize
from samovar.weights.gguf_names import CONSUMED, change_of, hf_name

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
PLAIN_TYPES = tuple(_PLAIN)
"""Types that are numbers and not blocks."""
_INTEGERS = ("I8", "I16", "I32", "I64")


def matrix_types(path: Path) -> dict[str, str]:
    """The types of a file's matrices by their Hugging Face names."""
    header = read_gguf_header(path)
    architecture = str(header.metadata.get("general.architecture"))
    matrices = [t for t in header.tensors.values() if len(t.shape) >= 2 and t.name not in CONSUMED]
    return {hf_name(architecture, tensor.name): tensor.type.name for tensor in matrices}


class GGUFCheckpoint(Checkpoint):
    """One GGUF model, in one file or several parts.

    The tensors named in `blocks` are uint8 [rows, blocks, bytes of a block], all others numbers.
    """

    def __init__(self, path: Path, *, blocks: Container[str] = ()) -> None:
        super().__init__(path)
        self._blocks = blocks
        header = read_gguf_header(path)
        self.architecture = str(header.metadata.get("general.architecture"))
        self._head_dim: int = hf_config(header)["head_dim"]
        self._entries: dict[str, GGUFTensor] = {}
        for tensor in header.tensors.values():
            if tensor.name in CONSUMED:
                continue
            if tensor.type.name in _INTEGERS:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} holds integers ({tensor.type.name}), not weights"
                )
            name = hf_name(self.architecture, tensor.name)
            if name in self._entries:
                raise CheckpointError(f"{path}: {tensor.name!r} and {self._entries[name].name!r} are both {name!r}")
            self._entries[name] = tensor
        self.tensors = {name: self._info(name, tensor) for name, tensor in self._entries.items()}

    def _info(self, name: str, tensor: GGUFTensor) -> TensorInfo:
        place, kind = (tensor.file.name, tensor.offset), tensor.type
        if name in self._blocks:
            shape = (*tensor.shape[:-1], tensor.shape[-1] // kind.block_size, kind.block_bytes)
            return TensorInfo(shape, kind.name, tensor.nbytes, torch.uint8, place)
        dtype = _PLAIN.get(tensor.type.name, torch.float32)
        return TensorInfo(tensor.shape, kind.name, tensor.nbytes, dtype, place)

    def equal(self, first: str, second: str) -> bool:
        """See `Checkpoint`. Blocks of two formats may hold the same values."""
        if torch.uint8 not in (self.tensors[first].dtype, self.tensors[second].dtype):
            return super().equal(first, second)
        with GGUFCheckpoint(self.path) as numbers:
            return numbers.equal(first, second)

    def _rows_at_once(self, name: str, shape: tuple[int, ...]) -> int:
        rows = super()._rows_at_once(name, shape)
        if len(shape) >= 2 and change_of(self.architecture, self._entries[name].name) == "interleaved":
            return max(1, rows // self._head_dim) * self._head_dim
        return rows

    def _copy_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        entry = self._entries[name]
        change = change_of(self.architecture, entry.name)
        count = target.shape[0]
        if change == "interleaved" and (first % self._head_dim or count % self._head_dim):
            raise CheckpointError(f"{name}: rows {first} to {first + count} are not whole heads of {self._head_dim}")
        rows = self._stored(entry, first, count) if name in self._blocks else self._dequantized(entry, first, count)
        if change == "interleaved":
            half = self._head_dim // 2
            halves = torch.unflatten(rows, 0, (-1, half, 2)).transpose(1, 2)
            torch.unflatten(target, 0, (-1, 2, half)).copy_(halves)
        elif change == "plus_one":
            target.copy_(rows.sub_(1))
        else:
            target.copy_(rows)

    def _stored(self, entry: GGUFTensor, first: int, count: int) -> torch.Tensor:
        """Rows as they are stored, uint8 [count, blocks, bytes]."""
        num_blocks, block_bytes = entry.shape[-1] // entry.type.block_size, entry.type.block_bytes
        rows = torch.empty(count, num_blocks, block_bytes, dtype=torch.uint8)
        self._read_bytes(entry.file, entry.offset + first * num_blocks * block_bytes, rows.view(-1))
        return rows

    def _dequantized(self, entry: GGUFTensor, first: int, count: int) -> torch.Tensor:
        """Entries `first` to `first + count` along axis 0, as float32 [count, ...]."""
        kind, rest = entry.type, entry.shape[1:]
        weights = torch.Size(rest).numel()
        skip, wanted = first * weights, count * weights
        begin, end = skip // kind.block_size, -(-(skip + wanted) // kind.block_size)
        blocks = torch.empty(end - begin, kind.block_bytes, dtype=torch.uint8)
        self._read_bytes(entry.file, entry.offset + begin * kind.block_bytes, blocks.view(-1))
        values = dequantize(kind.name, blocks).view(-1)
        return values[skip - begin * kind.block_size :][:wanted].view(count, *rest)
