"""The compiler of clients' wishes: every kind, what is refused, and hostile ones, which hurt nobody else."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from samovar.core.structured import StructuredOutputsParams
from samovar.core.tools import ToolDefinition
from samovar.errors import OverloadedError, ValidationError
from samovar.grammar.compiler import GrammarCompiler
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.side_main import Task
from samovar.grammar.side_process import SidePool, SideProcess
from samovar.grammar.tokens import vocabulary_of
from samovar.text.answer import AnswerPlan
from samovar.text.answering import answer_grammar
from samovar.text.dialogue import Dialogue
from samovar.text.formats.choose import tool_format
from tests.grammar.matching import EOS, PADDED, TOKENIZER, accepts

TWO_SECONDS_AND_A_BUSY_MACHINE = 20.0


def compiled(compiler: GrammarCompiler, **wanted: Any) -> str:
    grammar = compiler.structured(StructuredOutputsParams(**wanted))
    compiler.check(grammar)
    return grammar


@pytest.mark.parametrize(
    ("wanted", "yes", "no"),
    [
        ({"json": {"const": [1]}}, ["[1]", "[ 1]"], ["[2]"]),
        ({"json": '{"const": [1]}', "disable_any_whitespace": True}, ["[1]"], ["[ 1]"]),
        ({"json": True}, ["1", '{"a":[null]}'], ["a"]),
        ({"json_object": True}, ["{}", '{"a": {"b": 1.5e3}}'], ["[]", "1"]),
        ({"regex": "a+b?"}, ["aa", "ab"], ["b"]),
        ({"choice": ["a", "ab", 'q"\n\\', "ж"]}, ["a", "ab", 'q"\n\\', "ж"], ["b", "abb"]),
        ({"grammar": 'root ::= num ("+" num)*\nnum ::= [0-9]{1,3} # three\n'}, ["1+22", "7"], ["+", "1234"]),
        ({"grammar": 'start: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/'}, ["1+22", "7"], ["+", "1234"]),
        ({"grammar": 'start: "%json" j // %json {\nj: %json {"const": 7}\n'}, ["%json7"], ["%json8"]),
    ],
)
def test_every_kind(compiler: GrammarCompiler, wanted: dict[str, Any], yes: list[str], no: list[str]) -> None:
    """Feature A30."""
    grammar = compiled(compiler, **wanted)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"json": {"not": {}}}, "structured_outputs.json: #/not"),
        ({"regex": "(?=a)"}, "structured_outputs.regex"),
        ({"regex": "a\0b"}, "NUL"),
        ({"choice": ["\ud800"]}, "half a character"),
        ({"choice": ["x"] * 20_000}, "choices"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
        ({"grammar": "root ::= unknown"}, "unknown"),
        ({"grammar": "start: (\n"}, "structured_outputs"),
        ({"grammar": "start: nothing\n"}, "nothing"),
        ({"grammar": "  "}, "1 to"),
        ({"grammar": 'start: x\nx: %json {"uniqueItems": true}'}, "uniqueItems"),
        ({"grammar": 'start: x\nx: %json {"a": '}, "JSON"),
        ({"grammar": 'start: x\nx[stop="b"]: /a*/'}, "stop"),
        ({"grammar": "start: x\nx[max_tokens=3]: /a*/"}, "max_tokens"),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "%llguidance"),
        ({"grammar": "start: <|unknown|>"}, "unknown"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_refusals_name_the_field(compiler: GrammarCompiler, wanted: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        compiled(compiler, **wanted)
    assert word in str(caught.value) and str(caught.value.parameter).startswith("structured_outputs")


def test_an_expression_goes_into_a_larger_document(compiler: GrammarCompiler) -> None:
    lark = compiler.lark()
    params = StructuredOutputsParams(json={"type": "object", "required": ["a"]}, disable_any_whitespace=True)
    either = lark.any_of(lark.seq(lark.text("<tool>"), lark.json(None)), compiler.json_expression(params, lark))
    grammar = lark.document(either)
    compiler.check(grammar)
    assert accepts(grammar, '<tool>{"b": 1}') and accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{"a": 1}') and not accepts(grammar, "{}")
    with pytest.raises(ValidationError, match="cannot be combined"):
        compiler.json_expression(StructuredOutputsParams(grammar="root ::= [a]"), lark)
    with pytest.raises(ValidationError, match="tools: #/not"):
        lark.json({"not": {}})


NESTED: Any = {"type": "integer"}
for _ in range(3):
    NESTED = {"type": "array", "maxItems": 1_000, "items": NESTED}

HOSTILE: dict[str, dict[str, Any]] = {
    "nested quantifiers": {"regex": "(a+)+$"},
    "counted": {"regex": ".{100000}"},
    "a megabyte": {"regex": "a" * 1_000_000},
    "many states": {"regex": "(a|b)*a(a|b){5000}c.*x.{300}"},
    "counts of counts": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "many strings": {"json": {"enum": [f"value {i} {i * 7919 % 10007}" for i in range(5_000)]}},
    "nested arrays": {"json": NESTED},
    "deep": {"json": '{"items":' * 5_000 + "{}" + "}" * 5_000},
    "brackets": {"json": "[" * 400_000},
    "only itself": {"json": {"$ref": "#"}},
    "all of itself": {"json": {"allOf": [{"$ref": "#"}]}},
    "any of itself": {"json": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}]}},
    "a chain": {"json": {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(999)}
                                              | {"999": {}}}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}},
    "products": {"json": {"allOf": [{"anyOf": [{"properties": {f"x{i}": {"type": t}}, "required": [f"x{i}"]}
                                                for t in ("string", "integer", "null")]} for i in range(14)]}},
    "multiples": {"json": {"type": "integer", "multipleOf": 9_973, "minimum": 3, "maximum": 10**15}},
    "patterns": {"json": {"type": "string", "pattern": "^(([a-z]+)*)*[0-9]{1,5000}x(a|b|ab)*$", "minLength": 5_000}},
    "intersections": {"grammar": "start: A\nA: /(.*a.{20})/ & /(.*b.{21})/ & ~/(.*c.{22})/"},
    "repeated rules": {"grammar": 'start: ((("a"{1000}){1000}){1000}){1000}'},
    "parentheses": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "left and right": {"grammar": 'start: a\na: a a a a a a | "x" | |\n'},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_wishes_end_soon_while_others_go_on(compiler: GrammarCompiler, name: str) -> None:
    """B107, B113: compiled or refused at the deadline; a request beside it is served, and so is the next one."""
    outcome: list[str] = []

    def attack() -> None:
        try:
            compiled(compiler, **HOSTILE[name])
            outcome.append("compiled")
        except ValidationError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=attack)
    begun = time.monotonic()
    thread.start()
    compiled(compiler, json={"const": name})
    thread.join(TWO_SECONDS_AND_A_BUSY_MACHINE)
    assert outcome, f"still compiling after {time.monotonic() - begun:.1f} s"
    assert len(outcome[0]) < 1_000
    compiled(compiler, json={"const": name + "!"})


def test_a_compilation_ends_at_its_deadline_and_the_next_one_works() -> None:
    limits = GrammarLimits(deadline_seconds=0.05, build_seconds=100.0, processes=1)
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS], limits)
    try:
        for _ in range(2):
            with pytest.raises(ValidationError, match=r"0\.05 s"):
                compiled(compiler, json=HOSTILE["many properties"]["json"])
        compiled(compiler, regex="a")
    finally:
        compiler.close()


def test_a_grammar_whose_making_would_hold_up_the_engine_is_refused() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS], GrammarLimits(build_seconds=0.0))
    try:
        with pytest.raises(ValidationError, match="processor time"):
            compiled(compiler, json=True)
    finally:
        compiler.close()


def test_a_process_that_dies_is_replaced() -> None:
    """B113, pain 25: neither memory nor a crash reaches the server."""
    limits = GrammarLimits(processes=1)
    vocabulary = vocabulary_of(TOKENIZER, PADDED, [EOS])
    pool = SidePool(lambda: vocabulary, limits)
    try:
        pool.warm()
        (process,) = pool._idle
        process._process.kill()
        process._process.wait()
        verdict = pool.run(Task("check", 'start: "a"'))
        assert verdict is not None and verdict.problem is None
        assert pool._idle[0] is not process
    finally:
        pool.close()
    assert pool._idle == []


def test_a_process_that_was_killed_says_nothing_about_the_grammar() -> None:
    """The client is told to try again, not that its grammar is at fault; another process serves the next one."""
    limits = GrammarLimits(processes=1, deadline_seconds=30.0, build_seconds=30.0)
    vocabulary = vocabulary_of(TOKENIZER, PADDED, [EOS])
    pool = SidePool(lambda: vocabulary, limits)
    try:
        pool.warm()
        (process,) = pool._idle
        os.kill(process._process.pid, signal.SIGSTOP)
        killer = threading.Timer(0.3, process._process.kill)
        killer.start()
        with pytest.raises(OverloadedError, match="try again"):
            pool.run(Task("check", 'start: "a"'))
        killer.join()
        verdict = pool.run(Task("check", 'start: "a"'))
        assert verdict is not None and verdict.problem is None
    finally:
        pool.close()


def test_a_side_process_ends_with_its_parent_and_starts_light() -> None:
    process = SideProcess(vocabulary_of(TOKENIZER, PADDED, [EOS]), GrammarLimits())
    pipe = process._process.stdin
    assert pipe is not None
    pipe.close()
    assert process._process.wait(timeout=30) == 0
    process.end()


def test_memory_of_a_side_process_is_limited() -> None:
    limits = GrammarLimits(memory_bytes=1 << 20, deadline_seconds=20.0, build_seconds=100.0)
    process = SideProcess(vocabulary_of(TOKENIZER, PADDED, [EOS]), limits)
    verdict = process.run(Task("check", 'start: /(?s:.*)a.{1,9000}/ ("' + "x" * 400_000 + '")'), 20.0)
    assert verdict is None or verdict.problem is not None
    process.end()


def test_verdicts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feature E44."""
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS], GrammarLimits(cache_bytes=1_000))
    asked: list[str] = []
    run = compiler._pool.run
    monkeypatch.setattr(compiler._pool, "run", lambda task: asked.append(task.text) or run(task))
    try:
        for _ in range(3):
            compiler.check('start: "a"')
            with pytest.raises(ValidationError, match="Expected token"):
                compiler.check("start: (")
        assert len(asked) == 2
        for number in range(20):
            compiler.check(f'start: "{number}"')
        compiler.check('start: "a"')
        assert len(asked) == 23 and compiler._verdict_bytes <= 1_000 + 200
        with pytest.raises(ValidationError, match="bytes"):
            compiler.check("x" * 3_000_000)
    finally:
        compiler.close()


def test_making_a_compiler_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; import samovar.grammar.compiler, samovar.grammar.side_main, samovar.text.lark;"
        "print(sorted(m for m in ('torch', 'llguidance', 'jsonschema') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_refused_tool_is_named() -> None:
    """Agents send twenty tools at once: which one cannot be enforced, and why."""
    fine = ToolDefinition(name="fine", parameters={"type": "object"})
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = ToolDefinition(name="bad", parameters=unique)
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS], GrammarLimits())
    try:
        plan = AnswerPlan(tools=tool_format("hermes"), definitions={"fine": fine, "bad": bad})
        asked = Dialogue(messages=[], tools=[fine, bad], tool_choice="required")
        with pytest.raises(ValidationError, match=r"^tools: function 'bad': .*uniqueItems") as caught:
            answer_grammar(asked, plan, compiler)
        assert caught.value.parameter == "tools"
    finally:
        compiler.close()
