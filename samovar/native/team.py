"""A team of threads that runs lists of instructions: one call a model step, without the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from samovar.native.abi import CInstruction, CStep
from samovar.native.library import ERROR_BYTES, Library, NativeError, load


class Team:
    """`num_threads` threads, the caller's included, on one instruction set; None: the best of this machine.

    One thread may run at a time. `cpus` pins thread n to cpus[n], but for the caller's, which is left alone: what it
    starts later would inherit the pin.
    """

    def __init__(
        self, num_threads: int, isa: str | None = None, cpus: Sequence[int] | None = None,
        library: Library | None = None,
    ) -> None:  # fmt: skip
        self._address: int | None = None
        self.library = library or load()
        self.num_threads = num_threads
        if cpus is not None and len(cpus) != self.num_threads:
            raise NativeError(f"cpus names {len(cpus)} processors for {self.num_threads} threads; name one a thread")
        places = None if cpus is None else (ctypes.c_int32 * len(cpus))(*cpus)
        name = None if isa is None else isa.encode()
        create = self.library.functions.samovar_team_create
        self._address, why = self.library.checked(create, self.num_threads, places, name)
        if not self._address:
            raise NativeError(why)
        self.isa: str = self.library.functions.samovar_team_isa(self._address).decode()
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        self._run = self.library.functions.samovar_run

    def run(self, instructions: ctypes.Array[CInstruction], step: CStep) -> None:
        """Run a list of instructions, which must stay unchanged until `forget` or `close`; NativeError if refused."""
        if self._address is None:
            raise NativeError("this team is closed; make another")
        if self._run(self._address, instructions, len(instructions), ctypes.byref(step), self._error, ERROR_BYTES):
            raise NativeError(self._error.value.decode(errors="replace"))

    def forget(self) -> None:
        """Return once no thread can look at instructions that were run before; they may be freed then."""
        self.library.functions.samovar_forget(self._address)

    def report(self) -> dict[str, Any]:
        """Since the last report: seconds the caller waited for others, seconds of all runs, runs; threads in use now."""
        waited, ran = ctypes.c_double(), ctypes.c_double()
        runs, threads = ctypes.c_int64(), ctypes.c_int32()
        places = [ctypes.byref(value) for value in (waited, ran, runs, threads)]
        self.library.functions.samovar_team_report(self._address, *places)
        return {"waited": waited.value, "ran": ran.value, "runs": runs.value, "threads_in_use": threads.value}

    @property
    def num_bytes(self) -> int:
        """Memory that the runs so far made the team hold, shared and per thread."""
        return int(self.library.functions.samovar_team_bytes(self._address))

    def close(self) -> None:
        """End the threads and free their memory. May be called twice."""
        if self._address:
            self.library.functions.samovar_team_destroy(self._address)
            self._address = None

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def make_team(num_threads: int, isa: str | None = None) -> Team:
    """A team for a worker; `isa` None means the best instruction set of the machine."""
    return Team(num_threads, isa)
