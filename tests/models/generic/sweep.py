"""Tests every causal language model of Transformers; `python -m tests.models.generic.sweep` writes the list of the package.

With names of architectures only those are tested and printed.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from samovar.errors import CheckpointError
from samovar.models.generic.verdicts import PATH, Verdict
from tests.models.generic.gate import check, reference_of, subject

NO_TEXT_DECODER = {
    "BltForCausalLM": "it has encoders of bytes with attention of their own",
    "FuyuForCausalLM": "it is a model of images and text",
    "GitForCausalLM": "it is a model of images and text",
    "MllamaForCausalLM": "it attends to images",
    "MusicgenForCausalLM": "it is a model of sound",
    "MusicgenMelodyForCausalLM": "it is a model of sound",
    "MoshiForCausalLM": "it is a model of sound",
    "WhisperForCausalLM": "it is a model of sound",
    "TrOCRForCausalLM": "it attends to images",
    "Phi4MultimodalForCausalLM": "it is a model of images, sound and text",
    "Gemma4AssistantForCausalLM": "it drafts for another model",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts for another model",
    "ReformerModelWithLMHead": "its attention hashes",
    "ProphetNetForCausalLM": "it predicts several streams",
    "XLMWithLMHeadModel": "it computes an attention mask from lengths",
    "XLNetLMHeadModel": "its attention is over permutations",
    "CpmAntForCausalLM": "its attention is over segments",
    "Dots3NoteForCausalLM": "it has layers of the kind indexed_attention",
    "GPTNeoForCausalLM": "it knows no attention but its own",
}
"""Architectures for which there is no small config, and why the generic path would refuse them."""
STATE = (
    "Bamba FalconH1 FalconMamba Jamba Mamba Mamba2 NemotronH RecurrentGemma Zamba Zamba2 Lfm3 MiniMax Zaya KimiLinear "
    "OlmoHybrid GraniteMoeHybrid"
).split()
"""The same for those with recurrent state."""
FRESH = 3
"""Seeds of the reference that are tried: a router may choose between experts that are as good as equal."""


def architectures() -> dict[str, str]:
    """Architecture -> the model type that is tested, of every causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        is_text = architecture not in found or model_type.endswith("_text")
        if is_text and not architecture.endswith("ForConditionalGeneration"):
            found[architecture] = model_type
    return dict(sorted((found | {"Emu3ForCausalLM": "emu3_text_model"}).items()))


def judge(model_type: str, architecture: str) -> Verdict:
    """Test one architecture."""
    if architecture in NO_TEXT_DECODER:
        return Verdict(architecture, NO_TEXT_DECODER[architecture])
    if architecture.removesuffix("ForCausalLM") in STATE:
        return Verdict(architecture, "some of its layers have recurrent state")
    for seed in range(FRESH):
        verdict = _judge(model_type, architecture, seed)
        if not verdict.refusal.startswith("its results differ"):
            break
    return verdict


def _judge(model_type: str, architecture: str, seed: int) -> Verdict:
    try:
        reference = reference_of(model_type, architecture, seed=seed)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        return Verdict(architecture, f"not tested: {_line(error)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(subject(reference, Path(folder)))
        except CheckpointError as error:
            return Verdict(architecture, _line(error).partition("cannot run through Transformers: ")[2] or _line(error))
        except AssertionError as error:
            return Verdict(architecture, f"its results differ from Transformers': {_line(error)}")
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            return Verdict(architecture, f"it fails: {type(error).__name__}: {_line(error)}")
    return Verdict(architecture)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def write(verdicts: Iterable[Verdict], version: str) -> None:
    """The package's list."""
    lines = [
        f"# Written by python -m tests.models.generic.sweep, with Transformers {version}.",
        "# An architecture that passed the test, or one that did not: why.",
        *(f"{v.architecture}: {v.refusal}" if v.refusal else v.architecture for v in verdicts),
    ]
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    """Test those named, or all and write the list."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = []
    for architecture, model_type in architectures().items():
        if not names or architecture in names:
            found.append(judge(model_type, architecture))
            print(f"{architecture}: {found[-1].refusal or 'generic'}", flush=True)
    if not names:
        write(found, transformers.__version__)
    print(f"{sum(not v.refusal for v in found)} of {len(found)} pass")


if __name__ == "__main__":
    main(sys.argv[1:])
