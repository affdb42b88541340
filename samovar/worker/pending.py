"""Steps on their way: results of a step whose work is queued, read once the device has come to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.outputs import TokenLogprobs
from samovar.core.step import PlainTokens, SampledTokens, StepResult
from samovar.hardware.stream import DeviceStream, Mark
from samovar.sample.sampler import FAILURES


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran while it was launched, as on a CPU."""

    given: StepResult

    def result(self) -> StepResult:
        """What it gave."""
        return self.given


@dataclass(slots=True)
class ReadBack:
    """What one step in flight needs on the host: pinned memory for its tokens and the marks of its beginning and end."""

    tensor: torch.Tensor
    array: NDArray[np.int64]
    """The same memory, [max_rows]."""
    began: Mark
    ended: Mark


class ReadBacks:
    """Pinned buffers that steps in flight borrow; as many exist as steps were ever in flight at once."""

    def __init__(self, stream: DeviceStream, max_rows: int) -> None:
        self._stream, self._max_rows = stream, max_rows
        self._free: list[ReadBack] = []

    def take(self) -> ReadBack:
        """One that nobody else uses."""
        if self._free:
            return self._free.pop()
        tensor = self._stream.pinned(self._max_rows, torch.int64)
        marks = (self._stream.mark(is_timed=True), self._stream.mark(is_timed=True))
        return ReadBack(tensor, tensor.numpy(), *marks)

    def give_back(self, used: ReadBack) -> None:
        """Its step was read."""
        self._free.append(used)


@dataclass(slots=True)
class RowNews:
    """What the sampler says of single rows besides their tokens, by row of the step's samples."""

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


Completion: TypeAlias = Callable[[StepResult, RowNews], None]
"""Adds what was read from the device to a result, after the device came to the step's end."""


@dataclass(slots=True)
class QueuedStep:
    """A step whose work is queued. `read_back.array[i]` will be the token of `slots[i]`; negative: why there is none."""

    partial: StepResult
    slots: list[int]
    completions: list[Completion]
    read_back: ReadBack
    home: ReadBacks

    def result(self) -> StepResult:
        """Wait for the device; raises `RuntimeError` if work of this step, or before it, failed there."""
        result, back = self.partial, self.read_back
        back.ended.wait()
        token_ids = back.array[: len(self.slots)].tolist()
        result.seconds = back.began.seconds_until(back.ended)
        self.home.give_back(back)
        news = RowNews()
        for complete in self.completions:
            complete(result, news)
        is_plain = not (result.failed or news.failed or news.logprobs)
        if is_plain and (not token_ids or min(token_ids) >= 0):
            result.sampled = PlainTokens(self.slots, token_ids)
            return result
        _report(result, self.slots, token_ids, news)
        return result


def _report(result: StepResult, slots: list[int], token_ids: list[int], news: RowNews) -> None:
    """Fill `sampled`, in batch order, leaving out the rows that failed."""
    sampled: list[SampledTokens] = []
    for row, (slot, token) in enumerate(zip(slots, token_ids, strict=True)):
        if row in news.failed:
            result.failed.setdefault(slot, news.failed[row])
        elif token < 0:
            result.failed.setdefault(slot, FAILURES[token])
        if slot in result.failed:
            continue
        entry = news.logprobs.get(row)
        sampled.append(SampledTokens(slot, [token], None if entry is None else [entry]))
    result.sampled = sampled
