"""Answer a file of requests in OpenAI's batch form into another file, in order. Started again, it goes on where it stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, BinaryIO

from samovar.cli.described import fetch
from samovar.cli.output import ProgressLine
from samovar.config.engine import ENGINE_GROUPS, EngineConfig
from samovar.config.field import Group, field
from samovar.config.groups import ServerConfig, SourceConfig
from samovar.config.load import Settings
from samovar.config.rules import check_request, check_server
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.server.batch import LineReader
    from samovar.server.batch_files import BatchOutput, InputLine

USAGE = "samovar run-batch [MODEL] -i INPUT -o OUTPUT [flags]"
POSITIONAL = "model"
UNUSED = (
    "host", "port", "uds", "api_keys_file", "admin_port", "salt_by_key", "grpc_port", "grpc_host", "allowed_origins", "root_path",
    "shutdown_timeout", "sse_keep_alive_interval", "disable_docs",
)  # fmt: skip
"""Settings of a server that listens; here they would do nothing."""

STOPPED = "stopped; the same command goes on from here"


class RunBatchOptions(Group):
    """The files."""

    input_file: str = field(default="", flags=("-i",))
    """Local file of requests, one a line: custom_id, method, url and body as OpenAI's batch API has them. The urls are
    /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""
    output_file: str = field(default="", flags=("-o",))
    """Local file for the answers, in the order of the requests. If it has some of them, those are kept and not asked again."""
    overwrite: bool = field(default=False)
    """Answer everything afresh."""
    concurrency: int = field(default=256, ge=1, le=65536)
    """Requests in flight."""


OPTIONS = (RunBatchOptions, SourceConfig, *ENGINE_GROUPS.values(), ServerConfig)


def run(settings: Settings) -> int:
    """Answer what is not answered yet; exit code 1 if any answer is an error (its line says why)."""
    if idle := next((name for name in UNUSED if name in settings.given), None):
        flag = ServerConfig.settings[idle].flag
        raise ConfigError(f"{flag}: run-batch opens no port; leave it out, or use `samovar serve`")
    check_request(settings.engine)
    check_server(settings[ServerConfig])
    # The HTTP stack takes a quarter of a second to import: --help and wrong flags do not pay for it.
    from samovar.server.batch import LineReader
    from samovar.server.batch_files import open_input, open_output, read_lines

    options = settings[RunBatchOptions]
    # No keys: nobody but this process can call. With request ids every answer can be found in the log.
    server = dataclasses.replace(
        settings[ServerConfig],
        api_key=[],
        admin_api_key=[],
        enable_request_id_headers=True,
        log_level=settings[ServerConfig].log_level if "log_level" in settings.given else "warning",
    )
    with (
        open_input(options.input_file) as source,
        open_output(options.output_file, overwrite=options.overwrite, input_path=options.input_file) as output,
    ):
        lines = read_lines(source, longest_line(server))
        reader = LineReader()
        done = skip_answered(output, lines, reader)
        if done:
            print(f"{_lines(done)} answered already", file=sys.stderr)
        if not _is_at_end(source):
            fetch(settings.engine.model)
        logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with ProgressLine("batch", is_bytes=True) as progress:
            job = Job(options, source, lines, reader, output, progress)
            return until_stopped(settings.engine, server, job)


def until_stopped(config: EngineConfig, server: ServerConfig, job: Job) -> int:
    """The exit code of a run, which a signal may end early; what is answered by then is in the file."""
    try:
        return asyncio.run(answer(config, server, job))
    except asyncio.CancelledError:
        print(STOPPED, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise


def longest_line(server: ServerConfig) -> int:
    """Bytes of the longest line that is read whole."""
    from samovar.server.batch_files import LINE_EXTRA

    return server.max_body_bytes + LINE_EXTRA


def skip_answered(output: BatchOutput, lines: Iterator[InputLine], reader: LineReader) -> int:
    """Pass over the lines that have their answers; returns how many. Raises `ConfigError` for answers to other lines."""
    count = 0
    for line in output.match(lines):
        reader.read(line)  # for its custom_id
        count += 1
    return count


def _is_at_end(source: BinaryIO) -> bool:
    return source.tell() == os.fstat(source.fileno()).st_size


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What there is to do, and where it goes."""

    options: RunBatchOptions
    source: BinaryIO
    lines: Iterator[InputLine]
    reader: LineReader
    output: BatchOutput
    progress: ProgressLine


async def answer(config: EngineConfig, server: ServerConfig, job: Job) -> int:
    """Start the engine, answer, stop the engine; returns the exit code."""
    from samovar.engine.process_client import ProcessEngineClient
    from samovar.server.app import create_app
    from samovar.server.batch import BatchRun
    from samovar.server.run import load_model
    from samovar.server.state import ServingState

    if _is_at_end(job.source):
        return report(0, job.output.num_errors)
    client = ProcessEngineClient(config, engine_timeout=server.engine_timeout, log_level=server.log_level.upper())
    state = ServingState(server)
    state.names = state.names or [config.model.model]
    with suppress(NotImplementedError):  # event loops of some systems have no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, asyncio.current_task())
    async with AsyncExitStack() as at_end:
        at_end.push_async_callback(client.close)
        at_end.callback(state.close)
        preparer = await load_model(config, server, client)
        at_end.callback(preparer.close)
        state.attach(client, preparer)
        app = create_app(None, None, server, state=state)
        batch = BatchRun(app, job.reader, job.output, job.options.concurrency, lambda: state.status == "ready")
        total = os.fstat(job.source.fileno()).st_size
        await batch.run(job.lines, lambda count, at: job.progress(at, total))
    return report(batch.num_answered, job.output.num_errors)


def _stop(task: asyncio.Task[int] | None) -> None:
    if task is not None:
        task.cancel()


def report(answered: int, failed: int) -> int:
    """Say how it went; returns the exit code, which is about the whole file."""
    wrong = f"; {_lines(failed)} of the file ended in an error (`error` in the output says why)" if failed else ""
    print(f"{_lines(answered)} answered{wrong}", file=sys.stderr)
    return 1 if failed else 0


def _lines(count: int) -> str:
    return f"{count:,} line" + ("" if count == 1 else "s")
