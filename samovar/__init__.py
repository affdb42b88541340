"""Samovar: an engine that runs and serves large language models. Public names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samovar.core.sampling_params import OutputKind, SamplingParams
    from samovar.core.structured import StructuredOutputsParams
    from samovar.engine.async_llm import AsyncLLM
    from samovar.engine.beam_search import BeamSearchParams
    from samovar.engine.engine_args import EngineArgs
    from samovar.engine.llm import LLM
    from samovar.engine.prompts import PromptType, TextPrompt, TokensPrompt
    from samovar.engine.request_output import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
    )
    from samovar.errors import SamovarError

__version__ = "0.1.0"

_HOMES = {
    "LLM": "samovar.engine.llm",
    "AsyncLLM": "samovar.engine.async_llm",
    "EngineArgs": "samovar.engine.engine_args",
    "SamplingParams": "samovar.core.sampling_params",
    "OutputKind": "samovar.core.sampling_params",
    "StructuredOutputsParams": "samovar.core.structured",
    "BeamSearchParams": "samovar.engine.beam_search",
    "BeamSearchOutput": "samovar.engine.request_output",
    "BeamSearchSequence": "samovar.engine.request_output",
    "RequestOutput": "samovar.engine.request_output",
    "CompletionOutput": "samovar.engine.request_output",
    "Logprob": "samovar.engine.request_output",
    "PromptType": "samovar.engine.prompts",
    "TextPrompt": "samovar.engine.prompts",
    "TokensPrompt": "samovar.engine.prompts",
    "SamovarError": "samovar.errors",
}
"""Public name -> the module it lives in."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "Logprob",
    "OutputKind",
    "PromptType",
    "RequestOutput",
    "SamovarError",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samovar' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
