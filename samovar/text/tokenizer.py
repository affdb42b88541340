"""What a tokenizer is to the rest of the engine, and how one is found for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from samovar.config.description import ModelDescription
from samovar.errors import CheckpointError


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable once loaded; safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's own vocabulary may be padded beyond it."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids. `add_special_tokens` adds what the model expects around a text (BOS, EOS), but no second BOS
        before a text that begins with one. Without `parse_special` the text of a special token is ordinary text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """A whole text; invalid UTF-8 becomes one U+FFFD per maximal bad sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes a token adds to a text; empty for an id that is not in the vocabulary."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token alone as text; may hold U+FFFD when it is part of a character."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which `skip_special_tokens` leaves out."""
        ...


@runtime_checkable
class SpanTokenizer(Tokenizer, Protocol):
    """A tokenizer that can be told which stretches of a text must not become special tokens. All loaded ones can."""

    @property
    def added_tokens(self) -> Mapping[str, bool]:
        """Texts matched before ordinary tokenization -> whether they are special (control) tokens."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Template variables such as `bos_token` -> the token's text."""
        ...

    def encode_spans(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """As `encode(text, add_special_tokens=False)`, but no added token that touches one of the `literal`
        (start, end) stretches is recognised there: such text is tokenized as ordinary text."""
        ...


def load_tokenizer(description: ModelDescription, source: str | None = None) -> SpanTokenizer:
    """The tokenizer of a checkpoint, or of `source` (a directory, tokenizer.json or .gguf file) if given.

    Looks for tokenizer.json, then tekken.json, in a directory. Raises `CheckpointError` when there is none.
    """
    path = Path(source) if source is not None else description.path
    if not path.exists():
        raise CheckpointError(f"tokenizer {path}: no such file or directory")
    if path.is_dir():
        found = next((path / name for name in ("tokenizer.json", "tekken.json") if (path / name).is_file()), None)
        if found is None:
            found = next(iter(sorted(path.glob("*.gguf"))), None)
        if found is None:
            raise CheckpointError(
                f"{path}: no tokenizer.json or tekken.json; name another one with --tokenizer, "
                "or serve token ids only with --skip-tokenizer-init"
            )
        path = found
    if path.name.startswith("tekken") and path.suffix == ".json":
        from samovar.text.tekken import load_tekken

        return load_tekken(path)
    if path.suffix == ".json":
        from samovar.text.hf_tokenizer import load_hf

        return load_hf(path, description)
    from samovar.text.gguf_tokenizer import load_gguf

    return load_gguf(path)
