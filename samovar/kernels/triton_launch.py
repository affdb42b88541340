"""The one door through which Triton kernels start: `launch`. It can also take note of launches instead of making them.

Noting is how kernels are compiled before they are needed: a forward pass over tensors without memory (device "meta")
names every kernel with the very arguments it will see, nothing runs, and the notes are compiled side by side. With
`TargetDriver` that works for a GPU that this machine does not have.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from samovar.kernels.direct_launch import DirectLaunches, direct_launches, unspecialized

logger = logging.getLogger(__name__)

Grid = tuple[int, ...]

SHARED_BYTES = {70: 96 << 10, 75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10,
                100: 227 << 10, 103: 227 << 10, 120: 99 << 10, 121: 99 << 10}  # fmt: skip
"""Shared memory that one block may use, by compute capability (CUDA programming guide, technical specifications)."""


def cdiv(count: int, each: int) -> int:
    """Programs that take `each` of `count`. Triton's function of this name is made for kernels, and slow outside them."""
    return -(-count // each)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`; 0 for 0. See `cdiv`."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One noted launch: a Triton kernel, its positional arguments (tensors as dtypes) and its keyword arguments."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Equal keys compile to the same code."""
        free = unspecialized(self.kernel)
        numbers = tuple(
            (argument.bit_length() > 31, *(() if i in free else (argument == 1, argument % 16 == 0)))
            if type(argument) is int
            else argument
            for i, argument in enumerate(self.arguments)
        )
        return (self.kernel, numbers, tuple(sorted(self.options.items(), key=itemgetter(0))))

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)


@dataclass(slots=True)
class LaunchNotes:
    """Launches noted so far, each kind once."""

    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)
    """Whose launches are noted: an engine on another thread goes on."""

    def take(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Note one launch; a tensor counts only by its dtype."""
        plain = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        launch = Launch(kernel, plain, options)
        self.launches.setdefault(launch.key(), launch)


_notes: LaunchNotes | None = None

DIRECT = True
"""Whether kernels are launched past Triton's own launch code where that is possible; read at the first launch."""

_direct: DirectLaunches | None = None
_is_settled = False


def settle_launches(*, direct: bool | None = None) -> str | None:
    """Choose the way that kernels are launched from here on; returns why it is Triton's own. The first launch does so.

    `direct` is whether to try the short way, `DIRECT` unless given.
    """
    global _direct, _is_settled
    found = direct_launches() if (DIRECT if direct is None else direct) else "switched off"
    _direct, _is_settled = (None, True) if isinstance(found, str) else (found, True)
    if isinstance(found, str):
        logger.info("kernels are launched by Triton's own code: %s", found)
        return found
    return None


def launch(kernel: Any, grid: Grid, *arguments: Any, **options: Any) -> None:
    """Run `kernel` (a `triton.jit` function) on `grid`; `options` are its constexprs, num_warps, num_stages.

    Integers among `arguments` that change from step to step must be marked `do_not_specialize` in the kernel, or each
    new kind of value would compile it again.
    """
    if _notes is not None and _notes.thread == threading.get_ident():
        _notes.take(kernel, arguments, options)
    elif all(grid):
        if not _is_settled:
            settle_launches()
        if _direct is not None:
            _direct.launch(kernel, grid, arguments, options)
        else:
            kernel[grid](*arguments, **options)


@contextmanager
def noting() -> Iterator[LaunchNotes]:
    """Inside, `launch` only takes notes on this thread; one thread of a process at a time."""
    global _notes
    if _notes is not None:
        raise RuntimeError("launches are being noted already")
    _notes = notes = LaunchNotes()
    try:
        yield notes
    finally:
        _notes = None


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """What became of one noted launch: Triton's kernel, or the exception that compiling it raised."""

    launch: Launch
    kernel: Any
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The outcome of `compile_each`: how many kernels were compiled and how many found in the cache, in how long."""

    outcomes: list[Compiled]
    num_compiled: int
    num_cached: int
    seconds: float

    @property
    def failures(self) -> list[Compiled]:
        """Launches that cannot be compiled."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    def __str__(self) -> str:
        parts = [f"{self.num_compiled} compiled"] if self.num_compiled else []
        parts += [f"{self.num_cached} from the cache"] if self.num_cached or not parts else []
        return f"kernels: {', '.join(parts)} in {self.seconds:.1f} s"


def compile_each(notes: LaunchNotes, threads: int, *, loads: bool = False) -> CompileReport:
    """Compile every noted launch for the active driver's target, `threads` at a time; with `loads` also put the code on
    the GPU, which is where too much shared memory shows, and where Triton before 3.7 calls the C compiler once more.

    Triton's passes and the compilers it calls release the interpreter lock, so threads do. A launch that fails stops no
    other.
    """
    if not notes.launches:
        return CompileReport([], 0, 0, 0.0)
    from triton.runtime._async_compile import AsyncCompileMode

    began = time.perf_counter()
    waiting: list[tuple[Launch, Any, Any]] = []
    outcomes: list[Compiled] = []
    with counting_compiles() as hits:
        with ThreadPoolExecutor(threads, "compile") as executor, AsyncCompileMode(executor, ignore_errors=True):
            for noted in notes.launches.values():
                try:
                    # Triton takes a torch dtype for a pointer that is aligned to 16 bytes, as torch's allocations are.
                    kernel = noted.kernel.warmup(*noted.arguments, grid=(1, 1, 1), **noted.options)
                # A boundary: Triton's front end raises what it likes, and the report tells every failure.
                except Exception as error:
                    outcomes.append(Compiled(noted, None, error))
                else:
                    waiting.append((noted, kernel, getattr(kernel, "future", None)))
    for noted, kernel, future in waiting:
        failed = None if future is None else future.exception()
        done = None if failed is not None else kernel if future is None else kernel.result()
        outcomes.append(Compiled(noted, done, failed))
    if loads:
        with ThreadPoolExecutor(threads, "load") as executor:
            outcomes = list(executor.map(_loaded, outcomes))
    return CompileReport(outcomes, hits.count(False), hits.count(True), time.perf_counter() - began)


def _loaded(outcome: Compiled) -> Compiled:
    if outcome.kernel is None:
        return outcome
    try:
        outcome.kernel._init_handles()
    # A boundary: the driver's and Triton's complaints have no common class, and the report tells every one.
    except Exception as error:
        return Compiled(outcome.launch, outcome.kernel, error)
    return outcome


def compile_all(notes: LaunchNotes, threads: int) -> int:
    """`compile_each`, raising the first failure; returns how many launches there were."""
    report = compile_each(notes, threads)
    for failure in report.failures:
        raise RuntimeError(f"{failure.launch.name} does not compile: {failure.error}") from failure.error
    return len(report.outcomes)


@contextmanager
def counting_compiles() -> Iterator[list[bool]]:
    """Inside, the list gets an entry for every kernel Triton makes: True if its cache had it."""
    from triton import knobs

    hits: list[bool] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **news: hits.append(bool(news["cache_hit"]))
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


def on_compile(heard: Callable[[str], None]) -> None:
    """From now on, call `heard` with the name of every kernel that had to be compiled or read from the cache."""
    from triton import knobs

    knobs.compilation.listener = lambda **news: heard(str(news["src"].name))


def is_installed() -> bool:
    """Whether there is a Triton to compile with."""
    return importlib.util.find_spec("triton") is not None


def set_cache_folder(folder: Path) -> None:
    """Keep compiled kernels in `folder`. Triton files them by its own version, the target, the source and the options."""
    from triton import knobs

    # Triton's own switches, which it passes on to child processes through the environment. Fusing a multiplication with
    # an addition is its default so far; newer versions warn where that is not said.
    knobs.cache.dir = str(folder)
    knobs.language.default_fp_fusion = True


class TargetDriver:
    """Stands in for Triton's driver to compile for `capability` (90 for sm_90) without such a GPU; it runs nothing."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps compiled kernels per device: one number per architecture."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        """Never used."""
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Inside, Triton compiles for sm_`capability`."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(TargetDriver(capability))
    try:
        yield
    finally:
        driver._active = before
