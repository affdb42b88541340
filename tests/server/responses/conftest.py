"""Fixtures: a server over the scripted thinking model that says whatever a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from samovar.config.groups import ServerConfig
from samovar.core.request import Request
from samovar.grammar.compiler import GrammarCompiler
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_server
from tests.server.responses.checker import check_stream, events_of
from tests.server.scripted_engine import ScriptedEngine, engine_facts
from tests.server.truth_table import MAX_LEN, VOCAB, encode_marked, prompt_text, thinking_preparer

PATH = "/v1/responses"


@dataclass
class Talker:
    """A running server; `says` is what its model says next."""

    says: str = "Hello."
    live: LiveServer = field(init=False, repr=False)
    http: httpx.Client = field(init=False, repr=False)
    sdk: openai.OpenAI = field(init=False, repr=False)

    def script(self, request: Request, index: int) -> list[int]:
        """The engine's script."""
        return encode_marked(self.says)

    @property
    def prompt(self) -> str:
        """The text of the newest prompt."""
        return prompt_text(self.live.engine.requests[-1])

    @property
    def request(self) -> Request:
        """The newest request."""
        return self.live.engine.requests[-1]

    def ask(self, says: str | None = None, **body: Any) -> dict[str, Any]:
        """The answer, not streamed."""
        self.says = self.says if says is None else says
        answer = self.http.post(PATH, json={"input": "hi"} | body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def stream(self, says: str | None = None, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, each one checked."""
        self.says = self.says if says is None else says
        answer = self.http.post(PATH, json={"input": "hi", "stream": True} | body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.content)
        check_stream(events)
        return events

    def refusal(self, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused with 400."""
        answer = self.http.post(PATH, json={"input": "hi"} | body)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparer]:
    """The door in front of the scripted thinking model."""
    preparer = thinking_preparer(tmp_path_factory.mktemp("thinker"))
    yield preparer
    assert isinstance(preparer.grammar, GrammarCompiler)
    preparer.grammar.close()


def talking(preparer: Preparer, config: ServerConfig | None = None, **engine: Any) -> Iterator[Talker]:
    """A server, an HTTP client and an SDK until the generator ends."""
    talker, info = Talker(), engine_facts(vocab_size=VOCAB, max_model_len=MAX_LEN)
    with live_server(lambda: ScriptedEngine(talker.script, info=info, **engine), preparer, config) as live:
        talker.live = live
        with (
            httpx.Client(base_url=live.url, timeout=30, verify=False) as talker.http,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as talker.sdk,
        ):
            yield talker


@pytest.fixture(scope="session")
def shared_talker(thinker: Preparer) -> Iterator[Talker]:
    """One server for the whole session."""
    yield from talking(thinker)


@pytest.fixture
def talker(shared_talker: Talker) -> Talker:
    """The shared server, saying hello."""
    shared_talker.says = "Hello."
    return shared_talker


@pytest.fixture
def slow(thinker: Preparer) -> Iterator[Talker]:
    """A server of one's own that says a token every few milliseconds."""
    yield from talking(thinker, step_seconds=0.003)
