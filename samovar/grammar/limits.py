"""What a grammar may cost: the sizes a client may send, compile time and memory, and the work of one mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 4_000,
    "max_lexer_states": 64_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's own limits: some 20 ms for the worst mask, 25 MB for the worst lexer. The side process and the engine use
the same, so that what compiles there compiles here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Limits on what a client sends, and on its compilation."""

    source_bytes: int = 512 * 1024
    """A schema, pattern or grammar as the client wrote it, and the grammar made of it."""
    pattern_bytes: int = 16 * 1024
    """One regular expression."""
    depth: int = 64
    """JSON objects and arrays inside one another; 16 more inside structural tags."""
    nodes: int = 50_000
    """Values of any kind in a schema, after references are followed once each."""
    properties: int = 1_000
    """Properties of one object."""
    enum_values: int = 10_000
    """Values of one `enum`, and options of a `choice`."""
    items: int = 4_096
    """`minItems` and `maxItems`: llguidance writes out one rule for each."""
    deadline_seconds: float = 2.0
    """For one compilation in the side process."""
    build_seconds: float = 0.5
    """Of processor time for the grammar itself, because the engine spends it once more."""
    memory_bytes: int = 2 * 1024**3
    """Address space of a side process beyond what it has when it is ready."""
    processes: int = 2
    """Side processes at once."""
    cache_bytes: int = 64 * 1024 * 1024
    """Kept verdicts, by the size of their grammars."""
