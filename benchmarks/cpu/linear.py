"""Products with packed weights on a CPU: GB/s of weights and GFLOP/s, beside what this machine reads and multiplies at best.

PYTHONPATH=. python benchmarks/cpu/linear.py [--formats Q4_0,BF16] [--rows 1,16,512] [--shapes 2048x5632] [--threads 2]
[--isa amx] [--bandwidth GB/s] [--peak GFLOP/s]. Times are medians of whole LINEAR instructions, input preparation included,
over copies of the weight that exceed the caches where rows are few. Run it alone: a neighbour on a core halves a figure.

Without --bandwidth and --peak the two are measured here: reads by summing a large array in the team's number of threads,
products by the fastest figure of the run itself, so that the shares of a format and shape can be compared.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samovar.hardware.cpu import num_threads
from samovar.native.abi import CInstruction, CMatrix, Count, CRegister, CStep, Format, Op
from samovar.native.matrix import aligned_bytes, packed_bytes
from samovar.native.team import Team

SHAPES = "2048x5632,5632x2048,2048x2048,576x1536,1536x576,960x576"
FORMATS = "F32,F16,BF16,I8,Q4_0,Q4_1,Q8_0,Q4_K,Q6_K"
ROWS = "1,4,16,64,512"
COLD_BYTES = 300 << 20
"""Weights are spread over so many bytes, so that few rows read them from memory."""
FEW_ROWS = 64
SECONDS = 0.3


@dataclass
class Figure:
    """One shape and format at one number of rows: its median seconds, bytes and operations."""

    name: str
    seconds: float
    num_bytes: int
    operations: float


def bandwidth(count: int) -> float:
    """Bytes a second that the threads read from memory together, the best of a few passes."""
    arrays = [np.ones(COLD_BYTES // 8 // count, dtype=np.int64) for _ in range(count)]

    def once() -> float:
        threads = [threading.Thread(target=array.max) for array in arrays]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    return sum(array.nbytes for array in arrays) / min(once() for _ in range(5))


def weights(format: Format, outputs: int, cols: int, rows: int) -> tuple[list[CMatrix], NDArray[np.uint8]]:
    """Copies of a packed weight, and their memory. What it holds does not change the time: all bytes are 0x11."""
    size = -(-packed_bytes(format, outputs, cols) // 64) * 64
    count = max(1, COLD_BYTES // size) if rows <= FEW_ROWS else 4
    memory = aligned_bytes(size * count)
    memory[:] = 0x11
    return [CMatrix(format, outputs, cols, 0, memory.ctypes.data + n * size) for n in range(count)], memory


def measure(team: Team, format: Format, outputs: int, cols: int, rows: int) -> Figure:
    """The median of single instructions, each on the next copy of the weight."""
    copies, memory = weights(format, outputs, cols, rows)
    x = np.random.default_rng(0).standard_normal((rows, cols), dtype=np.float32)
    y = np.zeros((rows, outputs), dtype=np.float32)
    registers = (CRegister * 2)(CRegister(x.ctypes.data, cols), CRegister(y.ctypes.data, outputs))
    step = CStep(registers=registers, num_registers=2)
    step.counts[Count.TOKENS] = rows
    matrices = (CMatrix * len(copies))(*copies)
    programs = []
    for n in range(len(copies)):
        program = (CInstruction * 1)()
        it = program[0]
        it.op, it.rows = Op.LINEAR, Count.TOKENS
        it.input[:], it.output[:] = [0, -1, -1, -1], [1, -1]
        it.i[0], it.i[2] = 1, cols
        it.p[0] = ctypes.addressof(matrices) + n * ctypes.sizeof(CMatrix)
        programs.append(program)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        team.run(programs[len(times) % len(programs)], step)
        times.append(time.perf_counter() - start)
    team.forget()
    del memory
    name = f"{format.name:7}{outputs:>6} x {cols:<6}{rows:>5}"
    num_bytes = packed_bytes(format, outputs, cols)
    return Figure(name, statistics.median(times[2:]), num_bytes, 2.0 * rows * outputs * cols)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--isa")
    parser.add_argument("--bandwidth", type=float, help="GB/s of this machine")
    parser.add_argument("--peak", type=float, help="GFLOP/s of this machine, all threads")
    return parser.parse_args()


def main() -> None:
    """Measure, then print each figure with its shares of the machine's."""
    asked = arguments()
    team = Team(asked.threads, asked.isa)
    read = asked.bandwidth * 1e9 if asked.bandwidth else bandwidth(team.num_threads)
    figures: list[Figure] = []
    for shape in asked.shapes.split(","):
        outputs, cols = (int(size) for size in shape.split("x"))
        for format in (Format[name] for name in asked.formats.split(",")):
            if format >= Format.Q4_0 and cols % (256 if format.name.endswith(("_K", "_XS")) else 32):
                continue
            figures += [measure(team, format, outputs, cols, int(rows)) for rows in asked.rows.split(",")]
    team.close()
    peak = asked.peak * 1e9 if asked.peak else max(figure.operations / figure.seconds for figure in figures)
    print(
        f"{team.isa}, {team.num_threads} threads; reads {read / 1e9:.1f} GB/s, multiplies {peak / 1e9:.0f} GFLOP/s at best"
    )
    print("format outputs x inputs   rows      us    GB/s  of reads  GFLOP/s  of products")
    for figure in figures:
        rate, speed = figure.num_bytes / figure.seconds, figure.operations / figure.seconds
        print(
            f"{figure.name} {figure.seconds * 1e6:9.1f} {rate / 1e9:7.1f} {rate / read:8.0%}"
            f" {speed / 1e9:9.0f} {speed / peak:10.0%}"
        )


if __name__ == "__main__":
    main()
