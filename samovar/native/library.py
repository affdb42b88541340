"""Finds and loads libsamovar, once a process. What is missing is said in words that name the remedy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import samovar.native
from samovar.config.field import variable
from samovar.errors import ConfigError
from samovar.native.abi import ABI_VERSION, declare

FILE_NAME = "libsamovar.so"
ERROR_BYTES = 512
T = TypeVar("T")


class NativeError(ConfigError):
    """The library is missing or does not fit, or refused what it was asked to do."""


class Library:
    """The loaded library: `call` runs one of its functions, and a message of the library becomes a `NativeError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
            declare(self.functions)
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path} is no library of this version: {error}; build it again") from error
        if (version := self.functions.samovar_abi_version()) != ABI_VERSION:
            raise NativeError(f"{path} has the interface {version}, {ABI_VERSION} is needed; build it again")

    @property
    def best_isa(self) -> str:
        """The widest instruction set of this machine that the library has code for."""
        return str(self.functions.samovar_best_isa().decode())

    @property
    def compiled_isas(self) -> list[str]:
        """Every instruction set the library has code for."""
        return str(self.functions.samovar_compiled_isas().decode()).split()

    def usable_isas(self) -> list[str]:
        """The instruction sets it has code for and this machine can run, from least to best."""
        names = self.compiled_isas
        return names[: names.index(self.best_isa) + 1]

    def checked(self, function: Callable[..., T], *arguments: object) -> tuple[T, str]:
        """What `function` returns when called with `arguments` and room for a message, and that message."""
        error = ctypes.create_string_buffer(ERROR_BYTES)
        result = function(*arguments, error, ERROR_BYTES)
        return result, error.value.decode(errors="replace")


def find() -> Path | None:
    """The library's file: SAMOVAR_NATIVE_LIBRARY, else beside this package wherever it is installed; None if missing."""
    if named := variable("SAMOVAR_NATIVE_LIBRARY"):
        return Path(named)
    places = [Path(folder) / FILE_NAME for folder in samovar.native.__path__]
    return next((path for path in places if path.exists()), None)


@cache
def load() -> Library:
    """The library; NativeError if it is missing or of another version."""
    path = find()
    if path is None:
        raise NativeError("the CPU kernels are not built: install a C++ compiler, then install samovar again")
    if not path.exists():
        raise NativeError(f"SAMOVAR_NATIVE_LIBRARY: there is no file {path}; name a built {FILE_NAME}, or unset it")
    return Library(path)
