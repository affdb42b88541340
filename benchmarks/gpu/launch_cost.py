"""What a kernel launch costs the host: Triton's own code against `kernels.direct_launch`, for kernels as models run them.

    PYTHONPATH=. python3 benchmarks/gpu/launch_cost.py

Both ways must leave the same bits. The table then gives microseconds of host time per call of an op, allocation and choice
of tiles included, and per `launch` alone: many calls are queued, and the clock stops before the device is waited for. The
last column is what the device needs per call: where it is the longest, the queue filled up and the host waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from samovar.attention.base import AttentionCall, Spans, SpanTensors
from samovar.attention.triton import TritonAttention
from samovar.kernels import overlap, triton_launch
from samovar.kernels.op import load_ops

CALLS, ROUNDS = 300, 9
DEVICE, DTYPE = "cuda", torch.bfloat16


def tensor(*shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def cases() -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """(name, call that returns what it computed): sizes of qwen3-0.6b, small enough for the host to be the slower one."""
    ops = load_ops("cuda")
    use = {name: ops[name].impls["triton"].function for name in ("rms_norm", "rope_write_kv", "linear", "linear_add")}
    x, weight, gain, residual = tensor(1, 1024), tensor(1024, 1024), tensor(1024), tensor(1, 1024)
    rows, fixed = tensor(4, 1024), ops["linear"].impls["triton_fixed"].function
    yield "rms_norm, 4 tokens", lambda: use["rms_norm"](rows, gain, 1e-6)
    yield "linear, 1 token (gemv)", lambda: use["linear"](x, weight)
    yield "linear, 4 tokens (dot)", lambda: fixed(rows, weight)

    def added() -> torch.Tensor:
        total = residual.clone()
        use["linear_add"](x, weight, total)
        return total

    yield "linear_add, 1 token, and a copy", added
    caches = [torch.zeros(64, 8, 32, 128, device=DEVICE, dtype=DTYPE).permute(0, 2, 1, 3) for _ in range(2)]
    qkv, head_gain = tensor(4, 32, 128), tensor(128)
    cos, sin = tensor(4, 1, 128), tensor(4, 1, 128)
    slots = torch.tensor([5, 40, 80, -1], device=DEVICE)

    def rope() -> torch.Tensor:
        return use["rope_write_kv"](qkv, cos, sin, *caches, slots, head_gain, head_gain, 1e-6, 16)

    yield "rope_write_kv, 4 tokens", rope
    yield "decode_attention, 4 sequences", decode(caches)


def decode(caches: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """One token of each of four sequences of 100."""
    backend = TritonAttention()
    tables = torch.arange(16, device=DEVICE, dtype=torch.int32).view(4, 4)
    tensors = SpanTensors(
        torch.arange(5, device=DEVICE, dtype=torch.int32),
        torch.full((4,), 100, device=DEVICE, dtype=torch.int32),
        torch.arange(4, device=DEVICE, dtype=torch.int32),
        tables,
    )
    plan = backend.plan(Spans([1] * 4, [100] * 4, tables, tensors))
    q, call = tensor(4, 16, 128), AttentionCall(scale=128**-0.5)
    keys, values = (cache.copy_(torch.randn_like(cache)) for cache in caches)
    return lambda: backend.run(q, (keys, values), plan, call)


def host_time(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call on the host and on the device, medians."""
    for _ in range(20):
        call()
    host, device = [], []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        host.append(time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / 1000)
    return statistics.median(host) / CALLS * 1e6, statistics.median(device) / CALLS * 1e6


class OnlyLaunch:
    """Takes the place of `launch` to keep the last one's arguments."""

    def __init__(self) -> None:
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._before = triton_launch.DirectLaunches.launch

    def of(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The last launch that `call` makes, by itself."""
        keeper = self

        def keep(direct: Any, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
            keeper.given = ((kernel, grid, *arguments), options)
            keeper._before(direct, kernel, grid, arguments, options)

        triton_launch.DirectLaunches.launch = keep  # type: ignore[method-assign]
        kept = call()
        triton_launch.DirectLaunches.launch = self._before  # type: ignore[method-assign]
        given, options = self.given

        def again() -> torch.Tensor:
            triton_launch.launch(*given, **options)
            return kept

        return again


def main() -> None:
    """Check, then print."""
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    overlap.adapt(f"sm_{major}{minor}")
    print(f"{'':32} {'op us':>18} {'launch us':>18} {'device':>8}")
    print(f"{'':32} {'triton':>9}{'direct':>9} {'triton':>9}{'direct':>9} {'us':>8}")
    with torch.inference_mode():
        for name, call in cases():
            results, ops, launches, device = [], [], [], []
            for direct in (False, True):
                reason = triton_launch.settle_launches(direct=direct)
                if direct and reason is not None:
                    raise SystemExit(f"no direct launches: {reason}")
                results.append([call().clone() for _ in range(3)][-1])
                of_op, on_device = host_time(call)
                ops.append(of_op)
                device.append(on_device)
            launch = OnlyLaunch().of(call)
            for direct in (False, True):
                triton_launch.settle_launches(direct=direct)
                launches.append(host_time(launch)[0])
            same = torch.equal(*results)
            numbers = f"{ops[0]:9.1f}{ops[1]:9.1f} {launches[0]:9.1f}{launches[1]:9.1f} {min(device):8.1f}"
            print(f"{name:32} {numbers} {'' if same else 'DIFFERENT RESULTS'}")


if __name__ == "__main__":
    main()
