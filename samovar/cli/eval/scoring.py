"""Windows through a loaded model: the log-probability of each scored token, and whole distributions where they are watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samovar.cli.eval.windows import Windows
from samovar.cli.output import ProgressLine
from samovar.errors import SamovarError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from samovar.engine.llm import LLM

    TakeRows = Callable[[int, slice, "torch.Tensor"], None]
    """(window, which of its scored rows, their logits [rows, vocab]); the logits are gone afterwards."""

ROWS_AT_ONCE = 64
"""Rows that are given away together: what is made of them has a copy or two of the vocabulary for each."""


def score(llm: LLM, windows: Windows, label: str, take: TakeRows | None = None) -> NDArray[np.float64]:
    """Log-probabilities of the scored tokens [windows, rows]. `take` is given the logits behind them, in any pieces, and
    some of them twice where memory ran out in between."""
    found = np.empty((len(windows.ids), windows.num_rows))
    with ProgressLine(label) as progress:
        for window in range(len(windows.ids)):
            if take is not None:
                llm.watch_logits(_scored_rows(windows, window, take))
            found[window] = _score_one(llm, windows, window)
            progress(window + 1, len(windows.ids))
    if take is not None:
        llm.watch_logits(None)
    return found


def _scored_rows(windows: Windows, window: int, take: TakeRows) -> Callable[[int, torch.Tensor], None]:
    """A listener for the logits of one prompt that passes on the rows that are scored."""
    first, last = windows.first_row, windows.first_row + windows.num_rows

    def listen(position: int, logits: torch.Tensor) -> None:
        end = min(last, position + len(logits))
        for begin in range(max(first, position), end, ROWS_AT_ONCE):
            stop = min(begin + ROWS_AT_ONCE, end)
            take(window, slice(begin - first, stop - first), logits[begin - position : stop - position])

    return listen


def _score_one(llm: LLM, windows: Windows, window: int) -> list[float]:
    from samovar.core.sampling_params import SamplingParams

    params = SamplingParams(prompt_logprobs=0, max_tokens=0, detokenize=False)
    (output,) = llm.generate([windows.ids[window]], params, use_tqdm=False)
    entries = output.prompt_logprobs
    if entries is None or len(entries) < windows.context:
        why = next((choice.error for choice in output.outputs if choice.error), "the engine gave no log-probabilities")
        raise SamovarError(f"window {window + 1} of {len(windows.ids)} could not be scored: {why}")
    scored = entries[windows.first_row + 1 :]
    return [entry[token].logprob for entry, token in zip(scored, windows.targets(window)) if entry is not None]
