"""Size gates: how long a file or function may be, how many parameters it may take, and what must carry a docstring."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Sequence

from tools.source import Function, Source, Violation

FILE_LINES, LONG_FILE_LINES, MEDIAN_FILE_LINES = 500, 800, 150
FUNCTION_LINES, P90_FUNCTION_LINES = 60, 30
PARAMETERS = 8
SMALL_ROOMS = {"samovar/models/": 150, "samovar/quant/": 120, "samovar/text/parsers/": 120}
"""Folders of many like files, each of which stays short."""
SPEAKING_LINES = 6
"""A public method of fewer lines may speak by its name alone."""


def check(sources: Sequence[Source]) -> Iterator[Violation]:
    """Every budget that is exceeded."""
    for source in sources:
        yield from file_length(source)
        yield from functions(source)
        yield from docstrings(source)
    yield from averages([source for source in sources if source.is_package])


def limit_of(source: Source) -> int:
    """Lines the file may have."""
    if source.is_test or source.room == "kernels" or "schema" in source.path.rsplit("/", 1)[-1]:
        return LONG_FILE_LINES
    for folder, lines in SMALL_ROOMS.items():
        if source.path.startswith(folder):
            return lines
    return FILE_LINES


def file_length(source: Source) -> Iterator[Violation]:
    """Files fit into one reading."""
    if (count := len(source.lines)) > (limit := limit_of(source)):
        yield source.violation("file-length", None, f"{count} lines, the limit is {limit}")


def functions(source: Source) -> Iterator[Violation]:
    """Functions are short, take few parameters, and are annotated. Tests may be longer, kernels both."""
    for name, node, is_method in source.functions:
        if source.room != "kernels" and not source.is_test and not is_kernel(node):
            if (count := _length(node)) > FUNCTION_LINES:
                yield source.violation("function-length", node, f"{count} lines, the limit is {FUNCTION_LINES}", name)
            if (count := len(parameters(node, is_method))) > PARAMETERS:
                yield source.violation("parameters", node, f"{count} parameters, the limit is {PARAMETERS}", name)
        if source.is_package and (missing := _unannotated(node, is_method)):
            yield source.violation("annotations", node, f"not annotated: {', '.join(missing)}", name)


def is_kernel(node: Function) -> bool:
    """Whether Triton compiles the function: it takes no objects and is one piece on purpose, wherever it stands."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(ast.unparse(decorator) == "triton.jit" for decorator in decorators)


def parameters(node: Function, is_method: bool) -> list[ast.arg]:
    """All parameters but self or cls."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if is_method and plain and not is_static:
        plain = plain[1:]
    stars = [star for star in (args.vararg, args.kwarg) if star is not None]
    return plain + args.kwonlyargs + stars


def _unannotated(node: Function, is_method: bool) -> list[str]:
    missing = [arg.arg for arg in parameters(node, is_method) if arg.annotation is None]
    return missing + (["the result"] if node.returns is None else [])


def _length(node: ast.AST) -> int:
    """Lines of a definition without its docstring."""
    total = (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
    body = getattr(node, "body", [])
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or 0) - first.lineno + 1
    return total


def docstrings(source: Source) -> Iterator[Violation]:
    """Modules, public classes and public functions say what they are; the first paragraph is a sentence."""
    if source.is_test:
        return
    if source.text.strip():
        yield from _docstring(source, source.tree, "", 0)
    yield from _members(source, source.tree, "")


def _members(source: Source, parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Violation]:
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        name = prefix + node.name
        least = SPEAKING_LINES if prefix and not isinstance(node, ast.ClassDef) else 0
        if not _is_overload(node):
            yield from _docstring(source, node, name, least)
        if isinstance(node, ast.ClassDef):
            yield from _members(source, node, f"{name}.")


def _docstring(
    source: Source, node: ast.Module | ast.ClassDef | Function, name: str, least: int
) -> Iterator[Violation]:
    text = ast.get_docstring(node)
    if text is None:
        if _length(node) >= least or isinstance(node, ast.Module):
            yield source.violation("docstring", node, "has no docstring", name)
    elif text.split("\n\n")[0].rstrip()[-1:] not in (".", "?", "!", ":", ")", "`"):
        yield source.violation("docstring", node, f"does not begin with a sentence: {text.splitlines()[0]!r}", name)


def _is_overload(node: ast.AST) -> bool:
    names = {d.id if isinstance(d, ast.Name) else getattr(d, "attr", "") for d in getattr(node, "decorator_list", [])}
    return bool(names & {"overload", "override", "setter"})


def averages(sources: Sequence[Source]) -> Iterator[Violation]:
    """The house as a whole stays small, not only its largest rooms."""
    lengths = [len(source.lines) for source in sources if source.lines]
    plain = (node for source in sources if source.room != "kernels" for _, node, _ in source.functions)
    spans = sorted(_length(node) for node in plain if not is_kernel(node))
    if lengths and (median := statistics.median(lengths)) > MEDIAN_FILE_LINES:
        message = f"the median file has {median:.0f} lines, the limit is {MEDIAN_FILE_LINES}"
        yield Violation("median-file", "samovar", 1, message)
    if spans and (p90 := spans[int(0.9 * (len(spans) - 1))]) > P90_FUNCTION_LINES:
        message = f"one function in ten has over {p90 - 1} lines, the limit is {P90_FUNCTION_LINES}"
        yield Violation("p90-function", "samovar", 1, message)
