"""Device facts and switches: the only place that talks to `torch.cuda`. CPU facts need no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError
from samovar.hardware import cpu

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""Device files of which one exists wherever a GPU that torch calls "cuda" can be used."""


def probe(kind: Literal["auto", "cpu", "cuda"] | str = "auto") -> DeviceFacts:
    """Facts of the device to use; "auto" takes a GPU if torch can use one, otherwise the CPU.

    torch is imported only where a GPU may exist. Raises `ConfigError` for an unknown kind or an absent GPU.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be one of auto, cpu, cuda, got {kind!r}")
    if kind == "cpu" or (kind == "auto" and not _may_have_gpu(_GPU_NODES)):
        return _probe_cpu()
    import torch

    if torch.cuda.is_available():
        return _probe_cuda(torch, 0)
    if kind == "auto":
        return _probe_cpu()
    raise ConfigError(
        f"--device cuda: torch {torch.__version__} finds no usable GPU; use --device cpu, or install a CUDA build of torch"
    )


def _may_have_gpu(nodes: Iterable[str]) -> bool:
    return any(Path(node).exists() for node in nodes)


def _probe_cpu() -> DeviceFacts:
    name, flags = cpu.cpu_name_and_flags()
    level = cpu.instruction_set(flags)
    total, available = cpu.memory_bytes()
    return DeviceFacts(
        kind="cpu",
        name=name,
        architecture=level,
        total_bytes=total,
        available_bytes=available,
        num_threads=cpu.num_threads(),
        is_unified=False,
        has_fast_bf16=cpu.has_fast_bf16(level),
        has_fast_fp16="avx512_fp16" in flags or "asimdhp" in flags,
    )


def _probe_cuda(torch: Any, index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    is_unified = bool(properties.is_integrated)
    if is_unified:
        total, free = cpu.memory_bytes()  # the driver's view of shared memory ignores what the system can reclaim
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        architecture=f"sm_{properties.major}{properties.minor}",
        total_bytes=total,
        available_bytes=free,
        num_threads=cpu.num_threads(),
        is_unified=is_unified,
        has_fast_bf16=properties.major >= 8,
        has_fast_fp16=properties.major >= 7,
    )


def set_threads(count: int) -> None:
    """Threads torch uses inside one operator."""
    import torch

    torch.set_num_threads(count)


def synchronize(kind: Literal["cpu", "cuda"]) -> None:
    """Wait until everything queued on the device has run; nothing to do on a CPU."""
    if kind == "cuda":
        import torch

        torch.cuda.synchronize()


def memory_reading(kind: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """(in use now, at most so far) in bytes: resident memory of the process, or torch's on the GPU."""
    if kind == "cpu":
        return cpu.process_memory()
    import torch

    return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
