"""Streaming to a device: on a queue that runs its work as late as it may, the same weights as by plain reading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from samovar.errors import CheckpointError
from samovar.hardware.stream import DeviceStream
from samovar.weights import checkpoint as checkpoint_module
from samovar.weights.checkpoint import Checkpoint, Piece
from samovar.weights.gguf import GGUFCheckpoint
from samovar.weights.safetensors import SafetensorsCheckpoint
from samovar.weights.stream import stream_pieces
from tests.weights.gguf_files import tiny_model, write_gguf


class LateStream:
    """A queue on the CPU: copies made inside `current` happen only when somebody waits for a mark behind them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done = 0
        self.lock = threading.RLock()

    def current(self) -> AbstractContextManager[object]:
        return Later(self)

    def mark(self, *, is_timed: bool = False) -> LateMark:
        return LateMark(self)

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)


class LateMark:
    def __init__(self, stream: LateStream) -> None:
        self.stream, self.position = stream, 0

    def record(self) -> None:
        self.position = len(self.stream.work)

    def wait(self) -> None:
        with self.stream.lock, torch.inference_mode():
            while self.stream.done < self.position:
                self.stream.work[self.stream.done]()
                self.stream.done += 1


class Later(TorchFunctionMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        with self.stream.lock:
            self.stream.work.append(lambda: func(*args))
        return args[0]


def streamed(checkpoint: Checkpoint, targets: dict[str, tuple[torch.Tensor, int | None, tuple[int, int]]]) -> int:
    """Fill the targets; returns in how many pieces."""
    pieces: list[Piece] = []
    for name, (target, axis, shard) in targets.items():
        pieces += checkpoint.pieces(name, target, axis=axis, shard=shard)
    heard: list[Piece] = []
    stream = cast(DeviceStream, LateStream())
    stream_pieces(checkpoint, pieces, stream, num_readers=3, heard=heard.append)
    assert heard == pieces
    return len(pieces)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_WEIGHTS", 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole tensors, shards of rows and of columns, conversions, strided targets, scalars and what is empty."""
    stored = {
        "a": torch.randn(200, 24), "b": torch.randn(64, 40).bfloat16(), "c": torch.randn(33).half(),
        "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "cube": torch.randn(50, 6, 4),
    }  # fmt: skip
    save_file(stored, tmp_path / "model.safetensors")
    fused = torch.zeros(200, 50, dtype=dtype)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        targets: dict[str, tuple[torch.Tensor, int | None, tuple[int, int]]] = {
            "a": (fused[:, 7:31], None, (0, 1)),
            "b": (torch.zeros(64, 10, dtype=dtype), 1, (3, 4)),
            "c": (torch.zeros(11, dtype=dtype), 0, (1, 3)),
            "scalar": (torch.zeros(1, dtype=dtype), None, (0, 1)),
            "empty": (torch.zeros(0, 4, dtype=dtype), None, (0, 1)),
            "cube": (torch.zeros(50, 3, 4, dtype=dtype), 1, (1, 2)),
        }
        assert streamed(checkpoint, targets) > 12
        for name, (target, axis, shard) in targets.items():
            expected = torch.zeros_like(target)
            checkpoint.read_into(name, expected, axis=axis, shard=shard)
            assert torch.equal(target, expected), name
    assert not bool(fused[:, :7].any()) and not bool(fused[:, 31:].any())


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_gguf(tmp_path: Path, quant: str) -> None:
    """Block formats are dequantized on the host, a few rows at a time; interleaved heads stay whole."""
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), quant=quant)
    with GGUFCheckpoint(tmp_path / "model.gguf") as checkpoint:
        targets = {
            name: (torch.zeros(info.shape, dtype=torch.bfloat16), None, (0, 1))
            for name, info in checkpoint.tensors.items()
        }
        streamed(checkpoint, cast(Any, targets))
        for name, (target, _, _) in targets.items():
            assert torch.equal(target, checkpoint.read(name).bfloat16()), name


def test_pages_are_dropped_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is given up to the system, region by region."""
    save_file({"a": torch.randn(100, 10)}, tmp_path / "model.safetensors")
    dropped: list[int] = []

    def advise(file: int, offset: int, size: int, advice: int) -> None:
        if advice == checkpoint_module.os.POSIX_FADV_DONTNEED:
            dropped.append(size)

    monkeypatch.setattr(checkpoint_module.os, "posix_fadvise", advise)
    for drops in (False, True):
        with SafetensorsCheckpoint(tmp_path) as checkpoint:
            checkpoint.drops_pages = drops
            streamed(checkpoint, {"a": (torch.zeros(100, 10), None, (0, 1))})
            assert sum(dropped) == (4000 if drops else 0)


def test_a_file_that_shrinks_is_reported(tmp_path: Path) -> None:
    """An error of a reader stops the stream."""
    save_file({"a": torch.randn(400, 10)}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        path = tmp_path / "model.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4000)
        with pytest.raises(CheckpointError, match="became shorter"):
            streamed(checkpoint, {"a": (torch.zeros(400, 10), None, (0, 1))})
