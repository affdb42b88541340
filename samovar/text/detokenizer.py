"""Token ids to text, one at a time: each token is bytes, and only complete characters leave the buffer."""

from __future__ import annotations

import codecs

from samovar.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence, as it grows. Constant work per token, nothing is decoded twice.

    The texts that `feed` and the last `flush` return are together the UTF-8 text of all the tokens' bytes. Bytes that
    are no UTF-8 become one U+FFFD per maximal bad sequence, as soon as they are known to be bad. It writes what comes
    after a prompt, so a first token that starts with a space keeps it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._trims_special = not spaces_between_special_tokens
        self._after_special = False
        self._decoder = _utf8("replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; possibly empty."""
        special = self._tokenizer.is_special(token_id)
        if special and self._skip_special:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._trims_special:
            if special and self._after_special:
                raw = raw.strip(b" ")
            self._after_special = special
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The end: U+FFFD if a character was left incomplete."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
