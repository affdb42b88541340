"""Serve a model over the OpenAI API. Downloads it first if it is not here."""

from __future__ import annotations

from samovar.cli.described import fetch
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.groups import ServerConfig, SourceConfig
from samovar.config.load import Settings
from samovar.config.rules import check_request, check_server

USAGE = "samovar serve [MODEL] [flags]"
POSITIONAL = "model"
OPTIONS = (SourceConfig, *ENGINE_GROUPS.values(), ServerConfig)


def run(settings: Settings) -> int:
    """Check everything that can be checked now, bring the model, then serve until told to stop."""
    engine, server = settings.engine, settings[ServerConfig]
    check_request(engine)
    check_server(server)
    fetch(engine.model)
    # Both take a while to import, the HTTP stack a third of a second: --help and wrong flags do not pay for it, and the
    # engine does not wait for it.
    from samovar.engine.child import EngineChild

    child = EngineChild(engine, log_level=server.log_level.upper())
    try:
        from samovar.server.run import serve

        return serve(engine, server, child=child)
    finally:
        child.end()
