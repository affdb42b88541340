"""Bounds of numbers: exact for integers of 64 bits, and never beyond what llguidance's floats tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, Protocol

from samovar.grammar.schema_rules import INTEGER_FORMATS

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
HIGHEST = 2**63 - 1
LOWEST = -(2**63 - 1024)
"""The next float above the lowest integer of 64 bits, with which llguidance's arithmetic overflows."""
FAR = 10**18
"""From here on llguidance needs both ends of a range."""
LARGEST_BOUND = 1e15
"""Of numbers that need not be integers."""
LARGEST_FRACTION = 1e6
"""Beyond it, bounds are moved inwards to whole numbers: floats have too few digits for more."""
SMALLEST_STEP = 1e-9
"""Between an exclusive bound and the next number that is allowed."""
MULTIPLE_STATES = 10_000
"""The significant digits of `multipleOf` as an integer: its automaton has so many states."""


class _Place(Protocol):
    """What is read and written of a schema."""

    @property
    def schema(self) -> Mapping[str, Any]: ...
    @property
    def types(self) -> tuple[str, ...]: ...
    @property
    def out(self) -> dict[str, Any]: ...
    def at(self, keyword: str) -> str: ...


class _Rewriter(Protocol):
    def refuse(self, pointer: str, problem: str, value: Any) -> NoReturn: ...


def check_multiple(value: Any) -> str | None:
    """Why a `multipleOf` cannot be enforced; None if it can."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return f"multipleOf must be a number above 0, got {str(value)[:100]!r}"
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    if int("".join(map(str, digits))) > MULTIPLE_STATES or not (isinstance(exponent, int) and -9 <= exponent <= 9):
        return f"multipleOf {str(value)[:100]} is not up to {MULTIPLE_STATES} times a power of ten from 1e-9 to 1e9"
    return None


def numeric_rules(rewriter: _Rewriter, place: _Place) -> None:
    """Write `minimum`, `maximum` and their exclusive forms of a place as they are enforced."""
    low, is_low_open = _bound(rewriter, place, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _bound(rewriter, place, "maximum", "exclusiveMaximum", min)
    form = place.schema.get("format")
    if isinstance(form, str) and form in INTEGER_FORMATS and "string" not in place.types:
        if {"integer", "number"} & set(place.types):
            first, last = INTEGER_FORMATS[form]
            low, is_low_open = (low, is_low_open) if low is not None and low >= first else (Fraction(first), False)
            high, is_high_open = (high, is_high_open) if high is not None and high <= last else (Fraction(last), False)
    if "integer" in place.types and "number" not in place.types:
        least = None if low is None else math.floor(low) + 1 if is_low_open else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if is_high_open else math.floor(high)
        _integer_bounds(rewriter, place, least, most)
        return
    for keyword, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound) > LARGEST_BOUND:
            problem = (
                f"bounds of numbers are enforced up to {LARGEST_BOUND:g}, got {float(bound):g}; use an integer type"
            )
            rewriter.refuse(place.at(keyword), problem, None)
    # llguidance lets 1000 through as an exclusive minimum under a maximum of 1000.5: it gets inclusive bounds only.
    start = None if low is None else _inclusive(low, is_low_open, 1)
    end = None if high is None else _inclusive(high, is_high_open, -1)
    if start is not None and end is not None and start > end:
        rewriter.refuse(place.at("minimum"), f"no number is between {float(start)} and {float(end)}", None)
    _check_multiples(rewriter, place, start, end)
    if start is not None:
        place.out["minimum"] = _plain(start)
    if end is not None:
        place.out["maximum"] = _plain(end)


def _inclusive(bound: Fraction, is_open: bool, sign: int) -> Fraction:
    """The bound itself, or the first number beyond it that is told from it. Far out, only whole numbers are."""
    if abs(bound) > LARGEST_FRACTION:
        whole = sign * math.ceil(sign * bound)
        return Fraction(whole + sign if is_open and whole == bound else whole)
    return Fraction(repr(float(bound) + sign * SMALLEST_STEP)) if is_open else bound


def _bound(
    rewriter: _Rewriter, place: _Place, closed_name: str, open_name: str, stricter: Any
) -> tuple[Fraction | None, bool]:
    """One end of the range, and whether it is left out itself."""
    closed = _number(rewriter, place, closed_name, place.schema.get(closed_name))
    raw = place.schema.get(open_name)
    if isinstance(raw, bool):  # draft 4: the bound itself is in the other keyword
        if raw and closed is None:
            rewriter.refuse(place.at(open_name), f"{open_name} is true and there is no {closed_name}", raw)
        return closed, raw
    opened = _number(rewriter, place, open_name, raw)
    if opened is None or closed is None:
        return (closed, False) if opened is None else (opened, True)
    return (opened, True) if stricter(opened, closed) == opened else (closed, False)


def _number(rewriter: _Rewriter, place: _Place, keyword: str, value: Any) -> Fraction | None:
    if value is None and keyword not in place.schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        rewriter.refuse(place.at(keyword), f"{keyword} must be a finite number, got {str(value)[:100]!r}", value)
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _integer_bounds(rewriter: _Rewriter, place: _Place, least: int | None, most: int | None) -> None:
    if (least is not None and least > HIGHEST) or (most is not None and most < LOWEST):
        rewriter.refuse(place.at("minimum"), "integers are enforced within 64 bits with a sign", least or most)
    if least is not None:
        least = _inside(max(least, LOWEST), math.inf)
    if most is not None:
        most = HIGHEST if most >= HIGHEST else _inside(most, -math.inf)
    if least is not None and least > FAR and most is None:
        most = HIGHEST
    if most is not None and most < -FAR and least is None:
        least = LOWEST
    if least is not None and most is not None and least > most:
        rewriter.refuse(place.at("minimum"), f"no integer is between {least} and {most}", least)
    _check_multiples(rewriter, place, least, most)
    if least is not None:
        place.out["minimum"] = least
    if most is not None:
        place.out["maximum"] = most


def _inside(bound: int, towards: float) -> int:
    """The nearest integer on the range's side that a float holds: llguidance reads bounds as floats."""
    nearest = float(bound)
    if int(nearest) != bound and (int(nearest) < bound) == (towards > 0):
        nearest = math.nextafter(nearest, towards)
    return min(int(nearest), HIGHEST)


def _check_multiples(
    rewriter: _Rewriter, place: _Place, low: Fraction | int | None, high: Fraction | int | None
) -> None:
    step = place.schema.get("multipleOf")
    if step is None or low is None or high is None:
        return
    unit = Fraction(repr(step)) if isinstance(step, float) else Fraction(step)
    if math.ceil(Fraction(low) / unit) * unit > high:
        rewriter.refuse(place.at("multipleOf"), f"no multiple of {step} is within the bounds", step)


def _plain(bound: Fraction) -> int | float:
    return int(bound) if bound.denominator == 1 else float(bound)
