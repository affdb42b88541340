"""Writes docs/configuration.md from the declarations of the settings; `python -m tools.configuration_doc` updates it."""

from __future__ import annotations

from samovar.cli.help import describe, signature
from samovar.config.field import VARIABLES, Group, help_of
from samovar.config.groups import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
)
from tools.source import ROOT

PATH = ROOT / "docs" / "configuration.md"
GROUPS: tuple[type[Group], ...] = (SourceConfig, ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, ServerConfig)
INTRODUCTION = """\
# Configuration

Generated from the declarations in `samovar/config/groups.py` by `python -m tools.configuration_doc`; a gate fails when
it is out of date.

A setting is given as a flag (`--max-num-seqs 64`, `--max_num_seqs=64`), as a line of a YAML file passed with `--config`
(`max-num-seqs: 64`), as a keyword of `LLM` (`max_num_seqs=64`), or, where one is named, by an environment variable. A
flag wins over a variable, a variable over the file, the file over the default. Switches have a
`--no-` form. Objects are JSON, or keys behind a dot: `--hf-overrides.rope_theta 1000000`. A list takes several values or
is repeated.

Numbers and sizes in bytes (`--memory` too) may carry a unit, the same everywhere: small `k`, `m`, `g`, `t` count in
thousands and capital `K`, `M`, `G`, `T` in 1,024s, as in vLLM; `kB`, `MB`, `GB`, `TB` and `KiB`, `MiB`, `GiB`, `TiB` are
what they say. So `32k` is 32,000, `32K` is 32,768, `8g` is 8,000,000,000 bytes and `8G` is `8GiB`.

What is left at `auto` is decided when the model and the machine are known; every decision is printed with its reason.
Flags of vLLM that do not exist here are refused with the reason; none is ignored.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for group in GROUPS:
        texts = help_of(group)
        rows = [
            f"| `{signature(setting)}` | {_cell(texts[setting.name])} | {_cell(describe(setting).strip('[]'))} |"
            for setting in group.settings.values()
        ]
        title = (group.__doc__ or "").splitlines()[0].rstrip(".")
        parts.append("\n".join([f"## {title}", "", "| flag | meaning | values |", "|---|---|---|", *rows]))
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in VARIABLES.items()]
    parts.append("\n".join(["## Environment variables", "", "| name | meaning |", "|---|---|", *rows]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def complaint() -> str | None:
    """None if the page is current."""
    if PATH.exists() and PATH.read_text(encoding="utf-8") == render():
        return None
    return f"{PATH.relative_to(ROOT)} is out of date: run python -m tools.configuration_doc"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
