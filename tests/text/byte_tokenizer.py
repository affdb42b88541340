"""A tokenizer whose tokens are any bytes the test wants: the hardest vocabulary for streaming."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0..255 are the bytes; then `pieces`, then `specials` (control tokens). No BOS."""

    def __init__(self, pieces: Sequence[bytes] = (), specials: Sequence[str] = ("<eos>",)) -> None:
        ordinary = [bytes([b]) for b in range(256)] + list(pieces)
        self.first_special = len(ordinary)
        self.table = ordinary + [text.encode() for text in specials]

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def bos_token_id(self) -> int | None:
        return None

    @property
    def eos_token_id(self) -> int | None:
        return self.first_special

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.first_special
