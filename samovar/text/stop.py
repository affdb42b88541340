"""Stop strings in streamed text: found across any chunk borders, holding back only what may still become one.

An automaton over all stop strings at once (Aho and Corasick 1975): its state is the longest tail of the text so far
that begins some stop string, which is exactly what must not be shown yet.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """The stop strings of one request, compiled; shared by all its choices. Work and memory grow with their length."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.steps: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fallback = [0]
        self.stop: list[str | None] = [None]
        """Per state, the longest stop string that ends there."""
        for text in stops:
            if text:
                self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for char in text:
            following = self.steps[state].get(char)
            if following is None:
                following = self.steps[state][char] = len(self.steps)
                self.steps.append({})
                self.depth.append(self.depth[state] + 1)
                self.fallback.append(0)
                self.stop.append(None)
            state = following
        self.stop[state] = text

    def _link(self) -> None:
        queue = deque(self.steps[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.steps[state].items():
                self.fallback[child] = self.next(self.fallback[state], char)
                self.stop[child] = self.stop[child] or self.stop[self.fallback[child]]
                queue.append(child)

    def next(self, state: int, char: str) -> int:
        """The state after one more character."""
        steps = self.steps
        while (following := steps[state].get(char)) is None:
            if state == 0:
                return 0
            state = self.fallback[state]
        return following


@lru_cache(maxsize=64)
def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; kept, since clients send the same ones again and again."""
    return StopAutomaton(stops)


class StopMatcher:
    """Follows the text of one choice.

    The match that is completed first ends the text; of several completed by the same character the longest counts.
    The result does not depend on how the text was cut into chunks.
    """

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.match: str | None = None
        """The stop string that was completed, as the request spelled it."""

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Add text; returns what may be shown now. After a match, `match` is set and nothing more comes out."""
        if self.match is not None or not text:
            return ""
        automaton, state = self._automaton, self._state
        buffer = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            state = automaton.next(state, char)
            if (stop := automaton.stop[state]) is not None:
                self.match = stop
                self._held = ""
                return buffer[: at if self._include_stop else at - len(stop)]
        self._state = state
        ready = len(buffer) - automaton.depth[state]
        self._held = buffer[ready:]
        return buffer[:ready]

    def flush(self) -> str:
        """The end of the text came without a match: what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
