"""Command lines, variables and files -> settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.config.field import Group, field
from samovar.config.flags import parse_words, to_words
from samovar.config.groups import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
)
from samovar.config.load import HelpAsked, load
from samovar.config.parse import parse_integer
from samovar.errors import ConfigError

GROUPS = (SourceConfig, ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, ServerConfig)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAMOVAR_API_KEY", "SAMOVAR_OFFLINE", "SAMOVAR_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def given_values(*words: str) -> dict[str, Any]:
    settings = load(words, GROUPS, positional="model")
    assert not settings.arguments
    return {n: getattr(settings[g], n) for g in GROUPS for n in g.settings if n in settings.given}


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 1 << 20), ("1m", 10**6), ("4GiB", 4 << 30), ("4G", 4 << 30),
     ("4GB", 4 * 10**9), ("1.5GiB", 3 << 29), ("25.6k", 25_600), ("-1", -1), ("1_000", 1000), ("2 GiB", 2 << 30)],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "4Gib", "1e9", "0x10", "four", "1kk", "--1", "1__0", "٤"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_integer(text)


@given(st.integers(-(10**15), 10**15))
def test_every_integer_reads_as_itself(value: int) -> None:
    assert parse_integer(str(value)) == value


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
        (["--max_num_seqs=8"], {"max_num_seqs": 8}),
        (["some/model", "--max-num_seqs", "8"], {"model": "some/model", "max_num_seqs": 8}),
        (["--model", "a", "b"], {"model": "b"}),
        (["--max-model-len", "-1"], {"max_model_len": -1}),
        (["--max-model-len=32k"], {"max_model_len": 32_000}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--enable-prefix-caching=false"], {"enable_prefix_caching": False}),
        (["--no-enable-prefix-caching=false"], {"enable_prefix_caching": True}),
        (["-tp", "1"], {"tensor_parallel_size": 1}),
        (["-tp=1"], {"tensor_parallel_size": 1}),
        (["--api-key", "a", "b", "--api-key=c"], {"api_key": ["a", "b", "c"]}),
        (["--allowed-origins", '["x", "y"]'], {"allowed_origins": ["x", "y"]}),
        (["--hf-overrides", '{"a": {"b": 1}}'], {"hf_overrides": {"a": {"b": 1}}}),
        (["--hf-overrides.a.b", "1", "--hf-overrides.a.c=x"], {"hf_overrides": {"a": {"b": 1, "c": "x"}}}),
        (["--hf-overrides.rope_theta", "1e6"], {"hf_overrides": {"rope_theta": 1e6}}),
        (["--gpu-memory-utilization", ".9"], {"gpu_memory_utilization": 0.9}),
        (["--step-time-target-ms", "50"], {"step_time_target_ms": 50.0}),
        (["--kv-cache-memory-bytes", "4GiB"], {"kv_cache_memory_bytes": 4 << 30}),
        (["--disable-fastapi-docs"], {"disable_docs": True}),
        (["--max-num-seqs", "8", "--max-num-seqs", "9"], {"max_num_seqs": 9}),
        (["--tokenizer", "none"], {"tokenizer": None}),
        (["--", "-strange-name"], {"model": "-strange-name"}),
    ],
)
def test_command_lines(words: list[str], values: dict[str, Any]) -> None:
    assert given_values(*words) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-sequences", "8"], "unknown setting --max-num-sequences; did you mean --max-num-seqs?"),
        (["--no-enable-prefix-cache"], "did you mean --no-enable-prefix-caching?"),
        (["--zzz"], "unknown setting --zzz"),
        (["--max-num-seqs"], "--max-num-seqs needs a value"),
        (["--max-num-seqs", "--port", "1"], "--max-num-seqs needs a value"),
        (["--max-num-seqs", "many"], "--max-num-seqs must be a whole number such as 4096, 32k or 4GiB, got 'many'"),
        (["--no-port"], "--no-port: --port is not a switch"),
        (["--enable-prefix-caching=maybe"], "must be true or false, got 'maybe'"),
        (["--hf-overrides", "{"], "must be a JSON object"),
        (["--hf-overrides", "[1]"], "must be a JSON object"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "'a' already has the value 1"),
        (["--port.x", "1"], "--port takes one value, not keys"),
        (["--dtype", "fp8"], "--dtype must be one of auto, float32"),
        (["--speculative-config", "{}"], "--speculative-config is not available: speculative decoding"),
        (["--enable-lora"], "--enable-lora is not available: LoRA"),
        (["-dp", "2"], "is not available: one device per engine"),
        (["--ssl-keyfile", "k"], "reverse proxy"),
        (["--max-model", "1"], "unknown setting --max-model"),
        (["-x"], "unknown setting"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given_values(*words)
    assert message in str(caught.value)


def test_a_flag_of_another_engine_is_never_also_ours() -> None:
    from samovar.config.foreign import REASONS, SHORT

    ours = {name for group in GROUPS for name in group.settings}
    assert not ours & REASONS.keys()
    assert set(SHORT.values()) <= REASONS.keys()


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("log-level: warning\nmax_num_seqs: 3\nport: 9000\nmodel: from-file\nmax-model-len: 32k\n")
    monkeypatch.setenv("SAMOVAR_LOG_LEVEL", "error")
    settings = load(["--config", str(path), "--port", "9001"], GROUPS, positional="model")
    assert settings[ServerConfig].port == 9001
    assert settings[ServerConfig].log_level == "error"
    assert settings.engine.scheduler.max_num_seqs == 3
    assert settings.engine.model.model == "from-file"
    assert settings.engine.model.max_model_len == 32_000
    assert settings.engine.cache.block_size == 0
    assert {"port", "log_level", "max_num_seqs", "model"} <= settings.given
    assert "block_size" not in settings.given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-sequences: 1", "unknown setting max-num-sequences; did you mean max-num-seqs?"),
        ("max-num-seqs: -1", "--max-num-seqs must be >= 0, got -1"),
        ("port: true", "--port must be a whole number, got True"),
        ("api-key: {a: b}", "--api-key must be a list of strings"),
        ("- a", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("port: 1\nport-: 2", "unknown setting"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "appears twice"),
        ("port: 1\nport: 1", "port appears twice; leave one"),
        ("hf-overrides: {a: {b: 1, b: 2}}", "b appears twice; leave one"),
        ("api-key: &a [*a, {c: 1, c: 2}]", "c appears twice; leave one"),
        ("config: other.yaml", "a file cannot name another one"),
        ("enable-lora: true", "enable-lora is not available: LoRA"),
    ],
)
def test_files_name_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path)], GROUPS)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_values_in_files(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "api-key: [a, b]\nserved-model-name: one\nhf-overrides: {x: 1}\nenable-prefix-caching: no\n"
        "step-time-target-ms: 5\nrevision: 12\nmax-num-queued-tokens: 2M\n"
    )
    settings = load(["--config", str(path)], GROUPS)
    assert settings[ServerConfig].api_key == ["a", "b"]
    assert settings[ServerConfig].served_model_name == ["one"]
    assert settings[ModelConfig].hf_overrides == {"x": 1}
    assert settings[CacheConfig].enable_prefix_caching is False
    assert settings[SchedulerConfig].step_time_target_ms == 5.0
    assert settings[ModelConfig].revision == "12"
    assert settings[SchedulerConfig].max_num_queued_tokens == 2 << 20


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    load(["--config", str(tmp_path / "empty.yaml")], GROUPS)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(["--config", str(tmp_path / "none.yaml")], GROUPS)


def test_help_is_asked_for() -> None:
    for words, topic in ((["--help"], ""), (["m", "-h"], ""), (["--help=cache"], "cache")):
        with pytest.raises(HelpAsked) as caught:
            load(words, GROUPS)
        assert caught.value.topic == topic


def test_one_name_is_declared_once() -> None:
    class Clash(Group):
        """Clashes."""

        port: int = field(default=1)
        """A port."""

    with pytest.raises(TypeError, match="declared by ServerConfig already"):
        load([], (ServerConfig, Clash))


_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=8).filter(
    lambda text: text.lower() not in ("none", "null")
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": _TEXT,
    "tokenizer": _TEXT,
    "offline": st.booleans(),
    "max_model_len": st.integers(1, 10**9) | st.just(-1),
    "hf_overrides": st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=3),
}


@given(st.fixed_dictionaries({}, optional=_VALUES))
def test_words_of_settings_parse_back(values: dict[str, Any]) -> None:
    group = ModelConfig(**values)
    assert parse_words(to_words(group, set(values)), ModelConfig.settings).values == values


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_are_understood_or_refused(words: list[str]) -> None:
    try:
        load([w for w in words if not w.startswith("--config")], GROUPS)
    except (ConfigError, HelpAsked):
        pass
