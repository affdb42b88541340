"""499 schemas of real configuration files: each compiles or is refused within the limits, and nothing breaks."""

from __future__ import annotations

import io
import json
import pickle
import sqlite3
import time
from collections import Counter
from typing import Any, NoReturn

import pytest

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.grammar.compiler import GrammarCompiler
from tests.packages import package_file

SHA256 = "049b62589e7cc3a11fa5d1977cdbf0524cf1c905a81cd0f9d27075b7578cf2d3"


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain values; anything that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def schemas() -> list[tuple[str, Any]]:
    path = package_file("schemastore", "0.2.3", "schemastore/cache.sqlite", SHA256)
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    found = []
    for (table,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for row in base.execute(f'SELECT * FROM "{table}"'):
            for cell in row:
                if isinstance(cell, bytes):
                    value = PlainUnpickler(io.BytesIO(cell)).load()
                    try:
                        found.append((str(row[0]), json.loads(value["_content"])))
                    except ValueError:
                        continue  # not every answer in the cache is JSON
    base.close()
    return found


@pytest.mark.slow
def test_real_schemas_compile_or_are_refused(compiler: GrammarCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    """B113: within the deadline, whatever the size."""
    counts, slowest = Counter[str](), 0.0
    found = schemas()
    for _, schema in found:
        begun = time.monotonic()
        try:
            compiler.check(compiler.structured(StructuredOutputsParams(json=schema)))
            counts["compiled"] += 1
        except ValidationError as error:
            counts["refused"] += 1
            counts[str(error).rpartition(": ")[2][:60]] += 1
        slowest = max(slowest, time.monotonic() - begun)
    with capsys.disabled():
        print(f"\n{len(found)} schemas, slowest {slowest:.2f} s")
        print(json.dumps(counts.most_common(25), indent=1))
    assert len(found) > 400 and counts["compiled"] + counts["refused"] == len(found)
    assert counts["compiled"] > 50
