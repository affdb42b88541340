"""A `DeviceStream` on the CPU that checks what a GPU would not forgive, and an attention backend that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from samovar.attention.base import AttentionCall, AttentionPlan, AttentionSpec, Spans
from samovar.attention.choose import AttentionRoute
from samovar.attention.reference import attend
from samovar.config.engine import with_settings
from samovar.core.device_facts import DeviceFacts
from samovar.worker.device_runner import DeviceRunner
from samovar.worker.worker import Worker


@dataclass
class HostMark:
    """A mark whose work is done at once; counts what is asked of it."""

    num_records: int = 0
    num_waits: int = 0

    def record(self) -> None:
        self.num_records += 1

    def wait(self) -> None:
        self.num_waits += 1

    def seconds_until(self, later: Any) -> float:
        assert self.num_records == later.num_records > 0
        return 1e-6


@dataclass
class HostGraph:
    """Runs the captured function again, into the tensor that the first run returned."""

    stream: HostStream
    work: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        for graph in self.stream.graphs:
            if graph is not self:
                graph.output.fill_(-99)  # Its memory is shared.
        self.output.copy_(self.work())
        self.stream.num_replays += 1


@dataclass
class HostStream:
    """`protected` tensors are put back after a capture, because capturing on a GPU runs nothing."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    protected: list[torch.Tensor] = field(default_factory=list)
    graphs: list[HostGraph] = field(default_factory=list)
    marks: list[HostMark] = field(default_factory=list)
    num_replays: int = 0
    refuses: Callable[[], bool] = lambda: False

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, *, is_timed: bool = False) -> HostMark:
        self.marks.append(HostMark())
        return self.marks[-1]

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((size,), -7, dtype=dtype)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype and target.shape == source.shape
        target.copy_(source)

    def reserve(self, num_bytes: int) -> None:
        pass

    def release(self) -> None:
        pass

    def capture(self, work: Callable[[], Any]) -> tuple[HostGraph, Any]:
        if self.refuses():
            raise torch.OutOfMemoryError("no room for a graph")
        before = [tensor.clone() for tensor in self.protected]
        output = work()
        for tensor, old in zip(self.protected, before, strict=True):
            tensor.copy_(old)
        self.graphs.append(HostGraph(self, work, output))
        return self.graphs[-1], output


class TensorAttention:
    """Reads sequences from `Spans.tensors` when it runs, as kernels do; of the lists only how many there are."""

    name = "tensors"
    captures = True

    def launch_shape(self, spans: Spans) -> int:
        return max(spans.total_tokens) // 48

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        return None

    def plan(self, spans: Spans) -> AttentionPlan:
        tensors = spans.tensors
        assert tensors is not None
        for tensor in (tensors.first_rows, tensors.totals, tensors.table_rows, tensors.tables):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        return spans

    def run(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tensors = cast(Spans, plan).tensors
        assert tensors is not None
        out, (keys, values) = torch.zeros_like(q), cache
        for i, total in enumerate(tensors.totals.tolist()):
            first, last = tensors.first_rows[i : i + 2].tolist()
            if not total:
                continue
            at = torch.arange(total)
            blocks = tensors.tables[tensors.table_rows[i]].long()[at // keys.shape[1]]
            k, v = (t[blocks, at % keys.shape[1]].float() for t in (keys, values))
            out[first:last] = attend(q[first:last], k, v, call, sinks)
        return out


def put_on_stream(worker: Worker, kind: str = "graphs", most_graphs: int = 64) -> tuple[HostStream, DeviceRunner]:
    """Give a loaded worker the runner that a GPU would have: with "graphs", "eager", or attention that "gathers"."""
    stream = HostStream()
    if kind != "gathers":
        worker.attention = AttentionRoute((TensorAttention(),), tuple(0 for _ in worker.attention.groups), ())
    worker.config = with_settings(worker.config, enforce_eager=kind == "eager")
    worker._stream = stream
    worker.reset_cache()
    runner = worker._runner
    assert isinstance(runner, DeviceRunner)
    stream.protected.append(runner._state.last_sampled)
    if runner._graphs is not None:
        runner._graphs._most = most_graphs
    return stream, runner
