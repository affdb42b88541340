"""PositionLogprobs -> the three shapes OpenAI and vLLM give them. One entry a token, whatever the text looks like."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from samovar.core.events import LogprobEntry, PositionLogprobs
from samovar.server.openai.schema import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from samovar.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _name(entry: LogprobEntry, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.text


def chat_logprobs(positions: Sequence[PositionLogprobs], top: int, as_ids: bool) -> ChatLogprobs:
    """Entries with at most `top` alternatives each (-1: all there are)."""
    rows = []
    for position in positions:
        alternatives = position.top if top < 0 else position.top[:top]
        rows.append(
            ChatLogprob(
                token=_name(position.chosen, as_ids),
                logprob=_finite(position.chosen.logprob),
                bytes=list(position.chosen.raw),
                top_logprobs=[
                    TopLogprob(token=_name(e, as_ids), logprob=_finite(e.logprob), bytes=list(e.raw))
                    for e in alternatives
                ],
            )
        )
    return ChatLogprobs(content=rows)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], top: int) -> PromptLogprobs:
    """vLLM's shape: token id (as text) -> logprob, rank, text; the prompt's own token is always there."""
    rows: PromptLogprobs = []
    for position in positions:
        if position is None:
            rows.append(None)
            continue
        entries = [position.chosen, *(position.top if top < 0 else position.top[:top])]
        rows.append(
            {
                str(e.token_id): PromptLogprob(logprob=_finite(e.logprob), rank=e.rank, decoded_token=e.text)
                for e in reversed(entries)
            }
        )
    return rows


class CompletionLogprobsWriter:
    """The parallel lists of one completion choice, in increments. Offsets count characters of the choice's text.

    A token that starts inside a character has the offset of that character; one that adds no text (a special token
    that is left out) has the offset where the next text begins.
    """

    def __init__(self, top: int, as_ids: bool, tokenizer: Tokenizer | None, keeps_special: bool) -> None:
        self._top = top
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._keeps_special = keeps_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> CompletionLogprobs:
        """The prompt's entries; the first token has no logprob."""
        lists = _empty()
        for token, position in zip(ids, positions, strict=True):
            if position is not None:
                self._add(lists, position)
                continue
            text = f"token_id:{token}" if self._as_ids or self._tokenizer is None else self._tokenizer.token_text(token)
            lists.tokens.append(text)
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
            self._advance(lists, token, raw)
        return lists

    def add(self, positions: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """The entries of the tokens since the last call."""
        lists = _empty()
        for position in positions:
            self._add(lists, position)
        return lists

    def _add(self, lists: CompletionLogprobs, position: PositionLogprobs) -> None:
        chosen = position.chosen
        lists.tokens.append(_name(chosen, self._as_ids))
        lists.token_logprobs.append(_finite(chosen.logprob))
        entries = position.top if self._top < 0 else position.top[: self._top]
        if all(entry.token_id != chosen.token_id for entry in entries):
            entries = [*entries, chosen]
        alternatives: dict[str, float] = {}
        for entry in entries:
            name = _name(entry, self._as_ids)
            if name in alternatives:  # two tokens with the same text, such as parts of characters
                name = f"token_id:{entry.token_id}"
            alternatives[name] = _finite(entry.logprob)
        lists.top_logprobs.append(alternatives)
        self._advance(lists, chosen.token_id, chosen.raw)

    def _advance(self, lists: CompletionLogprobs, token: int, raw: bytes) -> None:
        lists.text_offset.append(self._offset)
        if self._keeps_special or self._tokenizer is None or not self._tokenizer.is_special(token):
            self._offset += len(self._decoder.decode(raw))


def _empty() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Increments -> the whole."""
    whole = _empty()
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole
