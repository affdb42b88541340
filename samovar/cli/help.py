"""The text of `samovar COMMAND --help`, made from the declarations. Asked for rarely, so it may parse source."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Collection, Sequence

from samovar.config.field import Group, Setting, help_of
from samovar.errors import ConfigError

WIDTH = 100
COLUMN = 34


def command_help(
    usage: str, purpose: str, groups: Sequence[type[Group]], topic: str, *, unused: Collection[str] = ()
) -> str:
    """Usage and flags of a command. `topic`: "" or "all" for everything, a group's name, or one flag.

    `unused` names settings of the groups that the command refuses: they are not listed.
    """
    wanted = topic.lstrip("-").replace("_", "-").lower()
    if wanted in ("", "all"):
        return "\n\n".join([f"usage: {usage}", purpose.strip(), *(_section(group, unused) for group in groups)])
    for group in groups:
        if wanted in (group.__name__.lower(), section_name(group)):
            return _section(group, unused)
        for setting in group.settings.values():
            if setting.flag == f"--{wanted}":
                return _row(setting, help_of(group).get(setting.name, ""))
    names = [section_name(group) for group in groups] + [
        s.flag[2:] for group in groups for s in group.settings.values()
    ]
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; sections: {', '.join(section_name(g) for g in groups)}"
    raise ConfigError(f"--help={topic}: no such section or flag{hint}")


def section_name(group: type[Group]) -> str:
    """`SchedulerConfig` -> `scheduler`."""
    return group.__name__.removesuffix("Config").removesuffix("Options").lower()


def _section(group: type[Group], unused: Collection[str]) -> str:
    texts = help_of(group)
    rows = [_row(one, texts.get(one.name, "")) for one in group.settings.values() if one.name not in unused]
    title = (group.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return "\n".join([f"{title}:", *rows])


def _row(setting: Setting, text: str) -> str:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 40)).columns)
    spelled = ", ".join([*(f for f in setting.rule.flags if not f.startswith("--")), signature(setting)])
    body = textwrap.wrap(f"{text} {describe(setting)}".strip(), max(width - COLUMN, 30)) or [""]
    head = f"  {spelled}"
    lines = [head] if len(head) > COLUMN - 2 else [f"{head:<{COLUMN}}{body.pop(0)}"]
    return "\n".join(lines + [" " * COLUMN + line for line in body])


def signature(setting: Setting) -> str:
    """`--port N`, `--[no-]enable-prefix-caching`, `--dtype NAME`."""
    if setting.kind == "bool":
        return f"--[no-]{setting.flag[2:]}" if setting.default else setting.flag
    words = {"str": "TEXT", "int": "N", "float": "X", "list[str]": "TEXT ...", "dict[str, Any]": "JSON"}
    return f"{setting.flag} {'NAME' if setting.rule.choices and setting.kind == 'str' else words[setting.kind]}"


def describe(setting: Setting) -> str:
    """Choices, default and variable in brackets; empty if there is nothing to say."""
    parts = []
    if setting.rule.choices:
        parts.append("one of " + ", ".join(map(str, setting.rule.choices)))
    if setting.kind != "bool" and setting.default not in (None, "", [], {}):
        parts.append(f"default {setting.default}")
    if setting.rule.env:
        parts.append(f"variable {setting.rule.env}")
    return f"[{'; '.join(parts)}]" if parts else ""
