"""ServingState: what every endpoint of one server reaches. Created before the model is loaded, filled when it is."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from samovar.config.groups import ServerConfig
from samovar.engine.client import EngineClient
from samovar.engine.metrics import ServingMetrics
from samovar.errors import EngineDeadError, NotFoundError
from samovar.server.anthropic.volatile import SystemMemory
from samovar.server.exchange import Exchange
from samovar.server.keys import KeyRing
from samovar.server.problems import RequestError
from samovar.server.responses.store import ResponseStore
from samovar.text.prepare import Preparer

T = TypeVar("T")

OFFLOAD_CHARS = 8192
"""Requests with more text than this are rendered and tokenized on a thread, so that the event loop stays free."""
SLOW_SECONDS = 0.5
"""After one small request took longer than this (a chat template may take seconds), all go to a thread."""

DEFAULT_NAME = "default"
"""Model name that always means the served model."""

_LOADING = "the model is still loading; retry when /ready answers 200"


class ServingState:
    """One server's engine client, preparer, metrics and life cycle. Belongs to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.keys = KeyRing.load(config)
        self.metrics: ServingMetrics | None = None
        self.is_draining = False
        self.drain_deadline: float | None = None
        """`time.monotonic()` until which running calls may take once the drain began."""
        self.num_calls = 0
        """API calls in progress, for /load."""
        self.system_memory = SystemMemory()
        """System prompts of recent conversations, for /v1/messages."""
        self.responses = ResponseStore(config.responses_store_bytes if config.enable_responses_store else 0)
        """Answers of /v1/responses that are kept."""
        self.stream_interval = 1
        """Tokens per streamed chunk where a request does not say."""
        self.created = int(time.time())
        self.names: list[str] = list(config.served_model_name)
        self.fingerprint = ""
        self._is_slow = False
        self._client: EngineClient | None = None
        self._preparer: Preparer | None = None
        self._calls: dict[asyncio.Task[None], Exchange] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="samovar-text")
        self._waiting_pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="samovar-wait")

    def attach(self, client: EngineClient, preparer: Preparer) -> None:
        """The model is loaded: start to answer."""
        info = client.info
        self.names = self.names or [info.model]
        identity = f"{info.model}\0{info.dtype}\0{info.kv_cache_dtype}\0{info.weight_bytes}"
        self.fingerprint = "samovar-" + hashlib.sha256(identity.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        self.metrics = ServingMetrics(self.names[0], info)
        self.metrics.take_snapshot(client.stats)
        client.on_stats(self.metrics.take_snapshot)
        self._client = client
        self._preparer = preparer.with_variables(self.config.default_chat_template_kwargs)

    @property
    def status(self) -> Literal["ready", "starting", "draining", "dead", "paused"]:
        """Where the server stands, as /ready says it. "paused": an operator paused the engine or put it to sleep."""
        if self.is_draining:
            return "draining"
        if self._client is None:
            return "starting"
        if not self._client.is_alive:
            return "dead"
        if not self._client.is_ready:
            return "starting"
        return "ready" if self._client.refuses is None else "paused"

    @property
    def has_dead_engine(self) -> bool:
        """True if an engine was there and is not any more."""
        return self._client is not None and not self._client.is_alive

    @property
    def client(self) -> EngineClient:
        """The engine; raises `EngineDeadError` while the model is loading."""
        if self._client is None:
            raise EngineDeadError(_LOADING)
        return self._client

    @property
    def preparer(self) -> Preparer:
        """The door for requests; raises `EngineDeadError` while the model is loading."""
        if self._preparer is None:
            raise EngineDeadError(_LOADING)
        return self._preparer

    def require_loaded(self) -> None:
        """Raise `EngineDeadError` until the model has been loaded once."""
        if self._client is None:
            raise EngineDeadError(_LOADING)

    def require_ready(self) -> None:
        """Raise `EngineDeadError` unless new work may start."""
        status = self.status
        if status == "draining":
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if status == "dead":
            raise EngineDeadError("the engine is not running; see the server's log")
        if status == "starting":
            raise EngineDeadError(_LOADING)
        if status == "paused":
            raise EngineDeadError(self.client.refuses or "the engine is paused")

    def check_model(self, name: str | None) -> str:
        """The name to report for a request that asked for `name`; raises `NotFoundError` for a model not served."""
        if name and name != DEFAULT_NAME and name not in self.names:
            served = ", ".join(self.names)
            raise NotFoundError(f"model {name[:200]!r} is not served here; this server has {served}", parameter="model")
        return self.names[0]

    async def offload(self, size: int, work: Callable[[], T], *, is_foreign: bool = False, waits: bool = False) -> T:
        """Run `work` here if `size` characters or tokens are little and it runs no client's template, else on a thread.

        What mostly `waits` for another process, as the compiling of grammars does, keeps none of the threads that work.
        """
        if waits:
            return await asyncio.get_running_loop().run_in_executor(self._waiting_pool, work)
        if size <= OFFLOAD_CHARS and not is_foreign and not self._is_slow:
            started = time.monotonic()
            try:
                return work()
            finally:
                self._is_slow = time.monotonic() - started > SLOW_SECONDS
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def enter(self, call: asyncio.Task[None], exchange: Exchange) -> None:
        """Note an API call's task, so that a shutdown or an operator can end it."""
        self._calls[call] = exchange
        call.add_done_callback(self._calls.pop)

    def end_calls(self) -> int:
        """Shutdown's last word: cancel every API call in progress. Returns how many there were."""
        return self._end(list(self._calls), EngineDeadError("the server is shutting down"))

    def end_call(self, name: str) -> int:
        """End the calls whose answer has this id, or that came with this X-Request-Id. Returns how many there were."""
        named = [
            call
            for call, exchange in self._calls.items()
            if name
            in (exchange.response_id, exchange.scope.get("samovar.request_id"), exchange.header(b"x-request-id"))
        ]
        return self._end(named, RequestError(410, "RequestAbortedError", "an operator ended this request"))

    def _end(self, calls: list[asyncio.Task[None]], reason: Exception) -> int:
        for call in calls:
            self._calls[call].ended_by = reason
            call.cancel()
        return len(calls)

    def close(self) -> None:
        """Give back the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._waiting_pool.shutdown(wait=False, cancel_futures=True)
