"""DeviceFacts: what the machine offers, as plain data. Probed by `hardware`, read by `config.resolve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device. `architecture` is "sm_90" for a GPU or the best instruction set ("avx512_bf16") for a CPU.

    `total_bytes` and `available_bytes` are the memory of the pool the model lives in; `is_unified` means that pool is
    the system's own (GB10). `num_threads` counts physical cores this process may use.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    architecture: str
    total_bytes: int
    available_bytes: int
    num_threads: int
    is_unified: bool = False
    has_fast_bf16: bool = False
    has_fast_fp16: bool = False
    has_kernels: bool = False
    """A CPU for which the library of kernels is there."""
