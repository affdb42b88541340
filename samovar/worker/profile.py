"""Profile: what torch's profiler notes of the steps between two calls, as a trace file for a browser."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from samovar.errors import ConflictError, ValidationError

PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What may name a file, before the time."""


class Profile:
    """At most one profile at a time, written to `directory`. Belongs to the thread that runs steps."""

    def __init__(self, directory: str | None, device: torch.device) -> None:
        self._directory = directory
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: torch.profiler.profile | None = None
        self._path = Path()

    def start(self, prefix: str = "") -> None:
        """Begin. Raises `ConflictError` without a directory or while another one is under way."""
        if self._directory is None:
            raise ConflictError("profiling is off: start with --profiler-dir DIRECTORY")
        if self._running is not None:
            raise ConflictError("a profile is under way: stop it first (stop_profile)")
        if prefix and not PREFIX.fullmatch(prefix):
            message = f"prefix must be at most 64 letters, digits, dots, dashes or underscores, got {prefix!r}"
            raise ValidationError(message, parameter="prefix", value=prefix)
        folder = Path(self._directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConflictError(f"--profiler-dir {folder}: {error}") from error
        self._path = folder / f"{prefix or 'samovar'}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06}.json"
        self._running = torch.profiler.profile(activities=self._activities)
        self._running.start()

    def stop(self) -> str:
        """End it and write the file; returns its path. Raises `ConflictError` if none is under way."""
        running, self._running = self._running, None
        if running is None:
            raise ConflictError("no profile is under way: start one first (start_profile)")
        running.stop()
        running.export_chrome_trace(str(self._path))
        return str(self._path)
