"""What commands print: sizes, tables, and a progress line on standard error that disappears when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType


def size(count: int) -> str:
    """Bytes for people, in binary units: 98,400,000 -> `93.8 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> str:
    """Columns aligned; the columns named in `right` are flush right, the last one is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


class ProgressLine:
    """One line on standard error, redrawn at most ten times a second; silent where nobody watches."""

    def __init__(self, label: str, *, is_bytes: bool = False) -> None:
        self.label, self.is_bytes = label, is_bytes
        self.is_shown = sys.stderr.isatty()
        self.began = time.monotonic()
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` (0: unknown)."""
        now = time.monotonic()
        if not self.is_shown or (now - self._drawn < 0.1 and done != total):
            return
        self._drawn = now
        print(f"\r\x1b[K{self.text(done, total, now - self.began)}", end="", file=sys.stderr, flush=True)

    def text(self, done: int, total: int, seconds: float) -> str:
        """The line itself."""
        shown = (size(done), size(total)) if self.is_bytes else (f"{done:,}", f"{total:,}")
        if not total:
            return f"{self.label}  {shown[0]}"
        filled = 24 * done // total
        left = f", {seconds / done * (total - done):.0f} s left" if done and seconds > 1 and done < total else ""
        return f"{self.label}  [{'█' * filled}{'·' * (24 - filled)}] {shown[0]} of {shown[1]}{left}"

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
