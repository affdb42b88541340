"""Says which implementation computes each operation of a model here, and what the others answered; loads no weights."""

from __future__ import annotations

from samovar.cli.described import declare, look_up
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings

USAGE = "samovar routes [MODEL] [flags]"
POSITIONAL = "model"
OPTIONS = (SourceConfig, *ENGINE_GROUPS.values())


def run(settings: Settings) -> int:
    """Bind the model without weights and print its routes."""
    found = look_up(settings.engine)
    worker = declare(found)
    config = found.resolved.config
    print(
        f"{found.description.architecture}, {config.model.dtype}, on {found.facts.kind} ({found.facts.architecture})\n"
    )
    for line in worker.routes():
        name, _, answers = line.partition(": ")
        print(name)
        for answer in answers.split(" · "):
            print(f"  {answer}")
    return 0
