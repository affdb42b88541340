"""EngineChild: starts one engine process, talks to it, and makes sure that it ends. Torch-free, asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from samovar.config.engine import EngineConfig
from samovar.core.messages import EngineMessage, FrontEndMessage, decode_engine, encode

logger = logging.getLogger(__name__)

ENTRY = "samovar.engine.process"
"""The module that is run as the engine process."""

KILL_SECONDS = 5.0
"""How long a killed process may take to be gone."""


class EngineChild:
    """One engine process, from start to reaped, and the socket to it.

    The socket is made in a directory that only this user can enter. On Linux its name is gone again before the child
    starts, which gets a descriptor of it instead: nothing is left behind however we end. Standard input of the child
    stays open as the sign that we live.
    """

    def __init__(self, config: EngineConfig, *, entry: str = ENTRY, log_level: str = "INFO") -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="samovar-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        path = self._directory / "engine"
        self._socket.bind(f"ipc://{path}")
        setup = {"address": f"ipc://{path}", "parent": os.getpid(), "config": config, "log_level": log_level}
        if sys.platform != "linux":
            self._process = self._spawn(entry, setup, ())
            return
        # O_PATH names the socket itself; opened through /proc it is found even when it has no name any more.
        descriptor = os.open(path, os.O_PATH)
        shutil.rmtree(self._directory)
        try:
            self._process = self._spawn(entry, setup | {"address": f"ipc:///proc/self/fd/{descriptor}"}, (descriptor,))
        finally:
            os.close(descriptor)

    def _spawn(self, entry: str, setup: dict[str, Any], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
        # Its own session: a Ctrl-C or Ctrl-Z in the terminal reaches only us, and we decide what becomes of it.
        process = subprocess.Popen(
            [sys.executable, "-m", entry],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=descriptors,
        )
        assert process.stdin is not None
        body = msgspec.msgpack.encode(setup)
        try:
            process.stdin.write(len(body).to_bytes(8, "little") + body)
            process.stdin.flush()
        except BrokenPipeError:
            logger.warning("engine process %d ended before it read its set-up", process.pid)
        return process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """True if a signal froze the process (SIGSTOP, a debugger). Known on Linux only."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b") ")[2][:1] in (b"T", b"t")

    def send(self, message: FrontEndMessage) -> None:
        """Queue one message for the engine; never blocks, and is lost if the process is gone."""
        sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
        sent.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # Lost: nothing for asyncio to report.

    async def receive(self) -> EngineMessage:
        """The next message of the engine."""
        return decode_engine(await self._socket.recv())

    async def wait(self, timeout: float) -> bool:
        """Wait until the process ended by itself; False if it still runs after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self.exit_status is None:
            if loop.time() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def destroy(self) -> None:
        """Kill the process if it still runs, reap it, and remove the socket."""
        if self.exit_status is None:
            self._process.kill()
            if not await self.wait(KILL_SECONDS):
                logger.error("engine process %d does not die", self.pid)
        self.release()

    def end(self) -> None:
        """Kill the process if it still runs and nobody awaits it; nothing after `destroy`."""
        if not self._socket.closed:
            self._process.kill()
            self._process.wait()
            self.release()

    def release(self) -> None:
        """Close what this side holds; the child, should it still run, ends at the closed pipe."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _has_descriptor() -> bool:
    """Whether standard error is a real file (it is not under some test runners and notebooks)."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return False
    return True
