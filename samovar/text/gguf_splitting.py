"""How a GGUF file's `tokenizer.ggml.pre` splits text into words before byte-pair merging.

The file holds a name only; the patterns are those of the tokenizers that the names stand for, written as regular
expressions in the dialect of the `tokenizers` library. Each pattern cuts every piece the earlier ones left into its
matches and the text between them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Splitting:
    """One family's way of splitting.

    `whole_words_first`: a word that is itself a token is never split by the merges. `adds_bos`: the family begins
    every text with its BOS token unless the file says otherwise. `has_bos`: False for families whose BOS id in the
    file has no meaning.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False
    has_bos: bool = True


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|{_TAIL}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
_NO_ENDINGS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|{_TAIL}"
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_SPARK_WORDS = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str, marks: str) -> str:
    """Words are cut before a capital: the pattern of tekken and o200k."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{digits}|{marks}|{_TAIL}"


_SLASHED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _cased("", r"\p{N}", _SLASHED_MARKS)
_O200K = _cased(_ENDINGS + "?", r"\p{N}{1,3}", _SLASHED_MARKS)
_YOUTU = _cased(_ENDINGS + "?", r"\p{N}", _SLASHED_MARKS)
_KIMI = r"\p{Han}+|" + _cased(_ENDINGS + "?", r"\p{N}{1,3}", _MARKS).replace(
    _UPPER, _UPPER[:-1] + r"&&[^\p{Han}]]"
).replace(_LOWER, _LOWER[:-1] + r"&&[^\p{Han}]]")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_FALCON_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
_DEFAULT_MARKS = r"[\p{P}\$\+<=>\^~\|]+"

# The letters of deepseek-llm's tokenizer.json, a list of ranges without a shorter name.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")

DEFAULT = Splitting((_DEFAULT_MARKS, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""For files without a name, or with the name "default"."""

_llama3 = Splitting((_LLAMA3,), whole_words_first=True, adds_bos=True)
_gpt2 = Splitting((_GPT2,))
_starcoder = Splitting((r"\p{N}", _GPT2))
_qwen2 = Splitting((_QWEN2,))
_deepseek3 = Splitting((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))
_glm4 = Splitting((_LLAMA3,), whole_words_first=True, has_bos=False)
_o200k = Splitting((_O200K,))
_bailing = Splitting(
    (rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",),
)
_bloom = Splitting((_BLOOM,))

SPLITTINGS: dict[str, Splitting] = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _llama3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "mpt", "olmo", "jais", "trillion"),
            *("granite-docling", "exaone4"),
        ),
        _gpt2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _starcoder
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"),
        _qwen2,
    ),
    "qwen35": Splitting((_QWEN35,)),
    "ufakzeka": Splitting((_NO_ENDINGS,)),
    "laguna": Splitting((r"[^\n]+|[\n]+", _QWEN2)),
    "minicpm5": Splitting((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words_first=True),
    "seed-coder": Splitting(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",),
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "exaone-moe": Splitting(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    "spark2_5": Splitting((r"\p{N}{1,3}", _CJK, _SPARK_WORDS, r"\p{N}")),
    "youtu": Splitting(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _YOUTU,
        ),
        whole_words_first=True,
    ),
    "falcon": Splitting((_FALCON_MARKS, _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _bloom),
    "viking": Splitting((_BLOOM, r"\p{N}")),
    "chatglm-bpe": Splitting((_LLAMA3,), has_bos=False),
    **dict.fromkeys(("glm4", "glm5"), _glm4),
    "tekken": Splitting((_TEKKEN,), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _o200k),
    "granite-embed-multi-97m": Splitting((_O200K,), whole_words_first=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    "kimi-k2": Splitting((_KIMI,)),
    "chameleon": Splitting(
        (r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    ),
}
"""`tokenizer.ggml.pre` -> how to split."""
