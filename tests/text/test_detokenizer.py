"""Streaming text: any ids give the text that decoding all of them at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.text.detokenizer import Detokenizer
from samovar.text.fast_tokenizer import FastTokenizer
from samovar.text.gguf_tokenizer import load_gguf
from samovar.text.tokenizer import Tokenizer
from tests.text.byte_tokenizer import ByteTokenizer

PIECES = [
    b" the",
    "世".encode(),
    "世界".encode()[:4],
    b"\x80\x81",
    b"\xf0\x9f",
    " \U0001f642".encode()[1:],
    b"",
    b"\xed\xa0\x80",
]
BYTES = ByteTokenizer(PIECES, ["<a>", "<b>"])


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@given(
    st.lists(
        st.integers(-2, BYTES.vocab_size + 3) | st.sampled_from([0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0x80, 0xC3]), max_size=60
    )
)
def test_streamed_is_whole(ids: list[int]) -> None:
    """B046, B047, B055: any ids, unknown ones too: streamed == decoded at once == Python's UTF-8 decoder."""
    for skip in (True, False):
        text = "".join(stream(BYTES, ids, skip_special_tokens=skip))
        assert text == BYTES.decode(ids, skip_special_tokens=skip)
        text.encode()  # always valid


@pytest.mark.parametrize("name", ["llama-spm", "gemma-4", "qwen2", "gpt-2", "bert-bge"])
def test_real_vocabularies(vocabularies: Path, name: str) -> None:
    """B046, B053, B055: random ids of real vocabularies, special and added tokens among them."""
    tokenizer = load_gguf(vocabularies / f"ggml-vocab-{name}.gguf")

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 5) | st.integers(0, 300), max_size=40), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        text = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
        # After a prompt: what the ids add to a text that ends in an ordinary character.
        anchor = tokenizer.encode("x", add_special_tokens=False)
        before = tokenizer.decode(anchor, skip_special_tokens=skip)
        assert before + text == tokenizer.decode([*anchor, *ids], skip_special_tokens=skip)

    check()


def test_hangul_byte_by_byte(smollm2_tokenizer: FastTokenizer) -> None:
    """B047: a long Korean text in byte-level BPE has no U+FFFD and no text before a character is complete."""
    text = "다람쥐 헌 쳇바퀴에 타고파. 키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. " * 20
    ids = smollm2_tokenizer.encode(text)
    assert len(ids) > len(text)  # syllables are split over tokens
    pieces = stream(smollm2_tokenizer, ids)
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)


def test_space_while_bytes_are_pending() -> None:
    """B049: a lead byte, " the", a continuation byte: one U+FFFD for each bad sequence, as soon as it is bad."""
    the = 256 + PIECES.index(b" the")
    assert stream(BYTES, [0xE4, the, 0x96]) == ["", "\ufffd the", "\ufffd", ""]
    assert stream(BYTES, [0xF0, 0x9F, 0x99]) == ["", "", "", "\ufffd"]
    assert stream(BYTES, [0xE4, 0xB8, 0x96]) == ["", "", "世", ""]


@pytest.mark.parametrize("kept", range(1, 7))
def test_cut_inside_a_character(kept: int) -> None:
    """B050: generation ends inside a character: whole characters, then exactly one U+FFFD for the rest."""
    ids = list("世界".encode())[:kept]
    whole, rest = divmod(kept, 3)
    assert "".join(stream(BYTES, ids)) == "世界"[:whole] + ("\ufffd" if rest else "")


def test_leading_space(smollm2_tokenizer: FastTokenizer, spm_tokenizer: FastTokenizer) -> None:
    """B053: the first token after a prompt keeps its space; a whole text decoded alone loses the one it was given."""
    assert "".join(stream(smollm2_tokenizer, smollm2_tokenizer.encode(" hello"))) == " hello"
    space, a = (spm_tokenizer.encode(t, add_special_tokens=False)[0] for t in (" ", "a"))
    assert spm_tokenizer.token_text(a) == " a"
    assert "".join(stream(spm_tokenizer, [a])) == " a"
    assert "".join(stream(spm_tokenizer, [a, a])) == " a a"
    single = spm_tokenizer.encode("", add_special_tokens=False)
    assert single == [] and spm_tokenizer.decode([a, a]) == "a a"
    assert spm_tokenizer.decode(spm_tokenizer.encode("  a")) == "  a"
    assert spm_tokenizer.token_text(space).strip() == ""


def test_special_tokens() -> None:
    """B055: special tokens are left out or shown; spaces inside them only matter between two of them."""
    tokenizer = ByteTokenizer([], [" <a>", "<b> "])
    a, b = tokenizer.first_special, tokenizer.first_special + 1
    ids = [0x78, a, b, 0x79]
    assert "".join(stream(tokenizer, ids)) == "xy"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "x <a><b> y"
    shown = stream(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(shown) == "x <a><b>y"


def test_no_window() -> None:
    """B047: each token is looked up exactly once, whatever came before it."""

    class Counting(ByteTokenizer):
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return super().token_bytes(token_id)

    tokenizer = Counting()
    stream(tokenizer, list("世界".encode()) * 500)
    assert tokenizer.calls == 3000
