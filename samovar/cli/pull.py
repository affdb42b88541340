"""Downloads a model now and checks its headers, so that serving it later needs no network."""

from __future__ import annotations

from samovar.cli.output import ProgressLine, size
from samovar.config.groups import ModelConfig, SourceConfig
from samovar.config.load import Settings
from samovar.hub.pull import pull

USAGE = "samovar pull MODEL [flags]"
POSITIONAL = "model"
OPTIONS = (SourceConfig, ModelConfig)


def run(settings: Settings) -> int:
    """Fetch, describe, and say where it is."""
    model = settings[ModelConfig]
    with ProgressLine(f"downloading {model.model}", is_bytes=True) as progress:
        path, description = pull(model, progress=progress)
    stored = size(description.stored_bytes)
    print(f"{path}\n{description.architecture}, {description.num_parameters / 1e6:,.0f} M parameters, {stored}")
    return 0
