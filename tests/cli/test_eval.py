"""The commands of `samovar eval` with real models: figures against Transformers, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.eval import asking, needle, opened
from samovar.cli.eval.needle import Case
from samovar.cli.main import main
from samovar.config.field import Group
from samovar.config.groups import ModelConfig
from samovar.config.load import load
from samovar.hub.locate import find_model
from samovar.text.tokenizer import load_tokenizer
from tests.checkpoints import write_random_llama

SMALL = ["--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "4MiB"]
TEXT = "Once upon a time there was a small engine. What is the answer to the question? The sea and the sun. " * 12
CONTEXT = 64


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer."""
    return write_random_llama(tmp_path_factory.mktemp("other-llama"), seed=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def exact(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [windows, rows, vocab] of the scored rows as Transformers gives them, and the scored tokens."""
    from transformers import LlamaForCausalLM

    ids = load_tokenizer(find_model(ModelConfig(model=str(folder)))).encode(TEXT)
    windows = torch.tensor([ids[i : i + CONTEXT] for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)])
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(windows).logits
    return logits[:, CONTEXT // 2 : -1].double().log_softmax(-1), windows[:, CONTEXT // 2 + 1 :]


def scores(folder: Path) -> torch.Tensor:
    """Log-probabilities of the scored tokens [windows, rows]."""
    log_p, targets = exact(folder)
    return log_p.gather(2, targets[:, :, None]).squeeze(2)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["eval", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("chunk", ["512", "17"])
def test_perplexity(
    tiny_model: Path, other_model: Path, text: Path, chunk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model), "--text", str(text), "--context", str(CONTEXT), "--max-num-batched-tokens", chunk, *SMALL]
    found = said(capsys, "ppl", *words, "--against", str(other_model), "--against-dtype", "float32")
    expected, reference = scores(tiny_model), scores(other_model)
    assert (found["windows"], found["context"]) == (len(expected), CONTEXT) and len(expected) > 3
    # Logits of float32 models agree within 1e-4.
    first, second = found["models"]
    assert first["perplexity"] == pytest.approx(math.exp(-expected.mean()), rel=1e-4)
    assert second["perplexity"] == pytest.approx(math.exp(-reference.mean()), rel=1e-4)
    assert found["ratio"]["value"] == pytest.approx(math.exp((reference - expected).mean()), rel=2e-4)
    assert first["interval"][0] < first["perplexity"] < first["interval"][1]
    assert first["model"]["name"] == f"{tiny_model.name} --dtype float32" and first["model"]["weight_bytes"] > 0


def test_divergence(
    tiny_model: Path, other_model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reference"
    words = [str(tiny_model), "--text", str(text), "--context", str(CONTEXT), "--max-num-batched-tokens", "40", *SMALL]
    against = ["--against", str(other_model), "--against-dtype", "float32", "--reference-file", str(file)]
    found = said(capsys, "kl", *words, *against)
    (log_p, targets), (log_q, _) = exact(other_model), exact(tiny_model)
    apart = (log_p.exp() * (log_p - log_q)).sum(-1)
    # The reference is kept in float16: a hundredth of a percent of so large divergences.
    assert found["divergence"]["mean"] == pytest.approx(apart.mean().item(), rel=1e-3)
    assert found["divergence"]["max"] == pytest.approx(apart.max().item(), rel=1e-3)
    assert found["divergence"]["p50"] == pytest.approx(apart.median().item(), rel=0.05)
    assert found["same_top"]["share"] == (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    own = log_p.gather(2, targets[:, :, None])
    assert found["reference_perplexity"]["perplexity"] == pytest.approx(math.exp(-own.mean()), rel=1e-3)
    assert found["reference"] == f"{other_model.name} --dtype float32" and [file] == list(tmp_path.glob("reference*"))
    # The file serves other models: the reference itself is nowhere apart from it.
    found = said(capsys, "kl", str(other_model), *words[1:], "--reference-file", str(file))
    assert abs(found["divergence"]["max"]) < 1e-5 and found["same_top"]["share"] == 1
    assert found["perplexity_ratio"]["value"] == pytest.approx(1, abs=1e-3)
    # And none that is scored otherwise.
    assert main(["eval", "kl", *words, *against]) == 2
    assert "exists already; leave out --against" in capsys.readouterr().err
    assert main(["eval", "kl", *words, "--windows", "2", "--reference-file", str(file)]) == 1
    assert "scored on other tokens" in capsys.readouterr().err


def test_a_form_is_compared_with_the_model_itself(
    tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model), "--text", str(text), "--context", "64", "--windows", "2", *SMALL[2:]]
    assert main(["eval", "kl", *words, "--kv-cache-dtype", "bfloat16"]) == 0
    table = capsys.readouterr().out
    assert f"{tiny_model.name} --kv-cache-dtype bfloat16 against {tiny_model.name}: 2 windows of 64 tokens" in table
    mean = next(line for line in table.splitlines() if line.startswith("mean divergence")).split()
    # bfloat16 keeps 8 bits of keys and values: enough to be seen, far from enough to change what is said.
    assert 1e-8 < float(mean[2]) < 0.05
    assert main(["eval", "kl", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("samovar: nothing to compare: name another model with --against") and err.count("\n") == 1


def test_the_reference_has_its_own_form() -> None:
    words = ["m.gguf", "--quantization", "int8", "--kv-cache-dtype", "int8", "--threads", "1", "--tokenizer", "t"]
    options: tuple[type[Group], ...] = (opened.AgainstOptions, *ENGINE_OPTIONS)
    settings = load(words, options, positional="model")
    assert opened.label(settings) == "m.gguf --quantization int8 --kv-cache-dtype int8"
    name, flags = opened.reference_flags(settings)
    assert name == "m.gguf" and flags == {"model": "m.gguf", "dtype": "auto", "threads": 1, "tokenizer": "t"}
    other = load([*words, "--against", "a/b", "--against-dtype", "float32"], options, positional="model")
    name, flags = opened.reference_flags(other)
    assert name == "b --dtype float32" and flags == {"model": "a/b", "dtype": "float32", "threads": 1}
    assert [flags["model"] for _, flags in opened.runs_of(other)] == ["m.gguf", "a/b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppl", "--context", "2048"], "--context 2048 is more than the 1024 tokens that the model takes"),
        (["ppl", "--context", "1024"], "the text has only"),
        (["ppl", "--text", "./none"], "--text none: cannot be read"),
        (["ppl", "--skip-tokenizer-init"], "an evaluation needs the tokenizer"),
        (["ppl", "--context", "4"], "context"),
        (["gsm8k", "--questions", "./none"], "--questions none: cannot be read"),
        (["needle", "--lengths", "100k"], "more than the 1024 that the model takes"),
        (["needle", "--depths", "101"], "--depths must be percents"),
        (["needle", "--lengths", "no"], "--lengths must be whole numbers"),
        (["kl", "--against", "no-such-folder/x", "--load-format", "safetensors"], "no-such-folder"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--text" in words or words[0] not in ("ppl", "kl") else ["--text", str(text)]
    assert main(["eval", words[0], str(tiny_model), *words[1:], *given, *SMALL, "--offline"]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("samovar: ") and message in err and err.count("\n") == 1


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("ppl", "kl", "gsm8k", "needle"))
    for name in ("ppl", "kl", "gsm8k", "needle"):
        assert main(["eval", name, "--help"]) == 0
        assert "--against" in capsys.readouterr().out
    assert main(["eval", "perplexity"]) == 2


def test_questions_are_asked_and_compared(
    script_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model always says 12, another always 15."""
    path = tmp_path / "q.jsonl"
    numbers = [12, 12, 12, 15, 3]
    path.write_text("\n".join(json.dumps({"question": "How many?", "answer": f"#### {n}"}) for n in numbers))
    one, two = script_model(["That is ", "#### ", "12"]), script_model(["It is ", "15", "."])
    words = [
        "gsm8k",
        str(one),
        "--questions",
        str(path),
        "--against",
        str(two),
        "--threads",
        "1",
        "--max-num-seqs",
        "4",
    ]
    found = said(capsys, *words)
    first, second = found["models"]
    assert (first["right"], second["right"], first["asked"]) == (3, 1, 5)
    assert first["hits"] == [True, True, True, False, False] and first["answers"][0] == "That is #### 12"
    assert found["comparison"] == {"only_first": 3, "only_second": 1, "p_value": pytest.approx(2 * 5 / 16)}
    assert main(["eval", *words, "--style", "plain", "--num-questions", "2"]) == 0
    assert "of 2" in capsys.readouterr().out
    without = script_model(["12"])
    settings = json.loads((without / "tokenizer_config.json").read_text())
    (without / "tokenizer_config.json").write_text(json.dumps({"eos_token": settings["eos_token"]}))
    plain = ["gsm8k", str(without), "--questions", str(path), "--threads", "1"]
    assert said(capsys, *plain)["models"][0]["right"] == 3
    assert main(["eval", *plain, "--style", "chat"]) == 2
    assert "this model has no chat template" in capsys.readouterr().err


def test_needles(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["needle", str(tiny_model), "--lengths", "128,4k", "--depths", "50", "--repeats", "2", *SMALL]
    found = said(capsys, *words)
    assert found["models"][0]["cells"] == [{"length": 128, "depth": 50, "right": 0, "asked": 2}]
    assert found["comparison"] is None
    assert main(["eval", *words, "--against", str(tiny_model)]) == 0
    assert "0/2" in (out := capsys.readouterr().out) and "McNemar" in out


def test_a_found_needle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(512, 50, 0), Case(512, 50, 1), Case(512, 100, 0)]
    asked = list[str]()

    def answer(llm: Any, prompts: list[str], **options: Any) -> list[str]:
        asked.extend(prompts)
        first, second, third = (case.number for case in cases)
        return [f" {first[:3]},{first[3:]}.", f"{second[:-1]}", f"It is {third}"]

    class Words:
        def encode(self, text: str, **options: Any) -> list[int]:
            return [0] * len(text.split())

    class Loaded:
        def get_tokenizer(self) -> Words:
            return Words()

    monkeypatch.setattr(needle, "answers", answer)
    monkeypatch.setattr(needle, "is_chat", lambda llm, options: False)
    settings = load([], needle.OPTIONS, positional="model")
    assert list(needle.search(Loaded(), cases, settings).values()) == [True, False, True]  # type: ignore[arg-type]
    assert asked[0].endswith(f"Answer: The secret number of {cases[0].city} is") and cases[0].number in asked[0]
    assert asking.share([True, False])["share"] == 0.5 and np.isclose(asking.share([])["share"], 0)
