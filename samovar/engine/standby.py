"""Standby: pausing and sleeping. Whether an engine makes steps, and which of its memory is given away meanwhile.

Paused, an engine makes no steps. Asleep, it has also given back its cache (its requests compute their K/V again after
waking), and from level 1 on its weights. Every change waits for the steps that are under way, whose news are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from samovar.core.outputs import SequenceOutput
from samovar.engine.executor import Executor
from samovar.errors import CheckpointError, ConflictError
from samovar.schedule.scheduler import Scheduler

TAGS = ("weights", "kv_cache", "scheduling")
"""What `wake_up` can be asked for."""


class Stepping(Protocol):
    """What the engine does for its standby."""

    def settle(self) -> None:
        """Book every step that is under way."""
        ...

    def run_dry(self) -> None:
        """Make steps until no request is left."""
        ...

    def tell(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hand out these outputs with the next step's."""
        ...


class Standby:
    """One engine's state. `sign` is called now and then while something takes long."""

    def __init__(self, executor: Executor, scheduler: Scheduler, stepping: Stepping) -> None:
        self._executor, self._scheduler, self._stepping = executor, scheduler, stepping
        self.sign: Callable[[], None] = lambda: None
        self.is_paused = False
        self.refuses: str | None = None
        """Why new requests are not wanted."""
        self._level: int | None = None  # None: awake.
        self._missing: set[str] = set()

    @property
    def is_asleep(self) -> bool:
        """Also while something is missing still."""
        return self._level is not None

    @property
    def state(self) -> str:
        """In a word, for people."""
        if self._level is not None:
            return f"asleep (level {self._level})"
        return "paused" if self.is_paused else "running" if self.refuses is None else "pausing"

    def is_dry(self, mode: str) -> bool:
        """Whether a pause of this mode can begin. One that waits keeps new requests out from now on."""
        if mode != "wait" or self.is_paused:
            return True
        self.refuses = "the engine is being paused"
        return not self._scheduler.has_work

    def pause(self, mode: str) -> None:
        """Make no more steps; what becomes of live requests is `mode`'s to say."""
        if mode == "abort":
            self._stepping.tell(self._scheduler.abort_all())
        elif mode == "wait" and not self.is_paused:
            self._stepping.run_dry()
        self._stepping.settle()
        self.is_paused = True
        if self._level is None:
            self.refuses = None if mode == "keep" else "the engine is paused; resume it first"

    def resume(self) -> None:
        """Make steps again. Raises `ConflictError` while the engine sleeps."""
        if self._missing:
            raise ConflictError(f"the engine is {self.state} and has no {' and no '.join(self._absent())}: wake it up")
        self.is_paused, self.refuses, self._level = False, None, None

    def sleep(self, level: int, mode: str) -> None:
        """Pause, and give memory back."""
        was_paused, refused = self.is_paused, self.refuses
        self.pause(mode)
        if level:
            self.release_cache()
            try:
                self._executor.call("release_weights", level, sign=self.sign)
            except (ConflictError, MemoryError, RuntimeError) as error:
                if self._level is None:  # It was awake, and there was no room to sleep: as if nothing had been asked.
                    self._restore(["kv_cache"])
                    self.is_paused, self.refuses = was_paused, refused
                raise ConflictError(f"the engine cannot sleep: {error or type(error).__name__}") from error
            if not self._executor.call("holds_weights"):
                self._missing.add("weights")
        self._level = max(level, self._level or 0)
        self.refuses = f"the engine is {self.state}; wake it up first"

    def release_cache(self) -> int:
        """Give the cache's memory back; the engine must be paused. Returns bytes."""
        self._scheduler.reset_prefix_cache(reset_running=True)
        self._missing.add("kv_cache")
        return int(self._executor.call("release_cache"))

    def doze(self, mode: str) -> int:
        """Pause and give the cache back, but not the weights; returns bytes."""
        self.pause(mode)
        freed = self.release_cache()
        self._level = self._level or 0
        self.refuses = f"the engine is {self.state} and has no K/V cache; wake it up first"
        return freed

    def wake(self, tags: Iterable[str]) -> bool:
        """Bring back what is missing of `tags`, weights first; go on if then nothing is. Raises `ConflictError` if there
        is no memory for it, or the checkpoint cannot be read any more: the engine sleeps on."""
        if self._level is None:
            return True
        self._restore(tags)
        if self._missing:
            return False
        self.resume()
        return True

    def _restore(self, tags: Iterable[str]) -> None:
        for tag in ("weights", "kv_cache"):
            if tag in tags and tag in self._missing:
                verb = "restore_weights" if tag == "weights" else "restore_cache"
                try:
                    self._executor.call(verb, sign=self.sign)
                except (MemoryError, RuntimeError, OSError, CheckpointError) as error:
                    # torch's out-of-memory error is a RuntimeError. Whatever it was, it can be tried again.
                    raise ConflictError(f"the engine cannot wake up: {error or type(error).__name__}") from error
                self._missing.discard(tag)

    def _absent(self) -> list[str]:
        return [{"weights": "weights", "kv_cache": "K/V cache"}[tag] for tag in TAGS if tag in self._missing]
