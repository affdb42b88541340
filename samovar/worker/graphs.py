"""DecodeGraphs: decode steps captured once and replayed, so that a step costs the host one call instead of hundreds."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from samovar.hardware.stream import DeviceStream, Graph

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured steps by key. All share one pool of memory; beyond `most` of them, the one not used for longest goes.

    A key's first step runs as it is, which also initialises whatever a kernel needs once; its second is captured and
    replayed. What cannot be captured, for lack of memory for instance, runs as it is from then on, and the log says so.
    """

    def __init__(self, stream: DeviceStream, most: int) -> None:
        self._stream, self._most = stream, max(most, 1)
        self._graphs: OrderedDict[Hashable, tuple[Graph, torch.Tensor]] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._graphs)

    def knows(self, key: Hashable) -> bool:
        """Whether a step of this key is captured, or never will be."""
        return key in self._graphs or key in self._refused

    @property
    def is_full(self) -> bool:
        """Whether another graph would push one out."""
        return len(self._graphs) >= self._most

    def run(self, key: Hashable, work: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Queue the step that `work` queues; None if a step of this key must not run this way.

        `work` reads and writes memory that stays where it is, and returns the one tensor it leaves. That tensor is valid
        for what is queued before the next `run`. Raises `torch.OutOfMemoryError` if the first step of a key does not fit.
        """
        found = self._graphs.get(key)
        if found is None:
            if key in self._refused:
                return None
            if (thread := threading.get_ident()) != self._thread:
                # Libraries keep handles by thread, and make them at first use, which must not be while capturing.
                self._thread = thread
                self._seen.clear()
            if key not in self._seen:
                output = work()
                self._seen.add(key)
                return output
            found = self.capture(key, work)
            if found is None:
                return None
        self._graphs.move_to_end(key)
        graph, output = found
        graph.replay()
        return output

    def refuse(self, key: Hashable, why: object) -> None:
        """Run steps of this key without a graph from now on."""
        self._refused.add(key)
        logger.warning("decode steps of kind %s run without a captured graph: %s", key, why)

    def capture(self, key: Hashable, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor] | None:
        """Capture a step that has run before, without running it; None, and logged, if that is impossible."""
        if self.is_full:
            # Its last replay may still be under way.
            done = self._stream.mark()
            done.record()
            done.wait()
            self._graphs.popitem(last=False)
        try:
            captured = self._stream.capture(work)
        except RuntimeError as error:
            # No memory, or a kernel that does what must not be captured: the step itself is not lost.
            self.refuse(key, error)
            return None
        self._graphs[key] = captured
        return captured
