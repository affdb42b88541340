"""Tokenizer of a GGUF file, built from its metadata: byte-level BPE, SentencePiece, WordPiece, unigram.

The file names its algorithm and stores pieces, scores, merges and flags; what it does not store (patterns, defaults)
belongs to the family and is in `gguf_splitting` or below.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from samovar.config.gguf import read_gguf_header
from samovar.errors import CheckpointError
from samovar.text.fast_tokenizer import FastTokenizer, Framing
from samovar.text.gguf_splitting import DEFAULT, SPLITTINGS, Splitting
from samovar.text.token_bytes import SPACE_MARK, PieceBytes, byte_level, sentencepiece, wordpiece

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_PREFIX = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
"""Template variable -> the word in the file's key (whose spelling is the file format's)."""

_SHOWN_CONTROLS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Harmony's structure marks: stored as control tokens, but a reader of the output needs them."""


@dataclass(slots=True)
class _Vocabulary:
    """The metadata of one file, typed."""

    path: Path
    metadata: dict[str, Any]
    texts: list[str]
    types: list[int]

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"metadata {_PREFIX + key!r} must be a boolean, not {value!r}")
        return value

    def token_id(self, word: str, default: int | None = None) -> int | None:
        """The id stored under e.g. `tokenizer.ggml.bos_token_id`; None if it is not in the vocabulary."""
        value = self.get(f"{word}_token_id", default)
        return value if isinstance(value, int) and 0 <= value < len(self.texts) else None

    def text_to_id(self) -> dict[str, int]:
        """Piece -> id; of equal pieces the last one counts."""
        return {text: i for i, text in enumerate(self.texts)}

    def scores(self) -> list[float]:
        scores = self.get("scores")
        if scores is None or len(scores) < len(self.texts):
            raise self.fail("metadata 'tokenizer.ggml.scores' is missing or shorter than the vocabulary")
        return list(scores[: len(self.texts)])

    def merges(self) -> list[tuple[str, str]]:
        lines = self.get("merges")
        if lines is None:
            raise self.fail("metadata 'tokenizer.ggml.merges' is missing; a BPE vocabulary cannot be used without it")
        pairs = []
        for line in lines:
            at = line.find(" ", 1)
            if at < 0:
                raise self.fail(f"merge {line!r} does not name two pieces")
            pairs.append((line[:at], line[at + 1 :]))
        return pairs


@dataclass(slots=True, kw_only=True)
class _Built:
    """What one algorithm makes of a vocabulary."""

    model: Any
    pieces: PieceBytes
    adds_bos: bool
    adds_eos: bool = False
    normalizer: Any = None
    pre_tokenizer: Any = None
    strips_space: bool = False
    bos: int | None = None
    eos: int | None = None


def load_gguf(path: Path) -> FastTokenizer:
    """The tokenizer in a GGUF file. Raises `CheckpointError` if it has none, or one of an unknown kind."""
    metadata = read_gguf_header(path).metadata
    kind, pre = metadata.get(_PREFIX + "model"), metadata.get(_PREFIX + "pre")
    texts, types = metadata.get(_PREFIX + "tokens"), metadata.get(_PREFIX + "token_type")
    if kind is None or texts is None:
        raise CheckpointError(f"{path}: holds no tokenizer (tokenizer.ggml.model, .tokens); name one with --tokenizer")
    vocabulary = _Vocabulary(path, metadata, list(texts), list(types) if types is not None else [1] * len(texts))
    if len(vocabulary.types) != len(vocabulary.texts):
        raise CheckpointError(f"{path}: {len(vocabulary.types)} token types for {len(vocabulary.texts)} tokens")
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise CheckpointError(f"{path}: tokenizer model {kind!r} is not supported; known: {', '.join(_BUILDERS)}")
    try:
        built = builder(vocabulary, pre)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception for pieces and merges that do not fit together
        raise CheckpointError(f"{path}: damaged tokenizer: {error}") from error
    return _assemble(vocabulary, built)


def _assemble(vocabulary: _Vocabulary, built: _Built) -> FastTokenizer:
    backend = tokenizers.Tokenizer(built.model)
    if built.normalizer is not None:
        backend.normalizer = built.normalizer
    if built.pre_tokenizer is not None:
        backend.pre_tokenizer = built.pre_tokenizer
    backend.add_tokens(_added_tokens(vocabulary))
    bos, eos = built.bos, built.eos
    prefix = (bos,) if vocabulary.flag("add_bos_token", built.adds_bos) and bos is not None else ()
    suffix = (eos,) if vocabulary.flag("add_eos_token", built.adds_eos) and eos is not None else ()
    named = {name: vocabulary.texts[i] for name, word in _NAMED.items() if (i := vocabulary.token_id(word)) is not None}
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None:
            named.setdefault(name, vocabulary.texts[token])
    return FastTokenizer(
        backend,
        Framing(prefix=prefix, suffix=suffix, bos=bos, eos=eos, named=named),
        vocab_size=len(vocabulary.texts),
        pieces=built.pieces,
        strips_space=built.strips_space,
        twice=_repeated(vocabulary),
    )


def _repeated(vocabulary: _Vocabulary) -> dict[int, str]:
    """Ids whose text belongs to a later id as well."""
    if len(set(vocabulary.texts)) == len(vocabulary.texts):
        return {}
    last = vocabulary.text_to_id()
    return {i: text for i, text in enumerate(vocabulary.texts) if last[text] != i}


def _added_tokens(vocabulary: _Vocabulary) -> list[AddedToken]:
    """Control, unknown and user-defined tokens, which are matched before anything else is done to a text."""
    trims = _trimming(vocabulary)
    added = []
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED) or not text:
            continue
        left, right = trims(text)
        special = kind != _USER_DEFINED and text not in _SHOWN_CONTROLS
        added.append(AddedToken(text, lstrip=left, rstrip=right, normalized=False, special=special))
    return added


def _trimming(vocabulary: _Vocabulary) -> Callable[[str], tuple[bool, bool]]:
    """Which added tokens swallow the white space before and after them: not stored in the file, known by family."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    pre = vocabulary.get("pre", "")
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or vocabulary.metadata.get("general.architecture") in (
        "nomic-bert-moe",
        "jina-bert-v3",
    ):
        return lambda text: (text == "<mask>", False)
    if "phi-3" in name or "phi3" in name:
        return lambda text: (False, text not in ("<unk>", "<s>", "<|endoftext|>"))
    if pre == "modern-bert" or "modern-bert" in name:
        return lambda text: (text == "[MASK]", False)
    return lambda text: (False, False)


def _byte_bpe(vocabulary: _Vocabulary, pre: str | None) -> _Built:
    """Byte-level BPE (GPT-2's scheme)."""
    if pre in ("gemma4", "sarvam-moe"):
        return _marked_bpe(vocabulary, pre)
    splitting: Splitting | None = DEFAULT if pre is None else SPLITTINGS.get(pre)
    if splitting is None:
        raise vocabulary.fail(f"pre-tokenizer {pre!r} is not known; give the model's tokenizer.json with --tokenizer")
    model = models.BPE(
        vocab=vocabulary.text_to_id(), merges=vocabulary.merges(), ignore_merges=splitting.whole_words_first
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _Built(
        model=model,
        pieces=byte_level,
        pre_tokenizer=pre_tokenizers.Sequence([*splits, alphabet]),
        adds_bos=splitting.adds_bos,
        bos=vocabulary.token_id("bos", 11) if splitting.has_bos else None,
        eos=vocabulary.token_id("eos", 11),
    )


def _marked_bpe(vocabulary: _Vocabulary, pre: str | None) -> _Built:
    """BPE over characters with U+2581 for spaces and byte fallback, words cut at line ends only (Gemma 4)."""
    model = models.BPE(vocab=vocabulary.text_to_id(), merges=vocabulary.merges(), byte_fallback=True)
    return _Built(
        model=model,
        pieces=sentencepiece,
        normalizer=normalizers.Replace(" ", SPACE_MARK),
        pre_tokenizer=pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated"),
        adds_bos=False,
        bos=vocabulary.token_id("bos"),
        eos=vocabulary.token_id("eos"),
    )


def _sentencepiece(vocabulary: _Vocabulary, pre: str | None) -> _Built:
    """SentencePiece BPE: the pair whose joined piece scores best is merged first."""
    ids = vocabulary.text_to_id()
    model = models.BPE(
        vocab=ids,
        merges=_merges_from_scores(vocabulary, ids),
        unk_token=_text_of(vocabulary, "unknown", 0),
        fuse_unk=True,
        byte_fallback=True,
    )
    prefixed = vocabulary.flag("add_space_prefix", True)
    marks = normalizers.Replace(" ", SPACE_MARK)
    return _Built(
        model=model,
        pieces=sentencepiece,
        normalizer=normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if prefixed else marks,
        adds_bos=True,
        strips_space=prefixed,
        bos=vocabulary.token_id("bos", 1),
        eos=vocabulary.token_id("eos", 2),
    )


def _text_of(vocabulary: _Vocabulary, word: str, default: int) -> str | None:
    token = vocabulary.token_id(word, default)
    return None if token is None else vocabulary.texts[token]


def _merges_from_scores(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first.

    With all of them in that order, merging by rank does what merging by score does.
    """
    never = (_UNKNOWN, _CONTROL, _BYTE)
    joinable = {text for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind not in never}
    scores = vocabulary.scores()
    merges: list[tuple[str, str]] = []
    for token in sorted(range(len(scores)), key=lambda i: -scores[i]):
        text = vocabulary.texts[token]
        if len(text) < 2 or text not in joinable or ids[text] != token:
            continue
        cuts = range(1, len(text))
        merges += [(text[:cut], text[cut:]) for cut in cuts if text[:cut] in joinable and text[cut:] in joinable]
    return merges


def _wordpiece(vocabulary: _Vocabulary, pre: str | None) -> _Built:
    """WordPiece; the file marks word starts with U+2581 instead of continuations with ##."""
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    pieces = {}
    for i, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            pieces[text] = i
        else:
            pieces[text[1:] if text.startswith(SPACE_MARK) else "##" + text] = i
    cls = vocabulary.token_id("cls", 101)
    return _Built(
        model=models.WordPiece(vocab=pieces, unk_token=_text_of(vocabulary, "unknown", 100) or "[UNK]"),
        pieces=wordpiece,
        normalizer=normalizers.BertNormalizer(
            lowercase=lowercase, strip_accents=vocabulary.flag("normalizer.strip_accents", lowercase)
        ),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        adds_bos=True,
        adds_eos=True,
        strips_space=True,
        bos=cls if cls is not None else vocabulary.token_id("bos"),
        eos=vocabulary.token_id("seperator", 102),
    )


def _unigram(vocabulary: _Vocabulary, pre: str | None) -> _Built:
    """Unigram language model (T5's scheme), with the normalization table the file carries."""
    unknown = vocabulary.token_id("unknown", 2)
    pieces = list(zip(vocabulary.texts, vocabulary.scores(), strict=True))
    steps: list[Any] = []
    table = vocabulary.get("precompiled_charsmap")
    if table is not None and len(table):
        steps.append(_precompiled(table.tobytes()))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefixed = vocabulary.flag("add_space_prefix", True)
    return _Built(
        model=models.Unigram(pieces, unknown, _BYTE in vocabulary.types),
        pieces=sentencepiece,
        normalizer=normalizers.Sequence(steps),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always" if prefixed else "never"),
        adds_bos=False,
        adds_eos=True,
        strips_space=prefixed,
        bos=vocabulary.token_id("bos"),
        eos=vocabulary.token_id("eos", 1),
    )


def _precompiled(table: bytes) -> Any:
    """The normalizer of a SentencePiece character map, which the library only takes as JSON."""
    entry = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode("ascii")}
    document: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": entry}
    document |= dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    document["model"] = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return tokenizers.Tokenizer.from_str(json.dumps(document)).normalizer


_BUILDERS: dict[str, Callable[[_Vocabulary, str | None], _Built]] = {
    "gpt2": _byte_bpe,
    "gemma4": _marked_bpe,
    "llama": _sentencepiece,
    "bert": _wordpiece,
    "t5": _unigram,
}
