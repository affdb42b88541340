"""From a command's settings to what can be known without loading weights: files, description, device, decisions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.cli.output import ProgressLine
from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.config.groups import ModelConfig
from samovar.config.resolve import Resolved, resolve
from samovar.config.rules import check_request
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.device import probe
from samovar.hub.locate import find_model, locate
from samovar.native.facts import with_kernels

if TYPE_CHECKING:
    from samovar.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Described:
    """A model as its headers and this machine describe it."""

    description: ModelDescription
    facts: DeviceFacts
    resolved: Resolved


def fetch(model: ModelConfig) -> Path:
    """The model's files, downloaded with a progress line if they are not here."""
    with ProgressLine(f"downloading {model.model}", is_bytes=True) as progress:
        return locate(model, progress=progress)


def find(model: ModelConfig) -> ModelDescription:
    """What the model says about itself, fetched as `fetch` does."""
    with ProgressLine(f"downloading {model.model}", is_bytes=True) as progress:
        return find_model(model, progress=progress)


def look_up(config: EngineConfig) -> Described:
    """Find, describe, probe and resolve. Raises what each of these raises."""
    check_request(config)
    description = find(config.model)
    return _resolved(config, description, with_kernels(probe(config.device.device)))


def look_up_for(config: EngineConfig, facts: DeviceFacts) -> Described:
    """The same for a device that need not be this machine's."""
    check_request(config)
    return _resolved(config, find(config.model), facts)


def _resolved(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Described:
    return Described(description, facts, resolve(config, description, facts))


def declare(found: Described) -> Worker:
    """The worker that the engine would make of it, with its memory plan and routes, before any weight is loaded."""
    # The worker brings torch, which few of the quick commands need.
    from samovar.worker.worker import Worker

    return Worker(found.resolved.config, found.description, found.facts)
