"""A server under Poisson arrivals while a very long prompt comes every few seconds: who waits how long for each token.

    PYTHONPATH=. python3 benchmarks/gpu/serve_load.py CONFIGDIR [--rates 4 16 64] [flags of `samovar serve`]

Starts `samovar serve` on a private socket with random weights, and a tokenizer made here in which every id is a word of
its own, so that every token reaches the client as one event. The client is a bare protocol: at 64 requests a second it
takes eight thousand events a second and a small part of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from samovar.cli.bench.figures import percentile
from samovar.cli.local_server import local_server
from samovar.cli.output import table

DRAIN_SECONDS = 120.0
"""How long requests may take to end once no new ones come."""
MARK = b" ~"
"""What every word begins with, and nothing else in an answer has."""
WARM_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""How many requests are sent side by side before the clock starts, so that what is made on first use is there."""


@dataclass(slots=True)
class Heard:
    """One request as its client heard it; seconds."""

    is_long: bool
    asked: int
    start: float = 0.0
    at: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Until the first token."""
        return self.at[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Between one token and the next."""
        return [later - earlier for earlier, later in zip(self.at, self.at[1:])]


class Listener(asyncio.Protocol):
    """Sends one request and notes when each token comes."""

    def __init__(self, body: bytes, heard: Heard, done: asyncio.Future[None]) -> None:
        self.body, self.heard, self.done = body, heard, done
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the whole request at once."""
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        self.heard.start = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(head.encode() + self.body)

    def data_received(self, data: bytes) -> None:
        """Count the words in what came: a busy server puts several into one event. A cut event counts when it is whole."""
        now = time.perf_counter()
        whole, end, self.rest = (self.rest + data).rpartition(b"\n\n")
        if not end:
            return
        self.heard.at += [now] * whole.count(MARK)
        if b'"error"' in whole:
            self.heard.error = whole[whole.index(b'"error"') :][:200].decode("utf-8", "replace")

    def connection_lost(self, error: Exception | None) -> None:
        """The server closes when the answer is over."""
        if not self.heard.error and len(self.heard.at) != self.heard.asked:
            said = self.rest[:200].decode("utf-8", "replace")
            self.heard.error = f"{len(self.heard.at)} of {self.heard.asked} tokens came; {error or said!r}"
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to where."""

    uds: str
    model: str
    vocab: int
    prompt: int
    spread: int
    output: int
    long_prompt: int
    long_output: int
    every: float

    def body(self, rng: random.Random, *, is_long: bool) -> tuple[bytes, Heard]:
        """One request of random ids, ready to be sent."""
        length = self.long_prompt if is_long else rng.randint(self.prompt - self.spread, self.prompt + self.spread)
        count = self.long_output if is_long else self.output
        content = {
            "model": self.model,
            "prompt": rng.choices(range(10, self.vocab), k=length),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(content, separators=(",", ":")).encode(), Heard(is_long, count)


async def send(load: Load, body: bytes, heard: Heard) -> Heard:
    """One request, to its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.create_unix_connection(lambda: Listener(body, heard, done), load.uds)
    try:
        await asyncio.wait_for(done, DRAIN_SECONDS)
    except TimeoutError:
        heard.error = f"not over after {DRAIN_SECONDS:.0f} s"
    finally:
        transport.abort()
    return heard


def arrivals(load: Load, rate: float, seconds: float, seed: int) -> list[tuple[float, bytes, Heard]]:
    """(when, body, record) in order of time: a Poisson process of short prompts, and the long ones at their intervals."""
    rng, due, made = random.Random(seed), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        made.append((due, *load.body(rng, is_long=False)))
    if load.long_prompt:
        for index in range(int(seconds / load.every)):
            made.append(((index + 0.5) * load.every, *load.body(rng, is_long=True)))
    return sorted(made, key=lambda item: item[0])


async def play(load: Load, rate: float, seconds: float, seed: int) -> tuple[list[Heard], float, float]:
    """Send everything at its time; (records, seconds until the last ended, latest that a request was sent too late)."""
    planned = arrivals(load, rate, seconds, seed)
    began, tasks, latest = time.perf_counter() + 0.05, [], 0.0
    for due, body, heard in planned:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        latest = max(latest, time.perf_counter() - began - due)
        tasks.append(asyncio.create_task(send(load, body, heard)))
    records = list(await asyncio.gather(*tasks))
    return records, time.perf_counter() - began, latest


async def warm(load: Load) -> None:
    """Everything that is made on first use is made: short batches of many sizes, and one long prompt."""
    rng = random.Random(99)
    for size in WARM_SIZES:
        await asyncio.gather(*(send(load, *load.body(rng, is_long=False)) for _ in range(size)))
    if load.long_prompt:
        await send(load, *load.body(rng, is_long=True))


def row(rate: float, records: list[Heard], seconds: float, latest: float) -> list[str]:
    """The figures of one rate; milliseconds."""
    good = [one for one in records if not one.error]
    short, long = [one for one in good if not one.is_long], [one for one in good if one.is_long]
    ttft, gaps = [one.ttft for one in short], [gap for one in short for gap in one.gaps]
    long_ttft, long_gaps = [one.ttft for one in long], [gap for one in long for gap in one.gaps]

    def ms(values: list[float], *percents: float) -> str:
        return " / ".join(f"{1000 * percentile(values, percent):.1f}" for percent in percents)

    return [
        f"{rate:g}",
        f"{len(short)} + {len(long)}",
        str(len(records) - len(good)),
        f"{sum(len(one.at) for one in good) / seconds:,.0f}",
        ms(ttft, 50, 99),
        ms(gaps, 50, 99, 100),
        ms(long_ttft, 50, 100),
        ms(long_gaps, 50, 99),
        f"{1000 * latest:.1f}",
    ]


HEAD = [
    "req/s",
    "done + long",
    "errors",
    "tok/s",
    "TTFT p50 / p99 ms",
    "ITL p50 / p99 / max ms",
    "long: TTFT p50 / max",
    "long: ITL p50 / p99",
    "client late",
]


@contextmanager
def spoken_model(folder: Path) -> Iterator[tuple[Path, int]]:
    """(a folder with the model's config.json and a tokenizer whose every id is a word, vocabulary)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocab = int(config["vocab_size"])
    with tempfile.TemporaryDirectory(prefix="samovar-load-") as made:
        place = Path(made) / folder.name
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = [f"Ġ~{index}" for index in range(vocab)]
        model = {"type": "BPE", "vocab": {word: index for index, word in enumerate(words)}, "merges": []}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level,
                     "post_processor": None, "decoder": level, "model": model}  # fmt: skip
        (place / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        yield place, vocab


async def measure(load: Load, options: argparse.Namespace) -> list[list[str]]:
    """Warm up, then one row per rate."""
    began = time.perf_counter()
    await warm(load)
    print(f"warmed in {time.perf_counter() - began:.1f} s", flush=True)
    rows, errors = [], []
    for seed, rate in enumerate(options.rates):
        records, seconds, latest = await play(load, rate, options.seconds, seed)
        rows.append(row(rate, records, seconds, latest))
        errors += [one.error for one in records if one.error]
        print("  ".join(rows[-1]), flush=True)
    for error in sorted(set(errors))[:5]:
        print(f"error: {error}")
    return rows


def main() -> None:
    """Read the words, serve, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="folder with a config.json")
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 16, 64], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="how long requests arrive at each rate")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--spread", type=int, default=128, help="prompts are this much shorter or longer")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--long-prompt", type=int, default=32768, help="0 for none")
    parser.add_argument("--long-output", type=int, default=64)
    parser.add_argument("--every", type=float, default=5, help="seconds between long prompts")
    options, flags = parser.parse_known_args()
    # The client's own loop must not be what is measured.
    if importlib.util.find_spec("uvloop") is not None:
        asyncio.set_event_loop_policy(importlib.import_module("uvloop").EventLoopPolicy())
    with spoken_model(options.config) as (folder, vocab):
        words = [str(folder), "--load-format", "dummy", "--served-model-name", "load", *flags]
        if not any(flag.startswith("--max-model-len") for flag in flags):
            words += ["--max-model-len", str(max(options.long_prompt, options.prompt + options.spread) + 1024)]
        began = time.perf_counter()
        with local_server(words, ready_seconds=300) as address:
            print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
            assert address.uds is not None
            load = Load(
                address.uds, "load", vocab, options.prompt, options.spread, options.output, options.long_prompt,
                options.long_output, options.every,
            )  # fmt: skip
            rows = asyncio.run(measure(load, options))
    print(table([HEAD, *rows], right=range(len(HEAD)), indent=""))


if __name__ == "__main__":
    main()
