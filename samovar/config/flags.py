"""Command-line words -> values of settings. One walk over the words; what is not understood is refused with a hint.

`--name value`, `--name=value`, `_` for `-`, `--no-name` for booleans, several values or repetition for lists, JSON or
`--name.key value` for objects. No abbreviations: they change meaning when a flag is added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samovar.config.field import Group, Setting
from samovar.config.foreign import flag_of, unknown_setting
from samovar.config.parse import parse_object, parse_text, set_dotted
from samovar.errors import ConfigError

_NUMBER = re.compile(r"-\d[\d_.]*([eE][+-]?\d+)?[A-Za-z]{0,3}|-\.\d+|-inf")
HELP_FLAGS = ("-h", "--help")


@dataclass(slots=True)
class Words:
    """What the command line said: values by setting name, the words that belong to no flag, and the help asked for.

    `help_topic` is None if no help was asked for, "" for `--help`, and the text behind `--help=` otherwise.
    """

    values: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    help_topic: str | None = None


def parse_words(words: Sequence[str], settings: Mapping[str, Setting]) -> Words:
    """Read the words of a command line. Raises `ConfigError` for unknown flags and bad values."""
    return _Walk(list(words), settings).run()


def is_flag(word: str) -> bool:
    """Whether a word starts a flag: a dash and then no number."""
    return len(word) > 1 and word.startswith("-") and _NUMBER.fullmatch(word) is None


class _Walk:
    def __init__(self, words: list[str], settings: Mapping[str, Setting]) -> None:
        self.words, self.settings, self.at = words, settings, 0
        self.found = Words()
        self.others = {_plain(flag): setting for setting in settings.values() for flag in setting.rule.flags}

    def run(self) -> Words:
        while self.at < len(self.words):
            word = self.words[self.at]
            self.at += 1
            if word == "--":
                self.found.arguments += self.words[self.at :]
                break
            if is_flag(word):
                self.flag(word)
            else:
                self.found.arguments.append(word)
        return self.found

    def flag(self, word: str) -> None:
        spelled, equals, inline = word.partition("=")
        if spelled in HELP_FLAGS:
            self.found.help_topic = inline
            return
        name, *path = _plain(spelled).split(".")
        setting, is_negated = self.lookup(name, spelled)
        value = inline if equals else None
        if path and setting.kind != "dict[str, Any]":
            raise ConfigError(f"{spelled}: {setting.flag} takes one value, not keys")
        if setting.kind == "bool":
            truth = True if value is None else parse_text(setting, value)
            self.found.values[setting.name] = truth is not is_negated
        elif setting.kind == "list[str]":
            texts = [value] if value is not None else self.take_many(spelled)
            for text in texts:
                self.found.values.setdefault(setting.name, []).extend(parse_text(setting, text))
        elif setting.kind == "dict[str, Any]":
            target = self.found.values.setdefault(setting.name, {})
            text = value if value is not None else self.take(spelled)
            if path:
                set_dotted(target, setting.flag, path, text)
            else:
                target.update(parse_object(setting.flag, text))
        else:
            self.found.values[setting.name] = parse_text(setting, value if value is not None else self.take(spelled))

    def lookup(self, name: str, spelled: str) -> tuple[Setting, bool]:
        """The setting a flag means, and whether it is its `--no-` form."""
        if spelled.startswith("--") and name in self.settings:
            return self.settings[name], False
        if name in self.others and spelled.startswith("--") == (len(name) > 2):
            return self.others[name], False
        bare = self.settings.get(name.removeprefix("no_"))
        if spelled.startswith("--no") and bare is not None:
            if bare.kind != "bool":
                raise ConfigError(f"{spelled}: {bare.flag} is not a switch; give it a value or leave it out")
            return bare, True
        raise ConfigError(unknown_setting(name, sorted(self.settings), spell=flag_of))

    def take(self, spelled: str) -> str:
        """The value behind a flag."""
        if self.at >= len(self.words) or is_flag(self.words[self.at]):
            raise ConfigError(f"{spelled} needs a value")
        self.at += 1
        return self.words[self.at - 1]

    def take_many(self, spelled: str) -> list[str]:
        """All words up to the next flag, at least one."""
        texts = [self.take(spelled)]
        while self.at < len(self.words) and not is_flag(self.words[self.at]) and self.words[self.at] != "--":
            texts.append(self.take(spelled))
        return texts


def _plain(flag: str) -> str:
    """`--max-model-len` -> `max_model_len`."""
    return flag.lstrip("-").replace("-", "_")


def to_words(group: Group, given: Collection[str]) -> list[str]:
    """The words that set a group's given settings on another command line: the inverse of `parse_words`."""
    words: list[str] = []
    for name, setting in group.settings.items():
        value = getattr(group, name)
        if name not in given or value is None:
            continue
        if setting.kind == "bool":
            words.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif setting.kind in ("list[str]", "dict[str, Any]"):
            words.append(f"{setting.flag}={json.dumps(value)}")
        else:
            words.append(f"{setting.flag}={value}")
    return words
