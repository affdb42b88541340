"""The JSON-Schema-Test-Suite, all drafts: what compiles lets no invalid document through, and few valid ones out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from samovar.errors import ValidationError
from samovar.grammar.json_source import JsonStyle, enforced_schema
from samovar.grammar.limits import GrammarLimits
from tests.grammar.matching import accepts, start
from tests.packages import package_folder

SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = ("draft3", "draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
GAPS = Path(__file__).with_name("suite_gaps.json")
"""File of the suite -> why valid documents of it are left out; every file that has some is listed."""

NOT_ASSERTED = {"optional/content.json"}
"""Draft 7 lets an implementation check contentEncoding and contentMediaType; later drafts call them annotations."""


@cache
def suite() -> Path:
    return package_folder("jsonschema", "4.26.0", "json/tests", SHA256, source=True) / "json" / "tests"


def cases(draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    for path in sorted((suite() / draft).rglob("*.json")):
        name = path.relative_to(suite() / draft).as_posix()
        if name not in NOT_ASSERTED:
            for case in json.loads(path.read_text()):
                yield name, case["schema"], case["tests"]


@cache
def compiles(grammar: str) -> bool:
    return start(grammar).error is None


@cache  # drafts share most of their cases
def takes(grammar: str, text: str) -> bool:
    return accepts(grammar, text)


@pytest.mark.parametrize("draft", DRAFTS)
def test_suite(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B110, B118: enforced or refused; the suite is the judge."""
    gaps, counts, left_out, wrong = json.loads(GAPS.read_text()), Counter[str](), Counter[str](), []
    for name, schema, tests in cases(draft):
        counts["schemas"] += 1
        try:
            made = enforced_schema(schema, GrammarLimits(), JsonStyle(), field="json")
        except ValidationError:
            continue
        grammar = "start: %json " + json.dumps(made)
        if not compiles(grammar):
            continue
        counts["compiled"] += 1
        for test in tests:
            taken = takes(grammar, json.dumps(test["data"], ensure_ascii=False))
            counts["valid" if test["valid"] else "invalid"] += 1
            if taken and not test["valid"]:
                wrong.append((name, test["description"], schema, test["data"]))
            if test["valid"] and not taken:
                left_out[name] += 1
    with capsys.disabled():
        share = 100 - 100 * left_out.total() / counts["valid"]
        print(f"\n{draft}: {dict(counts)}, {len(wrong)} invalid taken, {share:.1f} % of the valid ones taken")
    assert wrong == []
    assert sorted(set(left_out) - set(gaps)) == []
    assert counts["compiled"] > 0.5 * counts["schemas"] and share > 90
