"""Sampler: logits of many rows -> one token each, with logprobs. Nothing here waits for the device before `collect`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from samovar.core.outputs import NOTHING_ALLOWED, TokenLogprobs
from samovar.kernels.sample_tokens import NOT_FINITE as NOT_FINITE_ID
from samovar.kernels.sample_tokens import sample_tokens
from samovar.sample.logprobs import LogprobTensors, measure
from samovar.sample.pipeline import SampleRows, needs_processing, process
from samovar.sample.state import Ids, SamplingState
from samovar.sample.transfer import download, mark, upload

NOT_FINITE = "the model produced logits that are not finite for this sequence"
ALL_FORBIDDEN = NOTHING_ALLOWED
ALL_FORBIDDEN_ID = -2

FAILURES = {NOT_FINITE_ID: NOT_FINITE, ALL_FORBIDDEN_ID: ALL_FORBIDDEN}
"""What stands in the place of a token where there is none -> why."""

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""An implementation of the op `sample_tokens`."""


@dataclass(slots=True)
class SampledRows:
    """`token_ids` int64 [rows], on the host; 0 in the rows of `failed` (row -> message)."""

    token_ids: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Tokens under way. `token_ids` int64 [rows] lie on the device; negative ones are keys of `FAILURES`."""

    token_ids: torch.Tensor
    _on_host: torch.Tensor
    _logprobs: tuple[Ids, Ids, LogprobTensors] | None
    """Rows that want logprobs, how many alternatives each, and the figures."""
    _done: torch.Event | None

    def collect(self) -> SampledRows:
        """Wait, and read what came."""
        if self._done is not None:
            self._done.synchronize()
        ids = self._on_host.numpy()
        failed = {int(row): FAILURES[int(ids[row])] for row in np.flatnonzero(ids < 0)}
        found: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            rows, counts, tensors = self._logprobs
            entries = zip(rows.tolist(), tensors.entries(counts), strict=True)
            found = {row: entry for row, entry in entries if row not in failed}
        return SampledRows(self._on_host.clamp(min=0) if failed else self._on_host, found, failed)


class Sampler:
    """Draws tokens by the settings in `state`. A row's token is a function of its own logits, settings and key.

    `draw` is the implementation of `sample_tokens` to use.
    """

    def __init__(self, state: SamplingState, draw: Draw = sample_tokens) -> None:
        self.state, self._draw = state, draw

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampledRows:
        """`launch` and wait."""
        return self.launch(logits, rows).collect()

    def launch(self, logits: torch.Tensor, rows: SampleRows) -> PendingSample:
        """Queue everything for logits [rows, vocab], float32, which are left unchanged.

        A row that fails is reported and cannot change another. Also writes `state.last_sampled`.
        """
        state, device = self.state, logits.device
        state.flush()
        changed = needs_processing(rows, state)
        slots = rows.slots
        if changed.size:
            # Rows that something changes are only looked at for now: whether they are finite.
            slots = slots.copy()
            slots[changed] = state.num_slots
        token_ids = self._tokens(logits, slots, rows.positions)
        if changed.size:
            index = upload(changed, device)
            part = logits[index]
            picked = rows.pick(changed)
            process(part, picked, state)
            found = self._tokens(part, picked.slots, picked.positions)
            found = torch.where(found < 0, ALL_FORBIDDEN_ID, found)
            token_ids[index] = torch.where(token_ids[index] < 0, NOT_FINITE_ID, found)
        measured = self._measure(logits, rows, token_ids)
        on_host = download(token_ids)
        return PendingSample(token_ids, on_host, measured, mark(device))

    def _tokens(self, logits: torch.Tensor, slots: Ids, positions: Ids) -> torch.Tensor:
        packed = np.empty((2, len(slots)), np.int32)
        packed[0], packed[1] = slots, positions
        where = upload(packed, logits.device)
        return self._draw(logits, self.state.settings, where[0], where[1], self.state.last_sampled)

    def _measure(
        self, logits: torch.Tensor, rows: SampleRows, token_ids: torch.Tensor
    ) -> tuple[Ids, Ids, LogprobTensors] | None:
        counts = self.state.num_logprobs[rows.slots]
        wanted = np.flatnonzero(counts >= 0)
        if not wanted.size:
            return None
        if len(wanted) < len(logits):
            index = upload(wanted, logits.device)
            logits, token_ids = logits[index], token_ids[index]
        counts = counts[wanted]
        return wanted, counts, measure(logits, token_ids.clamp(min=0), int(counts.max())).download()
