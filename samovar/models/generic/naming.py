"""What a checkpoint calls the tensors of a generic model, where that differs from file to file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from samovar.layers import Layer, Placement


class Naming:
    """What this checkpoint calls tensors: some are of a body without its head, and lack its `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.cut = prefix, ""

    def of(self, name: str) -> str:
        """What this checkpoint calls a tensor that Transformers calls `name`."""
        return name.removeprefix(self.cut)


class Names(Layer):
    """Looks at the checkpoint's names before the other layers do. Nobody reads those that one of `ignored` is found in."""

    def __init__(self, naming: Naming, ignored: Sequence[re.Pattern[str]]) -> None:
        super().__init__()
        self.naming, self.ignored = naming, tuple(ignored)
        self.left: set[str] = set()

    def bind(self, place: Placement) -> None:
        """Look at the names, if they are known."""
        names = place.stored_shapes.keys()
        has_prefix = not names or any(name.startswith(self.naming.prefix) for name in names)
        self.naming.cut = "" if has_prefix else self.naming.prefix
        self.left = {name for name in names if any(pattern.search(name) for pattern in self.ignored)}

    def unread(self) -> set[str]:
        """See `Layer`."""
        return self.left
