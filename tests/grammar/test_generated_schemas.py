"""Schemas by chance, answers by chance: what comes out validates, or was cut."""

from __future__ import annotations

import json
import random
from collections import Counter

import jsonschema
import pytest

from samovar.errors import ValidationError
from samovar.grammar.json_source import JsonStyle, enforced_schema
from samovar.grammar.limits import GrammarLimits
from tests.grammar.matching import babble, start, text_of
from tests.grammar.random_schemas import SchemaMaker

LONGEST_BLANK = 21


@pytest.mark.parametrize("number", [500, pytest.param(6_000, marks=pytest.mark.slow)])
def test_answers_of_a_model_without_sense_are_valid(number: int) -> None:
    """B110, B112, B118."""
    counts = Counter[str]()
    for seed in range(number):
        chance = random.Random(seed + 1_000_000 * (number > 500))
        schema = SchemaMaker(chance).document()
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            made = enforced_schema(schema, GrammarLimits(), JsonStyle(), field="json")
        except ValidationError as error:
            assert "no multiple" in str(error) or "no number" in str(error), (schema, error)
            counts["refused"] += 1
            continue
        grammar = "start: %json " + json.dumps(made)
        if (error := start(grammar).error) is not None:
            assert "Unsatisfiable" in error, (schema, error)
            counts["nothing valid"] += 1
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for _ in range(1 + (number > 500)):
            said, is_over = babble(start(grammar), chance, 120)
            if not is_over:
                counts["cut"] += 1
                continue
            text = text_of(said)
            assert " " * (LONGEST_BLANK + 1) not in text.replace("\t", " ")
            problems = [error.message for error in validator.iter_errors(json.loads(text))]
            assert problems == [], (schema, text)
            counts["valid"] += 1
    assert counts["valid"] > 0.6 * number, counts
