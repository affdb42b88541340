"""Fills a bound model: from a checkpoint by running the plan in file order, or with reproducible dummy values."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.hardware import cpu
from samovar.hardware.stream import CudaStream
from samovar.layers.layer import Layer, Source
from samovar.layers.norm import RMSNorm
from samovar.weights.checkpoint import Checkpoint, Piece
from samovar.weights.plan import check_coverage, layers_of, plan
from samovar.weights.stream import stream_pieces

DUMMY_VALUES = 1_000_003
"""Length of the random pattern dummy weights repeat; a prime, so that rows of equal width differ."""
BIAS_INPUTS = 2500
"""What a dummy bias counts as the sum of: its values stay near 1 / 50, small beside what a matrix gives."""

LAYERS_AHEAD = 4
"""Layers that are read while one repacks."""
MOST_READERS = 8
"""Threads that read weights for a GPU: more do not make a disk or a bus faster."""
MOST_OF_MEMORY = 0.5
"""Part of the machine's memory that a checkpoint may leave in the page cache."""

Filling = tuple[Layer, list[Piece]]
"""A layer and everything that fills it."""
Progress = Callable[[int, int], None]
"""Called with (weights loaded, weights in all)."""


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, progress: Progress | None = None) -> None:
    """Copy every tensor the layers of `model` ask for, and let each layer repack once it has all of its own.

    A checkpoint that lacks something, holds something nobody reads, or does not fit is refused before the first byte
    (see `weights.plan`). A second copy of a tied weight must be equal to the first. Raises `CheckpointError`.
    """
    _check_copies(model, checkpoint)
    on_host, on_gpu = _by_device(_in_file_order(model, checkpoint))
    total, done = sum(piece.target.numel() for _, pieces in (*on_host, *on_gpu) for piece in pieces), 0

    def heard(piece: Piece) -> None:
        nonlocal done
        done += piece.target.numel()
        if progress is not None:
            progress(done, total)

    _copy_on_threads(checkpoint, on_host, heard)
    if on_gpu:
        streamed = [piece for _, pieces in on_gpu for piece in pieces]
        _stream_to_gpu(checkpoint, streamed, heard)
        _check_range(checkpoint, streamed)
        for layer, _ in on_gpu:
            layer.after_load()


def _check_copies(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Everything that can be said before weights are read."""
    sources, layers = plan(model, checkpoint.tensors), list(layers_of(model))
    for layer in layers:
        _check_tied(layer, sources, checkpoint)
        _check_zeros(layer, checkpoint)


def _by_device(work: Iterable[Filling]) -> tuple[deque[Filling], list[Filling]]:
    """What is filled on the host (for a GPU too, where only a part of what is read gets there), and on a GPU."""
    on_host, on_gpu = deque[Filling](), list[Filling]()
    for layer, pieces in work:
        is_gpu = bool(pieces) and all(piece.target.device.type == "cuda" for piece in pieces)
        (on_gpu if is_gpu else on_host).append((layer, pieces))
    return on_host, on_gpu


def _in_file_order(model: nn.Module, checkpoint: Checkpoint) -> list[Filling]:
    """Every layer and what fills it: layer by layer, as they begin in the file, so that few of them are unfinished."""
    tensors, work = checkpoint.tensors, []
    for layer in layers_of(model):
        sources = sorted(layer.sources(), key=lambda source: (tensors[source.name].place, source.shard))
        pieces = [
            piece
            for source in sources
            for piece in checkpoint.pieces(source.name, source.target, axis=source.axis, shard=source.shard)
        ]
        work.append((tensors[sources[0].name].place if sources else ("", 0), layer, pieces))
    return [(layer, pieces) for _, layer, pieces in sorted(work, key=lambda entry: entry[0])]


def _copy_on_threads(checkpoint: Checkpoint, work: deque[Filling], heard: Callable[[Piece], None]) -> None:
    """Few layers are under way at a time: what one needs only until it has repacked is gone before most have begun."""
    under_way = deque[tuple[Layer, deque[Future[Piece]]]]()
    with one_thread_per_op() as num_threads, ThreadPoolExecutor(num_threads, "load") as threads:
        try:
            while work or under_way:
                while work and len(under_way) < LAYERS_AHEAD:
                    layer, pieces = work.popleft()
                    under_way.append((layer, deque(threads.submit(_copy, checkpoint, piece) for piece in pieces)))
                    del pieces
                layer, copies = under_way.popleft()
                while copies:
                    heard(copies.popleft().result())
                layer.after_load()
        finally:
            threads.shutdown(cancel_futures=True)


def _stream_to_gpu(checkpoint: Checkpoint, pieces: list[Piece], heard: Callable[[Piece], None]) -> None:
    stored = sum(checkpoint.tensors[name].nbytes for name in {piece.name for piece in pieces})
    checkpoint.drops_pages = stored > MOST_OF_MEMORY * cpu.memory_bytes()[0]
    with one_thread_per_op():
        stream_pieces(checkpoint, pieces, CudaStream(), num_readers=min(cpu.num_threads(), MOST_READERS), heard=heard)


def _check_range(checkpoint: Checkpoint, pieces: list[Piece]) -> None:
    """float16 holds less than bfloat16 and float32: a weight that became infinite must not pass unseen."""
    for piece in pieces:
        narrowed = piece.target.dtype == torch.float16 != checkpoint.tensors[piece.name].dtype
        if narrowed and not bool(piece.target.isfinite().all()):
            raise _out_of_range(piece.name)


def _out_of_range(name: str) -> CheckpointError:
    return CheckpointError(f"{name}: its values do not fit float16; use --dtype bfloat16 or float32")


@contextmanager
def one_thread_per_op() -> Iterator[int]:
    """Let every torch op run on the thread that calls it; gives the number of threads ops were spread over before.

    Conversions are short. Spread over threads each of them ends at a barrier, and on a machine that has other work to
    do one barrier can take as long as a time slice; whole pieces spread over threads meet no barriers.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _copy(checkpoint: Checkpoint, piece: Piece) -> Piece:
    """Fill one piece, on any thread."""
    with torch.inference_mode():  # a thread begins outside of it, and may then not write to tensors made inside
        checkpoint.copy(piece)
        stored = checkpoint.tensors[piece.name].dtype
        if piece.target.dtype == torch.float16 != stored and not bool(piece.target.isfinite().all()):
            raise _out_of_range(piece.name)
    return piece


def _check_tied(layer: Layer, sources: list[Source], checkpoint: Checkpoint) -> None:
    """A tensor that a layer leaves unread because it shares another's must not say something else.

    Transformers ties such weights only if they are equal and goes on with two different ones otherwise; here the
    setting is believed, or the load refused.
    """
    for name in layer.unread() & checkpoint.tensors.keys():
        shared = getattr(layer, name.rpartition(".")[2], None)
        if not isinstance(shared, torch.Tensor):
            continue
        pointer = shared.untyped_storage().data_ptr()
        first = next((s.name for s in sources if s.target.untyped_storage().data_ptr() == pointer), None)
        if first is None or not checkpoint.equal(name, first):
            raise CheckpointError(
                f"the config ties {name} to {first}, but the checkpoint holds two different tensors; "
                f"if the tensors are right, use --hf-overrides '{{\"tie_word_embeddings\": false}}'"
            )


def _check_zeros(layer: Layer, checkpoint: Checkpoint) -> None:
    """Tensors that a layer has no place for must say nothing."""
    for name in layer.zeros() & checkpoint.tensors.keys():
        if bool(checkpoint.read(name).any()):
            raise CheckpointError(f"{name} is not zero, but this model has no such tensor")


def fill_dummy(model: nn.Module, seed: int, *, progress: Progress | None = None) -> None:
    """Give a bound `model` weights that depend on `seed` and the tensors' names only.

    Matrices get normal values of variance 1 / inputs, so activations and logits stay of order one; norms are neutral.
    What is quantized gets any codes, and scales that keep it small.
    """
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(DUMMY_VALUES, generator=generator)
    codes = torch.randint(0, 256, (DUMMY_VALUES,), dtype=torch.uint8, generator=generator)
    scaled: dict[int, torch.Tensor] = {}
    layers = list(layers_of(model))
    sources = [source for layer in layers for source in layer.sources()]
    check_coverage(layers, sources)
    total, done = sum(source.target.numel() for source in sources), 0
    with one_thread_per_op():
        for layer in layers:
            for source in layer.sources():
                if isinstance(layer, RMSNorm):
                    source.target.fill_(0.0 if layer.offset else 1.0)
                elif (known := layer.dummy(source)) is not None:
                    source.target.copy_(known)
                elif source.target.is_floating_point():
                    inputs = _inputs(source)
                    if inputs not in scaled:
                        values = (pattern * inputs**-0.5).to(device=source.target.device, dtype=source.target.dtype)
                        scaled[inputs] = torch.cat((values, values))
                    _fill_pattern(source, scaled[inputs])
                else:
                    _fill_bytes(source.target, codes)
                done += source.target.numel()
                if progress is not None:
                    progress(done, total)
    for layer in layers:
        layer.after_load()


def _inputs(source: Source) -> int:
    """Numbers that one output is a sum of, over all ranks; vectors count as biases, which are small."""
    target = source.target
    if target.dim() < 2:
        return BIAS_INPUTS
    return target.shape[-1] * (source.shard[1] if source.axis == target.dim() - 1 else 1)


def _fill_pattern(source: Source, values: torch.Tensor) -> None:
    """Fill one target from the pattern (twice in `values`), beginning at a place that its name and part decide."""
    target = source.target if source.target.dim() else source.target.view(1)
    start = zlib.crc32(f"{source.name}/{source.axis}/{source.shard}".encode()) % DUMMY_VALUES
    width = target[0].numel() if target.dim() > 1 else 1
    rows = max(1, DUMMY_VALUES // max(1, width))
    for part in torch.split(target, rows):
        if part.numel() > DUMMY_VALUES:
            wide = values[:DUMMY_VALUES].repeat(-(-part.numel() // DUMMY_VALUES))
            part.copy_(wide[: part.numel()].view(part.shape))
            continue
        part.copy_(values[start : start + part.numel()].view(part.shape))
        start = (start + part.numel()) % DUMMY_VALUES


def _fill_bytes(target: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill a target of integers with the bytes `codes`, again and again."""
    raw = torch.empty(target.shape, dtype=target.dtype)
    for part in torch.split(raw.view(-1).view(torch.uint8), len(codes)):
        part.copy_(codes[: len(part)])
    target.copy_(raw)
