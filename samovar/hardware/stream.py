"""A queue of device work: what the worker uses of streams, events, pinned memory and captured graphs.

Work that is queued runs in order, later; the host goes on. `DeviceStream` is the interface (tests put a CPU behind it),
`CudaStream` the one of NVIDIA and AMD devices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Mark(Protocol):
    """A point in the queue. `record` puts it behind everything queued so far; it may be put again later."""

    def record(self) -> None: ...

    def wait(self) -> None:
        """Block this thread until the queue has come to the mark; returns at once if it was never recorded.

        Raises `RuntimeError` if work before it failed on the device.
        """
        ...

    def seconds_until(self, later: Mark) -> float:
        """Device time between two timed marks that the queue has passed."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue all of it once more, on the memory it was captured with."""
        ...


class DeviceStream(Protocol):
    """One in-order queue of one device."""

    @property
    def device(self) -> torch.device: ...

    def current(self) -> AbstractContextManager[object]:
        """Inside, torch queues this thread's device work here."""
        ...

    def mark(self, *, is_timed: bool = False) -> Mark: ...

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """[size] in host memory that the device reads and writes while the host goes on."""
        ...

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of device memory to pinned memory; equal shapes and dtypes."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Set memory aside that all captured graphs share; they take more only where that is not enough."""
        ...

    def release(self) -> None:
        """Give back what was set aside, once no captured graph is left."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Record what `work` queues instead of running it; returns the graph and what `work` returned.

        Tensors in that return value are filled by each replay; every other graph may overwrite them once nothing holds
        them any more. `work` must not wait for the device or read from it. Raises `torch.OutOfMemoryError`.
        """
        ...


class CudaStream:
    """A stream of the current CUDA device, beside the default one: capturing demands that."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as a graph that uses it.
        self._keeper: torch.cuda.CUDAGraph | None = None

    def current(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return torch.cuda.stream(self._stream)

    def mark(self, *, is_timed: bool = False) -> Mark:
        """See `DeviceStream`."""
        return _CudaMark(self._stream, is_timed)

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """See `DeviceStream`."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceStream`."""
        target.copy_(source, non_blocking=True)

    def reserve(self, num_bytes: int) -> None:
        """Capture a graph that does nothing with so much memory, and keep it: its memory is free for the others."""
        scratch = torch.zeros(1, dtype=torch.int32, device=self.device)

        def hold() -> None:
            torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            scratch.zero_()  # torch warns of graphs without a kernel

        self._keeper = self._record(hold)[0]

    def release(self) -> None:
        """See `DeviceStream`."""
        self._keeper = None
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """See `DeviceStream`."""
        if self._keeper is None:
            self.reserve(1)
        return self._record(work)

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        # `torch.cuda.graph` would wait for the device, collect garbage and empty the allocator's cache first.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:  # An interrupt, too, must not leave the stream recording.
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._leave_pool()
                raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which an error occurred, so that the stream runs work again; that error is the one to raise."""
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:
            self._leave_pool()

    def _leave_pool(self) -> None:
        """After a capture that broke off: what is allocated from now on must not come from the graphs' memory.

        Whether the allocator believes that it ended is not certain, and it records into a pool once only. So later
        captures share another one; graphs that exist keep theirs.
        """
        with suppress(RuntimeError):  # It was left already.
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self.release()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream, is_timed: bool) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, _CudaMark)
        return float(self._event.elapsed_time(later._event)) / 1000
