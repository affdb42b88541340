"""Request: what a client asked, after every check. Immutable; the engine accepts nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.core.constraint import Constraint
from samovar.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One admitted request.

    `request_id` is made by the front end that holds the connection and is unique in the engine; a client's own
    id never gets here. `params` came out of `core.validation.resolve_params`: `max_tokens` is an int and every id
    is inside the vocabulary. `eos_token_ids` end a sequence unless `params.ignore_eos`; `params.stop_token_ids` end
    it always. `arrival` is `time.monotonic()` of the front end (same machine, same clock).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    arrival: float
    priority: int = 0
    cache_salt: str | None = None
    constraint: Constraint | None = None
