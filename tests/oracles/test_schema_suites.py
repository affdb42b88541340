"""Schemas of test suites, of real files and by chance through a real server: refused by keyword, valid, or cut."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.protocols import Validator

from samovar.grammar.schema_rules import ANNOTATIONS, ENFORCED, REFUSED
from tests.checkpoints import write_random_llama
from tests.grammar.random_schemas import SchemaMaker
from tests.grammar.test_compiler import HOSTILE
from tests.grammar.test_schema_suite import DRAFTS, cases
from tests.grammar.test_schemastore import schemas as real_schemas
from tests.oracles.hostile_server import ControlStream, served
from tests.oracles.random_server import RandomServer, random_server, spread
from tests.server.wire import COMPLETIONS

MAX_TOKENS = 200
VALIDATORS: dict[str, type[Validator]] = {
    "draft3": jsonschema.Draft3Validator,
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
_UNKNOWN = re.compile(r"the keyword '.*' is not known", re.DOTALL)
_POINTER = re.compile(r"(?:^|: )(#[^:]*): ")
_LIMITS = re.compile(
    r"is larger than|nested deeper than|takes more than|more than the|grammar made of it|level exceeded"
)
_NOTHING = re.compile(r"nothing is valid|[Uu]nsatisfiable|no text satisfies")
KNOWN = ENFORCED | ANNOTATIONS | set(REFUSED)

Schema = tuple[type[Validator], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomServer]:
    with random_server(tmp_path_factory.mktemp("schemas") / "model") as running:
        yield running


def reason_of(answer: dict[str, Any]) -> str:
    """Why a schema was refused: the keyword that the message names, or what it says about the whole. "?" for neither."""
    message = answer["error"]["message"]
    if _UNKNOWN.search(message):
        return "(unknown keyword)"
    if named := re.search(r"the keyword '([^']+)' cannot be enforced", message):
        return named[1]
    if pointer := _POINTER.search(message):
        parts = [part for part in pointer[1].split("/") if part in KNOWN]
        if parts:
            return parts[-1]
    if _NOTHING.search(message):
        return "(nothing is valid)"
    if _LIMITS.search(message):
        return "(over a limit)"
    said = message.replace("patternProperty", "patternProperties").split()
    return next((word for word in said if word in ENFORCED), "?")


def run(server: RandomServer, schemas: Sequence[Schema], name: str) -> Counter[str]:
    """Asks for an answer to each schema twice, once with what closes made likelier; checks them; prints and returns counts."""
    usual: dict[str, Any] = {"prompt": "Answer:", "temperature": 1.0, "max_tokens": MAX_TOKENS}
    biased = usual | {"logit_bias": server.bias(4)}
    bodies = [
        chosen | {"seed": seed, "structured_outputs": {"json": schema}}
        for seed, (_, schema) in enumerate(schemas)
        for chosen in (usual, biased)
    ]
    counts, refused, wrong = Counter[str](), Counter[str](), []
    for at, (status, answer) in enumerate(server.ask(COMPLETIONS, bodies)):
        kind, schema = schemas[at // 2]
        if status == 400:
            assert answer["error"]["param"].startswith("structured_outputs"), answer
            counts["refused"] += at % 2 == 0
            refused[reason := reason_of(answer)] += at % 2 == 0
            if reason == "?":
                wrong.append((schema, answer["error"]["message"]))
            continue
        assert status == 200, (schema, status, answer)
        counts["accepted"] += at % 2 == 0
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            counts["cut"] += 1
            continue
        if choice["finish_reason"] != "stop":
            wrong.append((schema, choice))
            continue
        try:
            problem = problem_of(kind, schema, choice["text"])
        except re.error:
            counts["not judged"] += 1  # Python's `re`, which judges patterns here, has no \p{...}
            continue
        counts["validated"] += problem is None
        if problem is not None:
            wrong.append((schema, choice["text"], problem))
    print(f"\n{name}: {len(schemas)} schemas: {spread(counts)}; refused: {spread(refused)}")
    assert wrong == [], f"{len(wrong)}: {[str(part)[-400:] for case in wrong[:5] for part in case]}"
    return counts


def problem_of(kind: type[Validator], schema: Any, text: str) -> str | None:
    """What is wrong with a document."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return str(error)
    # Formats are those of the later drafts also in draft 3, where a time has no offset.
    validator = kind(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return next((error.message for error in validator.iter_errors(value)), None)


def distinct(schemas: Iterator[Schema]) -> list[Schema]:
    """Each schema once a kind."""
    return list({(kind, json.dumps(schema)): (kind, schema) for kind, schema in schemas}.values())


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_suite(server: RandomServer, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B110, B112, B118: the JSON-Schema-Test-Suite."""
    with capsys.disabled():
        counts = run(server, distinct((VALIDATORS[draft], schema) for _, schema, _ in cases(draft)), draft)
    assert counts["accepted"] > 40 and counts["validated"] > counts["accepted"] / 2


@pytest.mark.slow
def test_real_schemas(server: RandomServer, capsys: pytest.CaptureFixture[str]) -> None:
    """B113: schemas of real configuration files. Which draft they mean, they say."""
    found = real_schemas()
    with capsys.disabled():
        counts = run(
            server,
            [(jsonschema.validators.validator_for(schema, jsonschema.Draft7Validator), schema) for _, schema in found],
            "schemastore",
        )
    assert len(found) > 450 and counts["accepted"] > 50


def generated(count: int) -> list[Schema]:
    """Schemas by chance, others than those of the grammar's own tests."""
    return [
        (jsonschema.Draft202012Validator, SchemaMaker(random.Random(f"suite {seed}")).document())
        for seed in range(count)
    ]


@pytest.mark.slow
def test_generated_schemas(server: RandomServer, capsys: pytest.CaptureFixture[str]) -> None:
    """B110, B118."""
    with capsys.disabled():
        counts = run(server, generated(500), "generated")
    assert counts["accepted"] > 450 and counts["validated"] > 500


@pytest.mark.slow
def test_a_real_vocabulary(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with 49,152 tokens, which cut JSON in every place: some schemas of each origin."""
    chosen = generated(25)
    for draft in DRAFTS:
        own = distinct((VALIDATORS[draft], schema) for _, schema, _ in cases(draft))
        chosen += random.Random(draft).sample(own, 12)
    with random_server(tmp_path / "model", tokenizer=smollm2) as running, capsys.disabled():
        counts = run(running, chosen, "SmolLM2's vocabulary")
    assert counts["validated"] > 50


MORE_HOSTILE: dict[str, dict[str, Any]] = {
    "look-behind": {"regex": "(?<=a+)b"},
    "back-reference": {"regex": r"(a+)\1"},
    "unicode classes": {"regex": r"(\w{1,500}\s?){500}"},
    "half a schema": {"json": '{"type": "object", "properties": {'},
    "no type": {"json": {"type": "strange"}},
    "recursion by names": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a far reference": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "a large number": {"json": {"type": "integer", "minimum": 10**400}},
    "nothing but names": {"json": {"required": [f"n{i}" for i in range(5_000)]}},
}
DEADLINE = 2.0
A_BUSY_MACHINE = 8.0
"""More seconds that a check may take where others use the processors, too."""


@pytest.mark.slow
def test_hostile_wishes_disturb_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B107, B113: each is refused, or was harmless, within the deadline, and a stream beside them goes on."""
    model = write_random_llama(tmp_path / "model", max_position_embeddings=65_536)
    waits: list[tuple[float, str, int]] = []
    with served(model, tmp_path / "log") as http, ControlStream(http, max_tokens=60_000) as control:
        usual = {"prompt": "x", "max_tokens": 3}
        assert http.post(COMPLETIONS, json=usual | {"structured_outputs": {"regex": "a"}}).status_code == 200
        begun = time.monotonic()
        time.sleep(4)
        alone = control.largest_gap(begun, attacked := time.monotonic())
        for name, wanted in (HOSTILE | MORE_HOSTILE).items():
            sent = time.monotonic()
            answer = http.post(COMPLETIONS, json=usual | {"structured_outputs": wanted})
            waits.append((time.monotonic() - sent, name, answer.status_code))
            assert answer.status_code in (200, 400), (name, answer.text[:500])
        beside = control.largest_gap(attacked, over := time.monotonic())
        num_alone = sum(begun <= at <= attacked for at in control.times) / (attacked - begun)
        num_beside = sum(attacked <= at <= over for at in control.times) / (over - attacked)
    waits.sort(reverse=True)
    with capsys.disabled():
        print(f"\nhostile: {len(waits)}, {sum(status == 400 for *_, status in waits)} refused; slowest:")
        print(", ".join(f"{name} {seconds:.2f} s ({status})" for seconds, name, status in waits[:6]))
        print(f"largest gap of the stream: alone {alone:.3f} s, beside them {beside:.3f} s")
        print(f"pieces a second: alone {num_alone:.0f}, beside them {num_beside:.0f}")
    assert waits[0][0] < DEADLINE + A_BUSY_MACHINE
    assert sum(status == 400 for *_, status in waits) > len(waits) / 2
    assert beside < max(2.0, 10 * alone)
