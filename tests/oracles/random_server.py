"""A real engine with random weights behind HTTP, and a client that asks it many things at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from samovar.config.engine import EngineConfig, with_settings
from samovar.config.groups import ServerConfig
from samovar.engine.build import build_engine, find_model
from samovar.engine.door import load_text, load_tokenizer_of, make_preparer
from samovar.engine.in_process_client import InProcessEngineClient
from samovar.text.formats.choose import reasoning_format, tool_format
from samovar.text.prepare import Preparer
from tests.checkpoints import write_random_llama
from tests.server.live import LiveServer, live_server
from tests.server.truth_table import TEMPLATE

AT_ONCE = 96
ENDS = ('"', "}", "]", '"}', '"]', "'", ")", "<", ">")
"""Texts that close something. A random model, which says them by chance only, hardly ever comes to an end."""

Body = dict[str, Any]


@dataclass
class RandomServer:
    """The running server and its door."""

    live: LiveServer
    preparer: Preparer

    def write_calls_as(self, name: str) -> None:
        """From now on calls are written, and read, in this format."""
        format = tool_format(name)
        changed = copy(self.preparer)
        changed.formats = (format, None if format.whole is None else reasoning_format(name))
        self.live.on_loop(lambda: self.live.state.attach(self.live.state.client, changed))

    def bias(self, weight: float) -> dict[str, float]:
        """`logit_bias` towards what ends strings, objects and lists."""
        tokenizer = self.preparer.tokenizer
        assert tokenizer is not None
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ENDS]
        return {str(ids[0]): weight for ids in encoded if len(ids) == 1}

    def ask(self, path: str, bodies: Sequence[Body]) -> list[tuple[int, Body]]:
        """(status, answer) of each body, in their order; as many at once as the engine runs."""
        return asyncio.run(_ask(self.live.url, path, bodies))


async def _ask(url: str, path: str, bodies: Sequence[Body]) -> list[tuple[int, Body]]:
    limits, gate = httpx.Limits(max_connections=AT_ONCE), asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=1000, limits=limits) as http:

        async def one(body: Body) -> tuple[int, Body]:
            async with gate:
                answer = await http.post(path, json=body)
            return answer.status_code, answer.json()

        return await asyncio.gather(*map(one, bodies))


@contextmanager
def random_server(folder: Path, *, tokenizer: Path | None = None) -> Iterator[RandomServer]:
    """Serve a two-layer random Llama until the block ends: with its own small vocabulary, or that of another model."""
    write_random_llama(folder, max_position_embeddings=16384)
    config = with_settings(
        EngineConfig(), model=str(folder), dtype="float32", device="cpu", threads=1, max_num_seqs=AT_ONCE,
        memory="800MiB", step_time_target_ms=10_000.0,
    )  # fmt: skip
    if tokenizer is not None:
        config = with_settings(config, tokenizer=str(tokenizer))
        size = load_tokenizer_of(config, find_model(config)).vocab_size
        write_random_llama(folder, max_position_embeddings=16384, vocab_size=size)
    description = find_model(config)
    text = load_text(config, description, chat_template=TEMPLATE)
    engine, info = build_engine(config, lambda phase: None, description, tokenizer=text.tokenizer)
    preparer = make_preparer(config, description, info, text)

    def client() -> Any:
        return InProcessEngineClient(engine, info)

    with live_server(client, preparer, ServerConfig(port=0)) as live:
        yield RandomServer(live, preparer)
    preparer.close()


def spread(counts: Counter[str]) -> str:
    """Counts as one line, most first."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
