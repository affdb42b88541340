"""When a sequence ends by itself, and the news it sends."""

from __future__ import annotations

from samovar.core.outputs import SequenceOutput, TokenLogprobs
from samovar.core.sequence import FinishReason
from samovar.schedule.live import LiveSequence


def append_token(sequence: LiveSequence, token: int) -> FinishReason | None:
    """Append a sampled token; returns the reason if the sequence ends with it, and notes `stop_reason`.

    eos ends it with no stop reason, a stop token id with that id; both count only once `min_tokens` is reached.
    `limit` covers max_tokens, the context and the cache. A stop token that is also the last allowed one is a stop, and so
    is one that completes what the sequence's constraint asks for. ERROR means that its matcher failed.
    """
    sequence.token_ids.append(token)
    num_tokens = len(sequence.token_ids)
    if token in sequence.end_ids and num_tokens >= sequence.stop_from:
        sequence.stop_reason = None if token in sequence.eos_ids else token
        return FinishReason.STOP
    matcher = sequence.matcher
    if matcher is not None:
        matcher.advance(token)
        if matcher.error is not None:
            return FinishReason.ERROR
        if matcher.is_finished:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= sequence.limit else None


def news(
    sequence: LiveSequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None, error: str | None = None
) -> SequenceOutput:
    """An output with these new tokens; with the end and the timing too if the sequence is finished."""
    output = SequenceOutput(
        sequence.request.request_id, sequence.index, token_ids, sequence.num_cached_tokens, logprobs
    )
    if sequence.prompt_logprobs is not None and not sequence.num_prompt_logprobs_missing:
        output.prompt_logprobs = [None, *sequence.prompt_logprobs]
        sequence.prompt_logprobs = None
    if sequence.finish_reason is not None:
        output.finish_reason = sequence.finish_reason
        output.stop_reason = sequence.stop_reason
        output.error = error
        sequence.timing.num_preemptions = sequence.num_preemptions
        output.timing = sequence.timing
    return output
