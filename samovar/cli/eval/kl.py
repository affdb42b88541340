"""How far a model's distributions are from those of a reference on the same tokens; by default the model in its own form."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samovar.cli.bench.circumstances import described
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.eval.distributions import DistributionFile, divergence
from samovar.cli.eval.opened import (
    FACTS_HEADER,
    AgainstOptions,
    Facts,
    facts_of,
    flags_of,
    label,
    opened,
    reference_flags,
)
from samovar.cli.eval.ppl import perplexity, ratio
from samovar.cli.eval.report import interval, plain, title
from samovar.cli.eval.scoring import score
from samovar.cli.eval.statistics import mean_interval
from samovar.cli.eval.windows import TextOptions, Windows, read_text, windows_of
from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

USAGE = "samovar eval kl [MODEL] [--against MODEL] [flags]"
POSITIONAL = "model"

Rows = NDArray[np.float64]
"""One number for each scored token, [windows, rows]."""


class DivergenceOptions(Group):
    """The reference."""

    reference_file: str | None = field(default=None)
    """File that keeps the reference's distributions: used if it is there, made if not. Two bytes for each scored token and
    each word of the vocabulary. Default: a temporary one."""


OPTIONS = (DivergenceOptions, AgainstOptions, TextOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Make the reference's distributions or find them, score the model, print."""
    options, text = settings[AgainstOptions], read_text(settings[TextOptions])
    with _place(settings[DivergenceOptions].reference_file) as path:
        if not path.exists():
            _make_reference(settings, text, path)
        elif options.against is not None:
            raise ConfigError(f"--reference-file {path}: exists already; leave out --against, or name another file")
        reference, digest = DistributionFile.read(path)
        with opened(flags_of(settings)) as llm:
            windows = windows_of(llm, text, settings[TextOptions])
            reference.require(digest, windows, llm.info.vocab_size)
            facts = facts_of(llm, label(settings))
            found = Comparison(reference, windows)
            scores = score(llm, windows, facts.name, found.take)
    result = figures(found, scores) | {
        "reference": reference.model,
        "windows": len(windows.ids),
        "context": windows.context,
        "model": facts.plain(),
    }
    print(json.dumps(plain(result), indent=2) if options.json else report(result, facts))
    return 0


@contextmanager
def _place(named: str | None) -> Iterator[Path]:
    """Where the reference's distributions lie."""
    if named is not None:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="samovar-eval-") as folder:
        yield Path(folder) / "reference"


def _make_reference(settings: Settings, text: str, path: Path) -> None:
    """Score the reference; the file has its name once it is complete."""
    name, flags = reference_flags(settings)
    part = path.with_name(path.name + ".part")
    with opened(flags) as llm:
        windows = windows_of(llm, text, settings[TextOptions])
        made = DistributionFile.create(part, name, windows, llm.info.vocab_size)
        try:
            score(llm, windows, name, made.write)
            made.flush()
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


class Comparison:
    """Divergence, agreement, and the reference's own log-probability of every scored token, as the rows come."""

    def __init__(self, reference: DistributionFile, windows: Windows) -> None:
        self._reference, self._windows = reference, windows
        shape = (len(windows.ids), windows.num_rows)
        self.divergence: Rows = np.zeros(shape)
        self.same_top: Rows = np.zeros(shape)
        self.reference_scores: Rows = np.zeros(shape)

    def take(self, window: int, rows: slice, logits: torch.Tensor) -> None:
        """Compare some rows of a window."""
        import torch

        log_p = self._reference.log_probabilities(window, rows, logits.device)
        targets = torch.tensor(self._windows.targets(window)[rows], device=logits.device)
        apart, agrees = divergence(log_p, logits)
        self.divergence[window, rows] = apart.cpu().numpy()
        self.same_top[window, rows] = agrees.cpu().numpy()
        self.reference_scores[window, rows] = log_p.gather(1, targets[:, None]).squeeze(1).cpu().numpy()


def figures(found: Comparison, scores: Rows) -> dict[str, Any]:
    """Divergence in nats, agreement as a share, perplexities."""
    flat = found.divergence.ravel()
    quantiles = {f"p{percent:g}": float(np.quantile(flat, percent / 100)) for percent in (50, 90, 99, 99.9)}
    return {
        "divergence": {
            "mean": float(flat.mean()),
            "interval": mean_interval(found.divergence),
            **quantiles,
            "max": float(flat.max()),
        },
        "same_top": {"share": float(found.same_top.mean()), "interval": mean_interval(found.same_top)},
        "perplexity": perplexity(scores),
        "reference_perplexity": perplexity(found.reference_scores),
        "perplexity_ratio": ratio(scores, found.reference_scores),
    }


def report(result: dict[str, Any], facts: Facts) -> str:
    """For people."""
    apart, same, of = result["divergence"], result["same_top"], result["perplexity_ratio"]
    rows = [
        ("mean divergence", f"{apart['mean']:.4g}", interval(apart["interval"], ".4g")),
        *((f"{name[1:]} %", f"{apart[name]:.4g}", "") for name in ("p50", "p99", "p99.9")),
        ("largest", f"{apart['max']:.4g}", ""),
        ("same likeliest token", f"{100 * same['share']:.3f} %", _percent(same["interval"])),
        ("perplexity", f"{result['perplexity']['perplexity']:.4f}", interval(result["perplexity"]["interval"])),
        ("of the reference", f"{result['reference_perplexity']['perplexity']:.4f}", ""),
        ("ratio", f"{of['value']:.5f}", interval(of["interval"], ".5f")),
        *((name, cell, "") for name, cell in zip(FACTS_HEADER, facts.cells(), strict=True)),
    ]
    head = f"{facts.name} against {result['reference']}: {title(result)}; 95 % intervals"
    return "\n".join([head, table(rows, right=(1,), indent=""), described(facts.circumstances)])


def _percent(bounds: tuple[float, float]) -> str:
    return interval((100 * bounds[0], 100 * bounds[1]))
