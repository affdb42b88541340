"""Our layers in the places of Transformers' modules: which become which, and which tensors stay where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from samovar.models.generic.experts import experts_of
from samovar.models.generic.held import hold
from samovar.models.generic.layers import GenericEmbedding, GenericHead, GenericLinear
from samovar.models.generic.names import Stored, renamed


class Exchange:
    """Puts our layers into the places of modules of Transformers, and tensors that stay into `Held`."""

    def __init__(self, causal: Any, pieces: Mapping[str, list[Stored]]) -> None:
        self.causal, self.pieces = causal, pieces
        self.users: dict[int, list[tuple[nn.Module, str, str]]] = defaultdict(list)
        for path, module in causal.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.users[id(parameter)].append((module, name, ".".join(filter(None, (path, name)))))
        self.head = causal.get_output_embeddings()

    def apply(self) -> None:
        """Exchange everything that can be; the head last, because it may share the embedding's tensor."""
        from transformers.pytorch_utils import Conv1D

        paths = [(path, module) for path, module in self.causal.named_modules() if path]
        for path, module in paths:
            if type(module) is nn.Embedding and self._is_table(module):
                self._replace(path, self._embedding(path, module))
        for path, module in paths:
            if module is self.head and type(module) is nn.Linear:
                self._replace_head(path, module)
            elif type(module) in (nn.Linear, Conv1D) and len(self.users[id(module.weight)]) == 1:
                linear = self._linear(path, module, transposed=type(module) is Conv1D)
                if linear is not None:
                    self._replace(path, linear)
            elif hasattr(module, "is_concatenated"):
                experts = experts_of(path, module, self.pieces)
                if experts is not None:
                    self._replace(path, experts)
        hold(self.causal, self.pieces)

    def _replace(self, path: str, layer: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.causal.get_submodule(parent), name, layer)

    def _is_table(self, module: nn.Embedding) -> bool:
        """Whether only the head shares it."""
        others = [user for user, _, _ in self.users[id(module.weight)] if user is not module]
        tied = all(other is self.head and type(other) is nn.Linear and other.bias is None for other in others)
        return tied and module.max_norm is None and self._name(self._key(module)) is not None

    def _key(self, module: nn.Module) -> str:
        """Where the state dict has the weight of `module` itself."""
        weight = module._parameters["weight"]
        return next(key for user, _, key in self.users[id(weight)] if user is module)

    def _name(self, key: str) -> str | None:
        """The checkpoint's prefix of a weight that is stored whole as "prefix.weight"."""
        name = renamed(self.pieces, key)
        return name.removesuffix(".weight") if name is not None and name.endswith(".weight") else None

    def _embedding(self, path: str, module: nn.Embedding) -> GenericEmbedding:
        layer, name = GenericEmbedding(module.num_embeddings, module.embedding_dim), self._name(f"{path}.weight")
        assert name is not None, "_is_table said that it has one"
        layer.checkpoint_name = name
        return layer

    def _replace_head(self, path: str, module: nn.Linear) -> None:
        """With the embedding's tensor, or one of its own; with a bias it is a linear."""
        others = [user for user, _, _ in self.users[id(module.weight)] if user is not module]
        if module.bias is not None:
            linear = None if others else self._linear(path, module)
            if linear is not None:
                self._replace(path, linear)
            return
        tied = None
        if others:
            found = next(p for user, _, p in self.users[id(module.weight)] if user is not module)
            tied = self.causal.get_submodule(found.rpartition(".")[0])
            if not isinstance(tied, GenericEmbedding):
                return
        name = self._name(path + ".weight")
        if name is not None:
            head = GenericHead(module.out_features, module.in_features, tied_to=tied)
            head.checkpoint_name = name
            self._replace(path, head)

    def _linear(self, path: str, module: Any, *, transposed: bool = False) -> GenericLinear | None:
        """Of one checkpoint tensor, or of several, one below the other; None if it is stored in another way."""
        inputs, outputs = module.weight.shape if transposed else reversed(module.weight.shape)
        parts: dict[str, int] = {}
        for piece in self.pieces[f"{path}.weight"]:
            whole = (0, outputs, outputs)
            first, end, count = piece.ranges[0] if piece.ranges else whole
            is_rows = not piece.transposed and all(b - a == n for a, b, n in piece.ranges[1:])
            if not is_rows or not piece.name.endswith(".weight") or (transposed and piece.ranges):
                return None
            parts[piece.name.removesuffix(".weight")] = (end - first) * outputs // count
        has_bias = module.bias is not None
        if has_bias and [p.name for p in self.pieces[f"{path}.bias"]] != [f"{name}.bias" for name in parts]:
            return None
        return GenericLinear(inputs, outputs, parts, bias=has_bias, transposed=transposed)
