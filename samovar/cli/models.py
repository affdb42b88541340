"""Lists the architectures that run: native families, those that run through Transformers, and the others with the reason.

An architecture is what config.json calls so. With a name, only those that contain it are listed.
"""

from __future__ import annotations

from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.config.load import Settings
from samovar.errors import ConfigError
from samovar.models.generic.verdicts import verdicts
from samovar.models.registry import ARCHITECTURES

USAGE = "samovar models [ARCHITECTURE] [--unsupported]"
POSITIONAL = "architecture"


class ModelsOptions(Group):
    """Which architectures are listed."""

    architecture: str = field(default="")
    """Part of a name, in any case."""
    unsupported: bool = field(default=False)
    """List those that do not run, too, and why; a name does so without this."""


OPTIONS = (ModelsOptions,)


def support() -> list[tuple[str, str, str]]:
    """(architecture, "native", "generic" or "unsupported", file or reason), by name."""
    rows = {
        name: (name, "native", f"samovar/models/{where.partition(':')[0]}.py") for name, where in ARCHITECTURES.items()
    }
    for name, verdict in verdicts().items():
        kind = "unsupported" if verdict.refusal else "generic"
        rows.setdefault(name, (name, kind, verdict.refusal or "through Transformers"))
    return [rows[name] for name in sorted(rows)]


def run(settings: Settings) -> int:
    """Print the list."""
    options = settings[ModelsOptions]
    wanted = options.architecture.lower()
    rows = [row for row in support() if wanted in row[0].lower()]
    if not rows:
        raise ConfigError(f"no architecture is called {options.architecture!r}; `samovar models` lists those that run")
    if not (wanted or options.unsupported):
        rows = [row for row in rows if row[1] != "unsupported"]
    print(table(rows, indent=""))
    return 0
