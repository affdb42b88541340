"""The tokenizer every loader returns: a `tokenizers.Tokenizer` for encoding, own byte tables for decoding.

Decoding never asks the library: a token is bytes, a text is the bytes of its tokens, and only whole texts are turned
into characters. Special tokens are recognised by the library, except in stretches of a text marked as literal.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers

from samovar.errors import ValidationError
from samovar.text.matching import any_of, outside
from samovar.text.token_bytes import PieceBytes, scheme_of

_SURROGATES = re.compile("[\ud800-\udfff]")
_ALIAS_OPEN, _ALIAS_CLOSE = "\U0010fffd", "\U0010fffc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """What goes around an ordinary text: ids before and after it, and which id is BOS."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos: int | None = None
    eos: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    """Template variables such as `eos_token` -> text."""


class FastTokenizer:
    """`SpanTokenizer` over a `tokenizers.Tokenizer` whose post-processor is not used.

    `pieces` and `strips_space` default to what the library object's decoder says. `twice` holds the text of ids that
    share their text with another id, which the library cannot tell apart.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        framing: Framing,
        *,
        vocab_size: int,
        pieces: PieceBytes | None = None,
        strips_space: bool = False,
        twice: Mapping[int, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        if pieces is None:
            state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
            pieces, strips_space = scheme_of(state)
        self._backend = backend
        self._framing = framing
        self._vocab_size = vocab_size
        self._pieces, self._strips_space = pieces, strips_space
        self._twice = twice or {}
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._literal: _LiteralTwin | None = None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._framing.bos

    @property
    def eos_token_id(self) -> int | None:
        return self._framing.eos

    @property
    def added_tokens(self) -> Mapping[str, bool]:
        return {token.content: token.special for token in self._added.values()}

    @property
    def named_tokens(self) -> Mapping[str, str]:
        return self._framing.named

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids; see `Tokenizer.encode`. A lone surrogate counts as U+FFFD."""
        text = _encodable(text)
        if parse_special:
            ids = _ids(self._backend, text)
        else:
            ids = self._twin.encode(text, self._twin.special_spans(text))
        return self._framed(ids) if add_special_tokens else ids

    def encode_spans(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """See `SpanTokenizer.encode_spans`. Raises `ValidationError` for text that cannot be ordinary text."""
        text = _encodable(text)
        if not literal:
            return _ids(self._backend, text)
        return self._twin.encode(text, literal)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to a whole text; see `Tokenizer.decode`. A SentencePiece text loses the space it began with."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """One token as text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return token_id in self._special

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8", "replace")
        if not 0 <= token_id < self._vocab_size:
            return b""
        piece = self._twice.get(token_id) or self._backend.id_to_token(token_id)
        return b"" if piece is None else self._pieces(piece)

    def _framed(self, ids: list[int]) -> list[int]:
        prefix, bos = self._framing.prefix, self._framing.bos
        if prefix and ids[:1] == [bos] and prefix[-1] == bos:
            prefix = prefix[:-1]
        return [*prefix, *ids, *self._framing.suffix]

    @property
    def _twin(self) -> _LiteralTwin:
        if self._literal is None:
            self._literal = _LiteralTwin(self._backend, self._vocab_size)
        return self._literal


class _LiteralTwin:
    """A second front for the same model that knows the added tokens by unguessable aliases only.

    A text is prepared by writing the alias wherever an added token is meant and leaving it as it stands where it is
    not; then one pass over the whole text gives the same context to everything else as the normal tokenizer does.
    The vocabulary is shared with the original, not copied.
    """

    def __init__(self, original: tokenizers.Tokenizer, vocab_size: int) -> None:
        twin = tokenizers.Tokenizer(original.model)
        if original.normalizer is not None:
            twin.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            twin.pre_tokenizer = original.pre_tokenizer
        nonce = f"{_ALIAS_OPEN}{secrets.token_hex(8)}:"
        self._added = {token.content: (i, token) for i, token in original.get_added_tokens_decoder().items()}
        self._alias = {text: f"{nonce}{n}{_ALIAS_CLOSE}" for n, text in enumerate(self._added)}
        self._break = f"{nonce}break{_ALIAS_CLOSE}"
        # Aliases get the ids behind the model's own; fillers keep those clear of every real id.
        fillers = max(0, vocab_size - twin.get_vocab_size())
        names = [f"{nonce}fill{n}{_ALIAS_CLOSE}" for n in range(fillers)]
        twin.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in [*names, self._break]])
        twin.add_tokens([self._aliased(text) for text in self._alias])
        self._twin = twin
        self._meant = {twin.token_to_id(alias): self._added[text][0] for text, alias in self._alias.items()}
        self._break_id = twin.token_to_id(self._break)
        self._specials = {i: token.content for i, token in self._added.values() if token.special}
        self._any_added = any_of(self._added)
        self._any_special = any_of(self._specials.values())

    def _aliased(self, text: str) -> tokenizers.AddedToken:
        token = self._added[text][1]
        return tokenizers.AddedToken(
            self._alias[text], single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
        )

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens stand in a text."""
        return [match.span() for match in self._any_special.finditer(text)]

    def encode(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of `text`; added tokens are meant wherever they do not touch a `literal` stretch."""
        ids, stray = self._run(text, literal, breaking=False)
        if stray is not None:
            # The model itself joins ordinary characters into this token (some converted SentencePiece vocabularies):
            # cut there, at the price of a space where a vocabulary puts one before every piece of text.
            ids, stray = self._run(text, literal, breaking=True)
        if stray is not None:
            raise ValidationError(f"the text {stray!r} cannot be given to this model as ordinary text", value=stray)
        return ids

    def _run(self, text: str, literal: Sequence[tuple[int, int]], *, breaking: bool) -> tuple[list[int], str | None]:
        ids: list[int] = []
        stray = None
        for token in _ids(self._twin, self._prepare(text, literal, breaking=breaking)):
            if (meant := self._meant.get(token)) is not None:
                ids.append(meant)
            elif token in self._specials:
                stray = self._specials[token]
            elif token != self._break_id:
                ids.append(token)
        return ids, stray

    def _prepare(self, text: str, literal: Sequence[tuple[int, int]], *, breaking: bool) -> str:
        """Write aliases for the tokens that are meant; with `breaking`, cut the others after their first character."""
        out: list[str] = []
        done = 0
        for match, is_meant in outside(self._any_added, text, literal):
            if is_meant:
                out += [text[done : match.start()], self._alias[match[0]]]
                done = match.end()
            elif breaking:
                out += [text[done : match.start() + 1], self._break]
                done = match.start() + 1
        return "".join([*out, text[done:]])


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids without anything around them. The library's batch calls, unlike its single ones, let other threads run."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _encodable(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become U+FFFD; the length stays."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
