"""Scheduler: decides each step who computes how many tokens in which blocks, and books what came back.

There is no prefill and no decode, only tokens known and tokens computed. A step first gives one token to each running
sequence that lacks one, then shares what is left of the budget among those that lack more and those that wait, in the
order of the policy. Whoever runs out of blocks takes them from the sequence that is last in that order; it loses its
blocks, keeps its tokens and returns to its place in the queue.

Steps may overlap: a step may be scheduled while a token of the step before is still unknown (`num_in_flight`). Steps
run on the device in the order they were scheduled. Hence a slot or block may be given away as soon as its owner ends,
even if a launched step still writes to it: the new owner's writes come later. What a step computed is only *believed*
(published for sharing) in `update`, and only if the sequence still holds the blocks it had when the step was made.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as SequenceOf

from samovar.core.cache_spec import CacheSpec
from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.core.sequence import FinishReason, SequenceStatus
from samovar.core.step import FED, DecodeSequences, PlainTokens, SampledTokens, ScheduledStep, StepResult
from samovar.errors import ValidationError
from samovar.schedule.admission import ENTRY_RULES, House, Need, StepBudget, need_of, why_not_fit, why_not_ready
from samovar.schedule.cache_groups import group_layers
from samovar.schedule.constrained import Enforcer
from samovar.schedule.draft import Draft, collect_prompt_logprobs
from samovar.schedule.entry import live_request
from samovar.schedule.finish import append_token, news
from samovar.schedule.live import LiveSequence, make_sequences
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.policy import POLICIES
from samovar.schedule.prefix_cache import CacheIdentity
from samovar.schedule.rounds import Rounds
from samovar.schedule.standing import Standing, by_rank
from samovar.schedule.step_time import StepTimeModel

NO_TOKEN = "the worker returned no token for this sequence"


class Scheduler(Standing):
    """Owns requests, sequences, slots and blocks of one engine.

    `num_blocks` is what the workers allocated. Call `schedule` for a step, have it run, and hand its result to
    `update` (or `fail_step`) in the order of the steps. `now` is `time.monotonic()`. With an `enforcer` it takes
    constrained requests, and wants `let_in` to be called between steps.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        num_blocks: int,
        *,
        cache_specs: SequenceOf[CacheSpec] = (),
        identity: CacheIdentity | None = None,
        enforcer: Enforcer | None = None,
    ) -> None:
        super().__init__(options, num_blocks, enforcer)
        self._identity = identity or CacheIdentity()
        self._group = group_layers(cache_specs, options.block_size)
        self._rank = POLICIES[options.scheduling_policy]
        self._displaces = options.scheduling_policy == "priority"
        self._num_steps, self._num_requests = 0, 0
        self._times = StepTimeModel()
        self._rounds = Rounds(options.rounds_seconds)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `ValidationError` if it can never run."""
        if request.request_id in self._requests:
            message = f"request_id {request.request_id!r} is in use"
            raise ValidationError(message, parameter="request_id", value=request.request_id)
        for rule in ENTRY_RULES:
            rule(request, self.options, self._pool.num_blocks)
        self._constraints.check(request)
        order = self._num_requests
        self._num_requests += 1
        parent = live_request(request, order, self.options, self._identity, self._generation)
        # The last token of a full cache needs no place in it: nothing is computed from it.
        most = min(self.options.max_model_len, self._pool.num_blocks * self._block_size + 1)
        sequences = make_sequences(parent, self._rank(request, order), most, overlaps=self.options.async_scheduling)
        parent.live = {s.index: s for s in sequences}
        if parent.num_shared_tokens:
            parent.deferred = sequences[1:]
        self._constraints.begin(sequences)
        for sequence in sequences[: len(sequences) - len(parent.deferred)]:
            self._enqueue(sequence)
        self._requests[request.request_id] = parent
        self._counters.num_live += len(sequences)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request, or one of its choices, in whatever state it is; its slot and blocks are free on return.

        Returns the last output of each choice that was ended. Unknown ids are none of anybody's: they may just have
        ended by themselves.
        """
        parent = self._requests.get(request_id)
        if parent is None:
            return []
        chosen = [s for s in parent.live.values() if index is None or s.index == index]
        # Last choice first, so that no deferred one is promoted only to be ended.
        for sequence in reversed(chosen):
            self._end(sequence, FinishReason.ABORT)
        return [news(sequence, []) for sequence in chosen]

    def abort_all(self) -> list[SequenceOutput]:
        """End every request; returns the last output of every choice."""
        return [output for request_id in list(self._requests) for output in self.abort(request_id)]

    def let_in(self) -> list[SequenceOutput]:
        """Let sequences join the queue whose matchers are there by now; returns the last outputs of those that get none."""
        ready, failed = self._constraints.settle()
        for sequence in ready:
            self._waiting.add(sequence)
        return [self._end_with_error(sequence, message) for sequence, message in failed]

    # One step.

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if nobody can compute anything before the next `update` or `add`."""
        draft = Draft(self._budget())
        if self._displaces:
            self._make_way()
        unfinished = self._schedule_decodes(draft)
        self._schedule_prefills(draft, unfinished, now)
        if not draft.rows:
            return None
        masks = self._constraints.masks(draft)
        step = ScheduledStep(
            self._num_steps,
            draft.started,
            self._freed_slots,
            draft.rows,
            state_copies=draft.state_copies,
            state_saves=[(save.slot, save.row) for save in draft.saves],
            masks=masks,
            num_rounds=draft.num_rounds,
        )
        self._freed_slots = []
        self._num_steps += 1
        self._launched[step.step_id] = draft
        return step

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[SequenceOutput]:
        """Book the result of the oldest launched step; returns the news of every sequence that has any."""
        draft = self._take_launched(step, result.step_id)
        rows, num_rounds = draft.rows, draft.num_rounds
        if self._snapshots is not None:
            self._snapshots.settle(draft.saves, result.failed)
        if not isinstance(rows, DecodeSequences):
            outputs = self._book(draft, result, now)
        elif num_rounds > 1:
            outputs = self._book_rounds(draft, rows, result, now)
        elif isinstance(result.sampled, PlainTokens) and not result.failed:
            outputs = self._book_decodes(draft, rows, result.sampled, now)
        else:
            outputs = self._book(draft, result, now)
        self._counters.count_step(draft.budget.num_tokens * num_rounds, result.seconds)
        if isinstance(rows, DecodeSequences):
            self._rounds.observe(len(rows), result.seconds / num_rounds)
        if self.options.step_time_target:
            draft.budget.report(result.seconds / num_rounds)
        return outputs

    def _book(self, draft: Draft, result: StepResult, now: float) -> list[SequenceOutput]:
        """Book any kind of step."""
        sampled = {s.slot: s for s in result.sampled}
        outputs: list[SequenceOutput] = []
        for sequence, row, stay in zip(draft.sequences, draft.rows, draft.stays, strict=True):
            if row.samples:
                sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                continue  # It ended after this step was launched; what the step computed for it is thrown away.
            if row.slot in result.failed:
                outputs.append(self._end_with_error(sequence, result.failed[row.slot]))
                continue
            end = row.start + row.num_new_tokens
            if stay == sequence.stay:
                self._confirm(sequence, end)
            if row.num_prompt_logprobs:
                collect_prompt_logprobs(sequence, row.start, result.prompt_logprobs.get(row.slot, []))
            if row.samples:
                outputs.append(self._accept(sequence, sampled.get(row.slot), now))
            elif end == len(sequence.token_ids):  # max_tokens 0: the prompt was all that was wanted.
                self._end(sequence, FinishReason.LENGTH)
                outputs.append(news(sequence, []))
        return outputs

    def _book_decodes(
        self, draft: Draft, rows: DecodeSequences, sampled: PlainTokens, now: float
    ) -> list[SequenceOutput]:
        """`_book` for the most frequent kind of step, in which nothing happens to most sequences."""
        size, slots, tokens = self._block_size, rows.slots, sampled.token_ids
        outputs: list[SequenceOutput] = []
        if sampled.slots is not slots and sampled.slots != slots:
            by_slot = dict(zip(sampled.slots, tokens, strict=True))
            tokens = [by_slot.get(slot, -1) for slot in slots]
        count = 0
        for sequence, slot, stay, end, token in zip(
            draft.sequences, slots, draft.stays, rows.totals, tokens, strict=True
        ):
            sequence.num_in_flight -= 1
            parent = sequence.parent
            if stay == sequence.stay:  # So it has not ended either, and its tokens are those it had then.
                if not end % size or parent.deferred:
                    self._confirm(sequence, end)
                may_end = end + 1 >= sequence.limit or token in sequence.end_ids
                if token >= 0 and not may_end and sequence.prompt_logprobs is None and sequence.matcher is None:
                    sequence.token_ids.append(token)
                    timing = sequence.timing
                    timing.last_token = now
                    if not timing.first_token:
                        timing.first_token = now
                    count += 1
                    # Arguments by name would cost as much as the rest of the loop.
                    outputs.append(
                        SequenceOutput(parent.request.request_id, sequence.index, [token], sequence.num_cached_tokens)
                    )
                    continue
            elif sequence.finish_reason is not None:
                continue
            outputs.append(self._accept(sequence, None if token < 0 else SampledTokens(slot, [token]), now))
        self._counters.totals.generation_tokens += count
        return outputs

    def _book_rounds(self, draft: Draft, rows: DecodeSequences, result: StepResult, now: float) -> list[SequenceOutput]:
        """Book a step of several rounds, as if each round were a step of its own."""
        sampled = {s.slot: s for s in result.sampled}
        outputs: list[SequenceOutput] = []
        for sequence, slot, stay, end in zip(draft.sequences, rows.slots, draft.stays, rows.totals, strict=True):
            sequence.num_in_flight -= draft.num_rounds
            if sequence.finish_reason is not None:
                continue
            found = sampled.get(slot)
            if found is not None and found.token_ids:
                outputs.append(self._accept(sequence, found, now, end if stay == sequence.stay else None))
            has_all = found is not None and len(found.token_ids) == draft.num_rounds
            if sequence.finish_reason is None and (slot in result.failed or not has_all):
                outputs.append(self._end_with_error(sequence, result.failed.get(slot, NO_TOKEN)))
        return outputs

    def fail_step(self, step: ScheduledStep, message: str) -> list[SequenceOutput]:
        """Book a launched step that failed as a whole: the sequences in it end with ERROR, all others go on."""
        draft = self._take_launched(step, step.step_id)
        if self._snapshots is not None:
            self._snapshots.settle(draft.saves, {save.slot for save in draft.saves})
        outputs = []
        for sequence, row in zip(draft.sequences, draft.rows, strict=True):
            if row.samples:
                sequence.num_in_flight -= draft.num_rounds
            if sequence.finish_reason is None:
                outputs.append(self._end_with_error(sequence, message))
        return outputs

    # Making a step.

    def _schedule_decodes(self, draft: Draft) -> list[LiveSequence]:
        """Give each running sequence that lacks one token that token; returns those that lack more."""
        size, rounds = self._block_size, 1
        if not self._waiting:
            rounds = draft.num_rounds = self._rounds.plan(self._running, size, self._pool.num_free)
        sequences, unfinished = list[LiveSequence](), list[LiveSequence]()
        token_ids, silent, num_waiting = list[int](), list[int](), 0
        blocks: dict[int, list[int]] = {}
        for sequence in self._running:  # Shrinks from its end when someone is preempted.
            start, in_flight = sequence.num_computed_tokens, sequence.num_in_flight
            total = len(sequence.token_ids) + in_flight
            if total != start + 1 or not sequence.is_started:
                if total > start:
                    unfinished.append(sequence)
                continue
            if in_flight and (total >= sequence.limit or not sequence.overlaps):
                num_waiting += 1  # It will end with the tokens in flight, or needs to see them first.
                continue
            end = start + rounds
            if end > len(sequence.block_table) * size:
                if not self._find_block(sequence):
                    num_waiting += 1
                    break
                new_blocks = self._pool.allocate(-(-end // size) - len(sequence.block_table))
                sequence.block_table += new_blocks
                blocks[len(sequences)] = new_blocks
            token_ids.append(FED if in_flight else sequence.token_ids[start])
            sequence.num_computed_tokens = end
            if total < sequence.limit:
                sequence.num_in_flight = in_flight + rounds
            else:
                silent.append(len(sequences))
            sequences.append(sequence)
        draft.budget.num_decoding = len(sequences) + num_waiting
        if sequences:
            draft.add_decodes(sequences, token_ids, blocks, silent)
        if self._snapshots is not None:
            self._snapshots.roll(sequences, draft.saves)
        return unfinished

    def _schedule_prefills(self, draft: Draft, unfinished: list[LiveSequence], now: float) -> None:
        """Share the rest of the budget among running sequences with more to compute and waiting ones, in rank order."""
        i, admits = 0, True
        while draft.budget.tokens_left:
            running = unfinished[i] if i < len(unfinished) else None
            head = self._waiting.peek() if admits else None
            if head is not None and (running is None or head.rank < running.rank):
                if not self._start(head, draft.budget):
                    admits = False  # Nobody overtakes the first in the queue.
                    continue
                chosen = head
            elif running is not None:
                i += 1
                chosen = running
            else:
                break
            start = chosen.num_computed_tokens
            wanted = len(chosen.token_ids) - start
            count = draft.budget.chunk(start, wanted)
            if not count:
                break
            if self._snapshots is None:
                draft.add_chunk(chosen, count, now)
                continue
            self._snapshots.restore(chosen, draft.state_copies)
            draft.add_chunk(chosen, self._snapshots.cut(chosen, count), now)
            self._snapshots.save(chosen, draft.saves)

    def _budget(self) -> StepBudget:
        return StepBudget(self.options, self._max_step_tokens, self._times, has_company=self._counters.num_live > 1)

    def _house(self) -> House:
        return House(self._group, self._pool.num_blocks, self._pool.num_free, len(self._running), self._max_running)

    def _start(self, sequence: LiveSequence, budget: StepBudget) -> bool:
        """Give the first waiting sequence a slot and all the blocks of its known tokens, if the rules allow."""
        house = self._house()
        if why_not_ready(sequence, house) is not None:
            return False
        cached = self._match(sequence)
        need = self._need(sequence, cached, budget)
        if why_not_fit(sequence, need, house) is not None:
            return False
        self._waiting.remove(sequence)
        self._pool.share(cached)
        num_blocks = self._group.num_blocks(len(sequence.token_ids))
        sequence.block_table = cached + self._pool.allocate(num_blocks - len(cached))
        sequence.num_published = len(cached)
        sequence.num_computed_tokens = len(cached) * self._block_size
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=by_rank)
        if self._snapshots is not None:
            self._snapshots.begin(sequence)
        parent = sequence.parent
        if parent.num_cached_tokens is None:
            self._counters.start(parent, sequence.num_computed_tokens)
        if not sequence.stay:
            sequence.num_cached_tokens = parent.num_cached_tokens or 0
        return True

    def _need(self, sequence: LiveSequence, cached: list[int], budget: StepBudget) -> Need:
        return need_of(sequence, len(cached) * self._block_size, self._group, self._pool.num_free_among(cached), budget)

    def _match(self, sequence: LiveSequence) -> list[int]:
        """Blocks of the longest cached beginning, which must have a state behind it where the model has states. Positions
        whose logprobs are wanted must be computed."""
        parent = sequence.parent
        if parent.root is None or not parent.reads_cache or sequence.num_prompt_logprobs_missing:
            return []
        blocks = self._cache.match(sequence.block_hashes, parent.root, sequence.token_ids)
        return blocks if self._snapshots is None else blocks[: self._snapshots.known_blocks(sequence, len(blocks))]

    def _make_way(self) -> None:
        """Start waiting sequences that are more urgent than the least urgent running ones, preempting those.

        Only a better priority value displaces, never an earlier arrival, and only if that makes enough room.
        """
        while self._running and (head := self._waiting.peek()) is not None and not head.num_in_flight:
            urgency = head.rank[0]
            if self._running[-1].rank[0] <= urgency:
                return
            budget = self._budget()
            less_urgent = [s for s in self._running if s.rank[0] > urgency]
            house = self._house()
            house.num_running -= len(less_urgent)
            house.num_free += sum(self._pool.num_held_once(s.block_table) for s in less_urgent)
            need = self._need(head, self._match(head), budget)
            if why_not_ready(head, house) is not None or why_not_fit(head, need, house) is not None:
                return
            while not self._start(head, budget):
                if not less_urgent:
                    return
                self._preempt(less_urgent.pop())

    # Booking results.

    def _take_launched(self, step: ScheduledStep, result_id: int) -> Draft:
        oldest = next(iter(self._launched), None)
        if not step.step_id == result_id == oldest:
            raise RuntimeError(f"step {step.step_id} booked with result {result_id}, but step {oldest} is next")
        return self._launched.pop(step.step_id)

    def _accept(
        self, sequence: LiveSequence, sampled: SampledTokens | None, now: float, end: int | None = None
    ) -> SequenceOutput:
        """Append the sampled tokens up to the end of the sequence, if it comes. With an `end` the K/V of so many tokens was
        computed for the first of them, and one more for each that follows: believed here."""
        if sampled is None or not sampled.token_ids:
            return self._end_with_error(sequence, NO_TOKEN)
        matcher = sequence.matcher
        if matcher is not None and matcher.error is not None:  # It gave no mask for this token.
            return self._end_with_error(sequence, matcher.error)
        reason, count = None, 0
        for token in sampled.token_ids:
            if end is not None:
                self._confirm(sequence, end + count)
            reason = append_token(sequence, token)
            count += 1
            if reason is not None:
                break
        self._counters.totals.generation_tokens += count
        timing = sequence.timing
        timing.first_token = timing.first_token or now
        timing.last_token = now
        if reason is not None:
            self._end(sequence, reason)
        logprobs = None if sampled.logprobs is None else sampled.logprobs[:count]
        return news(sequence, sampled.token_ids[:count], logprobs, None if matcher is None else matcher.error)
