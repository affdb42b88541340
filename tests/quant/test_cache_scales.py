"""B160: names of cache scales from every exporter are known, and never mistaken for something else."""

from __future__ import annotations

import pytest

from samovar.quant.cache_scales import cache_scale_names, unused_line

ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "name",
    ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "attn.k_scale", "kv_scale"],
)
def test_names(name: str) -> None:
    assert f"{ATTENTION}.{name}" in cache_scale_names(ATTENTION)


@pytest.mark.parametrize(
    "name", ["k_proj.weight_scale", "k_proj.input_scale", "k_proj.weight", "o_proj.output_scale", "k_norm.weight"]
)
def test_names_of_other_things(name: str) -> None:
    assert f"{ATTENTION}.{name}" not in cache_scale_names(ATTENTION)


def test_the_line() -> None:
    assert unused_line([]) is None
    line = unused_line({"b.k_scale", "a.k_scale"})
    assert line is not None and "2 scales" in line and "a.k_scale" in line and "\n" not in line
