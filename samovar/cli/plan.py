"""Says what memory a model needs here, line by line: the plan of the engine itself; no weight is read."""

from __future__ import annotations

import json
from typing import Any

from samovar.cli.described import Described, declare, look_up
from samovar.cli.output import size, table
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.hardware.memory import MemoryPlan

USAGE = "samovar plan [MODEL] [flags]"
POSITIONAL = "model"


class PlanOptions(Group):
    """The form of the answer."""

    json: bool = field(default=False)
    """Print one JSON object instead of tables."""


OPTIONS = (PlanOptions, SourceConfig, *ENGINE_GROUPS.values())


def run(settings: Settings) -> int:
    """Print the plan. A model that does not fit raises `MemoryPlanError` with what would help."""
    found = look_up(settings.engine)
    plan = declare(found).memory_plan
    print(json.dumps(as_json(found, plan), indent=2) if settings[PlanOptions].json else as_text(found, plan))
    return 0


def as_json(found: Described, plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    description = found.description
    return {
        "model": str(description.path),
        "architecture": description.architecture,
        "format": description.format,
        "num_parameters": description.num_parameters,
        "device": found.facts.name,
        "available_bytes": found.facts.available_bytes,
        "lines": dict(plan.lines),
        "total_bytes": plan.total_bytes,
        "budget_bytes": plan.budget_bytes,
        "num_blocks": plan.num_blocks,
        "block_size": found.resolved.config.cache.block_size,
        "max_model_len": plan.max_model_len,
        "explanation": plan.explanation,
        "decisions": [{"name": n, "value": v, "reason": r} for n, v, r in found.resolved.as_rows()],
    }


def as_text(found: Described, plan: MemoryPlan) -> str:
    """The plan as tables."""
    description, facts = found.description, found.facts
    tokens = (plan.num_blocks - 1) * found.resolved.config.cache.block_size
    lines = [[name, size(count)] for name, count in plan.lines]
    lines += [["total", size(plan.total_bytes)], ["may be used", size(plan.budget_bytes)]]
    return "\n".join(
        [
            f"{description.path.name}: {description.architecture}, {description.num_parameters / 1e6:,.0f} M parameters, "
            f"{description.format}, {size(description.stored_bytes)} on disk",
            f"{facts.name}: {facts.architecture}, {size(facts.available_bytes)} of {size(facts.total_bytes)} available",
            "",
            table(lines, right=(1,)),
            "",
            f"  room for {tokens:,} tokens; longest sequence {plan.max_model_len:,}",
            f"  {plan.explanation}",
            "",
            table(found.resolved.as_rows()),
        ]
    )
