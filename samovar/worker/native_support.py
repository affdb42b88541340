"""The CPU library as a worker uses it: whether it is there, its team of threads, and a checkpoint's formats in memory."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from samovar.config.description import ModelDescription
from samovar.config.field import variable
from samovar.core.device_facts import DeviceFacts
from samovar.kernels.op import Kernels
from samovar.native import library
from samovar.native.library import Library, NativeError
from samovar.native.team import Team, make_team
from samovar.quant.base import QuantMethod
from samovar.quant.formats import BLOCKS, PLAIN, WeightFormat
from samovar.quant.online import Online
from samovar.quant.packed import Packed
from samovar.quant.products import Products
from samovar.quant.rounded import Rounded
from samovar.quant.stored import Stored
from samovar.weights.gguf import PLAIN_TYPES, matrix_types
from samovar.weights.plan import layers_of


class NativeSupport:
    """The library for one worker. The team exists from its first use until `close`, and comes back when needed."""

    def __init__(self, found: Library, num_threads: int) -> None:
        self._library, self.num_threads = found, num_threads
        self._team: Team | None = None
        self.notices: list[str] = []
        """What people should know about the formats that were chosen."""
        self.blocks: dict[str, WeightFormat] = {}
        """Names of the checkpoint's tensors that stay in a format of their own."""

    @property
    def isa(self) -> str:
        """The instruction set that its teams run on."""
        return self._library.best_isa

    @property
    def block_names(self) -> set[str]:
        """Tensors that are wanted as the checkpoint stores them."""
        return {name for name, format in self.blocks.items() if format.has_blocks}

    def lines(self, model: nn.Module) -> list[str]:
        """The formats of a bound model's weights, for people."""
        found: Counter[str] = Counter()
        for layer in layers_of(model):
            quant = vars(layer).get("quant")
            if isinstance(quant, Packed):
                found.update(format.name for format in quant.formats)
        formats = ", ".join(f"{count} {name}" for name, count in found.most_common())
        return [f"weights: {formats}", *(f"weights: {notice}" for notice in self.notices)]

    def team(self) -> Team:
        """The team, made now if there is none."""
        if self._team is None:
            self._team = make_team(self.num_threads)
        return self._team

    def close(self) -> None:
        """End the threads and give their memory back."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def quant(self, description: ModelDescription, dtype: torch.dtype, kernels: Kernels) -> Packed:
        """The formats of a checkpoint's weights in memory: its own blocks, and `dtype` for all else.

        float32 is exact: blocks become numbers then.
        """
        self.blocks, self.notices = {}, []
        if description.format == "gguf" and dtype is not torch.float32:
            self._read_formats(description, dtype)
        return Packed(PLAIN[dtype], Products(self.team, self.num_threads), kernels, self.blocks)

    def _read_formats(self, description: ModelDescription, dtype: torch.dtype) -> None:
        converted: Counter[str] = Counter()
        for name, kind in matrix_types(description.path).items():
            if kind in BLOCKS:
                self.blocks[name] = BLOCKS[kind]
            elif kind == "F16":
                self.blocks[name] = PLAIN[torch.float16]
            elif kind not in PLAIN_TYPES:
                converted[kind] += 1
        for kind, count in sorted(converted.items()):
            self.notices.append(
                f"{count} tensors of type {kind}, which has no form in memory: held as {PLAIN[dtype].name}"
            )


def find_support(facts: DeviceFacts, num_threads: int) -> NativeSupport | str:
    """The library, or why this worker does without it. One that was named and cannot be used is an error."""
    if facts.kind != "cpu":
        return "it is for CPUs"
    try:
        return NativeSupport(library.load(), num_threads)
    except NativeError as error:
        if variable("SAMOVAR_NATIVE_LIBRARY") is not None:
            raise
        return str(error)


def weight_notes(model: nn.Module) -> list[str]:
    """What there is to say about weights that are not held or multiplied as one would expect."""
    found: Counter[str] = Counter()
    for layer in layers_of(model):
        quant = vars(layer).get("quant")
        if isinstance(quant, QuantMethod) and (note := quant.note or _without_kernel(quant)):
            found[note] += 1
    return [f"weights: {count} layers of {note}" for note, count in found.most_common()]


def _without_kernel(quant: QuantMethod) -> str:
    """What to say about a format that a GPU multiplies by its reference."""
    stored = quant.inner if isinstance(quant, Online) else quant
    if not isinstance(stored, Stored) or stored.kernels.target.device == "cpu":
        return ""
    if stored.coded_products is not None or (isinstance(stored, Rounded) and stored.products is not None):
        return ""
    return f"{type(stored).__name__}, for which there is no kernel: decoded whenever it is multiplied"
