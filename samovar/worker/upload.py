"""Upload: the integers of one step, sent to the device in one copy that the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.hardware.stream import DeviceStream, Mark

NUM_BUFFERS = 4
"""Pinned buffers in turn: steps that may be queued while the host fills one more, and one to spare."""

ALIGNMENT = 4
"""Sections begin at multiples of this many integers: kernels are compiled for addresses aligned to 16 bytes."""


def aligned(size: int) -> int:
    """`size` integers, rounded up to whole sections."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Buffer:
    tensor: torch.Tensor
    array: NDArray[np.int32]
    """The same memory."""
    sent: Mark


class Upload:
    """A device buffer `staging` int32 [size] and the pinned buffers from which it is filled.

    Each step overwrites it; work queued before the next upload reads the old contents, work queued after it the new.
    Host memory: NUM_BUFFERS * size * 4 bytes; device memory: size * 4.
    """

    def __init__(self, stream: DeviceStream, size: int) -> None:
        self.size = aligned(size)
        self.staging = torch.zeros(self.size, dtype=torch.int32, device=stream.device)
        self._buffers = []
        for _ in range(NUM_BUFFERS):
            tensor = stream.pinned(self.size)
            self._buffers.append(_Buffer(tensor, tensor.numpy(), stream.mark()))
        self._next = 0

    def begin(self, needed: int) -> NDArray[np.int32]:
        """Host memory to fill, [size], with old contents; waits if the device has yet to read them.

        Raises `ValueError` if less than `needed` integers fit.
        """
        if needed > self.size:
            raise ValueError(f"{needed} integers of a step do not fit into the {self.size} that were planned for")
        buffer = self._buffers[self._next]
        buffer.sent.wait()
        return buffer.array

    def send(self, count: int) -> None:
        """Queue the copy of the first `count` integers of what `begin` returned to `staging`."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        self.staging[:count].copy_(buffer.tensor[:count], non_blocking=True)
        buffer.sent.record()
