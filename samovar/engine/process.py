"""The engine process: `python -m samovar.engine.process`, started by `engine.child` and by nobody else.

It reads one `EngineSetup` (msgpack, length first) from standard input, connects to the socket named there, reports the
phases of start-up, and then runs the engine loop. It never outlives its parent: the kernel kills it when the parent
dies (Linux), and a thread that watches standard input ends it at end of file (everywhere), from before torch is
imported. SIGINT and SIGTERM are ignored: when to stop is the parent's decision.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import struct
import sys
import threading

import msgspec
import zmq

from samovar.config.engine import EngineConfig
from samovar.core.collector import collector_paused
from samovar.core.messages import EngineMessage, Failed, FrontEndMessage, Ready, Starting, decode_front_end, encode
from samovar.engine.build import EngineBuilder, build_engine
from samovar.engine.loop import EngineLoop
from samovar.errors import SamovarError

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<Q")
"""Length of the set-up message on standard input."""

PR_SET_PDEATHSIG = 1
SECONDS_TO_FLUSH = 2.0
"""How long the last messages may take to leave the socket."""


class EngineSetup(msgspec.Struct, frozen=True):
    """What the parent tells its engine process: the socket to connect to, its own pid, and the configuration."""

    address: str
    parent: int
    config: EngineConfig
    log_level: str = "INFO"


class SocketChannel:
    """The engine's end of the socket. Messages are msgpack; nothing is ever unpickled."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def receive(self, timeout: float | None) -> list[FrontEndMessage]:
        """Every message that is there, after waiting up to `timeout` seconds for the first."""
        messages: list[FrontEndMessage] = []
        if not self._socket.poll(None if timeout is None else int(timeout * 1000)):
            return messages
        while True:
            try:
                messages.append(decode_front_end(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: EngineMessage) -> None:
        """Queue one message; never blocks."""
        self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Flush for a moment, then close."""
        self._socket.close(linger=int(SECONDS_TO_FLUSH * 1000))
        self._context.term()


def die_with_parent(parent: int) -> None:
    """Arrange that this process ends when `parent` does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_standard_input() -> None:
    """End the process at end of file: the parent holds the other end and never writes again."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def read_setup() -> EngineSetup:
    """The set-up message from standard input."""
    length = LENGTH.unpack(_read_exactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(_read_exactly(length), type=EngineSetup)


def _read_exactly(count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(0, count - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return bytes(parts)


def serve(config: EngineConfig, channel: SocketChannel, build: EngineBuilder) -> int:
    """Build the engine, say it is ready, and run it; returns the exit status."""
    try:
        with collector_paused():
            engine, info = build(config, lambda phase: channel.send(Starting(phase)))
        # What start-up made stays for good: the collector need not look at it again, and pauses stay short.
        gc.collect()
        gc.freeze()
        channel.send(Ready(info))
        EngineLoop(engine, channel).run()
    except SamovarError as error:
        channel.send(Failed(kind=type(error).__name__, message=str(error)))
        return 1
    except Exception as error:
        # The outermost border of the process: the parent gets a reason instead of silence, and we exit.
        logger.exception("the engine failed")
        channel.send(Failed(kind="EngineDeadError", message=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def main(build: EngineBuilder = build_engine) -> None:
    """Entry of the engine process; never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup = read_setup()
    die_with_parent(setup.parent)
    threading.Thread(target=watch_standard_input, name="watch-parent", daemon=True).start()
    logging.basicConfig(level=setup.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = SocketChannel(setup.address)
    status = serve(setup.config, channel, build)
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Straight out: interpreter shutdown would wait for a worker thread that may be in the middle of a long step.
    os._exit(status)


if __name__ == "__main__":
    main()
