"""Queries, bodies and answers of the admin routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Mode = Literal["abort", "wait", "keep"]
"""What happens to requests that run: they are ended, come to their end first, or wait where they stand."""


class SleepQuery(Struct):
    """Level 0 only pauses, 1 gives back the memory of the K/V cache and moves weights off the GPU, 2 drops them."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: Mode = "abort"


class WakeQuery(Struct):
    """What to bring back; everything if empty."""

    tags: Annotated[list[Literal["weights", "kv_cache", "scheduling"]], Meta(max_length=8)] = field(
        default_factory=list
    )


class PauseQuery(Struct):
    """What happens to running requests."""

    mode: Mode = "abort"


class ReleaseQuery(Struct):
    """What happens to running requests."""

    mode: Mode = "keep"


class NoQuery(Struct):
    """Takes nothing."""


class ResetQuery(Struct):
    """Running requests may lose their blocks, too, and compute them again. There is no external cache to reset."""

    reset_running_requests: bool = False
    reset_external: bool = False


class ProfileQuery(Struct):
    """Beginning of the file's name."""

    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = ""


class AbortBody(Struct):
    """Ids of answers (as their `id` field has them) or X-Request-Id values."""

    request_ids: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(min_length=1, max_length=4096)
    ]


class Aborted(Struct):
    """How many calls were ended; an id that names none that runs is in `unknown`."""

    num_aborted: int
    unknown: list[str]


class Sleeping(Struct):
    """Whether the engine sleeps, or is not wholly awake."""

    is_sleeping: bool


class Paused(Struct):
    """Whether scheduling is stopped."""

    is_paused: bool


class Success(Struct):
    """Whether it was done."""

    success: bool


class Freed(Struct):
    """Bytes that were given back."""

    freed_bytes: int


class Profile(Struct):
    """`path` is the file that was written, on the server's machine."""

    is_profiling: bool
    path: str | None = None


class ServerFacts(Struct):
    """What runs here and how. Keys are counted, never shown."""

    version: str
    engine: dict[str, Any]
    server: dict[str, Any]
