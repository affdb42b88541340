"""A hybrid model whose every token is an exact function of all tokens before it, by way of a state and by way of a cache.

Its recurrent layer hashes the tokens it has seen into one integer; its attention layer averages values that are small
integers, from which their exact sum is had back. The next token is a function of both, so that a state of another prefix,
a token lost or seen twice, and a wrong block each show in the next token or soon after.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from samovar.core.cache_spec import StateSpec, StateTensor
from samovar.layers import Attention, ForwardBatch, Placement
from samovar.layers.recurrent import Recurrent
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.registry import ARCHITECTURES
from tests.checkpoints import write_config, write_tokenizer

NAME = "ToyHybridForCausalLM"
PRIME, BASE = (1 << 31) - 1, 48_271
DIM = 16


def hashed(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * BASE + token + 1) % PRIME


def next_token(state: int, total: int, vocab: int) -> int:
    """What follows; `total` is the sum of the values of all tokens."""
    return 3 + (state // 7 + 13 * total) % (vocab - 3)


def value(token: int) -> int:
    """What attention remembers of a token."""
    return token % 5


class TokenHash(Recurrent):
    """A state of one integer, and a short history as convolutions have, of the last three tokens."""

    def bind(self, place: Placement) -> None:
        """There is nothing to fill."""
        self.device = place.device

    def state_spec(self) -> StateSpec:
        """Two tensors of different types."""
        return StateSpec((StateTensor("hash", (1,), "int64"), StateTensor("history", (3, 2), "float32")))

    def forward(self, token_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """int64 [tokens] -> the state after each, int64 [tokens]."""
        rows = batch.sequences
        assert rows is not None
        first_rows, state_rows = rows.first_rows.tolist(), rows.state_rows.tolist()
        assert list(rows.new_tokens) == [b - a for a, b in pairwise(first_rows)]
        assert rows.all_single == all(new == 1 for new in rows.new_tokens)
        found = []
        for row, first, end in zip(state_rows, first_rows[:-1], first_rows[1:], strict=True):
            state, history = int(self.state[0][row, 0]), self.state[1][row, :, 0].tolist()
            for token in token_ids[first:end].tolist():
                state = hashed(state, token + 31 * int(history[0]))
                history = [*history[1:], float(token)]
                found.append(state)
            self.state[0][row, 0] = state
            self.state[1][row] = torch.tensor(history).unsqueeze(1)
        return torch.tensor(found)


class ToyHybrid(DecoderLM):
    """See the top. Hidden states are (state // 7, sum of values)."""

    def __init__(self, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.hash = TokenHash()
        self.attention = Attention(1, 1, DIM)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float64 [tokens, 2]."""
        states = self.hash(batch.token_ids, batch)
        values = (batch.token_ids % 5).float()[:, None, None].expand(-1, 1, DIM).contiguous()
        zeros = torch.zeros_like(values)
        means = self.attention(zeros, zeros, values, batch)[:, 0]
        totals = (means.double() * (batch.positions + 1)).round()
        return torch.stack([(states // 7).double(), totals], 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """One token is likely."""
        tokens = 3 + (hidden[:, 0] + 13 * hidden[:, 1]).long() % (self.config.vocab_size - 3)
        return 50 * torch.nn.functional.one_hot(tokens, self.config.vocab_size).float()


class ToyRecurrent(ToyHybrid):
    """The same without attention: nothing is cached but the state."""

    def __init__(self, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.hash = TokenHash()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float64 [tokens, 2]."""
        states = self.hash(batch.token_ids, batch)
        return torch.stack([(states // 7).double(), torch.zeros(len(states), dtype=torch.float64)], 1)


def expected(prompt: Sequence[int], count: int, vocab: int, *, has_attention: bool = True) -> list[int]:
    """The `count` tokens after `prompt`."""
    tokens, total = list(prompt), 0
    state, history, seen = 0, [0, 0, 0], 0
    while len(tokens) < len(prompt) + count:
        for token in tokens[seen:]:
            state, history = hashed(state, token + 31 * history[0]), [*history[1:], token]
            total += value(token) if has_attention else 0
        seen = len(tokens)
        tokens.append(next_token(state, total, vocab))
    return tokens[len(prompt) :]


def write_toy(folder: Path, name: str = NAME, length: int = 4096) -> Path:
    """The checkpoint: there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_config(folder, architectures=[name], max_position_embeddings=length, num_hidden_layers=1)
    return folder


@contextmanager
def registered() -> Iterator[None]:
    """The registry has the toys meanwhile."""
    module = ModuleType("samovar.models.toy_hybrid")
    module.ToyHybrid, module.ToyRecurrent = ToyHybrid, ToyRecurrent  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setitem(ARCHITECTURES, NAME, "toy_hybrid:ToyHybrid")
        patch.setitem(ARCHITECTURES, "ToyRecurrentForCausalLM", "toy_hybrid:ToyRecurrent")
        yield
