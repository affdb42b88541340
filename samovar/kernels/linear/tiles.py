"""Which kernel multiplies how many tokens with a weight of which shape, as plain data: no Triton here.

Up to about a hundred tokens a product only waits for its weight. What counts then is that every multiprocessor has
enough bytes under way: about 3 MB at once for 4.3 TB/s and 700 ns, 24 KB on each of an H200's 132. So the tiles below
are chosen to put all programs of a product on the chip at the same time, none waiting for another to end, with two or
more loads of 8 KB each in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

GEMV_ELEMENTS = 4096
"""Weights that one program of the GEMV fetches at once, before its input is there, where rows are that short: four
16-byte loads for each of 128 threads."""
LONG_ROWS = (2, 1024)
"""Rows and columns of a program's tile where rows are longer, or end within a power of two: measured on an H200."""
FEW_PROGRAMS = 96
"""Programs of the tiled kernel below which multiprocessors of an H200 would stand idle."""
MULTIPROCESSORS = 132
"""Of an H200. A program more than each has room for is waited for by all."""
FULL = 0.88
"""Share of them that large programs, one each, must keep busy."""
GATED_FULL = 0.75
"""Share of the places in the last round of gated programs below which cuBLAS and an activation apart are faster: 92 us
instead of 98 for two times [17408, 5120], which are 272 programs."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One program of the GEMV: `rows` of the weight (of each part, if gated), `columns` of them at a time."""

    rows: int
    columns: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class DotTile:
    """One program of the tiled kernel: `tokens` x `rows` results, `depth` inputs at a time, `stages` of them in flight.

    With `splits` > 1 several programs share the inputs of one result; their partial sums are added in a fixed order.
    `ahead` columns of its weights, a power of two, each program asks for before the kernel ahead has ended; with 0 it
    starts after that.
    """

    tokens: int
    rows: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0

    def shared_bytes(self, parts: int, element_size: int) -> int:
        """Shared memory for all stages, which is what Hopper takes; chips that multiply from registers take one less."""
        return self.stages * self.depth * (self.tokens + parts * self.rows) * element_size


MOST_TOKENS = {1: 32, 2: 128}
"""Parts of a weight -> the most tokens for which the tiled kernel is used. cuBLAS multiplies more of them faster, but a
gated activation that costs no pass of its own is worth a little."""
AHEAD, MOST_TOKENS_AHEAD, MOST_AHEAD = 512, 16, 264
"""Columns of its weights that a program asks for ahead, up to so many tokens and programs. With more tokens the kernel
waiting for attention takes more from it than it gains, and more programs do not start together."""

MOST_WEIGHTS_NORMED = 1 << 26
"""A product of one token with at most so many weights norms its input on the fly. Every program repeats that work: with
more weights, and with more tokens, a kernel that norms once is cheaper."""


def norms_on_the_fly(tokens: int, n: int, k: int, parts: int = 1) -> bool:
    """Whether a product with `parts` times [n, k] norms its input itself."""
    return tokens == 1 and n * k * parts <= MOST_WEIGHTS_NORMED


def gemv_tile(n: int, k: int, parts: int = 1) -> GemvTile:
    """The tile for one token and a weight of `parts` times [n, k].

    Rows up to `GEMV_ELEMENTS` are fetched whole, several by one program if they are short.
    """
    columns = max(power_of_two(k), 32)
    rows = max(GEMV_ELEMENTS // columns, 1)
    if columns > GEMV_ELEMENTS or (columns != k and k > LONG_ROWS[1]):
        rows, columns = LONG_ROWS
    while rows > parts and n * parts < 4 * FEW_PROGRAMS * rows:
        rows //= 2
    return GemvTile(max(rows // parts, 1), columns)


def dot_tile(tokens: int, n: int, k: int, parts: int = 1, *, is_large: bool = True) -> DotTile:
    """The tile for a few tokens and a weight of `parts` times [n, k], up to 128 tokens in one row of programs.

    Large ones, of up to 147 KB, only with `is_large`.

    Measured on an H200. A matrix instruction takes 64 rows of the weight, so that a tile has at least those, of each
    part. Products of up to 32 tokens are split until most multiprocessors have work, the more the longer they are; gated
    ones cannot be, and are left to cuBLAS where they would be few.
    """
    width = min(max(power_of_two(tokens), 16), 128)
    if width > 32:
        return DotTile(width, 128 // parts, 64, warps=8)
    if parts == 2:
        return DotTile(width, 64, 128, stages=3)
    if is_large and width == 16 and (splits := _large_splits(n, k)):
        return DotTile(width, 128, 128, splits=splits, warps=8, stages=3 if splits == 1 else 4, ahead=AHEAD)
    programs, splits = -(-n // 64), 1
    while splits < 4 and (
        programs * splits < 64
        or (programs * splits < FEW_PROGRAMS and k > 2048 * splits)
        or (k > 4096 * splits and programs * splits <= MULTIPROCESSORS)
    ):
        splits *= 2
    ahead = AHEAD if tokens <= MOST_TOKENS_AHEAD and programs * splits <= MOST_AHEAD else 0
    return DotTile(width, 64, 128, splits=splits, stages=3 if k <= 1024 * splits else 4, ahead=ahead)


def _large_splits(n: int, k: int) -> int:
    """How often inputs are split so that programs of 128 rows, one on each multiprocessor, are enough; 0: not at all."""
    programs = -(-n // 128)
    splits = min(MULTIPROCESSORS // programs, 4)
    return splits if programs * splits >= FULL * MULTIPROCESSORS and k >= 2048 * splits else 0


def _leaves_idle(programs: int) -> bool:
    """Whether the last round of gated programs, one on each multiprocessor, is too small a part of the work."""
    return programs < GATED_FULL * MULTIPROCESSORS * -(-programs // MULTIPROCESSORS)


def fixed_tile(element_size: int, parts: int = 1) -> DotTile:
    """The one tile of deterministic mode: a result must not depend on how many others are computed beside it."""
    return DotTile(tokens=64, rows=128 // parts, depth=128 // element_size)


@lru_cache(maxsize=4096)
def choose_tile(tokens: int, n: int, k: int, parts: int, element_size: int, shared: int) -> GemvTile | DotTile | None:
    """How to multiply `tokens` tokens with `parts` times [n, k]; None leaves it to cuBLAS.

    The tiles were made for chips with much memory: one that takes more than `shared` bytes is not used.
    """
    if tokens == 1:
        return gemv_tile(n, k, parts)
    if not 1 < tokens <= MOST_TOKENS[parts]:
        return None
    if parts == 2 and (n < 64 * FEW_PROGRAMS or (tokens <= 32 and _leaves_idle(-(-n // 64)))):
        return None
    # Rows that start anywhere cannot be copied 16 bytes at a time.
    if element_size != 2 or k % 16:
        return None
    fitting = (dot_tile(tokens, n, k, parts, is_large=is_large) for is_large in (True, False))
    return next((tile for tile in fitting if tile.shared_bytes(parts, element_size) <= shared), None)


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
