"""Says which implementation computes each operation of a model here, and what the others answered; and in which formats
its tool calls and reasoning are read. Loads no weights."""

from __future__ import annotations

from samovar.cli.described import declare, look_up
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.groups import ServerConfig, SourceConfig
from samovar.config.load import Settings
from samovar.engine.enforcer import backend_text
from samovar.server.answers import formats_text
from samovar.text.chat_template import load_chat_template
from samovar.text.formats.choose import choose

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
    print(backend_text(config).replace(": ", "\n  "))
    template = load_chat_template(found.description)
    formats = choose(() if template is None else template.sources.values())
    print(f"answers\n  {formats_text(template, formats, ServerConfig())}")
    return 0
