"""The admin routes. They need an operator (`server.auth`)."""

from __future__ import annotations

from samovar.server.admin import control, schema
from samovar.server.routing import Look, Route


def _admin(
    path: str, look: Look, summary: str, answer: type, *, query: type | None = None, method: str = "POST"
) -> Route:
    return Route(path=path, method=method, summary=summary, look=look, query=query, answer=answer, is_admin=True)


ROUTES: tuple[Route, ...] = (
    _admin("/sleep", control.sleep, "Free the engine's memory.", schema.Sleeping, query=schema.SleepQuery),
    _admin("/wake_up", control.wake_up, "Take it back.", schema.Sleeping, query=schema.WakeQuery),
    _admin("/is_sleeping", control.is_sleeping, "Does the engine sleep?", schema.Sleeping, method="GET"),
    _admin("/pause", control.pause, "Stop scheduling.", schema.Paused, query=schema.PauseQuery),
    _admin("/resume", control.resume, "Go on.", schema.Paused),
    _admin("/is_paused", control.is_paused, "Is scheduling stopped?", schema.Paused, method="GET"),
    _admin(
        "/reset_prefix_cache", control.reset_prefix_cache, "Forget cached prompt beginnings.", schema.Success,
        query=schema.ResetQuery,
    ),
    _admin("/reset_mm_cache", control.reset_mm_cache, "Forget cached media.", schema.Success),
    _admin("/reset_encoder_cache", control.reset_mm_cache, "The same as /reset_mm_cache.", schema.Success),
    _admin(
        "/release_kv_cache_memory", control.release_kv_cache_memory, "Free the K/V cache until /wake_up.", schema.Freed,
        query=schema.ReleaseQuery,
    ),
    _admin("/start_profile", control.start_profile, "Start a profile.", schema.Profile, query=schema.ProfileQuery),
    _admin("/stop_profile", control.stop_profile, "End it and write its file.", schema.Profile),
    Route(
        path="/abort_requests", method="POST", summary="End calls by their answers' ids.", call=control.abort_requests,
        body=schema.AbortBody, answer=schema.Aborted, is_admin=True,
    ),
    _admin("/server_info", control.server_info, "Settings and state.", schema.ServerFacts, method="GET"),
)  # fmt: skip
