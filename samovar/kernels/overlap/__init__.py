"""Kernels that start before the kernel ahead of them has ended: programmatic dependent launch, on Hopper and later.

A kernel launched with `launch_options()` may start as soon as every program of the kernel ahead has called `start_next`
or ended (overlap/triton.py). That hides what a launch costs, and lets a kernel fetch weights and tables meanwhile. Every
kernel that takes part keeps these rules:

1. At least one program of every grid calls `await_previous`, and none of them writes anything before that: what it would
   write to may still be read. A program without work may end at once.
2. `start_next` comes strictly after `await_previous`. So whatever runs early knows that all kernels have ended but the
   one right ahead of it.
3. Before `await_previous` a kernel reads only what the kernel right ahead of it does not write, whether that one calls
   `start_next` or not: its end alone does not make its writes visible.
4. `start_next` comes once a program has asked for its inputs, or after its main loop where the next kernel would take
   bandwidth or room from programs at work; at once where few programs leave most of the chip idle.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}
"""Those with programmatic dependent launch."""

_is_on = False


def adapt(architecture: str) -> None:
    """Overlap kernels from here on if `architecture` ("sm_90") can: one process drives one kind of chip, and `Kernels`
    says which."""
    switch(architecture in ARCHITECTURES)


def switch(on: bool) -> None:
    """Whether kernels launched from here on may start before the kernel ahead of them has ended."""
    global _is_on
    _is_on = on


def is_on() -> bool:
    """Whether kernels overlap."""
    return _is_on


def launch_options() -> dict[str, Any]:
    """What `launch` needs for a kernel that takes the constant OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if _is_on else {"OVERLAP": False}
