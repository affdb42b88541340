"""A text as windows of tokens, of which the second half of each is scored, as llama.cpp's perplexity tool does it.

A window of n tokens is a prompt of its own; tokens n/2 + 1 to n - 1 are scored, each by the distribution that the tokens
before it give, so that every scored token has at least n/2 tokens of context. Where the tokenizer begins a text with a
token of its own (BOS), that token replaces the first one of every window. What is left over at the end is not used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samovar.config.field import Group, field
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM
    from samovar.text.tokenizer import Tokenizer

OWN_TEXT = Path(__file__).with_name("text.txt")
"""What is scored without --text: prose about this engine that no model has seen, then Judges 6-11 and Nehemiah 1-4 of
the King James Bible, which many have. It does not change any more, or figures could not be compared."""


class TextOptions(Group):
    """What is scored."""

    text: str | None = field(default=None)
    """UTF-8 file to score. Default: 60 KB that come with the package."""
    context: int = field(default=512, ge=8)
    """Tokens in one window; the second half of each is scored."""
    windows: int = field(default=0, ge=0)
    """Windows to score, from the beginning of the text; 0: all."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids of equally long windows; row p of a window is the distribution of its token p + 1."""

    ids: list[list[int]]

    @property
    def context(self) -> int:
        """Tokens in each."""
        return len(self.ids[0])

    @property
    def first_row(self) -> int:
        """The first row that is scored."""
        return self.context // 2

    @property
    def num_rows(self) -> int:
        """Scored rows of each window."""
        return self.context - 1 - self.first_row

    def targets(self, window: int) -> list[int]:
        """The tokens that the scored rows of a window speak of."""
        return self.ids[window][self.first_row + 1 :]

    def digest(self) -> str:
        """The same for the same tokens only."""
        return hashlib.sha256(np.array(self.ids, np.int64).tobytes()).hexdigest()


def read_text(options: TextOptions) -> str:
    """The text to score. Raises `ConfigError`."""
    path = OWN_TEXT if options.text is None else Path(options.text)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def windows_of(llm: LLM, text: str, options: TextOptions) -> Windows:
    """The windows that a model scores. Raises `ConfigError` if its context or the text is too short for one."""
    context = options.context
    if context > llm.info.max_model_len:
        raise ConfigError(f"--context {context} is more than the {llm.info.max_model_len} tokens that the model takes")
    return cut(llm.get_tokenizer(), text, context, options.windows)


def cut(tokenizer: Tokenizer, text: str, context: int, most: int) -> Windows:
    """`text` in windows of `context` tokens, at most `most` of them (0: all). Raises `ConfigError` if there is none."""
    ids, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    count = len(ids) // context
    if count == 0:
        raise ConfigError(f"--context {context}: the text has only {len(ids)} tokens; give a longer one with --text")
    made = [ids[i * context : (i + 1) * context] for i in range(min(count, most or count))]
    if ids[0] == tokenizer.bos_token_id and plain[:1] != ids[:1]:
        made = [[ids[0], *window[1:]] for window in made]
    return Windows(made)
