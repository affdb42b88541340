"""The admin endpoints: each checks its query, makes one call to the engine, and says what is so now."""

from __future__ import annotations

from typing import Any

import msgspec

from samovar.config.groups import ServerConfig
from samovar.errors import ValidationError
from samovar.server.admin import schema
from samovar.server.exchange import Exchange
from samovar.server.parsing import decode_body
from samovar.server.query import read_query
from samovar.server.state import ServingState
from samovar.server.version import version

SECRETS = ("api_key", "admin_api_key")
"""Settings of which only the number is told."""

_encode = msgspec.json.Encoder().encode


async def sleep(state: ServingState, exchange: Exchange) -> None:
    """Put the engine to sleep; answered once it sleeps."""
    asked = read_query(exchange, schema.SleepQuery)
    await state.client.call("sleep", level=asked.level, mode=asked.mode)
    await is_sleeping(state, exchange)


async def wake_up(state: ServingState, exchange: Exchange) -> None:
    """Bring back what sleep took away; answered once it is there."""
    asked = read_query(exchange, schema.WakeQuery)
    is_awake = await state.client.call("wake_up", tags=list(asked.tags))
    await exchange.reply(200, _encode(schema.Sleeping(is_sleeping=not is_awake)))


async def is_sleeping(state: ServingState, exchange: Exchange) -> None:
    """Whether the engine sleeps."""
    await exchange.reply(200, _encode(schema.Sleeping(is_sleeping=await state.client.call("is_sleeping"))))


async def pause(state: ServingState, exchange: Exchange) -> None:
    """Stop scheduling; answered once nothing runs."""
    asked = read_query(exchange, schema.PauseQuery)
    await state.client.call("pause", mode=asked.mode)
    await is_paused(state, exchange)


async def resume(state: ServingState, exchange: Exchange) -> None:
    """Go on."""
    await state.client.call("resume")
    await is_paused(state, exchange)


async def is_paused(state: ServingState, exchange: Exchange) -> None:
    """Whether scheduling is stopped, which it also is while the engine sleeps."""
    await exchange.reply(200, _encode(schema.Paused(is_paused=await state.client.call("is_paused"))))


async def reset_prefix_cache(state: ServingState, exchange: Exchange) -> None:
    """Forget every cached prompt beginning."""
    asked = read_query(exchange, schema.ResetQuery)
    if asked.reset_external:
        raise ValidationError(
            "reset_external: there is no cache outside the engine; leave it out", parameter="reset_external"
        )
    done = await state.client.call("reset_prefix_cache", reset_running_requests=asked.reset_running_requests)
    await exchange.reply(200, _encode(schema.Success(success=bool(done))))


async def reset_mm_cache(state: ServingState, exchange: Exchange) -> None:
    """True: no media are cached afterwards. None ever are, as this server takes text only."""
    read_query(exchange, schema.NoQuery)
    await exchange.reply(200, _encode(schema.Success(success=True)))


async def release_kv_cache_memory(state: ServingState, exchange: Exchange) -> None:
    """Give back the memory of the K/V cache until `wake_up`."""
    asked = read_query(exchange, schema.ReleaseQuery)
    freed = await state.client.call("release_kv_cache_memory", mode=asked.mode)
    await exchange.reply(200, _encode(schema.Freed(freed_bytes=freed)))


async def start_profile(state: ServingState, exchange: Exchange) -> None:
    """Start to record what the engine does; 409 if that is under way, or was not allowed when the server started."""
    asked = read_query(exchange, schema.ProfileQuery)
    await state.client.call("start_profile", prefix=asked.prefix)
    await exchange.reply(200, _encode(schema.Profile(is_profiling=True)))


async def stop_profile(state: ServingState, exchange: Exchange) -> None:
    """Write the recording to its file; 409 if none is under way."""
    path = await state.client.call("stop_profile")
    await exchange.reply(200, _encode(schema.Profile(is_profiling=False, path=path)))


async def abort_requests(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """End calls by the ids of their answers; their clients get an error."""
    asked = decode_body(body, schema.AbortBody, {})
    aborted = {name: state.end_call(name) for name in dict.fromkeys(asked.request_ids)}
    answer = schema.Aborted(sum(aborted.values()), [name for name, count in aborted.items() if not count])
    await exchange.reply(200, _encode(answer))


async def server_info(state: ServingState, exchange: Exchange) -> None:
    """Settings, decisions, memory and routes of the engine; settings of the server."""
    engine = await state.client.call("server_info")
    await exchange.reply(200, _encode(schema.ServerFacts(version(), engine, shown(state.config))))


def shown(config: ServerConfig) -> dict[str, Any]:
    """The server's settings without its secrets."""
    values = {name: getattr(config, name) for name in config.settings}
    return values | {name: f"{len(values[name])} keys" for name in SECRETS}
