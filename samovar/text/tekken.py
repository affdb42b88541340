"""Mistral's tekken.json, read by the `mistral-common` package (the optional extra `mistral`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samovar.errors import CheckpointError, ConfigError
from samovar.text.matching import any_of, outside


def load_tekken(path: Path) -> TekkenTokenizer:
    """Raises `ConfigError` when mistral-common is not installed, `CheckpointError` for a file it does not take."""
    if importlib.util.find_spec("mistral_common") is None:
        raise ConfigError(f"{path.name} needs the mistral-common package; pip install mistral-common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    try:
        return TekkenTokenizer(Tekkenizer.from_file(path))
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
        raise CheckpointError(f"{path}: not a usable tekken.json: {error}") from error


class TekkenTokenizer:
    """`SpanTokenizer` over mistral-common's `Tekkenizer`, whose own encoder knows no special tokens."""

    def __init__(self, tekken: Any) -> None:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        self._tekken = tekken
        self._policy = SpecialTokenPolicy.IGNORE  # For ordinary tokens only; we write special ones ourselves.
        self._num_special: int = tekken.num_special_tokens
        self._special: dict[str, int] = {tekken.id_to_piece(i): i for i in range(self._num_special)}
        self._text = {i: text for text, i in self._special.items()}
        self._any_special = any_of(self._special)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return int(self._tekken.n_words)

    @property
    def bos_token_id(self) -> int | None:
        return int(self._tekken.bos_id)

    @property
    def eos_token_id(self) -> int | None:
        return int(self._tekken.eos_id)

    @property
    def added_tokens(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._special, True)

    @property
    def named_tokens(self) -> Mapping[str, str]:
        return {"bos_token": self._text[self._tekken.bos_id], "eos_token": self._text[self._tekken.eos_id]}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids; see `Tokenizer.encode`."""
        ids = self.encode_spans(text, () if parse_special else ((0, len(text)),))
        bos: int = self._tekken.bos_id
        return [bos, *ids] if add_special_tokens and ids[:1] != [bos] else ids

    def encode_spans(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """See `SpanTokenizer.encode_spans`."""
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        ids: list[int] = []
        done = 0
        for match, is_meant in outside(self._any_special, text, literal):
            if is_meant:
                ids += self._ordinary(text[done : match.start()])
                ids.append(self._special[match[0]])
                done = match.end()
        return ids + self._ordinary(text[done:])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to a whole text; see `Tokenizer.decode`."""
        kept = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token; empty for an unknown id."""
        if token_id in self._text:
            return self._text[token_id].encode("utf-8")
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id not in self._bytes:
            self._bytes[token_id] = bytes(self._tekken.id_to_byte_piece(token_id, self._policy))
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return 0 <= token_id < self._num_special

    def _ordinary(self, text: str) -> list[int]:
        return list(self._tekken.encode(text, bos=False, eos=False)) if text else []
