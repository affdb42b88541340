"""How sequences end, and what an end without a model still has to get right."""

from __future__ import annotations

import pytest

from samovar.core.outputs import SequenceOutput, TokenLogprobs
from samovar.core.sequence import FinishReason
from samovar.core.step import SampledTokens, ScheduledStep, StepResult
from samovar.schedule.scheduler import Scheduler
from tests.schedule.drive import House, options, request


def script(
    tokens: list[int], *, overlaps: bool = True, eos: list[int] | None = None, prompt: int = 20, **params: object
) -> SequenceOutput:
    """Run a request against a sampler that emits `tokens` whatever the masks say; everything it sent, as one output."""
    scheduler = Scheduler(options(), 60)
    scheduler.add(request(prompt, eos=eos, **params))
    launched: list[ScheduledStep] = []
    heard = SequenceOutput("", 0, [])
    given = 0
    for _ in range(500):
        step = scheduler.schedule(0.0)
        if step is not None:
            launched.append(step)
        if launched and (len(launched) > overlaps or step is None):
            step = launched.pop(0)
            rows = [s for s in step.sequences if s.samples]
            result = StepResult(step.step_id, [SampledTokens(s.slot, [tokens[given % len(tokens)]]) for s in rows])
            given += len(rows)
            for output in scheduler.update(step, result, 0.0):
                heard.token_ids += output.token_ids
                heard.finish_reason, heard.stop_reason = output.finish_reason, output.stop_reason
        if not scheduler.has_work:
            return heard
    raise AssertionError("never ended")


@pytest.mark.parametrize("overlaps", [False, True])
class TestStopRules:
    """STOP rows, engine side."""

    def test_eos(self, overlaps: bool) -> None:
        """eos is a stop without a reason; tokens sampled after it are thrown away."""
        heard = script([5, 6, 0, 7], overlaps=overlaps, max_tokens=50)
        assert (heard.token_ids, heard.finish_reason, heard.stop_reason) == ([5, 6, 0], FinishReason.STOP, None)

    def test_stop_token(self, overlaps: bool) -> None:
        """A stop token id is a stop with that id as its reason."""
        heard = script([5, 6, 9, 7], overlaps=overlaps, max_tokens=50, stop_token_ids=[9, 30])
        assert (heard.token_ids, heard.finish_reason, heard.stop_reason) == ([5, 6, 9], FinishReason.STOP, 9)

    def test_ignore_eos_ignores_every_eos(self, overlaps: bool) -> None:
        """B040: two eos ids, both ignored, exactly max_tokens; a user's own stop id still counts, eos or not."""
        heard = script([0, 1, 5], overlaps=overlaps, ignore_eos=True, max_tokens=50, eos=[0, 1])
        assert len(heard.token_ids) == 50 and heard.finish_reason is FinishReason.LENGTH
        heard = script([5, 0, 1], overlaps=overlaps, ignore_eos=True, max_tokens=50, eos=[0, 1], stop_token_ids=[1])
        assert (heard.token_ids, heard.stop_reason) == ([5, 0, 1], 1)

    def test_min_tokens_counts_output_only(self, overlaps: bool) -> None:
        """B041: a prompt of 20 tokens does not count; eos from the first step on, 16 tokens come out."""
        heard = script([0], overlaps=overlaps, min_tokens=16, max_tokens=32)
        assert len(heard.token_ids) == 16 and heard.finish_reason is FinishReason.STOP

    def test_min_tokens_holds_for_every_end_id(self, overlaps: bool) -> None:
        """B043: the second eos and the stop ids are as banned as the first eos."""
        for id in (0, 1, 9):
            heard = script([id], overlaps=overlaps, min_tokens=8, max_tokens=32, eos=[0, 1], stop_token_ids=[9])
            assert len(heard.token_ids) == 8, f"id {id}"

    def test_max_tokens(self, overlaps: bool) -> None:
        """B044: exactly max_tokens, for any number; a stop on the last allowed token is a stop."""
        for count in (1, 2, 3, 17):
            heard = script([5], overlaps=overlaps, max_tokens=count)
            assert len(heard.token_ids) == count and heard.finish_reason is FinishReason.LENGTH
        assert script([5, 0], overlaps=overlaps, max_tokens=2).finish_reason is FinishReason.STOP

    def test_the_context_ends_it(self, overlaps: bool) -> None:
        """B044: no shift; at the context's end the answer ends with `length`."""
        heard = script([5], overlaps=overlaps, prompt=80, max_tokens=500)
        assert len(heard.token_ids) == 96 - 80 and heard.finish_reason is FinishReason.LENGTH

    def test_no_tokens(self, overlaps: bool) -> None:
        """max_tokens 0 computes the prompt, samples nothing and ends with `length`."""
        for prompt in (1, 20, 50, 96):
            heard = script([5], overlaps=overlaps, prompt=prompt, max_tokens=0)
            assert heard.token_ids == [] and heard.finish_reason is FinishReason.LENGTH


def test_no_step_is_launched_past_a_known_end() -> None:
    """With a token in flight that must be the last, nothing is scheduled for the sequence: no wasted row."""
    house = House(options(), 60, depth=2)
    house.add(request(10, max_tokens=5, ignore_eos=True))
    house.run()
    assert house.worker.num_computed == 10 + 4


def test_a_wasted_row_at_eos_changes_nothing() -> None:
    """eos is seen one step late: the extra row is computed, and its token is not sent."""
    house = House(options(), 60, depth=2)
    asked = [house.add(request(7 + i, max_tokens=80)) for i in range(12)]
    house.run()
    house.check_answers()
    computed = sum(len(a.prompt_token_ids) + len(house.heard[a.request_id, 0].token_ids) - 1 for a in asked)
    assert computed < house.worker.num_computed <= computed + len(asked)


def test_a_failed_row_ends_alone() -> None:
    """`StepResult.failed` ends that sequence with its message; the neighbours' answers are unchanged."""
    house = House(options(), 60, depth=2)
    asked = [house.add(request(6, max_tokens=20, ignore_eos=True)) for _ in range(3)]
    for _ in range(4):
        house.launch()
        house.read()
    house.launch()
    house.worker.rows[1].is_torn = True
    house.run()
    ends = [house.heard[a.request_id, 0].end for a in asked]
    assert [e.finish_reason for e in ends if e] == ["length", "error", "length"]
    assert ends[1] and ends[1].error == "this row failed"
    house.check_answers()
    house.check_idle()


def test_a_failed_step_ends_only_its_sequences() -> None:
    """Sequences that wait, or that joined a later step, are served; the scheduler stays usable."""
    house = House(options(max_num_seqs=2), 60, depth=2)
    asked = [house.add(request(6, max_tokens=20, ignore_eos=True)) for _ in range(4)]
    house.launch()
    house.launch()
    house.fail_step()
    house.run()
    ends = [house.heard[a.request_id, 0].end for a in asked]
    assert [e.finish_reason for e in ends if e] == ["error", "error", "length", "length"]
    assert ends[0] and ends[0].error == "the whole step failed"
    house.check_answers()
    house.check_idle()


def test_results_are_booked_in_order() -> None:
    """A result for another step than the oldest is a bug of the caller, and is said so."""
    scheduler = Scheduler(options(), 60)
    scheduler.add(request(6))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="step 0 is next"):
        scheduler.update(second, StepResult(second.step_id), 0.0)
    with pytest.raises(RuntimeError, match="result 1"):
        scheduler.update(first, StepResult(second.step_id), 0.0)


def test_a_row_without_a_token_is_an_error_not_a_hang() -> None:
    """A worker that forgets a row must not leave its request running for ever."""
    scheduler = Scheduler(options(), 60)
    scheduler.add(request(6))
    step = scheduler.schedule(0.0)
    assert step is not None
    [output] = scheduler.update(step, StepResult(step.step_id), 0.0)
    assert output.finish_reason is FinishReason.ERROR and "no token" in (output.error or "")
    assert not scheduler.has_work


def test_prompt_logprobs_over_chunks_and_preemption() -> None:
    """Each prompt position once, in order, whatever the chunks; the first is None; choice 0 only."""
    house = House(options(max_num_batched_tokens=7, max_num_seqs=6), 20, depth=2)
    for length in (1, 2, 30, 45):
        house.add(
            request(length, prompt_logprobs=1, logprobs=1, n=2, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
        )
    house.run()
    house.check_answers()
    assert house.scheduler.stats().num_preemptions > 0
    entries = [s.num_prompt_logprobs for step in house.steps for s in step.sequences if s.num_prompt_logprobs]
    assert max(entries) <= 7


def test_several_tokens_in_one_result() -> None:
    """Tokens after the end are cut off, with their logprobs."""
    scheduler = Scheduler(options(), 60)
    scheduler.add(request(6, max_tokens=20, logprobs=1))
    step = scheduler.schedule(0.0)
    assert step is not None
    logprobs = [TokenLogprobs([t], [-1.0], 1) for t in (7, 0, 8)]
    [output] = scheduler.update(step, StepResult(step.step_id, [SampledTokens(0, [7, 0, 8], logprobs)]), 0.0)
    assert output.token_ids == [7, 0] and output.logprobs == logprobs[:2]
    assert output.finish_reason is FinishReason.STOP
