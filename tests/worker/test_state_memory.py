"""The memory plan of models with recurrent layers: lines that add up, sequences that fit, snapshots as asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samovar.config.engine import EngineConfig, with_settings
from samovar.core.cache_spec import CacheSpec, StateSpec, StateTensor
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError, MemoryPlanError
from samovar.hardware.memory import GIB, MIB, MemoryPlan, ModelShape, plan_memory

STATE = StateSpec((StateTensor("matrix", (48, 128, 128), "float32"), StateTensor("inputs", (10_240, 3), "bfloat16")))
HYBRID = ModelShape(
    weight_bytes=50 * GIB,
    vocab_size=248_320,
    hidden_size=5120,
    intermediate_size=17_408,
    num_heads=24,
    head_dim=256,
    max_position_embeddings=32_768,
    element_bytes=2,
    cache_specs=(CacheSpec("full", 4, 256, 2),) * 16,
    state_specs=(STATE,) * 48,
    reads_pages=True,
)
"""Qwen3.5-27B's sizes."""
ROW = 48 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)
GPU = DeviceFacts(
    kind="cuda", name="x", architecture="sm_90", total_bytes=140 * GIB, available_bytes=139 * GIB, num_threads=4
)


def plan(shape: ModelShape = HYBRID, facts: DeviceFacts = GPU, **settings: Any) -> MemoryPlan:
    config = with_settings(EngineConfig(), **{"dtype": "bfloat16", "max_num_seqs": 64, "block_size": 32, **settings})
    return plan_memory(shape, facts, config)


def test_lines() -> None:
    """A row for each sequence and a spare one; a quarter of what is left is snapshots, and the cache gets the rest."""
    found = plan()
    lines = dict(found.lines)
    assert lines["recurrent state"] == 65 * ROW and found.num_seqs == 64
    assert lines["state snapshots"] == found.num_snapshots * ROW
    left = lines["state snapshots"] + lines["kv cache"]
    assert left / 4 - ROW < lines["state snapshots"] <= left / 4 + 32 * 16 * 4096
    assert found.total_bytes <= found.budget_bytes < found.total_bytes + 32 * 16 * 4096
    plain = plan(replace(HYBRID, state_specs=()))
    assert plain.num_snapshots == 0 and not any("state" in name for name in dict(plain.lines) if "sampler" not in name)


def test_fewer_sequences_run_where_their_states_leave_no_room() -> None:
    """512 of them would take 73 GiB; no more than half of what is left goes to states, and the plan says so."""
    found = plan(max_num_seqs=512)
    lines = dict(found.lines)
    assert found.num_seqs < 512 and found.num_seqs % 8 == 0
    half = (lines["recurrent state"] + lines["state snapshots"] + lines["kv cache"]) / 2
    assert half - 12 * ROW < lines["recurrent state"] <= half
    assert f"no more than {found.num_seqs} sequences have room for states" in found.explanation
    assert plan(max_num_seqs=1).num_seqs == 1


def test_snapshots_as_asked_for() -> None:
    """Whole rows of the bytes given; none without a prefix cache; not beyond what there is."""
    assert plan(state_snapshots="1GiB").num_snapshots == GIB // ROW == 6
    assert plan(state_snapshots="0").num_snapshots == 0
    assert plan(enable_prefix_caching=False).num_snapshots == 0
    with pytest.raises(ConfigError, match="--state-snapshots: 'many' is neither auto nor a size"):
        plan(state_snapshots="many")
    with pytest.raises(MemoryPlanError, match="state snapshots"):
        plan(state_snapshots="100GiB")


def test_exact_caches_come_first() -> None:
    """Snapshots share what a cache of given size leaves."""
    found = plan(kv_cache_memory_bytes=20 * GIB)
    lines = dict(found.lines)
    assert lines["kv cache"] == 20 * GIB
    left = found.budget_bytes - found.total_bytes + lines["state snapshots"]
    assert left / 4 - ROW < lines["state snapshots"] <= left / 4


def test_without_keys_and_values_blocks_count_tokens() -> None:
    """Enough of them for every sequence at full length, up to a bound; they take nothing."""
    small = StateSpec((StateTensor("scan", (8, 16, 16), "float32"),))
    shape = replace(HYBRID, cache_specs=(), state_specs=(small,) * 4, weight_bytes=100 * MIB)
    found = plan(shape, max_model_len=1000, max_num_seqs=8)
    assert dict(found.lines)["kv cache"] == 0 and found.num_blocks == 8 * (-(-1000 // 32) + 1)
    assert found.num_snapshots == 8 * 8
    assert plan(shape, max_num_seqs=512).num_blocks == 1 << 18
    assert plan(shape, max_model_len=32 << 19, max_num_seqs=1).num_blocks == (1 << 19) + 1
