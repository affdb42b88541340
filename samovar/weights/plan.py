"""Loading as a list of copies, made and compared with the checkpoint in both directions before a byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers.layer import Layer, Source
from samovar.weights.checkpoint import TensorInfo, sharded_shape

SHOWN_NAMES = 12
"""Names an error lists before it goes on with a count."""

_SCALE_SUFFIXES = ("scale", "scale_inv", "zero_point", "qweight", "qzeros", "scales", "g_idx", "input_scale")
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def plan(model: nn.Module, tensors: Mapping[str, TensorInfo]) -> list[Source]:
    """The copies that fill a bound `model` from a checkpoint with `tensors` (by Hugging Face name).

    Raises one `CheckpointError` that lists the tensors the checkpoint lacks, those no layer reads, and those whose
    shape or type does not fit. `model.ignore` (optional) holds endings of names that carry nothing a layer needs, and
    `model.ignore_beginnings` beginnings.
    """
    layers = list(layers_of(model))
    sources = [source for layer in layers for source in layer.sources()]
    wanted: set[str] = set().union(*(layer.claims() for layer in layers))
    allowed: set[str] = set().union(*(layer.unread() for layer in layers))
    ignore: tuple[str, ...] = tuple(getattr(model, "ignore", ()))
    beginnings: tuple[str, ...] = tuple(getattr(model, "ignore_beginnings", ()))
    left = (name for name in tensors.keys() - wanted - allowed if not name.endswith(ignore))
    unread = {name for name in left if not name.startswith(beginnings)}
    complaints = [
        *_listed("tensors are missing from the checkpoint", wanted - tensors.keys()),
        *_listed("checkpoint tensors are read by no layer" + _hint(unread), unread),
        *_listed("tensors do not fit", filter(None, (_misfit(source, tensors) for source in sources))),
    ]
    if complaints:
        raise CheckpointError(f"the checkpoint does not match {type(model).__name__}: {'; '.join(complaints)}")
    check_coverage(layers, sources)
    return sources


def layers_of(model: nn.Module) -> Iterator[Layer]:
    """Every layer of the tree, in declaration order."""
    return (module for module in model.modules() if isinstance(module, Layer))


def _listed(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    if not found:
        return []
    more = "" if len(found) <= SHOWN_NAMES else f" and {len(found) - SHOWN_NAMES} more"
    return [f"{len(found)} {what}: {', '.join(found[:SHOWN_NAMES])}{more}"]


def _hint(unread: set[str]) -> str:
    scales = [name for name in unread if name.rpartition(".")[2].endswith(_SCALE_SUFFIXES)]
    return " (some are scales: does config.json say how the checkpoint is quantized?)" if scales else ""


def _misfit(source: Source, tensors: Mapping[str, TensorInfo]) -> str | None:
    """What is wrong with one copy, or None."""
    info, target = tensors.get(source.name), source.target
    if info is None:
        return None
    try:
        shape = sharded_shape(source.name, info.shape, source.axis, source.shard)
    except CheckpointError as error:
        return str(error)
    if shape != tuple(target.shape) and (shape or (1,)) != tuple(target.shape):
        return f"{source.name} (layer holds {tuple(target.shape)}, checkpoint gives {shape})"
    if info.dtype != target.dtype and not (info.dtype in _PLAIN_FLOATS and target.dtype in _PLAIN_FLOATS):
        return f"{source.name} (layer holds {target.dtype}, checkpoint gives {info.dtype_name})".replace("torch.", "")
    return None


def check_coverage(layers: Iterable[Layer], sources: Iterable[Source]) -> None:
    """Prove that the copies fill every element of every weight exactly once: no uninitialised memory is ever served.

    A failure is a bug of a layer, not of the checkpoint, hence an `AssertionError` naming the tensor.
    """
    filled: dict[int, list[tuple[int, int, Source]]] = {}
    for source in sources:
        if source.target.device.type != "meta":
            place = (int(source.target.storage_offset()), source.target.numel(), source)
            filled.setdefault(source.target.untyped_storage().data_ptr(), []).append(place)
    for pieces in filled.values():
        target = pieces[0][2].target
        covered, size = sum(numel for _, numel, _ in pieces), target.untyped_storage().nbytes() // target.itemsize
        assert covered == size, f"{pieces[0][2].name} and what is fused with it fill {covered} of {size} elements"
        ends = 0
        for offset, numel, source in sorted(pieces, key=lambda piece: piece[:2]):
            assert offset >= ends or not source.target.is_contiguous(), f"{source.name} is copied over another tensor"
            ends = offset + (numel if source.target.is_contiguous() else 0)
    for layer in layers:
        for name, tensor in weights_of(layer):
            known = tensor.device.type == "meta" or tensor.untyped_storage().data_ptr() in filled
            assert known or tensor.numel() == 0, f"no copy fills {layer.path}.{name}"


def weights_of(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer that come from a checkpoint: `weight`, `bias`, and the entries of `weights`."""
    own = vars(layer)
    stored = own.get("weights")
    named = stored if isinstance(stored, dict) else {key: own.get(key) for key in ("weight", "bias")}
    return ((name, tensor) for name, tensor in named.items() if isinstance(tensor, torch.Tensor))
