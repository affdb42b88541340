"""serving_grpc: the gRPC server, from an open port to the end of its drain. Nothing of grpc is imported before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.server.state import ServingState

MAX_CALLS = 4096
"""Calls at once; more are answered RESOURCE_EXHAUSTED."""
MAX_METADATA_BYTES = 64 * 1024
HEALTH_SECONDS = 0.5
"""How often grpc.health.v1 takes over the server's status."""
LAST_WORDS_SECONDS = 2.0
SERVICE = "samovar.v1.Inference"
PACKAGES = ("grpc", "grpc_health", "grpc_reflection")
"""Of the extra `grpc`."""

_logger = logging.getLogger(__name__)


@asynccontextmanager
async def serving_grpc(state: ServingState) -> AsyncIterator[int | None]:
    """Serve gRPC until the block ends, if the server was told to; the port, or None. Raises `ConfigError`."""
    config = state.config
    if config.grpc_port is None:
        yield None
        return
    server, health = _make_server(state)
    address = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    try:
        port = server.add_insecure_port(f"{address}:{config.grpc_port}")
    except RuntimeError as error:
        message = f"cannot listen on {config.grpc_host}:{config.grpc_port} for gRPC; choose another --grpc-port or --grpc-host"
        raise ConfigError(message) from error
    await server.start()
    reporter = asyncio.ensure_future(_report_health(state, health))
    try:
        yield port
    finally:
        reporter.cancel()
        await health.enter_graceful_shutdown()
        left = (state.drain_deadline or 0.0) - time.monotonic()
        await server.stop(max(LAST_WORDS_SECONDS, left))


def _make_server(state: ServingState) -> tuple[Any, Any]:
    """(server, health service). Raises `ConfigError` without the packages."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        message = (
            f"--grpc-port needs packages that are not installed ({', '.join(missing)}); in Samovar's folder: "
            "pip install -c constraints.txt -e '.[grpc]'"
        )
        raise ConfigError(message)
    import grpc
    from grpc_health.v1 import health, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    from samovar.server.grpc.guard import RequireKey
    from samovar.server.grpc.proto import interface
    from samovar.server.grpc.service import Inference

    types = interface()
    server = grpc.aio.server(
        interceptors=[RequireKey(state.keys)],
        maximum_concurrent_rpcs=MAX_CALLS,
        options=[
            ("grpc.max_receive_message_length", state.config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    handlers = Inference(state, types).handlers()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, servicer


async def _report_health(state: ServingState, health: Any) -> None:
    """Keep grpc.health.v1 as the server is, for the whole server and for its service."""
    from grpc_health.v1 import health_pb2

    known: int | None = None
    while True:
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if state.status == "ready" else kinds.NOT_SERVING
        if status != known:
            for name in ("", SERVICE):
                await health.set(name, status)
            known = status
        await asyncio.sleep(HEALTH_SECONDS)
