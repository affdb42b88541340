"""Think x schema x tools: a small thinking model that can call tools, what it says in every case, and where it belongs.

The server of `truth_server` runs the real text side over a scripted engine. The script finds the number of its case in
the prompt ("case 12." in the last user message), so that a test of any API only has to send `case.question`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from samovar.config.description import ModelDescription
from samovar.config.groups import ServerConfig
from samovar.core.request import Request
from samovar.grammar.compiler import GrammarCompiler
from samovar.text.chat_template import load_chat_template
from samovar.text.formats.choose import reasoning_format, tool_format
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import Script, ScriptedEngine, encode, engine_facts

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
END_ID = 258
VOCAB = 256 + len(SPECIALS)
MAX_LEN = 8192

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    'Call with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)
"""ChatML with tools and thoughts. `enable_thinking` true opens the thought, false closes it, absent leaves it to the model."""

WEATHER: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TIME: dict[str, Any] = {
    "type": "object", "properties": {"zone": {"type": "integer"}}, "required": ["zone"], "additionalProperties": False,
}  # fmt: skip
TOOLS = (("get_weather", "Weather of a city.", WEATHER), ("get_time", "Time of a zone.", TIME))
"""(name, description, parameters); `get_weather` is the one that a named choice names."""
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
THOUGHT = 'First I look at {"it": "closely"}.'
CALLS = (("get_weather", '{"city": "Rome"}'), ("get_time", '{"zone": -3}'))

Think = Literal["on", "off", "absent"]
Tools = Literal["absent", "none", "auto", "required", "named"]


@dataclass(frozen=True)
class Case:
    """One row. `says` is what the model generates; the rest is where it has to arrive."""

    number: int
    think: Think
    schema: bool
    tools: Tools
    says: str
    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments), the arguments byte for byte."""

    @property
    def question(self) -> str:
        """The user's message."""
        return f"Answer case {self.number}."

    @property
    def ending(self) -> Literal["stop", "calls"]:
        """How the answer ends."""
        return "calls" if self.calls else "stop"

    @property
    def has_grammar(self) -> bool:
        """Whether the engine must be given one."""
        return self.schema or self.tools in ("required", "named")

    def __str__(self) -> str:
        return f"{self.number}-think_{self.think}-{'schema' if self.schema else 'free'}-tools_{self.tools}"


def _cases() -> Iterator[Case]:
    number = 0
    for think in ("on", "off", "absent"):
        for schema in (False, True):
            for tools in ("absent", "none", "auto", "required", "named"):
                for answer, text, calls in _answers(schema, tools):
                    thought = {
                        "on": f"{THOUGHT}\n</think>\n\n",
                        "off": "",
                        "absent": f"<think>\n{THOUGHT}\n</think>\n\n",
                    }
                    yield Case(
                        number, think, schema, tools, thought[think] + answer,  # type: ignore[arg-type]
                        reasoning="" if think == "off" else THOUGHT, text=text, calls=calls,
                    )  # fmt: skip
                    number += 1


def _answers(schema: bool, tools: str) -> Iterator[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """(what is generated after the thought, its content, its calls)."""
    said = '{"a": 1}' if schema else "Plain words, <b>no</b> call."
    if tools in ("absent", "none", "auto"):
        yield said, said, ()
    if tools in ("auto", "required", "named"):
        calls = CALLS[:1] if tools == "named" else CALLS
        yield "\n".join(map(call_text, calls)), "", calls
    if tools == "auto" and not schema:
        yield f"I look.\n{call_text(CALLS[0])}", "I look.", CALLS[:1]


def call_text(call: tuple[str, str]) -> str:
    """A call as the model writes it."""
    name, arguments = call
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


CASES: tuple[Case, ...] = tuple(_cases())


def write_thinking_model(folder: Path) -> ModelDescription:
    """A checkpoint folder without weights: bytes, then the special tokens, marks among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "chat_template": TEMPLATE,
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return ModelDescription(
        path=folder, format="safetensors", architecture="LlamaForCausalLM", config={}, eos_token_ids=(END_ID,),
        vocab_size=VOCAB,
    )  # fmt: skip


_MARKS = re.compile("|".join(map(re.escape, SPECIALS)))


def encode_marked(text: str) -> list[int]:
    """Text -> ids as the model would generate it: marks are special tokens, everything else bytes."""
    ids: list[int] = []
    at = 0
    for match in _MARKS.finditer(text):
        ids += [*encode(text[at : match.start()]), 256 + SPECIALS.index(match[0])]
        at = match.end()
    return [*ids, *encode(text[at:])]


def thinking_preparer(folder: Path, **parts: Any) -> Preparer:
    """The door in front of the scripted thinking model; `parts` go to `Preparer`, in place of formats and grammar."""
    description = write_thinking_model(folder)
    tokenizer = load_tokenizer(description)
    chosen: dict[str, Any] = {"formats": (tool_format("hermes"), reasoning_format("think"))}
    if "grammar" not in parts:
        chosen["grammar"] = GrammarCompiler(tokenizer, VOCAB, [END_ID])
    limits = limits_from(engine_facts(vocab_size=VOCAB, max_model_len=MAX_LEN))
    return Preparer(tokenizer, load_chat_template(description), limits, [END_ID], **(chosen | parts))


_BYTE_OF_ID = {token: byte for byte, token in enumerate(encode(bytes(range(128)).decode("ascii")))}


def prompt_text(request: Request) -> str:
    """The ASCII of a prompt, special tokens as their text."""
    ids = request.prompt_token_ids
    return "".join(SPECIALS[i - 256] if i >= 256 else chr(_BYTE_OF_ID.get(i, 63)) for i in ids)


def case_script(request: Request, index: int) -> list[int]:
    """The tokens of the case that the prompt's last user message names."""
    numbers = re.findall(r"case (\d+)\.", prompt_text(request))
    return encode_marked(CASES[int(numbers[-1])].says if numbers else "No case.")


@dataclass
class TruthServer:
    """The running server, and what its engine was asked."""

    live: LiveServer
    preparer: Preparer = field(repr=False)

    @property
    def last(self) -> Request:
        """The newest request of the engine."""
        return self.live.engine.requests[-1]


@contextmanager
def truth_server(folder: Path, config: ServerConfig | None = None) -> Iterator[TruthServer]:
    """A server that answers every case, until the block ends."""
    with scripted_server(folder, case_script, config) as running:
        yield running


@contextmanager
def scripted_server(
    folder: Path, script: Script, config: ServerConfig | None = None, **parts: Any
) -> Iterator[TruthServer]:
    """A server in front of the thinking model with another script; `parts` are for `thinking_preparer`."""
    preparer = thinking_preparer(folder, **parts)
    info = engine_facts(vocab_size=VOCAB, max_model_len=MAX_LEN)
    try:
        with live_server(lambda: ScriptedEngine(script, info=info), preparer, config or ServerConfig(port=0)) as live:
            yield TruthServer(live, preparer)
    finally:
        if "grammar" not in parts and isinstance(preparer.grammar, GrammarCompiler):
            preparer.grammar.close()


def check_constraint(case: Case, request: Request) -> None:
    """B140, B143: the grammar is there exactly when needed, and begins where the prompt and the model end thinking."""
    constraint = request.constraint
    if not case.has_grammar:
        assert constraint is None, (str(case), constraint)
        return
    assert constraint is not None and constraint.grammar, str(case)
    span = constraint.reasoning
    close = [256 + SPECIALS.index("</think>")]
    if case.think == "off":
        assert span is None, str(case)
    else:
        assert span is not None and span.end_ids == close and span.is_open == (case.think == "on"), str(case)
        assert span.start_ids == ([] if span.is_open else [256 + SPECIALS.index("<think>")]), str(case)
