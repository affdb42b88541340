"""Distributions of a reference model on disk, and how far another model's are from them.

A row is kept as its logits less the largest of them, in float16: exact at the top, and within 2**-11 of a logit's distance
from it elsewhere. That changes a divergence by less than 1e-6. Tables of many formats share one file.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samovar.cli.eval.windows import Windows
from samovar.cli.output import size
from samovar.errors import ConfigError, SamovarError

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 4096
"""A JSON object and blanks; the numbers follow."""
MARK = "samovar reference distributions"


class DistributionFile:
    """Rows [windows, rows, vocab] of float16. `model` names who made them."""

    def __init__(self, path: Path, model: str, shape: tuple[int, int, int], mode: str) -> None:
        self.path, self.model, self.shape = path, model, shape
        self._rows = np.memmap(path, np.float16, mode, HEADER_BYTES, shape)  # type: ignore[call-overload]

    @classmethod
    def create(cls, path: Path, model: str, windows: Windows, vocab_size: int) -> DistributionFile:
        """A file to be filled. Raises `ConfigError` if there is no room for it."""
        shape = (len(windows.ids), windows.num_rows, vocab_size)
        needed = 2 * shape[0] * shape[1] * shape[2] + HEADER_BYTES
        header = {"what": MARK, "model": model, "shape": shape, "tokens": windows.digest()}
        try:
            if needed > (free := shutil.disk_usage(path.parent).free):
                raise ConfigError(
                    f"the reference's distributions take {size(needed)}, and {path.parent} has {size(free)} left: score "
                    "fewer --windows, or name another place with --reference-file"
                )
            path.write_bytes(json.dumps(header).encode().ljust(HEADER_BYTES))
            os.truncate(path, needed)
            return cls(path, model, shape, "r+")
        except OSError as error:
            raise ConfigError(f"--reference-file {path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: Path) -> tuple[DistributionFile, str]:
        """A file that was filled, and the digest of its tokens. Raises `ConfigError` for any other file."""
        try:
            with path.open("rb") as file:
                header: dict[str, Any] = json.loads(file.read(HEADER_BYTES))
            windows, rows, vocab_size = (int(count) for count in header["shape"])
            if header["what"] != MARK or path.stat().st_size != 2 * windows * rows * vocab_size + HEADER_BYTES:
                raise ValueError("it has another size than its header says")
            return cls(path, str(header["model"]), (windows, rows, vocab_size), "r"), str(header["tokens"])
        except OSError as error:
            raise ConfigError(f"--reference-file {path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--reference-file {path}: is no file of `samovar eval kl` ({error})") from None

    def require(self, digest: str, windows: Windows, vocab_size: int) -> None:
        """Raise `SamovarError` unless a model with this vocabulary scores the very tokens of this file."""
        if digest != windows.digest():
            raise SamovarError(
                f"{self.model} was scored on other tokens: divergence needs the same text, --context, --windows and "
                "tokenizer"
            )
        if vocab_size != self.shape[2]:
            raise SamovarError(
                f"{self.model} has {self.shape[2]} logits and this model {vocab_size}: divergence needs one vocabulary"
            )

    def write(self, window: int, rows: slice, logits: torch.Tensor) -> None:
        """Keep some rows [rows, vocab]."""
        import torch

        below = logits.float() - logits.float().amax(-1, keepdim=True)
        self._rows[window, rows] = below.to(torch.float16).cpu().numpy()

    def log_probabilities(self, window: int, rows: slice, device: torch.device) -> torch.Tensor:
        """Some rows as float32 log-probabilities [rows, vocab] that sum to one."""
        import torch

        kept = torch.from_numpy(np.array(self._rows[window, rows])).to(device)
        return kept.float().log_softmax(-1)

    def flush(self) -> None:
        """Have it on disk."""
        self._rows.flush()


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(Kullback-Leibler divergence of the reference from the model, whether both have the same likeliest token), [rows].

    `reference` are log-probabilities, `logits` the model's logits, both [rows, vocab].
    """
    own = logits.float().log_softmax(-1)
    parts = reference.exp() * (reference - own)
    # Tokens that cannot be (-inf in both) add nothing.
    return parts.masked_fill(reference.isneginf(), 0).sum(-1), reference.argmax(-1) == own.argmax(-1)
