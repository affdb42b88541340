"""A few side processes, started when first needed, ended at their deadline, and started again."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from samovar.errors import OverloadedError
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.side_main import Opening, Task, Verdict, read_frame, write_frame
from samovar.grammar.tokens import Vocabulary

START_SECONDS = 60.0
"""For Python, llguidance and its table of the vocabulary on a busy machine."""

WAIT_SECONDS = 30.0
"""How long a request waits for a process others keep busy."""


class SideProcess:
    """One process that compiles. Not for two threads at once."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "samovar.grammar.side_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        opening = Opening(
            vocabulary.tokens,
            vocabulary.special_ids,
            vocabulary.eos_ids,
            limits.memory_bytes,
            limits.deadline_seconds,
            limits.build_seconds,
        )
        if self._ask(msgspec.msgpack.encode(opening), START_SECONDS) is None:
            self.end()
            raise OverloadedError("the process that compiles grammars does not start", reason="grammar")

    @property
    def is_alive(self) -> bool:
        """The process has not ended since its last task."""
        return self._process.poll() is None

    def run(self, task: Task, seconds: float) -> Verdict | None:
        """The verdict; None if there was none in time, or the process died of the task. It is over then.

        Raises `OverloadedError` if somebody else killed it, which says nothing about the task.
        """
        verdict = self._ask(msgspec.msgpack.encode(task), seconds)
        if verdict is None:
            was_killed = self._has_died_of(signal.SIGKILL)
            self.end()
            if was_killed:
                raise OverloadedError("the process that compiles grammars was killed; try again", reason="grammar")
        return verdict

    def _has_died_of(self, number: signal.Signals) -> bool:
        """Whether a signal ended the process; one that still runs has not died."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the end of its pipe may be seen before its own
            self._process.wait(timeout=0.1)
        return self._process.returncode == -number

    def end(self) -> None:
        """Kill the process and collect it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be sent has nobody to go to
                    pipe.close()
        self._process.wait()

    def _ask(self, message: bytes, seconds: float) -> Verdict | None:
        process = self._process
        if process.stdin is None or process.stdout is None:
            return None
        try:
            write_frame(process.stdin, message)
        except OSError:
            return None
        answer = select.poll()
        answer.register(process.stdout, select.POLLIN)
        frame = read_frame(process.stdout) if answer.poll(1000 * seconds) else None
        return None if frame is None else msgspec.msgpack.decode(frame, type=Verdict)


class SidePool:
    """At most `limits.processes` side processes. Safe to use from many threads; each task has one process to itself."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._idle: list[SideProcess] = []
        self._slots = threading.Semaphore(limits.processes)
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, task: Task) -> Verdict | None:
        """The verdict on a task; None if it takes too long or too much memory."""
        if not self._slots.acquire(timeout=WAIT_SECONDS):
            message = f"no process was free to compile the grammar within {WAIT_SECONDS:g} s; try again"
            raise OverloadedError(message, reason="grammar")
        try:
            if self._is_closed:  # those who waited for their turn need not start anything now
                raise OverloadedError("the server is shutting down", reason="grammar")
            process = self._take()
            verdict = process.run(task, self._limits.deadline_seconds)
            with self._lock:
                if verdict is not None and not self._is_closed:
                    self._idle.append(process)
                    return verdict
            process.end()
            return verdict
        finally:
            self._slots.release()

    def warm(self) -> None:
        """Start one process before it is needed."""
        self.run(Task("check", 'start: "a"'))

    def close(self) -> None:
        """End every process. Tasks that run now end by themselves."""
        with self._lock:
            self._is_closed = True
            processes, self._idle = self._idle, []
        for process in processes:
            process.end()

    def _take(self) -> SideProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return SideProcess(self._vocabulary(), self._limits)
