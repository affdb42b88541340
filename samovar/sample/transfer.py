"""Copies between host and device that nobody waits for.

Memory that the device copies by itself must be pinned. torch keeps pinned memory until the copies that were queued with
it are done, so the tensors here may be dropped at once.
"""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`: queued, not waited for. On a CPU, the array itself where it is contiguous."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host. From a GPU it is valid once an event recorded after this call has happened."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> torch.Event | None:
    """An event behind everything queued on `device` so far; None on a CPU, where nothing is ever pending."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
