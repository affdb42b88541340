"""Fixtures: a server whose model says what a test tells it to, with a template that knows thinking and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import httpx
import pytest

from samovar.config.description import ModelDescription
from samovar.config.groups import ServerConfig
from samovar.core.request import Request
from samovar.grammar.compiler import GrammarCompiler
from samovar.text.chat_template import load_chat_template
from samovar.text.formats.choose import choose
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import VOCAB, ScriptedEngine, encode, engine_facts, write_model

CONTEXT = 60_000
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Call with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>.<|im_end|>\n'
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.id }} {{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }} {{ m.name }}{% endif %}<|im_end|>\n"
    "{% elif not loop.first %}{{ raise_exception('system comes first') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""In the manner of Qwen3: tools behind the system prompt, and an empty thought where thinking is off."""


@dataclass
class Stage:
    """A server, its clients, and what its model is to say."""

    server: LiveServer
    http: httpx.Client
    sdk: anthropic.Anthropic
    text: str = ""

    def say(self, text: str, *, per_step: int = 3, cached: int = 0) -> None:
        """What every answer is from now on, how many tokens come at once, and how many are said to be cached."""
        self.text = text
        self.server.engine.per_step, self.server.engine.cached = per_step, cached

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        tokenizer = self.server.state.preparer.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(self.server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def agent_description(folder: Path) -> ModelDescription:
    """The tiny checkpoint folder with this file's template."""
    description = write_model(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return description


@pytest.fixture(scope="session")
def agent_preparer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparer]:
    """A door with formats and grammars."""
    description = agent_description(tmp_path_factory.mktemp("agent"))
    tokenizer = load_tokenizer(description)
    assert tokenizer is not None
    formats = choose([TEMPLATE])
    assert formats[0] is not None and formats[1] is not None
    grammar = GrammarCompiler(tokenizer, VOCAB, [258])
    limits = limits_from(engine_facts(max_model_len=CONTEXT))
    yield Preparer(tokenizer, load_chat_template(description), limits, [258], formats=formats, grammar=grammar)
    grammar.close()


@pytest.fixture(scope="session")
def shared_stage(agent_preparer: Preparer) -> Iterator[Stage]:
    """One server for all tests that leave no trace in it."""
    said: list[Stage] = []

    def script(request: Request, index: int) -> list[int]:
        return list(encode(said[0].text))

    facts = engine_facts(max_model_len=CONTEXT)
    with live_server(lambda: ScriptedEngine(script, info=facts), agent_preparer, ServerConfig(port=0)) as server:
        with (
            httpx.Client(base_url=server.url, timeout=30, verify=False) as http,
            anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk,
        ):
            said.append(Stage(server, http, sdk))
            yield said[0]


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """The shared server, saying hello."""
    shared_stage.say("Hello, wörld 🙂.")
    return shared_stage
