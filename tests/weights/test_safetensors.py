"""Safetensors folders: the same values as the safetensors library, and a one-line error for everything broken."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samovar.config.safetensors_header import INDEX_NAME, read_safetensors_folder, read_safetensors_header
from samovar.errors import CheckpointError
from samovar.weights.safetensors import DTYPES, SafetensorsCheckpoint


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    floats = {
        str(dtype).removeprefix("torch."): torch.randn(9, 8, generator=generator).to(dtype)
        for dtype in DTYPES.values()
        if dtype.is_floating_point and dtype is not torch.float8_e8m0fnu
    }
    others = {
        "int32": torch.arange(10, dtype=torch.int32),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
    }
    return {**floats, **others, "empty": torch.empty(0, 4), "cube": torch.randn(3, 4, 5, generator=generator)}


def test_values_and_shards(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            got = checkpoint.read(name)
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
        for axis, count in ((0, 3), (1, 4), (2, 5)):
            parts = [checkpoint.read("cube", axis=axis, shard=(i, count)) for i in range(count)]
            assert torch.equal(torch.cat(parts, dim=axis), tensors["cube"])
        with pytest.raises(CheckpointError, match="does not divide"):
            checkpoint.read("cube", axis=0, shard=(0, 2))
        with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
            checkpoint.read("nothing")


def test_reading_into_a_strided_target_of_another_dtype(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        fused = torch.zeros(9, 20, dtype=torch.bfloat16)
        checkpoint.read_into("float32", fused.narrow(1, 4, 8))
        assert torch.equal(fused[:, 4:12], tensors["float32"].bfloat16())
        assert not fused[:, :4].any() and not fused[:, 12:].any()
        one = torch.zeros(1)
        checkpoint.read_into("scalar", one)
        assert one.item() == 2.5
        with pytest.raises(CheckpointError, match="layer holds"):
            checkpoint.read_into("float32", torch.zeros(8, 9))


def test_a_row_shard_reads_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.randn(4096, 64), "v": torch.randn(8)}, tmp_path / "model.safetensors")
    read = []
    original = SafetensorsCheckpoint._read_bytes

    def count(self: Any, file: Path, offset: int, buffer: torch.Tensor) -> None:
        read.append(len(buffer))
        original(self, file, offset, buffer)

    monkeypatch.setattr(SafetensorsCheckpoint, "_read_bytes", count)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        checkpoint.read("w", axis=0, shard=(1, 4))
    assert sum(read) == 4096 * 64 * 4 // 4


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "link to a folder"])
def test_a_weight_file_that_is_no_file(tmp_path: Path, kind: str) -> None:
    """Nothing waits for a pipe, and no index is blamed where there is none."""
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path if kind == "link to a folder" else tmp_path / "nowhere")
    words = "link to a file that is not there" if kind == "dangling link" else "is not a file"
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{words}.*download the model again") as caught:
        read_safetensors_folder(tmp_path)
    assert "index" not in str(caught.value)


def sharded(folder: Path) -> dict[str, str]:
    """Three shards and an index; returns the index."""
    places = {}
    for shard in range(1, 4):
        name = f"model-{shard:05d}-of-00003.safetensors"
        tensors = {f"layer.{shard}.{part}": torch.full((2, 2), float(shard)) for part in ("a", "b")}
        save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": places}))


def test_sharded_with_and_without_index(tmp_path: Path) -> None:
    places = sharded(tmp_path)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == places.keys()
        assert checkpoint.read("layer.3.b").unique().item() == 3
    (tmp_path / INDEX_NAME).unlink()
    assert SafetensorsCheckpoint(tmp_path).tensors.keys() == places.keys()


def _drop_shard(folder: Path, places: dict[str, str]) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _drop_shard_and_index(folder: Path, places: dict[str, str]) -> None:
    _drop_shard(folder, places)
    (folder / INDEX_NAME).unlink()


def _index_names_too_much(folder: Path, places: dict[str, str]) -> None:
    write_index(folder, places | {"layer.9.a": "model-00003-of-00003.safetensors"})


def _index_names_wrong_file(folder: Path, places: dict[str, str]) -> None:
    write_index(folder, places | {"layer.1.a": "model-00003-of-00003.safetensors"})


def _index_names_too_little(folder: Path, places: dict[str, str]) -> None:
    write_index(folder, {k: v for k, v in places.items() if k != "layer.1.a"})


def _stale_shard(folder: Path, places: dict[str, str]) -> None:
    save_file({"x": torch.zeros(1)}, folder / "model-00004-of-00004.safetensors")


def _tensor_in_two_files(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX_NAME).unlink()
    save_file({"layer.1.a": torch.zeros(1)}, folder / "model-00003-of-00003.safetensors")


def _index_leaves_the_folder(folder: Path, places: dict[str, str]) -> None:
    write_index(folder, places | {"layer.1.a": "../../other.safetensors"})


def _index_is_no_json(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text("{")


def _index_is_empty(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text("{}")


def _empty_folder(folder: Path, places: dict[str, str]) -> None:
    for path in folder.iterdir():
        path.unlink()


def _several_models(folder: Path, places: dict[str, str]) -> None:
    _empty_folder(folder, places)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, folder / name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop_shard, r"00002-of-00003.safetensors: missing, .*2 tensors.*'layer.2.a', 'layer.2.b'"),
        (_drop_shard_and_index, r"1 of 3 shards are missing, first: model-00002-of-00003"),
        (_index_names_too_much, r"00003-of-00003.safetensors: tensor 'layer.9.a' is not in it"),
        (_index_names_wrong_file, r"00003-of-00003.safetensors: tensor 'layer.1.a' is not in it"),
        (_index_names_too_little, r"00001-of-00003.safetensors: 1 tensors are not in .*'layer.1.a'"),
        (_stale_shard, r"00004-of-00004.safetensors: is not named by"),
        (_tensor_in_two_files, r"'layer.1.a' is also in model-00001"),
        (_index_leaves_the_folder, r"'layer.1.a' in '../../other.safetensors'"),
        (_index_is_no_json, "index is damaged"),
        (_index_is_empty, "no weight_map"),
        (_empty_folder, "holds no .safetensors file"),
        (_several_models, "several weight files"),
    ],
)
def test_incomplete_checkpoints(spoil: Callable[[Path, dict[str, str]], None], message: str, tmp_path: Path) -> None:
    """B154: shards missing, index and files disagreeing in every direction; the error names the file and the tensors."""
    spoil(tmp_path, sharded(tmp_path))
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors_folder(tmp_path)
    assert "\n" not in str(error.value)


def file_with(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "length 2**63": (file_with({}, length=2**63), "claims"),
    "length beyond the file": (file_with({}, length=100), "claims"),
    "not JSON": (file_with(b"{'a'"), "damaged"),
    "not UTF-8": (file_with(b"\xff\xfe{}"), "damaged"),
    "a list": (file_with([1]), "not a JSON object"),
    "deep nesting": (file_with(b'{"a":' + b"[" * 200_000), "damaged"),
    "huge number": (file_with(b'{"a":{"dtype":"F32","shape":[' + b"9" * 9000 + b'],"data_offsets":[0,8]}}'), "damaged"),
    "twice": (
        file_with(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"\0" * 4),
        "'a' appears twice",
    ),
    "no offsets": (file_with({"a": {"dtype": "F32", "shape": [2]}}), "exactly dtype, shape and data_offsets"),
    "dtype": (file_with({"a": entry("F31")}, b"\0" * 8), "unknown dtype 'F31'"),
    "dtype is a list": (file_with({"a": entry(["F32"])}, b"\0" * 8), "unknown dtype"),  # type: ignore[arg-type]
    "negative": (file_with({"a": entry(shape=[-2])}, b"\0" * 8), "bad shape"),
    "fraction": (file_with({"a": entry(shape=[2.0])}, b"\0" * 8), "bad shape"),
    "product wraps": (file_with({"a": entry(shape=[2**32, 2**32])}, b"\0" * 8), "needs"),
    "too many dimensions": (file_with({"a": entry(shape=[1] * 99)}, b"\0" * 8), "bad shape"),
    "offsets reversed": (file_with({"a": entry(offsets=[8, 0])}, b"\0" * 8), "bad data_offsets"),
    "offsets beyond": (file_with({"a": entry(offsets=[8, 16])}, b"\0" * 8), "hole"),
    "truncated": (file_with({"a": entry()}, b"\0" * 4), "truncated"),
    "too long": (file_with({"a": entry()}, b"\0" * 12), "belong to no tensor"),
    "overlap": (file_with({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlaps"),
    "hole": (file_with({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20), "hole"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_mutated_headers(tmp_path: Path) -> None:
    """Whatever passes the check can be read in full; everything else is a one-line error."""
    path, rng, passed = tmp_path / "model.safetensors", random.Random(2), 0
    save_file({f"t{i}": torch.zeros(i + 1, 3) for i in range(5)}, path)
    original = path.read_bytes()
    limit = 8 + int.from_bytes(original[:8], "little")
    for _ in range(2000):
        raw = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 4])):
            raw[rng.randrange(limit)] = rng.choice([rng.randrange(256), ord("0") + rng.randrange(10)])
        path.write_bytes(raw[: rng.choice([len(raw)] * 4 + [rng.randrange(len(raw))])])
        try:
            checkpoint = SafetensorsCheckpoint(tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            continue
        with checkpoint:
            for name in checkpoint.tensors:
                checkpoint.read(name)
        passed += 1
    assert passed < 1000


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with checkpoint, pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read("w")
