"""Launches kernels by Triton's own code and directly, on a driver that only writes down what it is asked to start.

Run as `python -m tests.kernels.triton.direct_process` in a process without TRITON_INTERPRET. Prints one JSON object: for
each variation of a launch, what was started by either way; and microseconds of either way up to the launcher.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from samovar.kernels import triton_launch
from samovar.kernels.direct_launch import DirectLaunches
from samovar.kernels.rms_norm.triton import rms_norm_triton
from samovar.kernels.triton_launch import TargetDriver


class WritingDriver(TargetDriver):
    """A Hopper that starts nothing."""

    def __init__(self) -> None:
        super().__init__(90)
        self.started: list[tuple[Any, ...]] = []
        self.device = 0
        self.num_loaded = 0
        self.utils = SimpleNamespace(
            load_binary=self.load, get_device_properties=lambda device: {"max_shared_mem": 227 << 10}
        )

    def get_current_device(self) -> int:
        """Two GPUs, one at a time."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """One for each GPU."""
        return 700 + device

    def load(self, *_: Any) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, threads): functions are numbered."""
        self.num_loaded += 1
        return 1, self.num_loaded, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls to start a kernel: (grid, stream, function, metadata, its own notes, hooks, arguments)."""

        def start(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in rest[3:]]
            self.started.append((x, y, z, stream, function, str(packed), arguments))

        return start


@triton.jit(do_not_specialize=["count"])
def some_kernel(
    x: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    FLAG: tl.constexpr = False,
) -> None:
    """A pointer that may be None, both kinds of integers, a float, constants with and without a default."""
    at = tl.arange(0, SIZE)
    value = tl.load(x + at * stride, at < count, 0.0).to(tl.float32) * scale
    if y is not None:
        value += tl.load(y + at)
    if FLAG:
        value += 1
    tl.store(x + at * stride, value.to(x.dtype.element_ty), at < count)


MEMORY = torch.zeros(1 << 12)
BASE: dict[str, Any] = {"x": MEMORY, "y": None, "count": 5, "stride": 3, "scale": 0.5, "SIZE": 16}
VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "another aligned pointer": {"x": MEMORY[64:]},
    "an unaligned pointer": {"x": MEMORY[1:]},
    "another unaligned pointer": {"x": MEMORY[7:]},
    "another dtype": {"x": MEMORY.to(torch.bfloat16)},
    "a second pointer": {"y": MEMORY},
    "a second one, unaligned": {"y": MEMORY[3:]},
    "a parameter": {"x": torch.nn.Parameter(MEMORY)},
    "another count": {"count": 7},
    "a count of 1": {"count": 1},
    "a count of 16": {"count": 16},
    "a count of 64 bits": {"count": 1 << 40},
    "a count without a sign": {"count": (1 << 63) + 5},
    "a negative count": {"count": -5},
    "the least count of 32 bits": {"count": -(1 << 31)},
    "a stride of 1": {"stride": 1},
    "a stride of 16": {"stride": 16},
    "a stride of 32": {"stride": 32},
    "a stride of 64 bits": {"stride": 1 << 33},
    "another scale": {"scale": 1.0},
    "a scale without a fraction": {"scale": 16.0},
    "an integer for a scale": {"scale": 2},
    "a truth for a scale": {"scale": True},
    "another constant": {"SIZE": 32},
    "a flag": {"FLAG": True},
    "a flag of 1": {"FLAG": 1},
    "no flag": {"FLAG": False},
    "more warps": {"num_warps": 8},
    "overlapping": {"launch_pdl": True},
}
GRIDS = ((3,), (3, 2), (4, 5, 6))


def main() -> None:
    """Every variation, each three times directly: the first time that is Triton's own way too."""
    fake = WritingDriver()
    driver.set_active(fake)
    assert triton_launch.settle_launches() is None
    found: dict[str, Any] = {"variations": {}}
    direct = triton_launch._direct
    assert isinstance(direct, DirectLaunches)
    for device in (0, 1):
        fake.device = device
        for name, changes in VARIATIONS.items():
            chosen = BASE | changes
            arguments = [chosen.pop(word) for word in ("x", "y", "count", "stride", "scale")]
            rows = []
            for grid in GRIDS:
                some_kernel[grid](*arguments, **chosen)
                rows.append([fake.started.pop()])
                for _ in range(3):
                    triton_launch.launch(some_kernel, grid, *arguments, **chosen)
                    rows[-1].append(fake.started.pop())
            found["variations"][f"{name}, device {device}"] = rows
    assert not fake.started
    found["kinds"] = sum(ready is not None for ready in direct._ready.values())
    found["through_triton"] = watched()
    fake.started.clear()
    found["us"] = {"direct": timed(fake)}
    assert triton_launch.settle_launches(direct=False) == "switched off"
    found["us"]["triton"] = timed(fake)
    print(json.dumps(found))


def watched() -> dict[str, int]:
    """How many of some equal launches went through Triton's `run`."""
    launch_hooks = triton.knobs.runtime.launch_enter_hook
    num_runs = []

    def counted(*arguments: Any, **options: Any) -> Any:
        num_runs.append(1)
        return type(some_kernel).run(some_kernel, *arguments, **options)

    def start() -> int:
        num_runs.clear()
        triton_launch.launch(some_kernel, (1,), MEMORY, None, 5, 48, 0.5, SIZE=64)
        return len(num_runs)

    def watch(metadata: Any) -> None:
        """A listener."""

    some_kernel.run = counted
    counts = {"first": start(), "second": start()}
    launch_hooks.add(watch)
    counts["watched"] = start()
    launch_hooks.remove(watch)
    return counts | {"unwatched": start()}


def timed(fake: WritingDriver) -> float:
    """Microseconds of a call of a real op, up to the launcher."""
    x, weight = torch.zeros(4, 1024), torch.ones(1024)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(400):
            rms_norm_triton(x, weight, 1e-6)
        times.append((time.perf_counter() - began) / 400 * 1e6)
        fake.started.clear()
    return min(times)


if __name__ == "__main__":
    main()
