"""DirectLaunches: the second launch of a Triton kernel on, without Triton's way from arguments to compiled code.

That way binds arguments, looks at each, and builds keys out of text, which takes longer than many kernels run. But what
it finds depends on little: the device, the constants and options, and of each other argument what Triton specializes
code for. A pointer counts by dtype and by being a multiple of 16 or not; an integer by its value, or where the kernel has
`do_not_specialize` by its width; a float not at all. Launches that are alike in all that run the code that Triton ran
the first time, on other pointers and numbers.

What is taken from Triton: `kernel[grid](...)` returns the compiled kernel, whose `run` takes grid, stream, function,
metadata, hooks and every argument in order, constants included. That holds for Triton 3.6 and 3.9. Its settings
(`triton.knobs`) count as they were at a kind's first launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

MOST_KINDS = 8192
"""Kinds of launches remembered; there are a few hundred unless an integer that changes is specialized."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A compiled kernel: call `run(*grid, stream, function, metadata, None, None, None, *arguments, *constants)`."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class DirectLaunches:
    """For one thread. `get_device` and `get_stream` are those of Triton's driver, `hooks` what Triton calls around
    launches: while there are any, everything goes Triton's way."""

    def __init__(
        self, get_device: Callable[[], int], get_stream: Callable[[int], int], hooks: tuple[list[Any], list[Any]]
    ) -> None:
        self._get_device, self._get_stream = get_device, get_stream
        self._before, self._after = hooks
        self._ready: dict[tuple[Any, ...], Ready | None] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run `kernel` on `grid`, by whichever way there is."""
        device = self._get_device()
        key = [id(kernel), device, *options, *options.values()]
        values = []
        free = unspecialized(kernel)
        for i, argument in enumerate(arguments):
            kind = type(argument)
            if kind is int:
                key.append(_width(argument) if i in free else argument)
                values.append(argument)
            elif argument is None or kind is float:
                key.append(kind)
                values.append(argument)
            elif isinstance(argument, torch.Tensor):
                # The address in place of the tensor saves the launcher from asking the driver what it is.
                pointer = argument.data_ptr()
                key += (argument.dtype, argument.is_cuda, pointer % 16 == 0)
                values.append(pointer)
            else:
                kernel[grid](*arguments, **options)
                return
        kind_of_launch = tuple(key)
        ready = self._ready.get(kind_of_launch)
        if ready is None or self._before or self._after:
            compiled = kernel[grid](*arguments, **options)
            if kind_of_launch not in self._ready:
                self._remember(kind_of_launch, kernel, compiled, len(arguments), options)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = self._get_stream(device)
        ready.run(x, y, z, stream, ready.function, ready.metadata, None, None, None, *values, *ready.constants)

    def _remember(
        self, key: tuple[Any, ...], kernel: Any, compiled: Any, num_arguments: int, options: dict[str, Any]
    ) -> None:
        if len(self._ready) >= MOST_KINDS:
            self._ready.clear()
        reason = why_not_direct(kernel, compiled, num_arguments, options)
        if reason is not None:
            logger.warning("kernel %s is launched the slow way: %s", kernel.__name__, reason)
            self._ready[key] = None
            return
        constants = tuple(options.get(p.name, p.default) for p in kernel.params[num_arguments:])
        self._ready[key] = Ready(compiled.run, compiled.function, compiled.packed_metadata, constants)


def _width(number: int) -> int:
    """Which type Triton gives an integer: 32 bits, 64 bits, 64 bits without a sign."""
    if -0x80000000 <= number < 0x80000000:
        return 32
    return 64 if number < 1 << 63 else -64


_unspecialized: dict[int, frozenset[int]] = {}


def unspecialized(kernel: Any) -> frozenset[int]:
    """Places of the arguments whose values change nothing in the code. An interpreted kernel has no code."""
    # By identity: a kernel's own hash is made of its source. Kernels are module-level and never go.
    found = _unspecialized.get(id(kernel))
    if found is None:
        parameters = getattr(kernel, "params", ())
        found = frozenset(parameter.num for parameter in parameters if parameter.do_not_specialize)
        _unspecialized[id(kernel)] = found
    return found


def why_not_direct(kernel: Any, compiled: Any, num_arguments: int, options: dict[str, Any]) -> str | None:
    """Why launches like one that returned `compiled` must go on through Triton; None if they need not."""
    if type(compiled).__name__ != "CompiledKernel":
        return f"Triton returned a {type(compiled).__name__}"
    missing = [name for name in ("run", "function", "packed_metadata") if not hasattr(compiled, name)]
    if missing:
        return f"Triton's compiled kernels have no {', '.join(missing)}"
    if kernel.pre_run_hooks:
        return "it has hooks of its own"
    for parameter in kernel.params[num_arguments:]:
        if not parameter.is_constexpr:
            return f"{parameter.name} is given by name, but is no constant"
        if parameter.name not in options and not parameter.has_default:
            return f"{parameter.name} is missing"
    return None


def direct_launches() -> DirectLaunches | str:
    """What this process launches with, or why it cannot: in the interpreter, on other GPUs, with another Triton."""
    from triton import knobs
    from triton.runtime.driver import driver

    if knobs.runtime.interpret:
        return "kernels are interpreted"
    active = driver.active
    target = active.get_current_target()
    if target.backend != "cuda":
        return f"code for {target.backend} may depend on more than is looked at here"
    before, after = (_listeners(knobs.runtime, name) for name in ("launch_enter_hook", "launch_exit_hook"))
    if before is None or after is None:
        return "this Triton keeps its launch hooks elsewhere"
    return DirectLaunches(active.get_current_device, active.get_current_stream, (before, after))


def _listeners(settings: Any, name: str) -> list[Any] | None:
    """The list in which Triton keeps who is called around launches; it grows and shrinks in place."""
    calls = getattr(getattr(settings, name, None), "calls", None)
    return calls if isinstance(calls, list) else None
