"""Machine code of Hopper: registers that are written while a product of matrices may still read them.

The instruction for groups of warps (HGMMA) takes its left operand out of registers and returns before it has read them;
only WARPGROUP.DEPBAR says that it has. Every way through a kernel is followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from subprocess import run

from triton import knobs

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
_NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "DEPBAR", "WARPGROUP", "LDGSTS", "LDGDEPBAR", "CCTL", "MEMBAR", "NOP")

Flight = tuple[frozenset[int], ...]
"""Registers that are read by each group of products under way, oldest first; the last group is still open."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: what it does, and with what."""

    name: str
    operands: tuple[str, ...]
    text: str


def disassembled(cubin: bytes, folder: Path) -> str:
    """The text of compiled code, by the disassembler that comes with Triton."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return run([knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, check=True, text=True).stdout


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the place of each label among them."""
    found, labels = list[Instruction](), dict[str, int]()
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _LINE.match(line):
            found.append(Instruction(match[1], tuple(part.strip() for part in match[2].split(",")), line.strip()))
    return found, labels


def overwritten(text: str) -> list[str]:
    """The instructions that write a register which a product under way reads."""
    code, labels = parsed(text)
    seen, wrong, ways = set[tuple[int, Flight]](), dict[int, str](), [(0, (frozenset[int](),))]
    while ways:
        at, flight = ways.pop()
        if at >= len(code) or (at, flight) in seen:
            continue
        seen.add((at, flight))
        step = code[at]
        if _results(step) & frozenset().union(*flight):
            wrong[at] = step.text
        if step.name.startswith("BRA"):
            target = next((labels[name] for name in re.findall(r"\.L_\w+", step.text) if name in labels), None)
            if target is not None:
                ways.append((target, flight))
            if not re.search(r"\*/\s+@", step.text):
                continue
        if step.name.startswith("EXIT") and not re.search(r"\*/\s+@", step.text):
            continue
        ways.append((at + 1, _after(step, flight)))
    return [wrong[at] for at in sorted(wrong)]


def _after(step: Instruction, flight: Flight) -> Flight:
    if step.name.startswith(("HGMMA", "QGMMA", "IGMMA")):
        given = step.operands[1]
        read = _registers(given, 4) if given.startswith("R") and given != "RZ" else frozenset[int]()
        flight = (*flight[:-1], flight[-1] | read)
        return (*flight, frozenset()) if "gsb0" in step.operands else flight
    if step.name == "WARPGROUP.DEPBAR.LE":
        left = int(step.operands[1], 16)
        closed = flight[:-1]
        return (*closed[len(closed) - left :], flight[-1]) if left < len(closed) else flight
    return flight


def _results(step: Instruction) -> frozenset[int]:
    """Registers that an instruction writes, those of products themselves left out."""
    if step.name.startswith(_NO_RESULT) or "GMMA" in step.name:
        return frozenset()
    count = 4 if ".128" in step.name else 2 if ".64" in step.name or "WIDE" in step.name else 1
    target = step.operands[0]
    return _registers(target, count) if re.match(r"R\d", target) else frozenset()


def _registers(operand: str, count: int) -> frozenset[int]:
    first = re.match(r"R(\d+)", operand)
    return frozenset(range(int(first[1]), int(first[1]) + count)) if first else frozenset()
