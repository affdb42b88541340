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

P = ParamSpec("P")
R = TypeVar("R")

TOOLCHAINS: dict[str, str] = {}
"""File name of an implementation -> module it needs, for those that need more than torch."""


@dataclass(frozen=True, slots=True)
class Target:
    """The static facts a choice is made from: device kind and architecture as in `DeviceFacts`, activation dtype."""

    device: str
    architecture: str
    dtype: torch.dtype


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


def load_ops() -> dict[str, Op[Any, Any]]:
    """Import every op's package and each sibling implementation whose toolchain is installed; returns `OPS`."""
    package = importlib.import_module("samovar.kernels")
    for found in pkgutil.walk_packages(package.__path__, "samovar.kernels."):
        needs = TOOLCHAINS.get(found.name.rpartition(".")[2])
        if needs is None or importlib.util.find_spec(needs) is not None:
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


class Kernels:
    """The choice of one implementation per op for one target, made on first use and kept.

    `overrides` are "OP=IMPLEMENTATION" as given to --kernel; a wrong one raises `ConfigError`.
    """

    def __init__(self, target: Target, device: torch.device | str, overrides: Sequence[str] = ()) -> None:
        load_ops()
        self.target, self.device = target, torch.device(device)
        self.wanted = dict(_override(text) for text in overrides)
        self.routes: dict[str, Route] = {}
        self._chosen: dict[str, Callable[..., Any]] = {}

    def use(self, op: Op[P, R]) -> Callable[P, R]:
        """The function that implements `op` on this target."""
        if op.name not in self._chosen:
            impl, self.routes[op.name] = self._choose(op)
            self._chosen[op.name] = impl.function
        return self._chosen[op.name]

    def _choose(self, op: Op[P, R]) -> tuple[Impl[P, R], Route]:
        wanted, answers, chosen = self.wanted.get(op.name), [], None
        for impl in op.candidates():
            if wanted is not None and impl.name != wanted:
                answers.append((impl.name, f"--kernel asks for {wanted}"))
                continue
            if chosen is not None:
                answers.append((impl.name, "accepts" if impl.name != "reference" else "always"))
                continue
            refusal = impl.refusal(self.target) or (None if impl.name == "reference" else self.probe(op, impl))
            answers.append((impl.name, refusal or "chosen"))
            if refusal is None:
                chosen = impl
        if chosen is None:
            raise ConfigError(f"--kernel {op.name}={wanted} cannot be used here: {dict(answers)[str(wanted)]}")
        by_choice = wanted == "reference" or self.target.device in op.plain_is_best
        return chosen, Route(op.name, chosen.name, tuple(answers), chosen.name == "reference" and not by_choice)

    def probe(self, op: Op[P, R], impl: Impl[P, R]) -> str | None:
        """Compare `impl` with the reference on the op's first example; None if equal within tolerance."""
        if op.make_examples is None:
            raise ValueError(f"{op.name} has no examples: declare them with @{op.name}.examples")
        arguments = next(iter(op.make_examples()))
        difference = compare(op, impl.function, arguments, self.target.dtype, self.device)
        return None if difference is None else f"differs from the reference: {difference}"


def cast_arguments(arguments: Iterable[Any], dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """Fresh copies of example arguments: floating-point tensors in `dtype`, others as they are, all on `device`."""
    return tuple(
        a.to(device=device, dtype=dtype if a.is_floating_point() else None, copy=True)
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
        written = [given[names.index(name)] for name in op.mutates]
        results.append([*(result if isinstance(result, tuple) else () if result is None else (result,)), *written])
    absolute, relative = op.tolerance_of(dtype)
    for expected, got in zip(*results, strict=True):
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return f"{tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
        error = (got.double() - expected.double()).abs() - relative * expected.double().abs()
        if not bool((error <= absolute).all()):
            return f"largest error {float((got.double() - expected.double()).abs().max()):.3g} in {dtype}"
    return None


def _override(text: str) -> tuple[str, str]:
    name, _, impl = text.partition("=")
    if name not in OPS:
        raise ConfigError(f"--kernel {text}: no op {name!r}; there are {', '.join(sorted(OPS))}")
    names = [candidate.name for candidate in OPS[name].candidates()]
    if impl not in names:
        raise ConfigError(f"--kernel {text}: {name} has no implementation {impl!r} here; there are {', '.join(names)}")
    return name, impl
