"""Habit gates: constructions that are allowed in one room only, or nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.source import ROOT, Source, Violation

BANNED_FILES = {"utils", "util", "misc", "common", "helpers", "helper"}
BANNED_WORDS = {"Manager", "Handler", "Helper", "Util", "Utils", "Info", "Data"}
ALLOWED_CLASSES = {"EngineInfo", "TensorInfo"}
CONFIG_NAMES = {"config", "cfg", "c", "hf_config", "model_config"}
UNFINISHED = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
OURS_ONLY = re.compile(r"(?<![\w.])/(?:w[o]rk|r[o]ot)/|py[p]i\.org|python[h]osted\.org|npm[j]s\.org")
"""Paths of one machine, and hosts of registries."""
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ""}


def check(sources: Sequence[Source]) -> Iterator[Violation]:
    """Every habit that is broken in a Python file."""
    for source in sources:
        for number, line in enumerate(source.lines, 1):
            if UNFINISHED.search(line):
                yield Violation("unfinished", source.path, number, "says that something is left to do")
        if source.is_package:
            yield from names(source)
            for node in ast.walk(source.tree):
                yield from _node(source, node)


def texts(root: Path = ROOT) -> Iterator[Violation]:
    """Paths of one machine and registry hosts in any text file."""
    for folder in ("samovar", "tests", "tools", "docs", "scripts", "benchmarks", ".ci", "."):
        paths = (root / folder).rglob("*") if folder != "." else root.glob("*")
        for path in sorted(paths):
            if not path.is_file() or path.suffix not in TEXT_SUFFIXES or "__pycache__" in path.parts:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if found := OURS_ONLY.search(line):
                    where = path.relative_to(root).as_posix()
                    yield Violation("machine", where, number, f"names {found[0]!r}, which exists on one machine only")


def names(source: Source) -> Iterator[Violation]:
    """Files and classes are named after what they are."""
    stem = source.path.rsplit("/", 1)[-1].removesuffix(".py")
    if stem in BANNED_FILES:
        yield source.violation("name", None, f"a file named {stem} says nothing")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name not in ALLOWED_CLASSES:
            for word in re.findall(r"[A-Z][a-z0-9]*", node.name):
                if word in BANNED_WORDS:
                    yield source.violation("name", node, f"{word!r} in a class name says nothing", node.name)


def _node(source: Source, node: ast.AST) -> Iterator[Violation]:
    if isinstance(node, ast.Attribute):
        yield from _attribute(source, node)
    elif isinstance(node, ast.Call):
        yield from _call(source, node)
    elif isinstance(node, ast.Try):
        yield from _try(source, node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            if module.split(".")[0] in ("pickle", "marshal", "dill", "cloudpickle"):
                yield source.violation("pickle", node, f"imports {module}, which runs code when it reads")
            if (
                module == "os"
                and isinstance(node, ast.ImportFrom)
                and {a.name for a in node.names} & {"environ", "getenv"}
            ):
                yield source.violation("environment", node, "reads the environment: use config.field.variable")


def _attribute(source: Source, node: ast.Attribute) -> Iterator[Violation]:
    if not isinstance(node.value, ast.Name):
        return
    dotted = f"{node.value.id}.{node.attr}"
    if dotted in ("os.environ", "os.getenv", "os.putenv") and source.path != "samovar/config/field.py":
        yield source.violation("environment", node, f"uses {dotted}: use config.field.variable")
    if dotted == "torch.cuda" and source.room != "hardware":
        yield source.violation("torch-cuda", node, "uses torch.cuda: ask hardware.device")


def _call(source: Source, node: ast.Call) -> Iterator[Violation]:
    if not isinstance(node.func, ast.Name):
        return
    if node.func.id in ("eval", "exec"):
        yield source.violation("eval", node, f"calls {node.func.id}")
    if node.func.id in ("getattr", "hasattr") and source.room == "models" and node.args:
        first = node.args[0]
        name = first.id if isinstance(first, ast.Name) else first.attr if isinstance(first, ast.Attribute) else ""
        if name in CONFIG_NAMES:
            yield source.violation(
                "getattr-config", node, f"{node.func.id}({name}, ...): declare a typed field instead"
            )


def _try(source: Source, node: ast.Try) -> Iterator[Violation]:
    caught = {name for handler in node.handlers for name in _caught(handler)}
    imports = any(isinstance(child, ast.Import | ast.ImportFrom) for child in node.body)
    if imports and caught & {"ImportError", "ModuleNotFoundError"} and source.room not in ("kernels", "attention"):
        yield source.violation(
            "try-import", node, "an import that may fail hides what is missing; name the extra instead"
        )
    for handler in node.handlers:
        if not {"", "Exception", "BaseException"} & set(_caught(handler)):
            continue
        if all(isinstance(child, ast.Pass | ast.Continue) for child in handler.body):
            yield source.violation("broad-except", handler, "catches everything and does nothing")
        elif not any("#" in line for line in source.lines[handler.lineno - 2 : handler.lineno + 1]):
            yield source.violation("broad-except", handler, "catches everything and no comment says why")


def _caught(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return [""]
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [kind.id if isinstance(kind, ast.Name) else getattr(kind, "attr", "") for kind in kinds]
