"""Weights to a GPU: threads read rows into a ring of pinned buffers, and one queue carries them over and converts them.

A buffer is read into again once the queue has passed the copy out of it, so host memory stays at the ring's size, disk and
bus work at the same time, and conversions are the GPU's. Works on any `DeviceStream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue

import torch

from samovar.hardware.stream import DeviceStream, Mark
from samovar.weights.checkpoint import Checkpoint, Piece

BUFFERS_PER_READER = 2
"""One is filled while the other is carried over."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A place of the ring: pinned bytes, as many on the device, and a mark behind the last use of both."""

    host: torch.Tensor
    staging: torch.Tensor
    used: Mark


def stream_pieces(
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    stream: DeviceStream,
    *,
    num_readers: int,
    heard: Callable[[Piece], None],
) -> None:
    """Fill every piece's target, which lies on `stream.device`; `heard` is told of each that is queued.

    Everything is there when this returns. Raises `CheckpointError` if a file cannot be read.
    """
    pieces = [piece for piece in pieces if host_bytes(checkpoint, piece)]
    size = max((host_bytes(checkpoint, piece) for piece in pieces), default=0)
    ring: SimpleQueue[Buffer] = SimpleQueue()
    with stream.current():
        for _ in range(BUFFERS_PER_READER * num_readers if pieces else 0):
            staging = torch.empty(size, dtype=torch.uint8, device=stream.device)
            ring.put(Buffer(stream.pinned(size, torch.uint8), staging, stream.mark()))

    def carry(piece: Piece) -> Piece:
        buffer = ring.get()
        try:
            _carry(checkpoint, piece, buffer, stream)
        finally:
            ring.put(buffer)
        return piece

    with ThreadPoolExecutor(num_readers, "load") as threads:
        try:
            for piece in threads.map(carry, pieces):
                heard(piece)
        finally:
            threads.shutdown(cancel_futures=True)
    end = stream.mark()
    end.record()
    end.wait()


def _carry(checkpoint: Checkpoint, piece: Piece, buffer: Buffer, stream: DeviceStream) -> None:
    """Read one piece and queue the rest of its way."""
    buffer.used.wait()
    info, shape = checkpoint.tensors[piece.name], host_shape(checkpoint, piece)
    size = host_bytes(checkpoint, piece)
    # A thread begins outside inference mode, and may then not write to tensors made inside.
    with torch.inference_mode():
        host, staging = (part[:size].view(info.dtype).view(shape) for part in (buffer.host, buffer.staging))
        checkpoint.read_rows(piece.name, piece.first, host)
        with stream.current():
            staging.copy_(host, non_blocking=True)
            if piece.column is not None:
                axis, (which, _) = piece.column
                width = piece.target.shape[axis]
                staging = staging.narrow(axis, width * which, width)
            piece.target.copy_(staging)
            buffer.used.record()


def host_shape(checkpoint: Checkpoint, piece: Piece) -> tuple[int, ...]:
    """Shape of what is read for `piece`: its rows, all other axes whole."""
    return (piece.target.shape[0], *(checkpoint.tensors[piece.name].shape or (1,))[1:])


def host_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    """Bytes of what is read for `piece`, in the dtype in which it is stored (float32 for block formats)."""
    return prod(host_shape(checkpoint, piece)) * checkpoint.tensors[piece.name].dtype.itemsize
