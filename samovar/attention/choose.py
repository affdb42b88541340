"""Which backend serves each kind of layer: an ordered list of candidates, and the reasons why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samovar.attention.base import AttentionBackend, AttentionPlan, AttentionSpec, Spans
from samovar.attention.cudnn import CudnnAttention
from samovar.attention.native import NativeAttention
from samovar.attention.reference import ReferenceAttention
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.attention.triton import TritonAttention
from samovar.config.groups import DeviceConfig
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError

CANDIDATES: tuple[type[AttentionBackend], ...] = (
    CudnnAttention,
    TritonAttention,
    NativeAttention,
    TorchSdpaAttention,
    ReferenceAttention,
)
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class AttentionRoute:
    """The choice for a model. `groups[layer]` indexes `backends` and the plans of a step.

    `lines` says, for each kind of layer, what each candidate answered.
    """

    backends: tuple[AttentionBackend, ...]
    groups: tuple[int, ...]
    lines: tuple[str, ...]

    def plan(self, spans: Spans) -> tuple[AttentionPlan, ...]:
        """One plan per group, for `ForwardBatch.plans`."""
        return tuple(backend.plan(spans) for backend in self.backends)


def choose(specs: Sequence[AttentionSpec], facts: DeviceFacts, config: DeviceConfig) -> AttentionRoute:
    """The first candidate that accepts each layer; `config.attention_backend` names one that must accept all.

    Raises `ConfigError` if the named backend is unknown or refuses a layer.
    """
    wanted, candidates = config.attention_backend, [candidate() for candidate in CANDIDATES]
    for candidate in candidates:
        if isinstance(candidate, TritonAttention):
            candidate.is_deterministic = config.deterministic
    if wanted != "auto":
        candidates = [candidate for candidate in candidates if candidate.name == wanted]
        if not candidates:
            names = ", ".join(candidate.name for candidate in CANDIDATES)
            raise ConfigError(f"--attention-backend {wanted}: no such backend; there are auto, {names}")
    chosen: dict[AttentionSpec, AttentionBackend] = {}
    lines: list[str] = []
    for spec in dict.fromkeys(specs):
        answers = [(candidate, candidate.accepts(spec, facts)) for candidate in candidates]
        accepting = [candidate for candidate, reason in answers if reason is None]
        said = " · ".join(
            f"{candidate.name}: {reason or ('chosen' if candidate is accepting[0] else 'accepts')}"
            for candidate, reason in answers
        )
        if not accepting:
            raise ConfigError(f"no attention backend serves {_words(spec)}: {said}; use --attention-backend auto")
        if config.deterministic and not isinstance(accepting[0], TritonAttention):
            raise ConfigError(
                f"--deterministic: attention through {accepting[0].name} depends on the batch; use "
                f"--attention-backend triton (it needs Triton)"
            )
        chosen[spec] = accepting[0]
        lines.append(f"attention {_words(spec)}: {said}")
    backends = tuple(dict.fromkeys(chosen.values()))
    groups = tuple(backends.index(chosen[spec]) for spec in specs)
    return AttentionRoute(backends, groups, tuple(lines))


def _words(spec: AttentionSpec) -> str:
    if spec.cache.latent is not None:
        return f"latent, {spec.num_heads} heads over rows of {spec.cache.latent.rank} + {spec.cache.latent.rope}"
    kind = "full" if spec.cache.window is None else f"window {spec.cache.window}"
    extras = (", softcap" if spec.softcap is not None else "") + (", sinks" if spec.has_sinks else "")
    return f"{kind}, {spec.num_heads}/{spec.cache.num_kv_heads} heads of {spec.cache.head_dim}{extras}"
