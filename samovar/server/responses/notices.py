"""Notices: what of a request was skipped. The answer lists them under `notices`, and the log has each once."""

from __future__ import annotations

import logging

from samovar.core.once import MAX_CHARS, Once

MAX_NOTICES = 32

_once = Once(logging.getLogger(__name__))


class Notices:
    """The notices of one request, each text once, at most `MAX_NOTICES`."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Say `text` to the client, and to the log if it never heard it."""
        text = text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 4] + " ..."
        if text in self.texts or len(self.texts) >= MAX_NOTICES:
            return
        self.texts.append(text)
        _once.warn(f"/v1/responses: {text}")
