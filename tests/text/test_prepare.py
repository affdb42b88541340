"""Preparer: the single door; limits, truncation, bad words, defaults, BOS."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from samovar.config.description import ModelDescription
from samovar.core.outputs import EngineInfo
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.validation import RequestLimits
from samovar.engine.chatting import values_of
from samovar.errors import ConfigError, ValidationError
from samovar.text.chat_template import ChatTemplate
from samovar.text.dialogue import Dialogue
from samovar.text.fast_tokenizer import FastTokenizer
from samovar.text.prepare import MIN_MESSAGES, Preparer, end_token_ids, limits_from, sampling_defaults
from tests.text.byte_tokenizer import ByteTokenizer

LIMITS = RequestLimits(vocab_size=256, max_model_len=64)
CHAT = ChatTemplate({"default": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ x }}"})


def preparer(**changes: Any) -> Preparer:
    parts: dict[str, Any] = {"tokenizer": ByteTokenizer(), "template": CHAT, "limits": LIMITS, "eos_token_ids": [3]}
    return Preparer(**{**parts, **changes})


def from_text(
    door: Preparer, text: str, params: SamplingParams | None = None, *, add_special_tokens: bool = True, **routing: Any
) -> Request:
    return door.from_ids(door.encode_text(text, add_special_tokens=add_special_tokens), params, **routing)


def from_messages(
    door: Preparer, messages: list[dict[str, Any]], params: SamplingParams | None = None, **more: Any
) -> Request:
    values = None if params is None else values_of(params)
    return door.from_dialogue(Dialogue(messages=messages, **more), values).request


def refused(field: str, call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValidationError) as error:
        call(*args, **kwargs)
    assert error.value.parameter == field
    return str(error.value)


def test_a_request() -> None:
    """Ids, eos, arrival, unique id, and an int max_tokens come out of every way in."""
    door = preparer()
    requests = [
        from_text(door, "hi"),
        door.from_ids([104, 105]),
        from_messages(door, [{"role": "user", "content": "hi"}], template_variables={"x": "!"}),
    ]
    assert [bytes(r.prompt_token_ids) for r in requests] == [b"hi", b"hi", b"user:hi;!"]
    assert len({r.request_id for r in requests}) == 3
    assert all(isinstance(r, Request) and r.eos_token_ids == [3] and r.arrival > 0 for r in requests)
    assert [r.params.max_tokens for r in requests] == [62, 62, 55]


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66, 1000])
def test_prompts_at_the_limit(length: int) -> None:
    """B016, B173: the border is defined on both sides; what is too long is refused with both numbers, never cut."""
    door = preparer()
    for call, value, name in (
        (partial(from_text, door), "a" * length, "prompt"),
        (door.from_ids, [97] * length, "prompt"),
        (partial(from_messages, door), [{"role": "user", "content": "a" * (length - 6)}], "messages"),
    ):
        if length < 64:
            assert len(call(value).prompt_token_ids) == length
        elif length == 64:
            assert "fill the context of 64" in refused("max_tokens", call, value)
            assert len(call(value, SamplingParams(max_tokens=0)).prompt_token_ids) == length
        else:
            message = refused(name, call, value)
            assert str(length) in message and "64" in message


def test_truncation_only_when_asked() -> None:
    """B173: explicit truncation keeps the end or the beginning; -1 fills the context but for one token."""
    door = preparer()
    ids = list(range(100))
    assert door.from_ids(ids, truncate_prompt_tokens=10).prompt_token_ids == ids[-10:]
    assert door.from_ids(ids, truncate_prompt_tokens=10, truncation_side="right").prompt_token_ids == ids[:10]
    assert door.from_ids(ids, truncate_prompt_tokens=-1).prompt_token_ids == ids[-63:]
    assert door.from_ids(ids[:5], truncate_prompt_tokens=10).prompt_token_ids == ids[:5]
    assert from_text(door, "abc", truncate_prompt_tokens=1).prompt_token_ids == [99]
    for bad in (0, -2, 64, 1.5, True, "3"):
        refused("truncate_prompt_tokens", door.from_ids, ids, truncate_prompt_tokens=bad)
    refused("truncation_side", door.from_ids, ids, truncate_prompt_tokens=3, truncation_side="middle")


def test_bad_prompts() -> None:
    """B016: empty prompts, ids outside the vocabulary and wrong types are refused by name."""
    door = preparer()
    refused("prompt", door.from_ids, [])
    refused("prompt", from_text, door, "")
    for bad in (256, -1, 2**40, True, "a", None, 1.0):
        refused("prompt", door.from_ids, [1, bad])
    refused("prompt", door.encode_text, 3)
    refused("messages", from_messages, door, [])


def test_without_tokenizer_or_template() -> None:
    """B059: ids still work; whatever needs text says so."""
    door = preparer(tokenizer=None, template=None)
    assert door.from_ids([1]).prompt_token_ids == [1]
    refused("prompt", from_text, door, "a")
    refused("messages", from_messages, door, [{"role": "user", "content": "a"}])
    refused("stop", door.from_ids, [1], SamplingParams(stop=["a"]))
    refused("bad_words", door.from_ids, [1], SamplingParams(bad_words=["a"]))
    assert "chat template" in refused(
        "messages", from_messages, preparer(template=None), [{"role": "user", "content": "a"}]
    )


def test_bad_words(smollm2_tokenizer: FastTokenizer, spm_tokenizer: FastTokenizer) -> None:
    """Each word in both forms: at the start of a text and after a space."""
    for tokenizer in (smollm2_tokenizer, spm_tokenizer):
        door = preparer(tokenizer=tokenizer, limits=RequestLimits(vocab_size=tokenizer.vocab_size, max_model_len=64))
        forms = door.from_ids([5], SamplingParams(bad_words=["Paris", " the"])).params.bad_words_token_ids
        assert forms is not None
        texts = {b"".join(map(tokenizer.token_bytes, form)).decode() for form in forms}
        assert {"Paris", " Paris"} <= texts | {t.strip() for t in texts} and {" the"} <= texts
        assert not any(tokenizer.is_special(token) for form in forms for token in form)
    assert preparer().from_ids([1], SamplingParams(bad_words=["a"])).params.bad_words_token_ids == [[97], [32, 97]]


def test_defaults() -> None:
    """Request over model over ours; null is unset; an absent max_tokens is 16 or the room, as the API says."""
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "eos_token_id": [1], "transformers_version": "5"}
    assert sampling_defaults(config) == {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    assert sampling_defaults(sampling_defaults(config)) == sampling_defaults(config)
    assert sampling_defaults({"do_sample": False, "temperature": 0.6})["temperature"] == 0.0
    door = preparer(default_sampling=config)
    params = door.params({"temperature": None, "top_k": 5})
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 7)
    plain = preparer()
    assert plain.params().max_tokens is None and plain.params(max_tokens=16).max_tokens == 16
    assert plain.params({"max_tokens": 3}, max_tokens=16).max_tokens == 3


@pytest.mark.parametrize(
    "config",
    [
        *({"temperature": value} for value in (-5, "x", 5.0)),
        *({"top_p": value} for value in (0, 1.5)),
        *({"top_k": 1.5}, {"max_new_tokens": -1}, {"repetition_penalty": 0}, {"min_p": [1]}),
    ],
)
def test_impossible_defaults(config: dict[str, Any]) -> None:
    """A model's default that no request could be served with is refused at the start, not blamed on every client."""
    for make in (sampling_defaults, lambda given: preparer(default_sampling=given)):
        with pytest.raises(ConfigError, match=r"generation_config: .*--override-generation-config"):
            make(config)


def test_limits_and_end_ids() -> None:
    """B040, B043: every end id of the files and the tokenizer counts; limits follow the engine."""
    info = EngineInfo("m", "A", 100, 32, "float32", "float32", 16, 9, 4, 64, 0.1, 1, True, "priority")
    limits = limits_from(info, max_logprobs=-1, max_tokens_ceiling=5)
    assert (limits.max_logprobs, limits.max_model_len, limits.allows_priority) == (100, 32, True)
    assert preparer(limits=limits).from_ids([1]).params.max_tokens == 5
    description = ModelDescription(path=None, format="gguf", architecture="A", config={}, eos_token_ids=(2, 0))  # type: ignore[arg-type]
    assert end_token_ids(description, ByteTokenizer()) == [2, 0, 256] and end_token_ids(description, None) == [2, 0]


def test_routing() -> None:
    """Priority and salt are checked at the door."""
    door = preparer()
    assert door.from_ids([1], cache_salt="s").cache_salt == "s"
    refused("priority", door.from_ids, [1], priority=1)
    refused("cache_salt", door.from_ids, [1], cache_salt="")


def test_bos_once(spm_tokenizer: FastTokenizer) -> None:
    """B146: completions add BOS unless the text begins with one; chat adds none, or one if asked for and missing."""
    limits = RequestLimits(vocab_size=spm_tokenizer.vocab_size, max_model_len=64)
    messages = [{"role": "user", "content": "a"}]
    for source, ids_of_bos in (("{{ bos_token }}x", 1), ("x", 0)):
        door = preparer(tokenizer=spm_tokenizer, limits=limits, template=ChatTemplate({"default": source}))
        assert from_text(door, "hello").prompt_token_ids.count(1) == 1
        assert from_text(door, "<s>hello").prompt_token_ids.count(1) == 1
        assert from_text(door, "hello", add_special_tokens=False).prompt_token_ids.count(1) == 0
        assert from_messages(door, messages).prompt_token_ids.count(1) == ids_of_bos
        assert from_messages(door, messages, add_special_tokens=True).prompt_token_ids.count(1) == 1


def test_request_templates() -> None:
    """B148: another template for one request; a broken one is the client's error, as are bad variable names."""
    door = preparer()
    messages = [{"role": "user", "content": "a"}]
    assert (
        bytes(from_messages(door, messages, chat_template="T{{ x }}", template_variables={"x": 1}).prompt_token_ids)
        == b"T1"
    )
    refused("chat_template", from_messages, door, messages, chat_template="{% if %}")
    refused("chat_template_kwargs", from_messages, door, messages, template_variables={"a b": 1})
    for name in ("messages", "tools", "self", "chat_template", "continue_final_message"):
        refused("chat_template_kwargs", from_messages, door, messages, template_variables={name: []})
    refused(
        "continue_final_message", from_messages, door, messages, continue_final_message=True, add_generation_prompt=True
    )


def test_endless_texts_are_refused_before_they_are_encoded() -> None:
    """Tens of megabytes cost as much as a few slices; what fits the documented bound is encoded whole."""

    class Counting(ByteTokenizer):
        encoded = 0

        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            self.encoded += len(text)
            return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    tokenizer = Counting()
    door = preparer(tokenizer=tokenizer)
    for call, value, name in (
        (partial(from_text, door), "a" * 10_000_000, "prompt"),
        (partial(from_messages, door), [{"role": "user", "content": "a" * 10_000_000}], "messages"),
    ):
        tokenizer.encoded = 0
        assert "100000 tokens" in refused(name, call, value) and tokenizer.encoded < 200_000
    kept = from_text(door, "a" * 90_000 + "b", truncate_prompt_tokens=3).prompt_token_ids
    assert bytes(kept) == b"aab"
    assert len(door.encode_text("a" * 99_000)) == 99_000


def test_countless_messages_are_refused_before_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has a token at least, so more of them than the context has cannot fit; rendering them takes a minute."""
    door, hello = preparer(), {"role": "user", "content": "x"}
    most = max(door.limits.max_model_len, MIN_MESSAGES)
    assert "tokens, but" in refused("messages", from_messages, door, [hello] * most)
    monkeypatch.setattr("samovar.text.prepare.prepare_dialogue", None)
    assert f"{most + 1} are more" in refused("messages", from_messages, door, [hello] * (most + 1))
    many = [{"text": "x"}] * (most + 1)
    assert f"{most + 1} are more" in refused("documents", from_messages, door, [hello], documents=many)
