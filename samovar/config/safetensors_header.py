"""Reads the headers of safetensors files and folders and checks every number in them; no weight byte is read.

A header that passes here can be trusted by whatever reads the weights: each tensor lies inside its file, has the bytes
its shape and dtype need, overlaps no other, and is where the index of a sharded checkpoint says.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 25 * 1024 * 1024
MAX_INDEX_BYTES = 100 * 1024 * 1024
MAX_DIMENSIONS = 8

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
"""Known dtypes and the bits of one element."""

_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor. The `nbytes` from `offset` (counted from the start of `file`) are known to lie inside the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_safetensors_header(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of one file by name. Raises `CheckpointError` if anything in the header does not fit the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise CheckpointError(f"{path}: truncated: its header claims {length} bytes, the file has {size}")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: its header claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    entries = _parse_json(path, raw, "header")
    entries.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _parse_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {what} is damaged: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its {what} is damaged: not a JSON object")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> SafetensorsTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise CheckpointError(f"{path}: tensor {name!r} has a bad shape: {str(shape)[:80]}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(f"{path}: tensor {name!r} has bad data_offsets: {str(offsets)[:80]}")
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {shape} needs {-(-bits // 8)} bytes, its offsets hold {nbytes}"
        )
    return SafetensorsTensor(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _check_layout(path: Path, tensors: dict[str, SafetensorsTensor], start: int, size: int) -> None:
    """The tensors fill the data section without holes or overlaps, as the format demands."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            word = "overlaps another" if tensor.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} {word} (starts at byte {tensor.offset}, expected {end})"
            )
        end += tensor.nbytes
    if end != size:
        word = "truncated" if end > size else "has bytes that belong to no tensor"
        raise CheckpointError(f"{path}: {word}: its tensors end at byte {end}, the file has {size}")


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, judged by names only; empty if there are none.

    The index names them; without one it is model.safetensors, a complete set of shards, or the only file there is.
    """
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if (folder / INDEX_NAME).exists():
        return [folder / name for name in sorted(set(_read_index(folder).values()))]
    if SINGLE_NAME in present:
        return [folder / SINGLE_NAME]
    shards = {name: match for name in present if (match := _SHARD_NAME.fullmatch(name))}
    if shards:
        stem, total = next((m[1], int(m[3])) for m in shards.values())
        wanted = [f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, min(total, 10_000) + 1)]
        if missing := [name for name in wanted if name not in present]:
            raise CheckpointError(f"{folder}: {len(missing)} of {total} shards are missing, first: {missing[0]}")
        return [folder / name for name in wanted]
    if len(present) > 1:
        raise CheckpointError(f"{folder}: holds several weight files and no {INDEX_NAME}: {', '.join(present[:5])}")
    if present and present[0].startswith("consolidated"):
        raise CheckpointError(
            f"{folder}: {present[0]} has Mistral's own tensor names; use the Hugging Face files of this model"
        )
    return [folder / name for name in present]


def read_safetensors_folder(folder: Path) -> dict[str, SafetensorsTensor]:
    """Every tensor of a checkpoint folder by name; index, files and headers agree or it is a `CheckpointError`."""
    files = safetensors_files(folder)
    if not files:
        raise CheckpointError(f"{folder}: holds no .safetensors file")
    index = _read_index(folder) if (folder / INDEX_NAME).exists() else None
    for file in files:
        if file.is_symlink() and not file.exists():
            raise CheckpointError(f"{file}: is a link to a file that is not there; download the model again")
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file}: is not a file (a folder, a pipe or a device); download the model again")
        if not file.is_file():
            names = sorted(name for name, at in (index or {}).items() if at == file.name)
            raise CheckpointError(
                f"{file}: missing, but {INDEX_NAME} places {len(names)} tensors there, first: {names[:3]}"
            )
    tensors: dict[str, SafetensorsTensor] = {}
    for file in files:
        found = read_safetensors_header(file)
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(f"{file}: tensor {min(twice)!r} is also in {tensors[min(twice)].file.name}")
        tensors.update(found)
    if index is not None:
        _check_index(folder, index, tensors)
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    try:
        if (size := path.stat().st_size) > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path}: is {size} bytes long, the limit is {MAX_INDEX_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    places = _parse_json(path, raw, "index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: has no weight_map")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: places tensor {name!r} in {file!r}, which is not a .safetensors file name")
    return places


def _check_index(folder: Path, index: dict[str, str], tensors: dict[str, SafetensorsTensor]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is not in it, but {INDEX_NAME} says so")
    if extra := sorted(tensors.keys() - index.keys()):
        at = tensors[extra[0]].file
        raise CheckpointError(f"{at}: {len(extra)} tensors are not in {INDEX_NAME}, first: {extra[:3]}")
    used = set(index.values())
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in used and (_SHARD_NAME.fullmatch(path.name) or path.name == SINGLE_NAME):
            raise CheckpointError(
                f"{path}: is not named by {INDEX_NAME}; the folder mixes two checkpoints, or the index is stale"
            )
