"""Shapes of log-probabilities: one entry a token, bytes kept, offsets true, minus infinity encodable."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from samovar.core.events import LogprobEntry, PositionLogprobs
from samovar.server.openai.logprobs import LOWEST, chat_logprobs
from tests.server.conftest import REPLY
from tests.server.wire import CHAT, COMPLETIONS, HELLO


def test_chat_shape(http: httpx.Client) -> None:
    """B059: token strings are strings, with their bytes beside them; entries == completion_tokens."""
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3}
    answer = http.post(CHAT, json=body).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert b"".join(bytes(e["bytes"]) for e in entries[:-1]) == REPLY.encode()
    for entry in entries:
        assert isinstance(entry["token"], str) and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][-1]["logprob"] == LOWEST


def test_completion_shape(http: httpx.Client) -> None:
    """The four lists are parallel, offsets are where each token's character begins, alternatives never collide."""
    choice = http.post(COMPLETIONS, json={"prompt": "hi", "logprobs": 5, "max_tokens": 60}).json()["choices"][0]
    rows: dict[str, list[Any]] = choice["logprobs"]
    assert len({len(v) for v in rows.values()}) == 1 and len(rows["tokens"]) == 37
    begins, seen = [], b""
    for byte in REPLY.encode():
        begins.append(len(seen.decode("utf-8", "ignore")))
        seen += bytes([byte])
    assert rows["text_offset"][:-1] == begins and rows["text_offset"][-1] == len(REPLY)
    assert all(len(top) == 6 for top in rows["top_logprobs"])


def test_echo_offsets(http: httpx.Client) -> None:
    """With echo, offsets run through prompt and answer: each one-byte token's text stands at its offset."""
    body = {"prompt": "Your answer: ", "echo": True, "logprobs": 0, "max_tokens": 2}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    rows = choice["logprobs"]
    for token, offset in zip(rows["tokens"], rows["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    assert rows["token_logprobs"][0] is None and rows["top_logprobs"][0] is None
    assert rows["top_logprobs"][1] == {"o": -0.75}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs(http: httpx.Client, path: str) -> None:
    """vLLM's prompt_logprobs: null first, then the prompt's own token and the alternatives by id."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hi", "n": 2}
    answer = http.post(path, json=body | {"prompt_logprobs": 2}).json()
    rows = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    assert len(rows) == answer["usage"]["prompt_tokens"] and rows[0] is None
    for row in rows[1:]:
        assert len(row) == 3 and all(entry.keys() == {"logprob", "rank", "decoded_token"} for entry in row.values())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_tokens_as_ids(http: httpx.Client, path: str) -> None:
    """return_tokens_as_token_ids writes every token of the logprobs by number."""
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1} if path == CHAT else {"prompt": "hi", "logprobs": 1}
    found = http.post(path, json=body | {"return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
    names = [e["token"] for e in found["content"]] if path == CHAT else found["tokens"]
    assert names and all(name.startswith("token_id:") for name in names)


def test_values_json_cannot_hold() -> None:
    """Minus infinity and NaN become the lowest number."""
    entries = [LogprobEntry(1, "a", b"a", value, 1) for value in (float("-inf"), float("nan"), -1.5)]
    found = chat_logprobs([PositionLogprobs(e, []) for e in entries], 0, False)
    assert [e.logprob for e in found.content] == [LOWEST, LOWEST, -1.5]
