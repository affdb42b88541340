"""Fixtures: the tiny text model, and one shared server that most tests talk to."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from samovar.config.description import ModelDescription
from samovar.config.groups import ServerConfig
from samovar.grammar.compiler import GrammarCompiler
from samovar.text.chat_template import load_chat_template
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import VOCAB, ScriptedEngine, engine_facts, saying, write_model
from tests.server.truth_table import TruthServer, truth_server

REPLY = "Grüße, wörld 🙂 and more words."


@pytest.fixture(scope="session")
def description(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    """The tiny checkpoint folder."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def preparer(description: ModelDescription) -> Iterator[Preparer]:
    """The door in front of the scripted engine. The template knows no tools, so calls are in the hermes format."""
    tokenizer, template = load_tokenizer(description), load_chat_template(description)
    compiler = GrammarCompiler(tokenizer, VOCAB, [258])
    yield Preparer(tokenizer, template, limits_from(engine_facts()), [258], grammar=compiler)
    compiler.close()


@pytest.fixture(scope="session")
def server(preparer: Preparer) -> Iterator[LiveServer]:
    """One server for tests that leave no trace in it."""
    with live_server(lambda: ScriptedEngine(saying(REPLY)), preparer, ServerConfig(port=0)) as running:
        yield running


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=30, verify=False) as client:
        yield client


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TruthServer]:
    """A server that answers every case of the truth table, and echoes nothing else."""
    with truth_server(tmp_path_factory.mktemp("thinking")) as running:
        yield running


@pytest.fixture(scope="session")
def truth_http(truth: TruthServer) -> Iterator[httpx.Client]:
    """An HTTP client of that server."""
    with httpx.Client(base_url=truth.live.url, timeout=30, verify=False) as client:
        yield client
