"""Once: warnings that are logged once for each text, however many requests cause them."""

from __future__ import annotations

import logging

MAX_REMEMBERED = 1024
MAX_CHARS = 300


class Once:
    """A logger's memory of what it said. Clients choose some of the texts, so it is bounded; what is over is not said."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Log `text`, unless that was done before."""
        text = text[:MAX_CHARS].encode("utf-8", "backslashreplace").decode()
        if text not in self._said and len(self._said) < MAX_REMEMBERED:
            self._said.add(text)
            self._logger.warning("%s (said once)", text)
