"""Beam search on top of an engine: every round is a batch of one-token requests, one per beam.

The prefix cache makes a round cheap. The rules are those of the classic algorithm (as in Transformers with early
stopping): of all continuations of all beams the 2 x width likeliest are looked at; an end token counts only among the
first `width` of them; a prompt is done when `width` beams have ended. With width 1 this is greedy decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.engine.batch import run_batch
from samovar.engine.engine import Engine
from samovar.engine.metrics import ServingMetrics
from samovar.engine.request_output import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from samovar.errors import ValidationError
from samovar.text.prepare import Preparer

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. `length_penalty` divides a beam's logprob by its number of new tokens to that power."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                rule = f"an integer in [1, {most}]" if most else "an integer >= 1"
                raise ValidationError(f"{name} must be {rule}, got {value!r}", parameter=name, value=value)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            bounds = f"[{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            message = f"length_penalty must be in {bounds}, got {self.length_penalty!r}"
            raise ValidationError(message, parameter="length_penalty", value=self.length_penalty)


@dataclass(slots=True)
class _Beam:
    """One open continuation. `ids` holds prompt and continuation."""

    ids: list[int]
    score: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


@dataclass(slots=True)
class _Search:
    """The search below one prompt."""

    prompt: list[int]
    beams: list[_Beam]
    ended: list[tuple[float, BeamSearchSequence]] = field(default_factory=list)

    def advance(self, outputs: list[RequestOutput], params: BeamSearchParams, eos: set[int]) -> None:
        """Replace the beams by the best continuations that `outputs` (one per beam) offer."""
        candidates = [
            (beam.score + entry.logprob, number, token, beam, outputs[number].outputs[0].logprobs)
            for number, beam in enumerate(self.beams)
            for token, entry in _alternatives(outputs[number])
        ]
        width = params.beam_width
        best = heapq.nsmallest(2 * width, candidates, key=lambda c: (-c[0], c[1], c[2]))
        self.beams = []
        for rank, (score, _, token, beam, logprobs) in enumerate(best):
            assert logprobs is not None
            grown = _Beam([*beam.ids, token], score, [*beam.logprobs, logprobs[0]])
            if token in eos and not params.ignore_eos:
                if rank < width:
                    self._end(grown, params, "stop", token)
            elif len(self.beams) < width:
                self.beams.append(grown)
        if len(self.ended) >= width:
            self.beams = []

    def stop(self, params: BeamSearchParams) -> None:
        """No tokens left: the open beams end as they are."""
        for beam in self.beams:
            self._end(beam, params, "length", None)
        self.beams = []

    def _end(self, beam: _Beam, params: BeamSearchParams, reason: str, token: int | None) -> None:
        score = beam.score / (len(beam.ids) - len(self.prompt)) ** params.length_penalty
        keeps_last = token is None or params.include_stop_str_in_output
        sequence = BeamSearchSequence(
            tokens=beam.ids if keeps_last else beam.ids[:-1],
            cum_logprob=beam.score,
            logprobs=beam.logprobs,
            finish_reason=reason,
            stop_reason=token,
        )
        self.ended.append((score, sequence))

    def result(self, width: int) -> BeamSearchOutput:
        """The best sequences, best first."""
        ranked = sorted(self.ended, key=lambda item: -item[0])
        return BeamSearchOutput([sequence for _, sequence in ranked[:width]])


def _alternatives(output: RequestOutput) -> list[tuple[int, Logprob]]:
    """The offered next tokens of one beam; none if its request failed or was full."""
    positions = output.outputs[0].logprobs
    return list(positions[0].items()) if positions else []


def search(
    engine: Engine,
    preparer: Preparer,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    metrics: ServingMetrics,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """Search below each prompt (token ids), `concurrency_limit` of them side by side. Each beam's step is counted as a
    request."""
    group = concurrency_limit or max(1, len(prompts))
    results: list[BeamSearchOutput] = []
    for first in range(0, len(prompts), group):
        searches = [_Search(prompt, [_Beam(list(prompt))]) for prompt in prompts[first : first + group]]
        _search_together(engine, preparer, searches, params, metrics)
        results += [_with_text(found.result(params.beam_width), preparer, params) for found in searches]
    return results


def _search_together(
    engine: Engine, preparer: Preparer, searches: list[_Search], params: BeamSearchParams, metrics: ServingMetrics
) -> None:
    # The limit on logprobs is for clients; a search may need more than they may ask for.
    wide = replace(preparer.limits, max_logprobs=preparer.limits.vocab_size)
    sampling = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=min(2 * params.beam_width, preparer.limits.vocab_size),
        allowed_token_ids=params.allowed_token_ids,
        detokenize=False,
        ignore_eos=True,
    )
    eos = set(preparer.eos_token_ids)
    door = Preparer(preparer.tokenizer, None, wide, preparer.eos_token_ids)
    for found in searches:
        door.from_ids(found.prompt, sampling)  # Refuses a prompt that leaves no room before anything runs.
    for _ in range(params.max_tokens):
        # The beams of one search are equally long: all of them can grow, or the context is full.
        open_searches = [s for s in searches if s.beams and len(s.beams[0].ids) < wide.max_model_len]
        if not open_searches:
            break
        beams = [beam for found in open_searches for beam in found.beams]
        requests: list[tuple[Request, str | None]] = [(door.from_ids(beam.ids, sampling), None) for beam in beams]
        outputs = iter(run_batch(engine, preparer.tokenizer, requests, metrics))
        for found in open_searches:
            found.advance(list(islice(outputs, len(found.beams))), params, eos)
    for found in searches:
        found.stop(params)


def _with_text(output: BeamSearchOutput, preparer: Preparer, params: BeamSearchParams) -> BeamSearchOutput:
    if preparer.tokenizer is not None:
        for sequence in output.sequences:
            sequence.text = preparer.tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
    return output
