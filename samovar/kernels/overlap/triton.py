"""The two instructions of programmatic dependent launch, and a prefetch; all do nothing in Triton's interpreter.

The rules for their places are in the package's docstring.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the kernel ahead has ended and everybody sees what it wrote."""
    if OVERLAP and not INTERPRETED:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr) -> None:
    """This program does not mind if the next kernel starts now; it does once all programs have said so or ended."""
    if OVERLAP and not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def fetch_to_l2(pointers: tl.tensor) -> None:
    """Ask for the cache lines of `pointers`, which must name memory, and do not wait."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
