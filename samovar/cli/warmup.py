"""Compiles a model's GPU kernels now and keeps them, so that a later start finds them ready; reads no weights.

With --arch it does so for a GPU that this machine does not have: fill the cache while an image is built, and copy it.
"""

from __future__ import annotations

from samovar.cli.described import Described, declare, look_up_for
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.field import Group, field, kernel_cache
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError, SamovarError
from samovar.hardware.device import probe, with_architecture

USAGE = "samovar warmup [MODEL] [--arch sm_90] [flags]"
POSITIONAL = "model"


class WarmupOptions(Group):
    """What to compile for."""

    arch: str | None = field(default=None)
    """GPU architecture to compile for, such as sm_80, sm_90 or sm_121. Default: this machine's."""


OPTIONS = (WarmupOptions, SourceConfig, *ENGINE_GROUPS.values())


def run(settings: Settings) -> int:
    """Compile, and say how many kernels and where they are. Fails if one cannot be compiled."""
    arch = settings[WarmupOptions].arch
    here = probe("auto")
    if here.kind == "cpu" and arch is None:
        raise ConfigError("there is no GPU here; name the one to compile for, such as --arch sm_90")
    is_here = here.kind == "cuda" and arch in (None, here.architecture)
    found = look_up_for(settings.engine, here if is_here or arch is None else with_architecture(arch))
    return _compile(found, is_here)


def _compile(found: Described, is_here: bool) -> int:
    worker = declare(found)
    from samovar.kernels.op import in_one_line
    from samovar.worker.warmup import compile_for

    report = compile_for(worker, is_here)
    print(f"{found.facts.architecture}: {report}; kept in {kernel_cache()}")
    complaints = [
        f"{failure.launch.name}: {in_one_line(failure.error)}" for failure in report.failures if failure.error
    ]
    if complaints:
        raise SamovarError(f"{len(complaints)} kernels do not compile: {'; '.join(complaints)}")
    return 0
