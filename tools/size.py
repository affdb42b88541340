"""Lines of every room and the largest files, and the difference to an earlier commit.

python -m tools.size [COMMIT]
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from tools.source import FOLDERS, ROOT, read_sources


def now() -> dict[str, int]:
    """Path -> lines in the working tree."""
    return {source.path: len(source.lines) for source in read_sources()}


def at(commit: str) -> dict[str, int]:
    """Path -> lines in a commit."""
    listed = _git("ls-tree", "-r", "--name-only", commit, *FOLDERS).splitlines()
    return {path: len(_git("show", f"{commit}:{path}").splitlines()) for path in listed if path.endswith(".py")}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def room(path: str) -> str:
    """`samovar/text/stop.py` -> `samovar/text`."""
    parts = path.split("/")[:-1]
    return "/".join(parts[:2])


def report(new: dict[str, int], old: dict[str, int]) -> str:
    """A table of rooms, then the ten largest files; with differences where there is something to compare."""
    rooms, before, files = Counter[str](), Counter[str](), Counter[str]()
    for path, lines in new.items():
        rooms[room(path)] += lines
        files[room(path)] += 1
    for path, lines in old.items():
        before[room(path)] += lines
    rows = [f"{'room':<28}{'files':>6}{'lines':>8}" + (f"{'change':>8}" if old else "")]
    for name in sorted(rooms | before):
        change = f"{rooms[name] - before[name]:>+8}" if old else ""
        rows.append(f"{name:<28}{files[name]:>6}{rooms[name]:>8}{change}")
    total = f"{'total':<28}{len(new):>6}{sum(new.values()):>8}"
    rows.append(total + (f"{sum(new.values()) - sum(old.values()):>+8}" if old else ""))
    largest = sorted(new.items(), key=lambda item: -item[1])[:10]
    return "\n".join([*rows, "", "largest files", *(f"{lines:>6}  {path}" for path, lines in largest)])


if __name__ == "__main__":
    print(report(now(), at(sys.argv[1]) if len(sys.argv) > 1 else {}))
