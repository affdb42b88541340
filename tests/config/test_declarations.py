"""Settings as declared: checks, defaults, help texts, and the environment's single door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from samovar.config import field as field_module
from samovar.config.field import VARIABLES, Group, cache_root, field, help_of, variable
from samovar.config.groups import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
)
from samovar.config.load import all_settings
from samovar.errors import ConfigError

GROUPS = (SourceConfig, ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, ServerConfig)


def test_every_setting_says_what_it_is() -> None:
    for group in GROUPS:
        texts = help_of(group)
        for name in group.settings:
            assert texts.get(name, "").endswith((".", ":")), f"{group.__name__}.{name} has no help text"


def test_names_are_unique_and_few() -> None:
    settings = all_settings(GROUPS)
    assert len(settings) <= 92, "about ninety public flags: fold one before adding another"
    spellings = [f for s in settings.values() for f in (s.flag, *s.rule.flags)]
    assert len(spellings) == len(set(spellings))


def test_defaults_keep_their_own_rules() -> None:
    for group in GROUPS:
        group()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_seqs": -1}, "--max-num-seqs must be >= 0, got -1"),
        ({"max_num_seqs": "8"}, "--max-num-seqs must be a whole number, got '8'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be a whole number, got True"),
        ({"max_num_seqs": 2.5}, "--max-num-seqs must be a whole number, got 2.5"),
        ({"max_num_queued_tokens": 2**63}, "--max-num-queued-tokens must be a number of at most 64 bits"),
        ({"max_num_seqs": None}, "--max-num-seqs must be a whole number, got None"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority, got 'lifo'"),
        ({"async_scheduling": 1}, "--async-scheduling must be true or false, got 1"),
        ({"step_time_target_ms": float("nan")}, "--step-time-target-ms must be >= 0 or -1, got nan"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(**values)  # type: ignore[arg-type]


def test_exceptions_to_a_bound() -> None:
    assert ModelConfig(max_model_len=-1).max_model_len == -1
    with pytest.raises(ConfigError, match=r"--max-model-len must be >= 1 or -1, got 0"):
        ModelConfig(max_model_len=0)
    with pytest.raises(ConfigError, match="got -2"):
        ModelConfig(max_logprobs=-2)


def test_groups_are_frozen_and_do_not_share_lists() -> None:
    first, second = ServerConfig(), ServerConfig()
    assert first.api_key is not second.api_key
    with pytest.raises(AttributeError):
        first.port = 1  # type: ignore[misc]


def test_a_type_that_cannot_be_parsed_is_refused_when_declared() -> None:
    with pytest.raises(TypeError, match="cannot have the type"):

        class Wrong(Group):
            """Wrong."""

            value: set[int] = field(default=None)


def test_environment_has_one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMOVAR_OFFLINE", "")
    assert variable("SAMOVAR_OFFLINE") is None
    with pytest.raises(KeyError, match="not a documented variable"):
        variable("SAMOVAR_SECRET_SWITCH")
    for group in GROUPS:
        for setting in group.settings.values():
            assert setting.rule.env is None or setting.rule.env in VARIABLES


def test_variables_are_few_and_documented() -> None:
    own = [name for name in VARIABLES if name.startswith("SAMOVAR_")]
    assert len(own) <= 12
    tree = ast.parse(Path(field_module.__file__).read_text())
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "environ"]
    assert len(reads) == 1


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SAMOVAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "samovar"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "samovar"
    monkeypatch.setenv("SAMOVAR_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
