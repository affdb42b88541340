"""Device facts and switches: the only place that talks to `torch.cuda`. CPU facts need no torch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Literal

from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError
from samovar.hardware import cpu
from samovar.hardware.memory import CONTEXT_BYTES

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""Device files of which one exists wherever a GPU that torch calls "cuda" can be used."""


def probe(kind: Literal["auto", "cpu", "cuda"] | str = "auto") -> DeviceFacts:
    """Facts of the device to use; "auto" takes a GPU if torch can use one, otherwise the CPU.

    torch is imported only where a GPU may exist. Raises `ConfigError` for an unknown kind or an absent GPU.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be one of auto, cpu, cuda, got {kind!r}")
    if kind == "cpu" or (kind == "auto" and not may_have_gpu()):
        return _probe_cpu()
    import torch

    if torch.cuda.is_available():
        return _probe_cuda(torch, 0)
    if kind == "auto":
        return _probe_cpu()
    raise ConfigError(
        f"--device cuda: torch {torch.__version__} finds no usable GPU; use --device cpu, or install a CUDA build of torch"
    )


def may_have_gpu() -> bool:
    """Whether the system shows a GPU at all; if not, torch need not even be asked."""
    return any(Path(node).exists() for node in _GPU_NODES)


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


_TYPICAL_GIB = {70: 32, 75: 16, 80: 80, 86: 24, 87: 32, 89: 24, 90: 80, 100: 180, 103: 270, 110: 120, 120: 32, 121: 120}
"""Memory of well-known GPUs by compute capability: decides nothing but defaults, and what is said to fit."""


def with_architecture(architecture: str) -> DeviceFacts:
    """What would be known of a GPU of `architecture` ("sm_90"), were it here. Raises `ConfigError` for an unknown one."""
    capability = architecture.removeprefix("sm_")
    if not capability.isdigit() or int(capability) not in _TYPICAL_GIB:
        known = ", ".join(f"sm_{number}" for number in _TYPICAL_GIB)
        raise ConfigError(f"--arch {architecture}: unknown architecture; there are {known}")
    size = _TYPICAL_GIB[int(capability)] << 30
    return DeviceFacts(
        kind="cuda",
        name=f"a GPU of {architecture}",
        architecture=f"sm_{capability}",
        total_bytes=size,
        available_bytes=size,
        num_threads=cpu.num_threads(),
        is_unified=capability in ("87", "110", "121"),
        has_fast_bf16=int(capability) >= 80,
        has_fast_fp16=True,
    )


def limit_memory(most_bytes: int) -> None:
    """Make torch's allocator refuse what would take `most_bytes` more of the GPU than this process has now, driver's
    part included.

    A step that needs more than was planned then fails alone, instead of taking memory that others count on. What another
    engine of this process holds is left to it.
    """
    import torch

    most = torch.cuda.memory_reserved() + max(most_bytes - CONTEXT_BYTES, 0)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))


def release_memory(kind: Literal["cpu", "cuda"] | str = "cuda") -> None:
    """Give what nothing holds any more back to the device, where another engine, or another process, looks for it."""
    # Graphs and layers refer to each other in circles. A frozen collector would not look at those made at start-up.
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        # Pinned memory, too; builds without CUDA do not have this.
        if (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            empty()


def drop_unused(kind: Literal["cpu", "cuda"]) -> None:
    """Give memory that no tensor uses back to the device, so that other sizes find it in one piece."""
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()


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
