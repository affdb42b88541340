"""What an engine answers besides generation: the calls listed in `engine.client`, with their arguments checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samovar.engine.standby import TAGS
from samovar.errors import ValidationError

if TYPE_CHECKING:
    from samovar.engine.engine import Engine

MODES = ("abort", "wait", "keep")
"""What becomes of live requests when an engine pauses."""


def answer(engine: Engine, name: str, arguments: Mapping[str, Any]) -> Any:
    """Run one call; returns plain values. Raises `ValidationError`, or `ConflictError` where the state does not allow it."""
    return _checked(name, arguments)(engine, **arguments)


def waits(name: str, arguments: Mapping[str, Any]) -> str | None:
    """The mode of a call that pauses the engine, None for any other call. Raises `ValidationError`."""
    parameters = inspect.signature(_checked(name, arguments)).parameters
    if "mode" not in parameters:
        return None
    return str(_one_of("mode", arguments.get("mode", parameters["mode"].default), MODES))


def _checked(name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    function = CALLS.get(name)
    if function is None:
        message = f"unknown engine call {name!r}; known: {', '.join(CALLS)}"
        raise ValidationError(message, parameter="name", value=name)
    known = list(inspect.signature(function).parameters)[1:]
    for argument in arguments:
        if argument not in known:
            message = f"{name} has no argument {argument!r}; it has {', '.join(known) or 'none'}"
            raise ValidationError(message, parameter=argument, value=arguments[argument])
    return function


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    if isinstance(value, bool) or value not in allowed:
        message = f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}"
        raise ValidationError(message, parameter=name, value=value)
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValidationError(f"{name} must be true or false, got {value!r}", parameter=name, value=value)
    return value


def _block_usage(engine: Engine) -> dict[str, int]:
    return engine.scheduler.block_usage()


def _reset_prefix_cache(engine: Engine, reset_running_requests: bool = False) -> bool:
    reset_running = _switch("reset_running_requests", reset_running_requests)
    return engine.scheduler.reset_prefix_cache(reset_running=reset_running)


def _pause(engine: Engine, mode: str = "abort") -> None:
    engine.standby.pause(_one_of("mode", mode, MODES))


def _resume(engine: Engine) -> None:
    engine.standby.resume()


def _is_paused(engine: Engine) -> bool:
    return engine.standby.state != "running"


def _sleep(engine: Engine, level: int = 1, mode: str = "abort") -> None:
    engine.standby.sleep(_one_of("level", level, (0, 1, 2)), _one_of("mode", mode, MODES))


def _wake_up(engine: Engine, tags: list[str] | None = None) -> bool:
    if not isinstance(tags, (list, tuple)) and tags is not None:
        raise ValidationError(f"tags must be a list of {', '.join(TAGS)}, got {tags!r}", parameter="tags", value=tags)
    return engine.standby.wake([_one_of("tags", tag, TAGS) for tag in tags or TAGS])


def _is_sleeping(engine: Engine) -> bool:
    return engine.standby.is_asleep


def _release_kv_cache_memory(engine: Engine, mode: str = "keep") -> int:
    return engine.standby.doze(_one_of("mode", mode, MODES))


def _start_profile(engine: Engine, prefix: str = "") -> None:
    engine.executor.call("start_profile", prefix)


def _stop_profile(engine: Engine) -> str:
    engine.standby.sign()
    return str(engine.executor.call("stop_profile", sign=engine.standby.sign))


def _server_info(engine: Engine) -> dict[str, Any]:
    now, most = engine.executor.call("memory_reading")
    return {"state": engine.standby.state, "memory": {"now": now, "most": most}, **engine.facts}


CALLS: dict[str, Callable[..., Any]] = {
    "block_usage": _block_usage,
    "reset_prefix_cache": _reset_prefix_cache,
    "pause": _pause,
    "resume": _resume,
    "is_paused": _is_paused,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "is_sleeping": _is_sleeping,
    "release_kv_cache_memory": _release_kv_cache_memory,
    "start_profile": _start_profile,
    "stop_profile": _stop_profile,
    "server_info": _server_info,
}
"""Name -> what answers it; arguments besides the engine are the call's."""
