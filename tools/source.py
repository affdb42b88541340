"""Python files of the repository, parsed once, and what a gate says about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("samovar", "tests", "tools", "benchmarks", "scripts")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Violation:
    """One place that breaks a gate. `where` is `path` or `path:name`, the key of a waiver."""

    gate: str
    where: str
    line: int
    message: str

    def __str__(self) -> str:
        path, _, name = self.where.partition(":")
        return f"{path}:{self.line}: [{self.gate}] {name + ': ' if name else ''}{self.message}"


class Source:
    """One Python file: its path relative to the root, its text, and its syntax tree."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @property
    def room(self) -> str:
        """The package of `samovar` this file is in; "" outside or at the top."""
        parts = self.path.split("/")
        return parts[1] if parts[0] == "samovar" and len(parts) > 2 else ""

    @property
    def is_package(self) -> bool:
        """Whether the file belongs to the product."""
        return self.path.startswith("samovar/")

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the tests."""
        return self.path.startswith("tests/")

    @cached_property
    def functions(self) -> list[tuple[str, Function, bool]]:
        """(qualified name, node, whether it is a method) of every function, inner ones too."""
        return list(_functions(self.tree, "", False))

    def violation(self, gate: str, node: ast.AST | None, message: str, name: str = "") -> Violation:
        """A complaint about a place in this file."""
        where = f"{self.path}:{name}" if name else self.path
        return Violation(gate, where, getattr(node, "lineno", 1), message)


def _functions(node: ast.AST, prefix: str, in_class: bool) -> Iterator[tuple[str, Function, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child, in_class
            yield from _functions(child, f"{prefix}{child.name}.", False)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", True)
        else:
            yield from _functions(child, prefix, in_class)


def read_sources(root: Path = ROOT) -> list[Source]:
    """Every Python file under `FOLDERS`, in order."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [Source(path, root) for path in paths]
