"""Device facts from files: what a container allows counts, not what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.errors import ConfigError
from samovar.hardware import cpu, device


def test_probe_of_this_machine() -> None:
    """Plausible numbers; auto without a GPU is the CPU."""
    facts = device.probe("cpu")
    assert facts.kind == "cpu" and 1 <= facts.num_threads <= len(cpu.usable_cpus())
    assert 0 < facts.available_bytes <= facts.total_bytes
    now, peak = device.memory_reading("cpu")
    assert 0 < now <= peak < facts.total_bytes
    device.synchronize("cpu")


def test_auto_looks_for_a_gpu_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device file, no GPU; an unknown kind is refused."""
    monkeypatch.setattr(device, "_GPU_NODES", ("/dev/no-such-device",))
    assert device.probe("auto").kind == "cpu"
    with pytest.raises(ConfigError, match="tpu"):
        device.probe("tpu")


def test_absent_gpu_is_an_error() -> None:
    """--device cuda without a GPU names the remedy."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="--device cpu"):
        device.probe("cuda")


@pytest.mark.parametrize(
    ("flags", "level", "is_fast"),
    [
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512_bf16 amx_tile amx_bf16", "amx_bf16", True),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni", "avx512_vnni", False),
        ("avx2 fma f16c", "avx2", False),
        ("avx2", None, False),
        ("asimd bf16", "neon_bf16", True),
        ("asimd", "neon", False),
        ("", None, False),
    ],
)
def test_instruction_sets(flags: str, level: str | None, is_fast: bool) -> None:
    """The best level all of whose flags are there."""
    found = cpu.instruction_set(frozenset(flags.split()))
    assert found == level if level else found not in dict(cpu._ISA_LEVELS)
    assert cpu.has_fast_bf16(found) is is_fast


def test_cpuinfo(tmp_path: Path) -> None:
    """x86 and ARM spellings; a missing file is no error."""
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor : 0\nmodel name\t: Fast 9000\nflags\t\t: avx2 fma f16c\n\nprocessor : 1\n")
    arm.write_text("processor : 0\nFeatures\t: asimd bf16\nModel\t: Board\n")
    assert cpu.cpu_name_and_flags(x86) == ("Fast 9000", {"avx2", "fma", "f16c"})
    assert cpu.cpu_name_and_flags(arm)[1] == {"asimd", "bf16"}
    assert cpu.cpu_name_and_flags(tmp_path / "none")[1] == frozenset()


def test_physical_cores(tmp_path: Path) -> None:
    """Hyper-threads of one core count once, and only CPUs of the affinity mask count."""
    for number, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cpu.physical_cores(list(range(8)), tmp_path) == 4
    assert cpu.physical_cores([0, 4, 1], tmp_path) == 2
    assert cpu.physical_cores([0, 1, 2], tmp_path / "absent") == 3


def test_cgroup_v2(tmp_path: Path) -> None:
    """The own group and its parents, all of which bind."""
    inner = tmp_path / "fs" / "box" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner / "memory.max").write_text("1000\n")
    (inner / "memory.current").write_text("700\n")
    (inner / "memory.stat").write_text("anon 400\ninactive_file 300\n")
    me = tmp_path / "me"
    me.write_text("0::/box/inner\n")
    folders = cpu._cgroup_folders("cpu", tmp_path / "fs", me)
    assert folders == [inner, inner.parent, tmp_path / "fs"]
    assert [cpu._cpu_quota(folder) for folder in folders] == [None, 1.5, None]
    assert cpu._memory_limit(inner) == (1000, 400)
    assert cpu._memory_limit(inner.parent) == (None, 0)


def test_cgroup_v1(tmp_path: Path) -> None:
    """Controllers in folders of their own, joint ones included, and "no limit" in its old spellings."""
    memory, joint = tmp_path / "fs" / "memory" / "box", tmp_path / "fs" / "cpu,cpuacct" / "box"
    memory.mkdir(parents=True)
    joint.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("2000")
    (memory / "memory.usage_in_bytes").write_text("900")
    (memory / "memory.stat").write_text("total_inactive_file 100\n")
    (memory.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    (memory.parent / "memory.usage_in_bytes").write_text("5")
    (joint / "cpu.cfs_quota_us").write_text("50000")
    (joint / "cpu.cfs_period_us").write_text("100000")
    (joint.parent / "cpu.cfs_quota_us").write_text("-1")
    me = tmp_path / "me"
    me.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n")
    assert [cpu._memory_limit(f) for f in cpu._cgroup_folders("memory", tmp_path / "fs", me)][:2] == [
        (2000, 800),
        (None, 0),
    ]
    assert [cpu._cpu_quota(f) for f in cpu._cgroup_folders("cpu", tmp_path / "fs", me)][:2] == [0.5, None]
    assert cpu._cgroup_folders("cpu", tmp_path / "fs", tmp_path / "no-proc") == []


def test_threads_are_set() -> None:
    """`set_threads` reaches torch."""
    import torch

    before = torch.get_num_threads()
    device.set_threads(1)
    assert torch.get_num_threads() == 1
    device.set_threads(before)
