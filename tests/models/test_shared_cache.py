"""Layers that read the keys and values of others: they cost no memory, and after them only rows that sample are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from samovar.attention.reference import ReferenceAttention
from samovar.errors import CheckpointError
from samovar.layers import HeadsLinear, SharedAttention
from samovar.layers.attention import attention_layers
from samovar.layers.fuse import fuse
from samovar.models.registry import build, resolve
from tests.models.paged_run import PagedRun
from tests.models.test_fusion import loaded, reference_kernels
from tests.models.test_last_rows import OnlySampling
from tests.models.transformers_oracle import oracle, tokens

NAMES = ["gemma4", "gemma3n"]


@pytest.mark.parametrize("name", NAMES)
def test_only_owners_have_a_cache(name: str) -> None:
    """Four of six layers; sliding ones share that of the last sliding owner, full ones that of the last full one."""
    model = loaded(name)
    assert [spec.window for spec in model.cache_specs()] == [7, None, 7, None]
    owners = attention_layers(model)
    shared = [layer for layer in model.modules() if isinstance(layer, SharedAttention)]
    assert [layer.owner for layer in shared] == [(owners[2],), (owners[3],)]
    dims = [spec.head_dim for spec in model.cache_specs()]
    assert dims == ([16, 24, 16, 24] if name == "gemma4" else [16] * 4)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_share_compute_only_rows_that_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(name)
    fused, seen = fuse(model, reference_kernels(torch.float32)), list[int]()
    for layer in (module for module in model.modules() if isinstance(module, HeadsLinear)):

        def counting(
            x: torch.Tensor, *rest: object, multiply: Callable[..., torch.Tensor] = layer.quant.multiply
        ) -> torch.Tensor:
            seen.append(len(x))
            return multiply(x, *rest)

        monkeypatch.setattr(layer.quant, "multiply", counting)
    run = PagedRun(model, ReferenceAttention())
    run.model = OnlySampling(fused, [1])  # type: ignore[assignment]
    run.step([(run.stream(9), tokens(9, 1)), (run.stream(5), tokens(5, 1))])
    assert seen and set(seen) == {1}


def test_what_cannot_be_shared_is_refused() -> None:
    raw = oracle("gemma4").family.raw | {"rms_norm_eps": 1e-6}
    with pytest.raises(CheckpointError, match="num_kv_shared_layers must be from 0 to 5, got 6"):
        build("Gemma4ForCausalLM", {**raw, "num_kv_shared_layers": 6})
    with pytest.raises(CheckpointError, match="no layer has keys and values for layers of 'full_attention'"):
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        resolve("Gemma4ForCausalLM").read_config({**raw, "layer_types": kinds, "num_kv_shared_layers": 2})
