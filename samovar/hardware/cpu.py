"""Facts of the CPU and its memory, as this process may use them: affinity, cgroup limits, physical cores. No torch."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_ISA_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("amx_bf16", frozenset({"amx_tile", "amx_bf16", "avx512_bf16"})),
    ("avx512_bf16", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})),
    ("avx512_vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})),
    ("avx512", frozenset({"avx512f", "avx512bw", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
    ("sve_bf16", frozenset({"sve", "bf16"})),
    ("neon_bf16", frozenset({"asimd", "bf16"})),
    ("neon", frozenset({"asimd"})),
)
"""Instruction sets from best to least, with the flags of /proc/cpuinfo that they need."""

_FAST_BF16 = frozenset({"amx_bf16", "avx512_bf16", "sve_bf16", "neon_bf16"})


def cpu_name_and_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """The processor's name and its feature flags (empty where the system does not tell)."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = frozenset(value.split())
                break
    return name, flags


def instruction_set(flags: frozenset[str]) -> str:
    """The best known level whose flags are all present, e.g. "avx512_bf16"; otherwise the machine type."""
    for name, needed in _ISA_LEVELS:
        if needed <= flags:
            return name
    return platform.machine() or "unknown"


def has_fast_bf16(level: str) -> bool:
    """True if `level` multiplies bfloat16 in hardware."""
    return level in _FAST_BF16


def usable_cpus() -> list[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(cpus: list[int], topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Distinct cores behind the logical `cpus`; hyper-threads of one core count once."""
    cores: set[str] = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(len(cores), 1)


def num_threads() -> int:
    """Threads worth starting: physical cores of the affinity mask, and no more than the cgroup's CPU quota."""
    quota = min((q for q in map(_cpu_quota, _cgroup_folders("cpu")) if q is not None), default=math.inf)
    return max(1, min(physical_cores(usable_cpus()), math.ceil(quota) if quota != math.inf else 1 << 30))


def _cgroup_folders(
    controller: str, root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")
) -> list[Path]:
    """Folders whose limits bind this process for `controller`, own group first, then its parents (v1 and v2)."""
    if not me.exists():
        return []
    folders: list[Path] = []
    for line in me.read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            base = root
        elif controller in names.split(","):
            base = root / names if (root / names).exists() else root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        folders += [f for f in (folder, *folder.parents) if f == base or base in f.parents]
    return [folder for folder in folders if folder.exists()]


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time one cgroup allows; None for no limit."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.exists():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if v1.exists():
        micros = int(v1.read_text())
        return None if micros <= 0 else micros / int((folder / "cpu.cfs_period_us").read_text())
    return None


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of system memory for this process; a cgroup limit lowers both."""
    total, available = _system_memory()
    for folder in _cgroup_folders("memory"):
        limit, used = _memory_limit(folder)
        if limit is not None and limit < total:
            total = limit
        if limit is not None:
            available = min(available, max(limit - used, 0))
    return total, min(available, total)


def _system_memory() -> tuple[int, int]:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
        return fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2


def _memory_limit(folder: Path) -> tuple[int | None, int]:
    """(limit, bytes in use that cannot be reclaimed) of one memory cgroup; limit None if there is none."""
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (folder / limit_name).exists() or not (folder / used_name).exists():
            continue
        text = (folder / limit_name).read_text().strip()
        if text == "max" or int(text) >= 1 << 60:
            return None, 0
        used, stat = int((folder / used_name).read_text()), folder / "memory.stat"
        if stat.exists():
            counters = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
            used -= int(counters.get(cache_key, 0))
        return int(text), max(used, 0)
    return None, 0


def process_memory() -> tuple[int, int]:
    """(resident now, resident at most so far) bytes of this process; zeros where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0, 0
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, peak = (int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak
