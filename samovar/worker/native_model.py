"""NativeModel: a lowered model on a team of threads. A step is one call of the library, whatever it computes."""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.layers.lower import (
    Body,
    CannotLower,
    Instruction,
    Program,
    Value,
    lower,
    matrices_of,
    norm_instruction,
    padded,
    weight_of,
)
from samovar.models.decoder import DecoderLM
from samovar.native.abi import CInstruction, Count, CRegister, Op
from samovar.native.team import Team
from samovar.worker.native_inputs import StepInputs

Rows = Literal["every", "last"]
"""Which rows come out: every one of the step, or the last one of each sequence that samples."""
Tail = Literal["hidden", "logits", "argmax"]
"""What comes out of them; "argmax" gives the logits, too."""

LOGITS, HIDDEN = 0, 1
"""Registers that every program has."""


class NativeModel:
    """The programs of a loaded model whose layers have been given their cache, and the memory they run in.

    `inputs` are the integers of the step to run. There is memory for `max_tokens` of them, and more once a step has more;
    at most `logits_rows` rows of logits are computed at once. Belongs to one thread.
    """

    def __init__(self, lowered: Lowered, team: Team, inputs: StepInputs, *, max_tokens: int, logits_rows: int) -> None:
        self._lowered, self._team, self.inputs, self.logits_rows = lowered, team, inputs, logits_rows
        self._logits = torch.empty(logits_rows, lowered.logits.width)
        self._assemble(max_tokens)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._lowered.logits.width

    def hidden(self, rows: Rows) -> torch.Tensor:
        """Hidden states after the final norm, [rows, hidden]: as the family's own code gives them."""
        count = self.inputs.num_tokens if rows == "every" else self.inputs.num_rows
        hidden = torch.empty(count, self._lowered.body.hidden_size)
        self._run(rows, "hidden", hidden)
        return hidden

    def logits(self, rows: Rows) -> torch.Tensor:
        """Logits of at most `logits_rows` rows, valid until the next step."""
        return self._logits[: self._run(rows, "logits")]

    def most_likely(self, rows: Rows) -> NDArray[np.int64]:
        """The id of each row's largest logit, -1 where it is not finite; valid until the next step."""
        return self.inputs.argmax_ids[: self._run(rows, "argmax")]

    def _run(self, rows: Rows, tail: Tail, hidden: torch.Tensor | None = None) -> int:
        """Run a program; returns how many rows come out."""
        inputs, step = self.inputs, self.inputs.step
        if inputs.num_tokens > self._max_tokens:
            self._assemble(inputs.num_tokens)
        if hidden is not None:
            self._registers[HIDDEN] = CRegister(hidden.data_ptr(), hidden.stride(0))
        step.registers = self._registers
        step.num_registers = len(self._registers)
        self._team.run(self._programs[rows, tail], step)
        return inputs.num_tokens if rows == "every" else inputs.num_rows

    def close(self) -> None:
        """Let go of programs and memory; nothing may be run any more."""
        self._team.forget()
        self._programs.clear()

    def _assemble(self, max_tokens: int) -> None:
        """Make memory and programs for steps of up to `max_tokens` tokens."""
        self._team.forget()
        self._max_tokens = max_tokens
        self._memory = torch.empty(self._lowered.columns * max_tokens)
        registers = [
            CRegister(self._logits.data_ptr(), self._logits.stride(0)),
            CRegister(None, self._lowered.body.hidden_size),
        ]
        self._programs = {key: self._assembled(program, registers) for key, program in self._lowered.programs.items()}
        self._registers = (CRegister * len(registers))(*registers)

    def _assembled(self, program: Program, registers: list[CRegister]) -> ctypes.Array[CInstruction]:
        """The library's form of a program; registers that it needs are added."""
        lowered, numbers, places = self._lowered, dict[Value, int](), program.places()[0]
        numbers.update({lowered.logits: LOGITS, lowered.hidden: HIDDEN})

        def number(value: Value | None) -> int:
            if value is None:
                return -1
            if value not in numbers:
                numbers[value] = len(registers)
                place = 4 * (places[value.root] * self._max_tokens + value.offset)
                registers.append(CRegister(self._memory.data_ptr() + place, padded(value.root.width)))
            return numbers[value]

        assembled = (CInstruction * len(program.instructions))()
        for target, instruction in zip(assembled, program.instructions, strict=True):
            target.op, target.rows = instruction.op, instruction.rows
            target.input[:] = _filled([number(value) for value in instruction.inputs], 4)
            target.output[:] = _filled([number(value) for value in instruction.outputs], 2)
            target.i[: len(instruction.i)] = instruction.i
            target.f[: len(instruction.f)] = instruction.f
            target.p[: len(instruction.p)] = [None if address is None else address() for address in instruction.p]
        return assembled


class Lowered:
    """Every program of a model that is bound with weights for the library; raises `CannotLower`.

    It outlives another `bind` of the same sizes: what weights and caches are is asked when it is assembled.
    """

    def __init__(self, model: DecoderLM) -> None:
        if type(model).logits is not DecoderLM.logits:
            raise CannotLower(f"{type(model).__name__} makes its logits in its own way")
        if model.lm_head.has_bias:
            raise CannotLower("its logits have a bias")
        self.body: Body = lower(model)
        self.logits, self.hidden = Value(model.config.vocab_size), Value(self.body.hidden_size)
        self.programs: dict[tuple[Rows, Tail], Program] = {}
        bodies: tuple[tuple[Rows, Program, Value, Count], ...] = (
            ("every", self.body.every, self.body.stream, Count.TOKENS),
            ("last", self.body.last, self.body.last_stream, Count.ROWS),
        )
        for rows, program, stream, count in bodies:
            head = _head(model, self.body, stream, self.logits, count)
            argmax = Instruction(Op.ARGMAX, (self.logits,), i=(self.logits.width,), rows=count)
            tails: dict[Tail, list[Instruction]] = {
                "hidden": [norm_instruction(self.body.final_norm, stream, self.hidden, count)],
                "logits": head,
                "argmax": [*head, argmax],
            }
            for tail, instructions in tails.items():
                kept = (self.logits, self.hidden)
                self.programs[rows, tail] = Program((*program.instructions, *instructions), kept)
        self.columns = max(program.places()[1] for program in self.programs.values())
        """Numbers for each token of a step that all values of a program take."""

    @property
    def num_instructions(self) -> int:
        """Of a step that gives tokens."""
        return len(self.programs["every", "argmax"].instructions)


def _head(model: DecoderLM, body: Body, stream: Value, logits: Value, rows: Count) -> list[Instruction]:
    """Final norm, output head and soft cap."""
    norm = body.final_norm
    p = (matrices_of(model.lm_head.table), None, weight_of(norm))
    product = Instruction(Op.LINEAR, (stream,), (logits,), i=(1, 0, stream.width, 1), f=(norm.eps,), p=p, rows=rows)
    cap = model.config.final_logit_softcapping
    if cap is None:
        return [product]
    return [product, Instruction(Op.SCALE_CAP, (logits,), (logits,), i=(logits.width,), f=(1.0, cap), rows=rows)]


def _filled(numbers: list[int], size: int) -> list[int]:
    return numbers + [-1] * (size - len(numbers))
