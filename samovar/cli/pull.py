"""Downloads a model now and checks its headers, so that serving it later needs no network."""

from __future__ import annotations

from samovar.cli.described import fetch
from samovar.cli.output import size
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig, SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError
from samovar.hub.locate import locate_tokenizer

USAGE = "samovar pull MODEL [flags]"
POSITIONAL = "model"
OPTIONS = (SourceConfig, ModelConfig)


def run(settings: Settings) -> int:
    """Fetch, read the headers, which proves that every file is here and whole in size, and say where it is."""
    model = settings[ModelConfig]
    if model.offline:
        raise ConfigError("--offline forbids pulling a model; leave it out")
    path = fetch(model)
    description = describe(path, model)
    stored = size(description.stored_bytes)
    print(f"{path}\n{description.architecture}, {description.num_parameters / 1e6:,.0f} M parameters, {stored}")
    if (tokenizer := locate_tokenizer(model)) is not None:
        print(f"{tokenizer}\ntokenizer")
    return 0
