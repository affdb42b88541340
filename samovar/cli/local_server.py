"""A server of our own for the length of a command: `samovar serve` as a child, on a private Unix socket."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samovar.cli.http_stream import Address, RequestRefused, ServerUnreachable, get_json
from samovar.errors import EngineDeadError

_SET_PARENT_DEATH_SIGNAL = 1
STOP_SECONDS = 10.0


@contextmanager
def local_server(words: Sequence[str], *, ready_seconds: float = 600.0) -> Iterator[Address]:
    """Start `samovar serve WORDS`, wait until it is ready, and stop it at the end; it ends with us in any case.

    Raises `EngineDeadError` with the server's last words if it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="samovar-") as folder:
        address = Address(uds=f"{folder}/api")
        log = Path(folder) / "log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [sys.executable, "-m", "samovar", "serve", *words, "--uds", f"{folder}/api"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 (no threads yet)
            )
        try:
            _wait_until_ready(child, address, log, ready_seconds)
            yield address
        finally:
            child.terminate()
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _die_with_parent() -> None:
    """In the child: be told to stop when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _wait_until_ready(child: subprocess.Popen[bytes], address: Address, log: Path, seconds: float) -> None:
    import asyncio

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if child.poll() is not None:
            raise EngineDeadError(f"the server did not start:\n{_last_words(log)}")
        try:
            asyncio.run(get_json(address, "/ready"))
            return
        except (ServerUnreachable, RequestRefused):
            time.sleep(0.05)
    raise EngineDeadError(f"the server was not ready after {seconds:.0f} s:\n{_last_words(log)}")


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:])
