"""What a team of threads costs: phases, run starts, and steps beside busy processes. Compiles team.cpp and runs it.

python -m benchmarks.cpu.team [--threads 2] [--seconds 3]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from samovar.config.field import variable
from samovar.hardware.cpu import num_threads

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> Path:
    """The program, optimized as the library is."""
    names = ("team.cpp", "program.cpp", "contention.cpp", "isa.cpp")
    sources = [str(ROOT / "benchmarks" / "cpu" / "team.cpp"), *(str(ROOT / "native" / name) for name in names)]
    command = [variable("CXX") or "c++", "-std=c++20", "-O3", f"-I{ROOT / 'native'}", *sources, "-pthread"]
    subprocess.run([*command, "-o", str(folder / "team")], check=True)
    return folder / "team"


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement beside other processes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        subprocess.run([str(program), str(options.threads), str(options.seconds)], check=True)


if __name__ == "__main__":
    main()
