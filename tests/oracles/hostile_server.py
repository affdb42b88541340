"""`samovar serve` as a process of its own, and a stream whose pauses are measured while others ask for hard things."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

from tests.server.wire import COMPLETIONS

START_SECONDS = 90


@contextmanager
def served(model: Path, log: Path) -> Iterator[httpx.Client]:
    """A client of a real server of this model until the block ends."""
    flags = "--port 0 --device cpu --dtype float32 --memory 600MiB --threads 1".split()
    with log.open("w") as out:
        command = [sys.executable, "-m", "samovar", "serve", str(model), *flags]
        child = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        with httpx.Client(base_url=_address(child, log), timeout=60) as http:
            yield http
    finally:
        child.terminate()
        try:
            child.wait(30)
        finally:
            child.kill()
            child.wait()


def _address(child: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and child.poll() is None:
        if found := re.search(r"is ready: .* on (\S+) after", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


class ControlStream:
    """A stream of tokens, read on a thread: when each piece came."""

    def __init__(self, http: httpx.Client, *, max_tokens: int) -> None:
        self.times: list[float] = []
        self._url, self._max_tokens = http.base_url, max_tokens
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="control-stream")

    def __enter__(self) -> ControlStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=60) as own, own.stream("POST", COMPLETIONS, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())
                if self._is_over.is_set():
                    return

    def largest_gap(self, begin: float, end: float) -> float:
        """The longest pause between two pieces in this time; all of it if none came."""
        times = [begin, *(at for at in self.times if begin <= at <= end), end]
        return max(later - earlier for earlier, later in pairwise(times))
