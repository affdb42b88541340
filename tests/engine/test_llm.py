"""LLM end to end on tiny models: vLLM's signatures and outputs, and the STOP rows of bugs.md through the whole house."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import samovar
from samovar import LLM, BeamSearchParams, EngineArgs, Logprob, RequestOutput, SamplingParams
from samovar.errors import CheckpointError, ConfigError, ValidationError
from tests.checkpoints import EOS, write_random_llama

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 128, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **OPTIONS) as made:
        yield made


@pytest.fixture
def say(script_model: Callable[..., Path]) -> Callable[..., RequestOutput]:
    """What a model that says `pieces` gives for these sampling parameters."""

    def run(pieces: list[str | bytes | int], params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
        with LLM(str(script_model(pieces, **options)), **OPTIONS) as made:
            return made.generate("go", params, use_tqdm=False)[0]

    return run


# --- stopping


@pytest.mark.parametrize("pieces", [list("DEFGHIJKL"), ["DE", "FG", "HI", "JK", "L"], ["DEF", "GHI", "JKL"]])
def test_stop_string_in_pieces_of_any_size(say: Callable[..., RequestOutput], pieces: list[str]) -> None:
    """B031: nothing of the stop string is left in the text, however the tokens cut it."""
    output = say(["C", *pieces, " tail"], GREEDY.clone(stop=["DEFGHIJ"])).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("C", "stop", "DEFGHIJ")
    kept = say(["C", *pieces, " tail"], GREEDY.clone(stop=["DEFGHIJ"], include_stop_str_in_output=True)).outputs[0]
    assert kept.text == "CDEFGHIJ"


def test_stop_string_inside_one_token(say: Callable[..., RequestOutput]) -> None:
    """B037: the stop is matched in text, not in tokens."""
    output = say(["a", "b.\n\nc", "d"], GREEDY.clone(stop=["\n\n"])).outputs[0]
    assert (output.text, output.stop_reason) == ("ab.", "\n\n")


def test_each_stop_keeps_its_own_string(say: Callable[..., RequestOutput]) -> None:
    """B035, B034: an empty stop is refused, and of several the one that matched is reported."""
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop=["", "END"])
    output = say(["x", " END", " y"], GREEDY.clone(stop=["never", "END", "y"])).outputs[0]
    assert (output.text, output.stop_reason) == ("x ", "END")


def test_stop_token_id(say: Callable[..., RequestOutput]) -> None:
    """A stop token is among the ids, not in the text, and is the reason; eos is none."""
    output = say(["x", 7, "y"], GREEDY.clone(stop_token_ids=[7])).outputs[0]
    assert (output.text, output.token_ids[-1], output.finish_reason, output.stop_reason) == ("x", 7, "stop", 7)
    output = say(["x", "y"]).outputs[0]
    assert (output.text, output.token_ids[-1], output.finish_reason, output.stop_reason) == ("xy", EOS, "stop", None)


def test_every_eos_of_the_generation_config_counts(say: Callable[..., RequestOutput]) -> None:
    """B040: with ignore_eos none of them ends the output; without, each of them does."""
    pieces = ["a", "b", 0, "c", 2, "d"]
    options: dict[str, Any] = {"eos": [0, 2], "then": 9}
    output = say(pieces, GREEDY, **options).outputs[0]
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (3, "stop", None)
    output = say(pieces, GREEDY.clone(ignore_eos=True, max_tokens=50), **options).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (50, "length")


def test_min_tokens_bans_every_end(say: Callable[..., RequestOutput]) -> None:
    """B041, B043: at least min_tokens completion tokens, whichever eos or stop id the model wants, whatever the prompt."""
    options: dict[str, Any] = {"eos": [0, 2], "then": 0}
    for params in (GREEDY.clone(min_tokens=8), GREEDY.clone(min_tokens=8, stop_token_ids=[5, 6])):
        output = say([0], params, **(options | {"then": 2})).outputs[0]
        assert len(output.token_ids) >= 8
        assert not {0, 2, *params.stop_token_ids} & set(output.token_ids[:8])
    # A stop string inside the first min_tokens tokens does not count either.
    output = say(["a", "b", "c"], GREEDY.clone(min_tokens=2, stop=["b"])).outputs[0]
    assert output.text == "abc"


@pytest.mark.parametrize("count", range(1, 7))
def test_cut_inside_a_character(say: Callable[..., RequestOutput], count: int) -> None:
    """B050: max_tokens may end between the bytes of a character: one U+FFFD for what is missing, never an error."""
    pieces: list[str | bytes | int] = [bytes([byte]) for byte in "世界".encode()]
    # 世 is e4 b8 96, 界 is e7 95 8c: no byte twice.
    output = say(pieces, GREEDY.clone(max_tokens=count)).outputs[0]
    assert output.text == "世界".encode()[:count].decode("utf-8", "replace")
    assert (len(output.token_ids), output.finish_reason) == (count, "length")


def test_endless_model_ends_at_max_tokens(llm: LLM) -> None:
    """B044: exactly max_tokens, or `length` when the context is full; nothing shifts."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=128)
    assert len(llm.generate([[5] * 200], params, use_tqdm=False)[0].outputs[0].token_ids) == 128
    full = llm.generate([[5] * 500], params, use_tqdm=False)[0].outputs[0]
    assert (len(full.token_ids), full.finish_reason) == (12, "length")


def test_sequence_larger_than_the_pool(tiny_model: Path) -> None:
    """B085: a pool of 6 blocks: refused when the plan says so, or ended with `length`; never a hang."""
    options = OPTIONS | {"num_gpu_blocks_override": 6}
    with pytest.raises(samovar.SamovarError, match="max-model-len"):
        LLM(str(tiny_model), **options)
    with LLM(str(tiny_model), **(options | {"max_model_len": -1})) as small:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        outputs = small.generate([[5] * 60, [6] * 10], params, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]
        assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs] == [
            small.info.max_model_len
        ] * 2
        with pytest.raises(ValidationError, match="context holds"):
            small.generate([[5] * 200], params, use_tqdm=False)


# --- prompts, parameters, outputs


def test_prompt_forms_agree(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    forms: list[Any] = ["Once upon a time", ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY.clone(max_tokens=5), use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["Once upon a time", None, "Once upon a time", None]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert len(llm.generate("one prompt", GREEDY.clone(max_tokens=1), use_tqdm=False)) == 1
    assert len(llm.generate(ids, GREEDY.clone(max_tokens=1), use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ({"multi_modal_data": {}, "prompt": "x"}, {}, "multi_modal_data"),
        ({}, {}, "prompt_token_ids"),
        ([{"prompt_token_ids": "text"}], {}, "list of ints"),
        (5, {}, "prompt"),
        (b"abc", {}, "prompts must be"),
        (bytearray(b"abc"), {}, "prompts must be"),
        ([b"abc"], {}, "got bytes"),
        ("x", {"sampling_params": {"max_tokens": 1}}, "must be SamplingParams.* got dict"),
        (["x"], {"sampling_params": [5]}, "must be SamplingParams.* got int"),
        ("x", {"lora_request": "adapter"}, "lora_request"),
        (["x", "y"], {"sampling_params": [SamplingParams()]}, "1 were given for 2"),
        (["x"], {"priority": [1]}, "scheduling-policy"),
        ([[99999]], {}, "outside the vocabulary"),
        ([[]], {}, "at least one token"),
        ("x", {"sampling_params": SamplingParams(logprobs=21)}, "max-logprobs"),
        ("x", {"tokenization_kwargs": {"truncate": 5}}, "truncate"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(
    llm: LLM, prompts: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValidationError, TypeError), match=message):
        llm.generate(prompts, **({"sampling_params": GREEDY, "use_tqdm": False} | arguments))
    assert not llm._engine.has_work


ENDLESS: dict[str, Any] = {"role": "user", "content": "x"}
ENDLESS["itself"] = ENDLESS


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "must be a list of messages.* got NoneType"),
        ("text", "must be a list of messages.* got str"),
        ({"role": "user"}, "must be a list of messages.* got dict"),
        ([5], "must be a list of messages.* got int"),
        ([[{"role": "user", "content": "x"}], None], "got NoneType"),
        ([ENDLESS], "contains itself"),
    ],
)
def test_wrong_conversations_are_refused_before_anything_runs(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm._engine.has_work


def test_flags(tiny_model: Path) -> None:
    """Unknown names, other engines' flags and bad values each get their own complaint; harmless defaults pass."""
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs("m", max_model_length=5)
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        EngineArgs("m", cpu_offload_gb=4)
    with pytest.raises(ConfigError, match="max-num-seqs"):
        EngineArgs("m", max_num_seqs=-1)
    with pytest.raises(ConfigError, match="max-num-seqs"):
        EngineArgs("m", max_num_seqs=[3])
    args = EngineArgs(str(tiny_model), max_model_len="1k", cpu_offload_gb=0, speculative_config=None, threads=1)
    assert args.config.model.max_model_len == 1000
    with LLM.from_engine_args(args) as made:
        assert made.info.max_model_len == 1000
    with pytest.raises(CheckpointError, match="no such file"):
        LLM("./not/here")


def test_logprobs(llm: LLM) -> None:
    """Chosen token first, ranks, the cumulative sum, prompt positions; greedy chooses rank 1."""
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 5
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        first = next(iter(position))
        assert first == token and position[token].rank == 1 and len(position) == 3
        assert isinstance(position[token], Logprob) and isinstance(position[token].decoded_token, str)
        assert max(position.values(), key=lambda p: p.logprob) is position[token]
    total = sum(position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 4
    assert all(6 + i in p for i, p in enumerate(output.prompt_logprobs[1:]) if p is not None)


def test_echo_without_generation(llm: LLM) -> None:
    """B007: max_tokens 0 computes the prompt only."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    output = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 3


def test_chat(llm: LLM) -> None:
    """One conversation or several; the prompt is the rendered template; the last message can be continued."""
    one = [{"role": "user", "content": "What is the answer?"}]
    outputs = llm.chat(one, GREEDY.clone(max_tokens=3), use_tqdm=False)
    assert outputs[0].prompt == "<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n"
    assert outputs[0].prompt_token_ids[0] == 1
    assert len(llm.chat([one, one], GREEDY.clone(max_tokens=3), use_tqdm=False)) == 2
    prefilled = [*one, {"role": "assistant", "content": "The answer"}]
    output = llm.chat(
        prefilled, GREEDY.clone(max_tokens=3), False, add_generation_prompt=False, continue_final_message=True
    )[0]
    assert output.prompt is not None and output.prompt.endswith("The answer")
    with pytest.raises(ValidationError):
        llm.chat(prefilled, GREEDY, False, continue_final_message=True)
    with pytest.raises(ValidationError, match="lora_request"):
        llm.chat(one, GREEDY, False, lora_request="x")


def test_prefilled_answer_twice(llm: LLM) -> None:
    """B101: the same continued conversation with prompt logprobs, from a cold and from a warm cache."""
    messages = [{"role": "user", "content": "Tell a story. " * 8}, {"role": "assistant", "content": "Once upon"}]
    for params in (GREEDY.clone(max_tokens=9), GREEDY.clone(max_tokens=9, prompt_logprobs=1)):
        first, second = (
            llm.chat(messages, params, False, add_generation_prompt=False, continue_final_message=True)[0]
            for _ in range(2)
        )
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert (first.prompt_logprobs is None) == (params.prompt_logprobs is None)
    assert llm.chat(messages, GREEDY, False, add_generation_prompt=False, continue_final_message=True)[
        0
    ].num_cached_tokens


def test_default_params_come_from_the_model(tmp_path: Path) -> None:
    from tests.checkpoints import write_generation_config

    folder = write_random_llama(tmp_path / "m")
    write_generation_config(folder, temperature=0.3, top_k=7, eos_token_id=[2])
    with LLM(str(folder), **OPTIONS) as made:
        params = made.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 16)
    with LLM(str(folder), **OPTIONS, generation_config="vllm") as made:
        assert made.get_default_sampling_params().temperature == 1.0


def test_metrics_move(tiny_model: Path) -> None:
    """A17: counters count what the outputs say, histograms hold one entry a request, gauges are idle afterwards."""
    with LLM(str(tiny_model), **OPTIONS) as made:

        def read() -> dict[str, Any]:
            return {m.name + m.labels.get("finished_reason", ""): m for m in made.get_metrics()}

        before = read()
        assert before["vllm:generation_tokens"].value == 0 and before["vllm:num_requests_running"].value == 0
        params = SamplingParams(temperature=1.0, n=2, max_tokens=4, ignore_eos=True)
        outputs = made.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
        made.beam_search([[5, 6]], BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True))
        after = read()
        assert after.keys() == before.keys()
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        assert after["vllm:generation_tokens"].value == tokens + 2 == 26
        assert after["vllm:prompt_tokens"].value == 3 * 3 + 2 + 3
        assert after["vllm:request_successlength"].value == 5 == after["samovar:requests_accepted"].value
        lengths = after["vllm:request_generation_tokens"]
        assert (lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (5, 26, 5)
        assert after["vllm:time_to_first_token_seconds"].count == 5
        steps = after["samovar:engine_steps"].value
        assert after["vllm:iteration_tokens_total"].count == steps > 4
        assert after["vllm:num_requests_running"].value == after["samovar:requests_in_flight"].value == 0
        assert after["vllm:kv_cache_usage_perc"].value == 0
        assert made.get_world_size() == made.get_world_size(include_dp=False) == 1


def test_shutdown(tiny_model: Path) -> None:
    made = LLM(str(tiny_model), **OPTIONS)
    made.shutdown()
    made.shutdown()
    with pytest.raises(ValidationError, match="shut down"):
        made.generate("x", use_tqdm=False)


def test_interrupted_batch_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: the next call starts from a clean engine."""
    step, calls = llm._engine.step, []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(*given)

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 10, GREEDY.clone(ignore_eos=True), use_tqdm=False)
    assert llm._engine.call("block_usage")["used"] == 0 and not llm._engine.has_work
    counts = {m.name + m.labels.get("finished_reason", ""): m for m in llm.get_metrics()}
    assert counts["vllm:request_successabort"].value == 10 and counts["samovar:requests_in_flight"].value == 0
    assert (
        len(llm.generate([[5, 6]], GREEDY.clone(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids)
        == 3
    )


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_interrupts_at_any_moment_leave_a_working_engine(llm: LLM, delay: float) -> None:
    """A real SIGINT, whatever it falls into: the batch ends with KeyboardInterrupt, the next one runs."""
    # A shell starts what it puts into the background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:  # The signal may be noted late; it is never lost.
            llm.generate([[5, 6]] * 20, GREEDY.clone(max_tokens=100, ignore_eos=True), use_tqdm=False)
    timer.join()
    assert llm._engine.call("block_usage")["used"] == 0 and not llm._engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate([[5, 6]], GREEDY.clone(max_tokens=3, ignore_eos=True), use_tqdm=False)) == 1


def test_skip_tokenizer_init(tiny_model: Path) -> None:
    """Ids in, ids out, with the arguments that benchmarks use; `tokenizer.json` is never opened."""
    with LLM(
        str(tiny_model), **OPTIONS, skip_tokenizer_init=True, load_format="dummy", gpu_memory_utilization=0.9
    ) as made:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        output = made.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)[0].outputs[0]
        assert (output.text, len(output.token_ids)) == ("", 4)
        with pytest.raises(ValidationError, match="without a tokenizer"):
            made.generate("text", params, use_tqdm=False)
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            made.get_tokenizer()


def test_progress_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY.clone(max_tokens=2), use_tqdm=True)
    assert capsys.readouterr().out == ""


def test_public_names() -> None:
    """Importing the package is cheap and loads no torch; every public name exists."""
    for name in samovar.__all__:
        assert getattr(samovar, name) is not None
    code = "import sys, samovar; samovar.SamplingParams; sys.exit(bool({'torch', 'transformers', 'zmq'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


# --- beam search


def test_beam_of_one_is_greedy(llm: LLM) -> None:
    for prompt in ([5, 6], [9] * 40):
        greedy = llm.generate([prompt], GREEDY.clone(max_tokens=20), use_tqdm=False)[0].outputs[0]
        beam = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=20))[0].sequences[0]
        ids = greedy.token_ids[:-1] if greedy.finish_reason == "stop" else greedy.token_ids
        assert beam.tokens == prompt + ids


def test_beam_search_is_transformers(llm: LLM, tiny_model: Path) -> None:
    """The same beams as the reference implementation with early stopping."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = [[5, 6, 7], [30, 40], [100, 11, 200, 7, 8]]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=12, include_stop_str_in_output=True))
    for prompt, output in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]), num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=12,
                early_stopping=True, pad_token_id=0, eos_token_id=EOS, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        for beam, ids, score in zip(
            output.sequences, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
        ):
            assert beam.tokens == ids[: len(beam.tokens)]
            assert beam.cum_logprob / (len(beam.tokens) - len(prompt)) == pytest.approx(score, abs=1e-4)
            assert beam.text is not None


def test_beams_and_the_end_of_the_context(llm: LLM) -> None:
    """Beams end with `length` where the context ends; a prompt that leaves no room is refused."""
    limit = llm.info.max_model_len
    found = llm.beam_search([[5] * (limit - 3)], BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True))[0]
    assert [len(s.tokens) for s in found.sequences] == [limit] * 3
    assert {s.finish_reason for s in found.sequences} == {"length"}
    for length in (limit, limit + 1):
        with pytest.raises(ValidationError, match=f"{limit}"):
            llm.beam_search([[5, 6], [5] * length], BeamSearchParams(beam_width=2, max_tokens=2))


def test_bad_beam_params() -> None:
    penalties = ({"length_penalty": value} for value in (float("nan"), -1e9, 11))
    for wrong in ({"beam_width": 0}, {"beam_width": 1000}, {"max_tokens": 0}, *penalties):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})
