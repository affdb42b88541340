"""Puts a command's settings together: flag, then environment, then `--config` file, then default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from samovar.config.engine import ENGINE_GROUPS, EngineConfig
from samovar.config.field import Group, Setting, variable
from samovar.config.flags import parse_words
from samovar.config.foreign import unknown_setting
from samovar.config.groups import SourceConfig
from samovar.config.parse import coerce, parse_text
from samovar.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
G = TypeVar("G", bound=Group)


class Settings:
    """The groups of one command, each complete and checked; `arguments` are the words that belong to no flag.

    `given` names the settings that were set by a flag, a variable or the file.
    """

    def __init__(self, groups: dict[type[Group], Group], arguments: list[str], given: frozenset[str]) -> None:
        self._groups = groups
        self.arguments = arguments
        self.given = given

    def __getitem__(self, group: type[G]) -> G:
        return cast(G, self._groups[group])

    @property
    def engine(self) -> EngineConfig:
        """The engine's groups as one value."""
        return EngineConfig(**cast(Any, {key: self._groups[group] for key, group in ENGINE_GROUPS.items()}))


class HelpAsked(Exception):
    """The words ask for help instead of a run; `topic` is what stood behind `--help=`."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


def all_settings(groups: Sequence[type[Group]]) -> dict[str, Setting]:
    """The settings of several groups by name; a name may be declared only once."""
    found: dict[str, Setting] = {}
    for group in groups:
        if twice := found.keys() & group.settings.keys():
            raise TypeError(f"{group.__name__}.{min(twice)} is declared by {found[min(twice)].group.__name__} already")
        found.update(group.settings)
    return found


def load(words: Sequence[str], groups: Sequence[type[Group]], *, positional: str | None = None) -> Settings:
    """Settings from the words of a command line. The first argument sets the setting named `positional`, if any.

    Raises `ConfigError` for anything unknown or out of range, `HelpAsked` for `--help`.
    """
    settings = all_settings(groups)
    said = parse_words(words, settings)
    if said.help_topic is not None:
        raise HelpAsked(said.help_topic)
    if positional is not None and said.arguments:
        said.values[positional] = said.arguments.pop(0)
    values = from_environment(settings) | said.values
    path = values.get("config")
    if path is not None and SourceConfig in groups:
        values = read_file(Path(path), settings) | values
    made = {group: group(**{n: values[n] for n in group.settings if n in values}) for group in groups}
    return Settings(made, said.arguments, frozenset(values))


def from_environment(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Values of the settings whose declared variable is set."""
    values: dict[str, Any] = {}
    for setting in settings.values():
        name = setting.rule.env
        if name is not None and (text := variable(name)) is not None:
            values[setting.name] = parse_text(setting, text, source=name)
    return values


def read_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Settings from a YAML file: one mapping from flag names (`_` or `-`) to values."""
    import yaml

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--config {path}: is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        content, twice = yaml.safe_load(text), _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a mapping of setting names to values")
    if twice is not None:
        raise ConfigError(f"--config {path}: {twice} appears twice; leave one")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name == "config":
            raise ConfigError(f"--config {path}: config: a file cannot name another one; copy its lines into this one")
        if name not in settings:
            raise ConfigError(f"--config {path}: {unknown_setting(name, sorted(settings), spell=_key)}")
        if name in values:
            raise ConfigError(f"--config {path}: {_key(name)} appears twice, as {name} and {_key(name)}")
        source = f"--config {path}: {_key(name)}"
        values[name] = coerce(settings[name], value, source=source)
        try:
            settings[name].check(values[name])
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from None
    return values


def _repeated_key(root: Any) -> str | None:
    """The first key that some mapping of a composed YAML document holds twice; loading would keep the last one."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += node.value
            continue
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            return next(key for key in keys if keys.count(key) > 1)
        waiting += [value for _, value in node.value]
    return None


def _key(name: str) -> str:
    return name.replace("_", "-")
