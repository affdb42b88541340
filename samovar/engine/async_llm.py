"""AsyncLLM: the embeddable server core. An engine in its own process, requests as async iterators of outputs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Self

from samovar.config.engine import EngineConfig
from samovar.core.outputs import EngineInfo
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason
from samovar.engine.build import find_model
from samovar.engine.door import DEFAULT_MAX_TOKENS, load_text, make_preparer
from samovar.engine.engine_args import EngineArgs
from samovar.engine.process_client import ProcessEngineClient
from samovar.engine.prompts import PromptType, require_params, split_prompt
from samovar.engine.request_output import OutputCollector, RequestOutput
from samovar.errors import EngineDeadError, ValidationError
from samovar.text.output import RequestPipeline
from samovar.text.prepare import Preparer
from samovar.text.tokenizer import Tokenizer


class AsyncLLM:
    """Serves requests that come and go. Belongs to one event loop; the engine starts with the first use.

    Use it as an async context manager, or call `shutdown`.
    """

    def __init__(
        self, config: EngineConfig, *, chat_template: str | None = None, engine_timeout: float = 120.0
    ) -> None:
        self._config = config
        self._chat_template = chat_template
        self._client = ProcessEngineClient(config, engine_timeout=engine_timeout)
        self._started: asyncio.Task[Preparer] | None = None
        self._running: dict[str, set[str]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> Self:
        """From engine flags; `options` go to the constructor."""
        return cls(engine_args.config, **options)

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises what made it fail."""
        await self._preparer()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, in the form `sampling_params.output_kind` asks for. Closing the iterator aborts.

        `request_id` is only a label, shown in the outputs and understood by `abort`; two live requests may share it.
        """
        if lora_request is not None:
            raise ValidationError("lora_request is not supported; leave it out", parameter="lora_request")
        require_params(sampling_params)
        preparer = await self._preparer()
        text, ids, salt = split_prompt(prompt)
        if ids is None:
            ids = preparer.encode_text(text or "")
        params = sampling_params or preparer.params(max_tokens=DEFAULT_MAX_TOKENS)
        request = preparer.from_ids(ids, params, priority=priority, cache_salt=salt)
        label = request_id or request.request_id
        self._running.setdefault(label, set()).add(request.request_id)
        try:
            async with aclosing(self._outputs(request, text, preparer.tokenizer)) as outputs:
                async for output in outputs:
                    output.request_id = label
                    yield output
        finally:
            self._running[label].discard(request.request_id)
            if not self._running[label]:
                del self._running[label]

    async def _outputs(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None
    ) -> AsyncGenerator[RequestOutput, None]:
        pipeline, collector = RequestPipeline(tokenizer, request), OutputCollector(request, prompt)
        async with aclosing(self._client.generate(request)) as news:
            async for output in news:
                events = pipeline.feed(output)
                for index in pipeline.take_stopped():
                    await self._client.abort(request.request_id, index)
                for event in events:
                    collector.add(event)
                if events and (ready := collector.take()) is not None:
                    yield ready
        if not collector.output.finished:  # `abort` ended the choices that are still open.
            for index in range(request.params.n):
                collector.end(index, FinishReason.ABORT)
            if (ready := collector.take()) is not None:
                yield ready

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the live requests with this label (or these); their iterators end with `finish_reason` "abort"."""
        labels = [request_id] if isinstance(request_id, str) else list(request_id)
        for internal in list(itertools.chain.from_iterable(self._running.get(label, ()) for label in labels)):
            await self._client.abort(internal)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine can serve."""
        if not self._client.is_alive:
            raise EngineDeadError("the engine is not running")

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with `skip_tokenizer_init`."""
        return (await self._preparer()).tokenizer

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prompt beginning. With the argument running requests compute theirs again, too."""
        return bool(await self._call("reset_prefix_cache", reset_running_requests=reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`; see `LLM.sleep`. `mode` says what becomes of live requests: "abort" ends
        them, "wait" waits for their ends, "keep" lets them go on after waking. New ones are refused meanwhile."""
        await self._call("sleep", level=level, mode=mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` gave away, or the part of it that `tags` names."""
        await self._call("wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        """Whether anything is missing, or the engine was put to sleep."""
        return bool(await self._call("is_sleeping"))

    async def pause_generation(self, mode: str = "abort") -> None:
        """Make no more steps until `resume_generation`; `mode` as for `sleep`, but kept requests keep their cache, too."""
        await self._call("pause", mode=mode)

    async def resume_generation(self) -> None:
        """Go on."""
        await self._call("resume")

    async def is_paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        return bool(await self._call("is_paused"))

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Note what runs, for a trace in `profiler_dir`. Raises `ConflictError` without that flag."""
        await self._call("start_profile", prefix=profile_prefix or "")

    async def stop_profile(self) -> None:
        """Write the trace."""
        await self._call("stop_profile")

    async def _call(self, name: str, **arguments: Any) -> Any:
        await self._preparer()
        return await self._client.call(name, **arguments)

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded engine."""
        return self._client.info

    @property
    def is_running(self) -> bool:
        """True while the engine is alive."""
        return self._client.is_alive

    async def shutdown(self) -> None:
        """Stop the engine; live requests fail. Returns when its process is gone."""
        await self._client.close()
        if self._started is not None:
            await asyncio.wait([self._started])
            if not self._started.cancelled() and self._started.exception() is None:
                self._started.result().close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def _preparer(self) -> Preparer:
        if self._started is None:
            self._started = asyncio.create_task(self._start(), name="engine-start")
        return await asyncio.shield(self._started)

    async def _start(self) -> Preparer:
        description = await asyncio.to_thread(find_model, self._config)
        text = await asyncio.to_thread(load_text, self._config, description, chat_template=self._chat_template)
        await self._client.start()
        return make_preparer(self._config, description, self._client.info, text)
