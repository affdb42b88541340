"""A few instructions of PTX carried out on integers, so that programs for threads can be tested without a GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence

WORD = 0xFFFFFFFF


def run(program: str, num_outputs: int, inputs: Sequence[int]) -> list[int]:
    """Words that a program of straight lines leaves in $0, $1, ... given those in the places behind them."""
    registers = {f"${num_outputs + place}": value & WORD for place, value in enumerate(inputs)}
    for line in program.strip()[1:-1].split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = re.findall(r"{.*?}|[^,\s]+", rest)
        values = [_value(word, registers) for word in sources]
        result = OPERATIONS[name](*values) & WORD
        if target.startswith("{"):
            low, high = _halves(target)
            registers[low], registers[high] = result & 0xFFFF, result >> 16
        else:
            registers[target] = result
    return [registers[f"${place}"] for place in range(num_outputs)]


def _halves(word: str) -> list[str]:
    return [name.strip() for name in word.strip("{}").split(",")]


def _value(word: str, registers: dict[str, int]) -> int:
    """A register, two halves of one in braces, or a number."""
    if word.startswith("{"):
        low, high = (registers[name] for name in _halves(word))
        return low | (high << 16)
    return registers[word] if word in registers else int(word, 0)


def _prmt(a: int, b: int, selector: int) -> int:
    source, found = a | (b << 32), 0
    for place in range(4):
        which = (selector >> (4 * place)) & 15
        byte = (source >> (8 * (which & 7))) & 0xFF
        if which & 8:
            byte = 0xFF if byte & 0x80 else 0
        found |= byte << (8 * place)
    return found


def _lop3(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for place in range(8):
        if (table >> place) & 1:
            terms = [word if (place >> bit) & 1 else ~word for word, bit in ((a, 2), (b, 1), (c, 0))]
            found |= terms[0] & terms[1] & terms[2]
    return found


def number(bits: int) -> float:
    """What 16 bits mean as bfloat16."""
    return float(struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0])


def _bits(value: float) -> int:
    """bfloat16 nearest to a number, ties to even. A double's sum and product of bfloat16 numbers is rounded once only."""
    word = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


def _fma(a: int, b: int, c: int) -> int:
    halves = [_bits(number(a >> s) * number(b >> s) + number(c >> s)) for s in (0, 16)]
    return halves[0] | (halves[1] << 16)


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "fma.rn.bf16x2": _fma,
}
