"""One declaration of a setting gives its dataclass field, check, command-line flag, environment name and docs row.

The only module that reads the environment; `VARIABLES` lists every name it may ask for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast, dataclass_transform

from samovar.errors import ConfigError

VARIABLES: dict[str, str] = {
    "SAMOVAR_ADMIN_API_KEY": "Key that opens the admin routes, if no --admin-api-key is given.",
    "SAMOVAR_API_KEY": "Key that clients must send, if no --api-key is given.",
    "SAMOVAR_CACHE": "Folder for downloads and compiled kernels. Default: samovar in XDG_CACHE_HOME or ~/.cache.",
    "SAMOVAR_LOG_LEVEL": "Least important messages to log, if no --log-level is given.",
    "SAMOVAR_NATIVE_LIBRARY": "File of the CPU kernels, if not the libsamovar.so that was installed with the package.",
    "SAMOVAR_OFFLINE": "1: never touch the network.",
    "CXX": "C++ compiler for the CPU kernels.",
    "HF_HOME": "Where the hub's own tools keep their files; models found there are used.",
    "HF_HUB_OFFLINE": "1: the hub is not asked (same as SAMOVAR_OFFLINE for hub ids).",
    "HF_TOKEN": "Token for gated models of the hub.",
    "NO_COLOR": "Any value: print without colours.",
    "TRITON_CACHE_DIR": "Where compiled GPU kernels are kept. Default: kernels in SAMOVAR_CACHE.",
    "XDG_CACHE_HOME": "Base folder of caches.",
}
"""Every environment variable this package reads, and what it does. There are no others."""

_TYPES: dict[str, tuple[type[Any], ...]] = {
    "str": (str,), "bool": (bool,), "int": (int,), "float": (float, int), "list[str]": (list,), "dict[str, Any]": (dict,),
}  # fmt: skip
_WORDS = {
    "str": "text", "bool": "true or false", "int": "a whole number", "float": "a number",
    "list[str]": "a list of strings", "dict[str, Any]": "an object",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy beyond its type: inclusive bounds, or one of a closed set."""

    ge: float | None = None
    le: float | None = None
    choices: tuple[Any, ...] | None = None
    flags: tuple[str, ...] = ()
    """Further spellings on the command line, such as "-tp"."""
    env: str | None = None
    """A documented SAMOVAR_* variable that sets it when no flag does."""
    also: tuple[Any, ...] = ()
    """Values allowed although they lie outside the bounds, such as -1 for "all"."""

    def complaint(self, value: Any) -> str | None:
        """None if `value` is fine, otherwise the rule in words."""
        if self.choices is not None and value is not None and value not in self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if value is None or not isinstance(value, (int, float)) or isinstance(value, bool) or value in self.also:
            return None
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return "a number of at most 64 bits"
        exceptions = "".join(f" or {extra}" for extra in self.also)
        if self.ge is not None and not value >= self.ge:
            return f">= {self.ge}{exceptions}"
        if self.le is not None and not value <= self.le:
            return f"<= {self.le}{exceptions}"
        return None


def field(*, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """Declare a setting; `rule` takes the attributes of `Rule`. The string below it is the help text."""
    metadata: Mapping[str, Rule] = {"rule": Rule(**rule)}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Group:
    """Base of the frozen setting groups. Subclasses become keyword-only frozen dataclasses by being declared."""

    settings: ClassVar[dict[str, Setting]] = {}
    """The settings a group declares, by name, in order."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.settings = {f.name: _setting(cls, f) for f in dataclasses.fields(cast(Any, cls))}

    def __post_init__(self) -> None:
        for setting in self.settings.values():
            setting.check(getattr(self, setting.name))


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared field of a group, as the parsers and the docs see it.

    `kind` is one of str, bool, int, float, list[str], dict[str, Any]; `is_optional` means None is allowed.
    """

    name: str
    group: type[Group]
    kind: str
    is_optional: bool
    default: Any
    rule: Rule

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise `ConfigError` naming the flag if `value` has the wrong type or breaks the rule."""
        if value is None and self.is_optional:
            return
        wrong_bool = isinstance(value, bool) and self.kind != "bool"
        if wrong_bool or not isinstance(value, _TYPES[self.kind]):
            raise ConfigError(f"{self.flag} must be {_WORDS[self.kind]}, got {value!r}")
        items: list[Any] = value if self.kind == "list[str]" else []
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{self.flag} must be {_WORDS[self.kind]}, got {value!r}")
        if complaint := self.rule.complaint(value):
            raise ConfigError(f"{self.flag} must be {complaint}, got {value!r}")


def _setting(group: type[Group], f: dataclasses.Field[Any]) -> Setting:
    kind, _, rest = str(f.type).partition(" | ")
    if kind not in _TYPES or rest not in ("", "None"):
        raise TypeError(f"{group.__name__}.{f.name}: a setting cannot have the type {f.type}")
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return Setting(f.name, group, kind, bool(rest), default, f.metadata["rule"])


def help_of(group: type[Group]) -> dict[str, str]:
    """Field name -> the string below it in the source, on one line. Parses the source: call it for help only."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:]):
        if not isinstance(before, ast.AnnAssign) or not isinstance(before.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[before.target.id] = " ".join(str(after.value.value).split())
    return texts


def variable(name: str) -> str | None:
    """A documented environment variable, None if unset or empty. KeyError for a name that is not in `VARIABLES`."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not a documented variable: add it to VARIABLES")
    return os.environ.get(name) or None


def cache_root() -> Path:
    """Folder under which everything downloaded or compiled is kept: SAMOVAR_CACHE, else samovar in the XDG cache."""
    if own := variable("SAMOVAR_CACHE"):
        return Path(own).expanduser()
    base = variable("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "samovar"


def kernel_cache() -> Path:
    """Folder of compiled GPU kernels: TRITON_CACHE_DIR, else kernels in the cache."""
    own = variable("TRITON_CACHE_DIR")
    return Path(own).expanduser() if own else cache_root() / "kernels"
