"""A server process over the scripted engine: `python -m tests.server.serve_scripted SHUTDOWN_TIMEOUT LOAD_SECONDS`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop

from samovar.config.groups import ServerConfig
from samovar.server.run import ready_text, run_until_signal
from samovar.server.sockets import address_of, open_socket
from samovar.server.state import ServingState
from samovar.text.chat_template import load_chat_template
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.scripted_engine import ScriptedEngine, engine_facts, write_model


async def main(shutdown_timeout: float, load_seconds: float) -> None:
    config = ServerConfig(port=0, shutdown_timeout=shutdown_timeout)
    listener = open_socket(config)
    state = ServingState(config)
    engine: list[ScriptedEngine] = []

    async def load() -> None:
        print(f"listening on {address_of(listener)}", flush=True)
        await asyncio.sleep(load_seconds)
        if load_seconds < 0:
            raise ValueError("cannot load")
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder))
            preparer = Preparer(load_tokenizer(model), load_chat_template(model), limits_from(engine_facts()), [258])
        engine.append(ScriptedEngine(lambda r, i: [5] * 400, step_seconds=0.01))
        state.attach(engine[0], preparer)
        print(ready_text(config, address_of(listener), "tiny", True, load_seconds), flush=True)

    await run_until_signal(state, listener, load)
    for one in engine:
        await one.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(float(sys.argv[1]), float(sys.argv[2])))
