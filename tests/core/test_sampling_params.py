"""SamplingParams and the door into the engine: every bad value is one typed error that names its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.messages import AddRequest, decode_front_end, encode
from samovar.core.request import Request
from samovar.core.sampling_params import SWITCHES, OutputKind, SamplingParams
from samovar.core.validation import RequestLimits, check_prompt, check_routing, resolve_params
from samovar.errors import ValidationError

LIMITS = RequestLimits(vocab_size=100, max_model_len=64)

BAD_VALUES: list[tuple[str, Any]] = [
    *(("n", v) for v in (0, -1, 1.5, True, "2", None)),
    *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, math.nan, math.inf, "0")),
    *(("repetition_penalty", v) for v in (0, -1, 1e-45, 1e-38, 0.0099, 100.1, 1e39, 1e308, math.nan, math.inf, "1")),
    *(("temperature", v) for v in (-0.1, 2.1, math.nan, math.inf, "1", True)),
    *(("top_p", v) for v in (0, -0.1, 1.1, math.nan)),
    *(("top_k", v) for v in (-2, 1.5, "5", True)),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
    *(("seed", v) for v in (2**63, -(2**63) - 1, 10**20, "100", 1.5)),
    *(("stop", v) for v in ([""], "", [None], [1], {"a": 1})),
    *(("stop_token_ids", v) for v in (["1"], [1.5], [True], 3)),
    *(("bad_words", v) for v in ([""], [3], ["w"] * 129)),
    *(("max_tokens", v) for v in (-1, 1.5, "4", True)),
    *(("min_tokens", v) for v in (-1, 1.5, 17)),
    *((name, v) for name in ("logprobs", "prompt_logprobs") for v in (-2, 1.5, "1", True)),
    *(
        ("logit_bias", v)
        for v in ({"AI": 1}, {"1.5": 1}, {"": 1}, {" 7": 1}, {"1": "x"}, {"1": math.nan}, [1], {True: 1})
    ),
    *(("allowed_token_ids", v) for v in ([], ["a"], [1.0])),
    *(("stream_interval", v) for v in (0, -1, 1.5)),
    *((name, v) for name in SWITCHES for v in (0, 1, 1.0, "yes", "", None, [])),
    *(("skip_reading_prefix_cache", v) for v in (0, 1, "no")),
    *(("output_kind", v) for v in (1, 3, "delta", True, None)),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda v: repr(v)[:30])
def test_bad_value_names_its_field(name: str, value: Any) -> None:
    """B005, B010, B011, B034: a value outside its documented range never becomes a SamplingParams."""
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_switches_are_all_the_booleans() -> None:
    """A field declared `bool` is checked as one, also one that is added later; both values and every kind pass."""
    declared = {f.name for f in dataclasses.fields(SamplingParams) if f.type == "bool"}
    assert declared == set(SWITCHES)
    for value in (True, False):
        assert SamplingParams(**dict.fromkeys(SWITCHES, value), skip_reading_prefix_cache=value).ignore_eos is value
    assert [SamplingParams(output_kind=kind).output_kind for kind in OutputKind] == list(OutputKind)


def test_documented_spellings() -> None:
    """One stop string, None lists, string bias keys, seed -1 and top_k -1 mean what vLLM says they mean."""
    params = SamplingParams(stop="END", seed=-1, top_k=-1, logit_bias={"7": 500, 8: -500})
    assert params.stop == ["END"]
    assert params.seed is None
    assert params.logit_bias == {7: 100.0, 8: -100.0}
    assert SamplingParams.from_optional(stop=None, n=None, temperature=0.5).stop == []


def test_greedy_with_several_choices_is_refused() -> None:
    with pytest.raises(ValidationError, match="n must be 1"):
        SamplingParams(n=2, temperature=0.0)
    assert SamplingParams(n=2, temperature=0.5).n == 2


def test_temperatures_near_zero() -> None:
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(temperature=0.001).effective_temperature == 0.01


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("stop_token_ids", {"stop_token_ids": [105], "min_tokens": 4}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("allowed_token_ids", {"allowed_token_ids": [100]}),
        ("logit_bias", {"logit_bias": {"100": 1}}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 10**6}),
        ("n", {"n": 5_000_000}),
        ("stop", {"stop": ["x"] * 10_000}),
        ("stop", {"stop": ["x" * 2**20]}),
        ("bad_words", {"bad_words_token_ids": [[5, 100]]}),
    ],
)
def test_model_dependent_limits(name: str, changes: dict[str, Any]) -> None:
    """B001, B002, B008: ids outside the vocabulary and unbounded counts stop at the door."""
    with pytest.raises(ValidationError) as caught:
        resolve_params(SamplingParams(**changes), 10, LIMITS)
    assert caught.value.parameter == name


IDS = st.lists(st.integers(0, 5), max_size=6)


@given(
    allowed=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=6), banned=IDS, stops=IDS, eos=IDS,
    min_tokens=st.integers(0, 1), max_tokens=st.integers(0, 3), ignore_eos=st.booleans(),
)  # fmt: skip
def test_rules_that_leave_no_token(
    allowed: list[int] | None, banned: list[int], stops: list[int], eos: list[int], min_tokens: int, max_tokens: int,
    ignore_eos: bool,
) -> None:  # fmt: skip
    """Lists that together forbid every token for the first place are refused, naming those that take part."""
    params = SamplingParams(
        allowed_token_ids=allowed,
        bad_words_token_ids=[[i] for i in banned] + [[0, 1]],
        stop_token_ids=stops,
        min_tokens=min(min_tokens, max_tokens),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    ends = [*stops, *([] if ignore_eos else eos)] if params.min_tokens else []
    left = [i for i in (range(6) if allowed is None else allowed) if i not in banned and i not in ends]
    limits = RequestLimits(vocab_size=6, max_model_len=64)
    if left or not max_tokens:
        assert resolve_params(params, 10, limits, eos).allowed_token_ids == allowed
        return
    with pytest.raises(ValidationError, match="no token is left") as caught:
        resolve_params(params, 10, limits, eos)
    fields = [
        name for name, ids in (("allowed_token_ids", allowed), ("bad_words", banned), ("min_tokens", ends)) if ids
    ]
    assert caught.value.parameter == fields[0] and all(name in str(caught.value) for name in fields)


@given(
    asked=st.one_of(st.none(), st.integers(1, 500)),
    prompt=st.integers(1, 63),
    ceiling=st.one_of(st.none(), st.integers(1, 80)),
)
def test_max_tokens_always_fits_context_and_ceiling(asked: int | None, prompt: int, ceiling: int | None) -> None:
    """B004, B019: absent and over-large caps are clamped to the room left and to the operator's ceiling."""
    limits = RequestLimits(vocab_size=100, max_model_len=64, max_tokens_ceiling=ceiling)
    resolved = resolve_params(SamplingParams(max_tokens=asked), prompt, limits)
    assert resolved.max_tokens is not None
    assert 1 <= resolved.max_tokens <= 64 - prompt
    assert ceiling is None or resolved.max_tokens <= ceiling
    if asked is not None and asked <= 64 - prompt and (ceiling is None or asked <= ceiling):
        assert resolved.max_tokens == asked


@pytest.mark.parametrize("length", [1, 63, 64])
def test_prompt_inside_the_context(length: int) -> None:
    check_prompt([1] * length, LIMITS)


def test_prompt_outside_the_context() -> None:
    """B016: one token too many is refused with both numbers; a full context has no room for an answer."""
    with pytest.raises(ValidationError, match="65 tokens.*64"):
        check_prompt([1] * 65, LIMITS)
    with pytest.raises(ValidationError, match="fill the context"):
        resolve_params(SamplingParams(), 64, LIMITS)
    with pytest.raises(ValidationError, match="at least one token"):
        check_prompt([], LIMITS)
    for bad in (100, -1, True, "3"):
        with pytest.raises(ValidationError, match="outside the vocabulary"):
            check_prompt([1, bad], LIMITS)  # type: ignore[list-item]


def test_routing_fields() -> None:
    check_routing(0, None, LIMITS)
    check_routing(-5, "salt", RequestLimits(vocab_size=1, max_model_len=1, allows_priority=True))
    for priority, salt in ((1, None), (2**63, None), (True, None), (0, ""), (0, "s" * 1025)):
        with pytest.raises(ValidationError):
            check_routing(priority, salt, LIMITS)


@given(
    ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
    temperature=st.floats(0, 2),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
)
def test_requests_survive_the_socket(ids: list[int], temperature: float, seed: int | None, stop: list[str]) -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=ids,
        params=SamplingParams(temperature=temperature, seed=seed, stop=stop, logit_bias={"3": 1}),
        eos_token_ids=[2],
        arrival=1.5,
    )
    assert decode_front_end(encode(AddRequest(request))) == AddRequest(request)
