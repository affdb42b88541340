"""Every format with its data file: a text, and the reasoning, content and calls that are in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.text.answer import AnswerPlan
from samovar.text.formats.choose import names, tool_format
from samovar.text.regions import RegionParser
from tests.text.formats.reading import TOOLS, read, summary

DATA = Path(__file__).parent / "data"
CASES = [
    pytest.param(file.stem, case, id=f"{file.stem}-{at}")
    for file in sorted(DATA.glob("*.json"))
    for at, case in enumerate(json.loads(file.read_text()))
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_data(name: str, case: dict[str, Any]) -> None:
    """B122, B125, B127, B128, B136: text, expected content and calls; what is malformed is content, nothing raises."""
    plan = AnswerPlan(tools=tool_format(name), definitions=TOOLS)
    truncated = case.get("truncated", False)
    got = summary(read(plan, [case["text"]], truncated=truncated))
    calls = case.get("calls", [])
    expected = {"reasoning": case.get("reasoning", ""), "content": case.get("content", ""), "calls": calls}
    assert got == expected
    assert summary(read(plan, case["text"], truncated=truncated)) == expected
    if "ids" in case:
        news = RegionParser(plan).feed(case["text"])
        assert [item.call_id for item in news if getattr(item, "name", None)] == case["ids"]


def test_every_format_has_a_data_file() -> None:
    """The data files are named as formats are."""
    assert {file.stem for file in DATA.glob("*.json")} == set(names()[0])
