"""A capture that breaks off leaves the stream, and the memory of the graphs, as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from samovar.hardware.stream import CudaStream


def breaks_in_python() -> None:
    """An error of the host between two kernels."""
    torch.ones(1024, device="cuda").add_(1)
    raise ValueError("the step is wrong")


def waits_for_the_device() -> None:
    """What must not be captured: the driver gives the capture up."""
    torch.ones(1024, device="cuda").sum().item()


def asks_for_too_much() -> None:
    """An allocation that cannot succeed, after one that did."""
    torch.ones(1024, device="cuda").add_(1)
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("failing", [breaks_in_python, waits_for_the_device, asks_for_too_much])
@pytest.mark.parametrize("times", [1, 3])
def test_later_captures_are_whole(device: str, failing: Callable[[], None], times: int) -> None:
    """Graphs from before and after the failure replay what they recorded, and plain work runs on the stream."""
    if device != "cuda":
        pytest.skip("captures are a GPU's")
    stream = CudaStream()
    x = torch.arange(4096, device="cuda", dtype=torch.float32)
    with stream.current():
        before, doubled = stream.capture(lambda: x * 2)
        for _ in range(times):
            with pytest.raises((ValueError, RuntimeError)):
                stream.capture(failing)
        plain = [x + 1 for _ in range(64)]
        after, tripled = stream.capture(lambda: x * 3)
        x += 1
        before.replay()
        after.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, x * 2)
    assert torch.equal(tripled, x * 3)
    assert all(torch.equal(tensor, x) for tensor in plain), "memory that a graph writes was handed out"
