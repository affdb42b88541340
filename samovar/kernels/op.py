"""Op: a function with a plain-torch reference and an ordered list of implementations tested against it.

An op is declared by writing its reference. Layers ask `Kernels.use(op)` once, when they are bound, and keep the plain
function they get: choosing costs nothing per call. Implementations live in sibling files of the op's package and are
imported only if the toolchain that their file name stands for is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from samovar.errors import ConfigError
from samovar.kernels import overlap

P = ParamSpec("P")
R = TypeVar("R")

TOOLCHAINS: dict[str, tuple[str, str]] = {"triton": ("triton", "cuda")}
"""File name of an implementation -> (module it needs, device kind it is for), for those that need more than torch."""


@dataclass(frozen=True, slots=True)
class Target:
    """The static facts a choice is made from: device kind and architecture as in `DeviceFacts`, activation dtype."""

    device: str
    architecture: str
    dtype: torch.dtype
    deterministic: bool = False
    """Only implementations that compute a row alike at every batch size may be chosen."""


@dataclass(frozen=True, slots=True)
class Impl(Generic[P, R]):
    """One implementation. `accepts` returns None, or the reason why it cannot serve a target."""

    name: str
    function: Callable[P, R]
    devices: tuple[str, ...]
    accepts: Callable[[Target], str | None]

    def refusal(self, target: Target) -> str | None:
        """Why this implementation cannot serve `target`; None if it can."""
        if target.device not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        return self.accepts(target)


@dataclass(eq=False)
class Op(Generic[P, R]):
    """A declared op. Calling it runs the reference.

    `prefer` orders the implementations by name; `mutates` names the tensor arguments it writes; `examples` yields
    argument tuples in float32 (tests and benchmarks cast them); `tolerance` is (absolute, relative) by dtype.
    `plain_is_best` lists device kinds on which nothing known beats the reference for targets that no implementation
    accepts, so that running it there is a choice and not a fallback.
    """

    reference: Callable[P, R]
    prefer: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    plain_is_best: tuple[str, ...] = ()
    impls: dict[str, Impl[P, R]] = field(default_factory=dict)
    tolerance: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    make_examples: Callable[[], Iterable[tuple[Any, ...]]] | None = None

    @property
    def name(self) -> str:
        return self.reference.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def impl(
        self, name: str, *, devices: tuple[str, ...], accepts: Callable[[Target], str | None] = lambda target: None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: register an implementation; its name must stand in `prefer`."""
        if name not in self.prefer:
            raise ValueError(f"{self.name}: implementation {name!r} has no place in prefer={self.prefer}")

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.impls[name] = Impl(name, function, devices, accepts)
            return function

        return register

    def examples(self, make: Callable[[], Iterable[tuple[Any, ...]]]) -> Callable[[], Iterable[tuple[Any, ...]]]:
        """Decorator: the argument tuples that tests, the probe (the first one) and benchmarks share."""
        self.make_examples = make
        return make

    def candidates(self) -> Iterator[Impl[P, R]]:
        """Every implementation in order of preference; the reference, which accepts all, comes last."""
        yield from (self.impls[name] for name in self.prefer if name in self.impls)
        yield Impl("reference", self.reference, ("cpu", "cuda"), lambda target: None)

    def missing(self) -> list[str]:
        """Preferred implementations that were not imported: they are for another device, or lack their toolchain."""
        return [name for name in self.prefer if name not in self.impls and name in TOOLCHAINS]

    def tolerance_of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(absolute, relative) error an implementation may show against the reference in `dtype`."""
        if dtype not in self.tolerance:
            raise KeyError(f"{self.name} declares no tolerance for {dtype}: set {self.name}.tolerance[{dtype}]")
        return self.tolerance[dtype]


OPS: dict[str, Op[Any, Any]] = {}
"""Every op that has been imported, by name. `load_ops` imports all."""


def op(
    *, prefer: tuple[str, ...] = (), mutates: tuple[str, ...] = (), plain_is_best: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator that declares an op by its reference; the arguments are those of `Op`."""

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(reference, prefer, mutates, plain_is_best)
        OPS[made.name] = made
        return made

    return declare


def load_ops(device: str = "cpu") -> dict[str, Op[Any, Any]]:
    """Import every op's package and each sibling implementation that is for `device` and whose toolchain is installed;
    returns `OPS`."""
    package = importlib.import_module("samovar.kernels")
    for found in pkgutil.walk_packages(package.__path__, "samovar.kernels."):
        needs, kind = TOOLCHAINS.get(found.name.rpartition(".")[2], (None, device))
        if kind == device and (needs is None or importlib.util.find_spec(needs) is not None):
            importlib.import_module(found.name)
    return OPS


@dataclass(frozen=True, slots=True)
class Route:
    """What was chosen for one op, and what each candidate answered as (name, answer)."""

    op: str
    chosen: str
    answers: tuple[tuple[str, str], ...]
    is_fallback: bool
    """True if the reference runs although something faster exists or is wanted on this device kind."""

    def __str__(self) -> str:
        return f"{self.op}: " + " · ".join(f"{name}: {answer}" for name, answer in self.answers)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An implementation that was chosen and cannot be used, and why."""

    op: str
    impl: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.impl} is not used: {self.reason}"


class Kernels:
    """The choice of one implementation per op for one target, made on first use and kept.

    `overrides` are "OP=IMPLEMENTATION" as given to --kernel; a wrong one raises `ConfigError`. On a CPU a choice is
    compared with the reference before it is made. On a GPU that would compile one kernel after the other: there
    `verify` compares all choices later, when they were compiled side by side, and `refuse` takes one back.
    """

    def __init__(self, target: Target, device: torch.device | str, overrides: Sequence[str] = ()) -> None:
        load_ops(target.device)
        if target.device == "cuda":
            overlap.adapt(target.architecture)
        self.target, self.device = target, torch.device(device)
        self.wanted = dict(_override(text, target.device) for text in overrides)
        self.routes: dict[str, Route] = {}
        self._chosen: dict[str, tuple[Op[Any, Any], Impl[Any, Any]]] = {}
        self._refused: dict[tuple[str, str], str] = {}

    def use(self, op: Op[P, R]) -> Callable[P, R]:
        """The function that implements `op` on this target."""
        if op.name not in self._chosen:
            impl, self.routes[op.name] = self._choose(op)
            self._chosen[op.name] = op, impl
        return self._chosen[op.name][1].function

    def refuse(self, op_name: str, impl_name: str, reason: str) -> None:
        """Choose another implementation than `impl_name` when the op is used next; its route gives the reason."""
        self._refused[op_name, impl_name] = reason
        if op_name in self._chosen and self._chosen[op_name][1].name == impl_name:
            del self._chosen[op_name], self.routes[op_name]

    def chosen(self) -> list[tuple[Op[Any, Any], Impl[Any, Any]]]:
        """Every choice made so far that is not the reference."""
        return [(op, impl) for op, impl in self._chosen.values() if impl.name != "reference"]

    def verify(self) -> list[Refusal]:
        """Compare every choice with its reference on the device; returns those that differ or do not run."""
        found = []
        for op, impl in self.chosen():
            try:
                reason = self.probe(op, impl)
            # A boundary: whatever compiling or starting a kernel raises means that it cannot be used, and is reported.
            except Exception as error:
                reason = f"does not run: {in_one_line(error)}"
            if reason is not None:
                found.append(Refusal(op.name, impl.name, reason))
        return found

    def note_probes(self) -> None:
        """Run the choices on what `verify` gives them, without memory: inside `noting` that notes their launches."""
        for op, impl in self.chosen():
            impl.function(*cast_arguments(self._probed(op), self.target.dtype, "meta"))

    def _choose(self, op: Op[P, R]) -> tuple[Impl[P, R], Route]:
        wanted, answers, chosen = self.wanted.get(op.name), [], None
        answers += [(name, f"needs {TOOLCHAINS[name][0]} on {TOOLCHAINS[name][1]}") for name in op.missing()]
        for impl in op.candidates():
            if wanted is not None and impl.name != wanted:
                answers.append((impl.name, f"--kernel asks for {wanted}"))
                continue
            if chosen is not None:
                answers.append((impl.name, "accepts" if impl.name != "reference" else "always"))
                continue
            refusal = self._refused.get((op.name, impl.name)) or impl.refusal(self.target)
            if refusal is None and impl.name != "reference" and self.target.device == "cpu":
                refusal = self.probe(op, impl)
            answers.append((impl.name, refusal or "chosen"))
            if refusal is None:
                chosen = impl
        if chosen is None:
            raise ConfigError(f"--kernel {op.name}={wanted} cannot be used here: {dict(answers)[str(wanted)]}")
        by_choice = wanted == "reference" or self.target.device in op.plain_is_best
        return chosen, Route(op.name, chosen.name, tuple(answers), chosen.name == "reference" and not by_choice)

    def probe(self, op: Op[P, R], impl: Impl[P, R]) -> str | None:
        """Compare `impl` with the reference on the op's first example; None if equal within tolerance."""
        difference = compare(op, impl.function, self._probed(op), self.target.dtype, self.device)
        return None if difference is None else f"differs from the reference: {difference}"

    @staticmethod
    def _probed(op: Op[P, R]) -> tuple[Any, ...]:
        if op.make_examples is None:
            raise ValueError(f"{op.name} has no examples: declare them with @{op.name}.examples")
        return next(iter(op.make_examples()))


def in_one_line(error: BaseException) -> str:
    """What an exception says, short enough for a report. Compilers begin with the place and end with the complaint."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[-1] if lines[0].endswith(':') else lines[0]}"


def cast_arguments(arguments: Iterable[Any], dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """Fresh copies of example arguments: floating-point tensors in `dtype`, codes as they are, all on `device`."""
    return tuple(
        a.to(device=device, dtype=dtype if a.is_floating_point() and a.itemsize > 1 else None, copy=True)
        if isinstance(a, torch.Tensor)
        else a
        for a in arguments
    )


def compare(
    op: Op[P, R], function: Callable[P, R], arguments: Iterable[Any], dtype: torch.dtype, device: torch.device | str
) -> str | None:
    """Run `function` and the reference on equal arguments; None if results (and written arguments) agree."""
    arguments = tuple(arguments)
    results = []
    for run in (op.reference, function):
        given = cast_arguments(arguments, dtype, device)
        result: Any = run(*given)  # type: ignore[call-arg]
        names = op.reference.__code__.co_varnames
        at = (names.index(name) for name in op.mutates)
        written = [given[i] for i in at if i < len(given) and given[i] is not None]
        results.append([*(result if isinstance(result, tuple) else () if result is None else (result,)), *written])
    absolute, relative = op.tolerance_of(dtype)
    for expected, got in zip(*results, strict=True):
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return f"{tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
        error = (got.double() - expected.double()).abs() - relative * expected.double().abs()
        if not bool((error <= absolute).all()):
            return f"largest error {float((got.double() - expected.double()).abs().max()):.3g} in {dtype}"
    return None


def _override(text: str, device: str) -> tuple[str, str]:
    name, _, impl = text.partition("=")
    if name not in OPS:
        raise ConfigError(f"--kernel {text}: no op {name!r}; there are {', '.join(sorted(OPS))}")
    impls = list(OPS[name].candidates())
    if impl not in [each.name for each in impls]:
        usable = ", ".join(each.name for each in impls if device in each.devices)
        raise ConfigError(
            f"--kernel {text}: {name} has no implementation {impl!r} here; on {device} there are {usable}"
        )
    return name, impl
