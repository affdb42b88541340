"""A model with random weights, without the weights: it says anything that the request's grammar allows, by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from samovar.core.request import Request
from samovar.grammar.matcher import Matchers
from samovar.text.tokenizer import Tokenizer
from tests.server.scripted_engine import encode

MAX_TOKENS = 1500
_ENDS = set(encode('"}],<\n'))
"""Taken where possible more often than chance would, so that texts come to an end."""
_PRINTABLE = set(encode("".join(map(chr, range(32, 127)))))


def random_script(tokenizer: Tokenizer, vocab_size: int, end: int) -> Callable[[Request, int], list[int]]:
    """A script for `ScriptedEngine`: a walk through the request's grammar; the same seed walks the same way."""
    matchers = Matchers(tokenizer, vocab_size, [end])
    walked: dict[str, list[int]] = {}

    def script(request: Request, index: int) -> list[int]:
        key = f"{request.params.seed} {index} {request.constraint}"
        if key not in walked:
            walked[key] = walk(request, random.Random(f"{request.params.seed} {index}"))
        return walked[key]

    def walk(request: Request, rng: random.Random) -> list[int]:
        if request.constraint is None:
            return [rng.choice(sorted(_PRINTABLE)) for _ in range(20)]
        matcher = matchers.start(request.constraint)
        row = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        ids: list[int] = []
        while len(ids) < MAX_TOKENS and not matcher.is_finished:
            free = not matcher.mask_into(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
            allowed = sorted(_PRINTABLE) if free else np.flatnonzero(bits).tolist()
            assert allowed, matcher.error
            token = _pick(rng, allowed, end, len(ids))
            if token == end:
                break
            matcher.advance(token)
            assert matcher.error is None, matcher.error
            ids.append(token)
        return ids

    return script


def _pick(rng: random.Random, allowed: list[int], end: int, count: int) -> int:
    if end in allowed and (len(allowed) == 1 or rng.random() < 0.5):
        return end
    others = [token for token in allowed if token != end]
    ends = [token for token in others if token in _ENDS]
    if ends and rng.random() < 0.4 + count / 200:
        return rng.choice(ends)
    plain = [token for token in others if token in _PRINTABLE]
    return rng.choice(plain or others)
