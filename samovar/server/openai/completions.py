"""POST /v1/completions: one or many prompts, text or ids, with echo; parse, check, generate, stream or collect."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from samovar.core.events import GenerationEvent
from samovar.server.calls import send_stream
from samovar.server.exchange import Exchange
from samovar.server.generate import Events, generate
from samovar.server.openai import refusals
from samovar.server.openai.choices import Answer, TokenCounts, collect
from samovar.server.openai.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from samovar.server.openai.prompts import TextPrompt, prepare_completion, response_id
from samovar.server.openai.schema import Completion, CompletionChoice, CompletionRequest
from samovar.server.pacing import Pacer
from samovar.server.parsing import decode_body
from samovar.server.state import ServingState

_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"


async def create_completion(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer one completions request, as JSON or as an event stream."""
    asked = decode_body(body, CompletionRequest, refusals.COMPLETIONS)
    state.require_ready()
    model = state.check_model(asked.model)
    prompts = await prepare_completion(state, exchange, asked)
    reply = CompletionReply(state, asked, model, prompts, response_id("cmpl-", asked.request_id, exchange))
    async with aclosing(generate(state, [p.request for p in prompts])) as events:
        if asked.stream:
            await send_stream(state, exchange, reply.frames(events))
        else:
            await exchange.reply(200, _encode(await reply.whole(events)))


class CompletionReply:
    """Turns the events of one call into chunks or into one answer."""

    def __init__(
        self, state: ServingState, asked: CompletionRequest, model: str, prompts: list[TextPrompt], reply_id: str
    ) -> None:
        config = state.config
        self._asked = asked
        self._interval = asked.stream_interval or state.stream_interval
        self._prompts = prompts
        self._n = prompts[0].request.params.n
        self._id, self._created, self._model = reply_id, int(time.time()), model
        self._fingerprint = state.fingerprint
        self._counts = TokenCounts([p.request for p in prompts], config.enable_prompt_tokens_details)
        options = asked.stream_options
        self._usage_at_end = bool(config.enable_force_include_usage or (options and options.include_usage))
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._is_plain = asked.logprobs is None and not (asked.return_token_ids or self._usage_always)
        as_ids = bool(asked.return_tokens_as_token_ids or config.return_tokens_as_token_ids)
        keeps_special = not prompts[0].request.params.skip_special_tokens
        self._writers = [
            CompletionLogprobsWriter(asked.logprobs or 0, as_ids, state.preparer.tokenizer, keeps_special)
            for _ in range(self._n * len(prompts) if asked.logprobs is not None else 0)
        ]
        self._frame_parts: dict[int, tuple[bytes, bytes]] = {}

    async def frames(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Events -> `data:` lines; each item may hold several."""
        pacer = Pacer(self._interval)
        counts, opened = self._counts, self._frame_parts
        async for choice, news in self._prompts_first(events):
            counts.take(choice, news)
            for event in pacer.take(choice, news):
                head = b"" if choice in opened else self._open(choice)
                if self._is_plain and event.finish_reason is None:
                    before, after = opened[choice]
                    yield head + before + _encode(event.text) + after
                else:
                    yield head + self._frame(choice, event)
        if self._usage_at_end:
            last = self._completion([])
            last.usage, last.system_fingerprint = counts.usage(), self._fingerprint
            yield _line(last)

    async def _prompts_first(self, events: Events) -> Events:
        """With echo and logprobs, hold a prompt's other choices until its first one brought the prompt's logprobs."""
        waiting: dict[int, list[tuple[int, GenerationEvent]]] = {}
        needs_prompt = bool(self._asked.echo) and self._asked.logprobs is not None
        async for choice, event in events:
            prompt = self._prompts[choice // self._n]
            if event.prompt_logprobs is not None:
                prompt.logprobs = event.prompt_logprobs
            if needs_prompt and prompt.logprobs is None and choice % self._n:
                waiting.setdefault(choice // self._n, []).append((choice, event))
                continue
            yield choice, event
            for held in waiting.pop(choice // self._n, ()):
                yield held
        for late in waiting.values():
            for held in late:
                yield held

    def _open(self, choice: int) -> bytes:
        """The first line of a choice, if it has an echo or prompt ids to tell."""
        prompt = self._prompts[choice // self._n]
        sample = _line(self._completion([CompletionChoice(index=choice, text=_MARK)]))
        before, _, after = sample.partition(_encode(_MARK))
        self._frame_parts[choice] = (before, after)
        if not (prompt.echo or self._asked.return_token_ids or prompt.num_truncated):
            return b""
        first = CompletionChoice(index=choice, text=prompt.echo)
        if self._writers and self._asked.echo:
            first.logprobs = self._writers[choice].prompt(prompt.request.prompt_token_ids, prompt.logprobs or [])
        self._add_prompt_facts(first, prompt)
        return _line(self._completion([first]))

    def _add_prompt_facts(self, choice: CompletionChoice, prompt: TextPrompt) -> None:
        if self._asked.return_token_ids:
            choice.prompt_token_ids = prompt.request.prompt_token_ids
        if prompt.num_truncated:
            choice.num_truncated_prompt_tokens = prompt.num_truncated

    def _frame(self, choice: int, event: GenerationEvent) -> bytes:
        news = CompletionChoice(index=choice, text=event.text)
        if self._writers:
            news.logprobs = self._writers[choice].add(event.logprobs or [])
        if self._asked.return_token_ids:
            news.token_ids = event.token_ids
        chunk = self._completion([news])
        if event.finish_reason is not None:
            news.finish_reason, news.stop_reason = event.finish_reason.value, event.stop_reason
            chunk.system_fingerprint = self._fingerprint
        if self._usage_always:
            chunk.usage = self._counts.usage()
        return _line(chunk)

    async def whole(self, events: Events) -> Completion:
        """Every event -> one answer."""
        answers = await collect(events, self._counts, self._n * len(self._prompts))
        for first, prompt in zip(answers[:: self._n], self._prompts, strict=True):
            prompt.logprobs = first.prompt_logprobs
        whole = self._completion([self._choice(index, answer) for index, answer in enumerate(answers)])
        whole.usage, whole.system_fingerprint = self._counts.usage(), self._fingerprint
        return whole

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices)

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        prompt = self._prompts[index // self._n]
        choice = CompletionChoice(
            index=index,
            text=prompt.echo + answer.log.text,
            finish_reason=answer.finish_reason.value,
            stop_reason=answer.log.stop_reason,
        )
        if self._writers:
            writer = self._writers[index]
            echoed = self._asked.echo and [writer.prompt(prompt.request.prompt_token_ids, prompt.logprobs or [])]
            choice.logprobs = joined([*(echoed or ()), writer.add(answer.logprobs)])
        if self._asked.prompt_logprobs is not None and index % self._n == 0:
            choice.prompt_logprobs = prompt_logprobs(prompt.logprobs or [], self._asked.prompt_logprobs)
        if self._asked.return_token_ids:
            choice.token_ids = answer.log.token_ids
        self._add_prompt_facts(choice, prompt)
        return choice


def _line(chunk: Completion) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
