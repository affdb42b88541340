"""Whether this machine has the CPU kernels, as a fact of its device."""

from __future__ import annotations

import dataclasses

from samovar.core.device_facts import DeviceFacts
from samovar.native import library
from samovar.native.library import NativeError


def with_kernels(facts: DeviceFacts) -> DeviceFacts:
    """`facts`, which also say whether the library is there."""
    if facts.kind != "cpu":
        return facts
    try:
        library.load()
    except NativeError:
        return facts
    return dataclasses.replace(facts, has_kernels=True)
