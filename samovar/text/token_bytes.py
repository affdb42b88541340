"""Vocabulary entry -> the bytes it stands for, for each way of writing a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

PieceBytes: TypeAlias = Callable[[str], bytes]

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019) -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Byte-level BPE: every character stands for one byte. A piece with other characters stands for itself."""
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def sentencepiece(piece: str) -> bytes:
    """SentencePiece: U+2581 is a space, `<0x0A>` a byte."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def wordpiece(piece: str, prefix: str = "##") -> bytes:
    """WordPiece: a piece without the continuation prefix begins a word."""
    text = piece[len(prefix) :] if piece.startswith(prefix) else " " + piece
    return text.encode("utf-8", "replace")


def word_end(piece: str, suffix: str = "</w>") -> bytes:
    """BPE with an end-of-word mark."""
    text = piece[: -len(suffix)] + " " if piece.endswith(suffix) else piece
    return text.encode("utf-8", "replace")


def plain(piece: str) -> bytes:
    """Pieces that stand for themselves."""
    return piece.encode("utf-8", "replace")


def scheme_of(decoder: dict[str, Any] | None) -> tuple[PieceBytes, bool]:
    """The decoder section of a tokenizer.json -> (piece to bytes, whether a whole text loses its first space)."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"]: part for part in parts}
    if "ByteLevel" in kinds:
        return byte_level, False
    if "WordPiece" in kinds:
        return partial(wordpiece, prefix=kinds["WordPiece"].get("prefix", "##")), True
    if "BPEDecoder" in kinds:
        return partial(word_end, suffix=kinds["BPEDecoder"].get("suffix", "</w>")), False
    if "Metaspace" in kinds:
        return sentencepiece, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if kinds.keys() & {"Replace", "ByteFallback"}:
        return sentencepiece, kinds.get("Strip", {}).get("start", 0) > 0
    return plain, False
