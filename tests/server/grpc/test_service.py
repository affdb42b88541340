"""The gRPC service over real channels: what it answers, what it refuses and how, keys, limits, cancellation."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.errors import ConfigError
from samovar.server.grpc import listen, proto
from samovar.server.grpc.listen import serving_grpc
from samovar.server.state import ServingState
from samovar.text.prepare import Preparer
from tests.server.scripted_engine import ScriptedEngine, encode, saying

TYPES = proto.interface()
TEXT = "Grüße, wörld 🙂 and more."
Code = grpc.StatusCode


@dataclass
class Running:
    """A service, and a channel to it."""

    port: int
    channel: Any
    engine: ScriptedEngine
    state: ServingState

    def method(self, name: str, answer: str) -> Any:
        """A method with one answer."""
        return self.channel.unary_unary(
            f"/samovar.v1.Inference/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=TYPES[answer].FromString,
        )

    def generate(self, metadata: Iterable[tuple[str, str]] = (), **fields: Any) -> Any:
        """A call of Generate."""
        return self.generate_from(TYPES["GenerateRequest"](**fields), metadata)

    def generate_from(self, request: Any, metadata: Iterable[tuple[str, str]] = ()) -> Any:
        """The same with a message."""
        method = self.channel.unary_stream(
            "/samovar.v1.Inference/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=TYPES["GenerateReply"].FromString,
        )
        return method(request, metadata=tuple(metadata))


@asynccontextmanager
async def running(
    preparer: Preparer, make: Callable[[], ScriptedEngine] = lambda: ScriptedEngine(saying(TEXT)), **settings: Any
) -> AsyncIterator[Running]:
    """A service until the block ends."""
    state = ServingState(ServerConfig(grpc_port=0, **settings))
    engine = make()
    state.attach(engine, preparer)
    async with serving_grpc(state) as port:
        assert port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Running(port, channel, engine, state)
    state.close()
    await engine.close()


async def _code(call: Any) -> tuple[grpc.StatusCode, str, str | None]:
    """(status, message, field) of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details() or "", trailing.get("samovar-field")


def test_what_is_read_is_what_protoc_reads(tmp_path: Path) -> None:
    """The file that users give to protoc and the one that the server reads are one interface."""
    source = tmp_path / proto.FILE
    source.parent.mkdir(parents=True)
    source.write_text(proto.source(), encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{tmp_path}",
        f"--descriptor_set_out={tmp_path / 'out'}",
        str(source),
    ]
    subprocess.run(words, check=True)
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "out").read_bytes()).file
    waiting = list(compiled.message_type)
    for message in waiting:
        waiting += message.nested_type
        for entry in message.field:
            entry.ClearField("json_name")
    assert proto.read(proto.source()) == compiled
    for text in ("message A { int32 x = 1 }", "import 'x';", "message A { extensions 1; }", "message ?"):
        with pytest.raises((SyntaxError, IndexError)):
            proto.read(text)


def test_nothing_is_imported_before_it_is_used() -> None:
    """A server without --grpc-port does not need the packages."""
    code = "import samovar.server.run, sys; sys.exit(any(name.split('.')[0] in ('grpc', 'google') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra."""
    monkeypatch.setattr(listen, "PACKAGES", ("grpc", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package.*\[grpc\]"):
        asyncio.run(_enter(ServingState(ServerConfig(grpc_port=0))))


async def _enter(state: ServingState) -> None:
    async with serving_grpc(state):
        pass


async def test_text_and_tokens(preparer: Preparer) -> None:
    """Prompt facts once and first, then news whose text and ids add up, then one finish a choice."""
    async with running(preparer) as own:
        replies = [
            r async for r in own.generate(text="abc", stopping={"max_tokens": 100}, sampling={"n": 2}, temperature=1.0)
        ]
        assert replies[0].prompt.num_tokens == 3 and not any(r.HasField("prompt") for r in replies[1:])
        for index, text in enumerate((TEXT, f"{TEXT}1")):
            news = [r.choice for r in replies[1:] if r.choice.index == index]
            assert "".join(n.text for n in news) == text
            assert [i for n in news for i in n.token_ids] == [*encode(text), 258]
            assert [n.HasField("finish") for n in news] == [False] * (len(news) - 1) + [True]
            assert news[-1].finish.reason == 1 and news[-1].finish.end_of_sequence
            assert news[-1].finish.num_tokens == len(encode(text)) + 1
        ids = [r async for r in own.generate(token_ids={"ids": [70, 71]}, output={"text": False})]
        assert own.engine.requests[-1].prompt_token_ids == [70, 71]
        assert ids[-1].choice.finish.reason == 2 and ids[-1].choice.finish.num_tokens == 16
        assert not any(r.choice.text for r in ids)


async def test_every_field_has_its_effect(preparer: Preparer) -> None:
    """What is set arrives in the engine's request, and what is not set is as over HTTP."""
    async with running(preparer) as own:
        async for _ in own.generate(text="abc"):
            pass
        plain = own.engine.requests[-1].params
        assert (plain.max_tokens, plain.temperature, plain.n, plain.logprobs, plain.seed) == (16, 1.0, 1, None, None)
        async for _ in own.generate(
            text="abcdef",
            model="tiny",
            temperature=0.5,
            sampling={"n": 1, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": -3},
            decoding={
                "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {5: -2.0},
                "allowed_token_ids": [*range(200)], "bad_words": ["zz"],
            },
            stopping={
                "max_tokens": 9, "min_tokens": 2, "stop_token_ids": [9], "stop": ["q"], "include_stop_str_in_output": True,
                "ignore_eos": True,
            },
            output={"logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": False, "spaces_between_special_tokens": False},
            cache={"skip_reading_prefix_cache": True, "salt": "me"},
            truncate_prompt_tokens=4,
            truncate_from_end=True,
            add_special_tokens=False,
        ):  # fmt: skip
            pass
        request = own.engine.requests[-1]
        p = request.params
        assert (p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (0.5, 7, 0.5, 0.25, -3)
        assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.logit_bias) == (
            0.5,
            -0.5,
            1.5,
            {5: -2.0},
        )
        assert p.allowed_token_ids == [*range(200)] and p.bad_words == ["zz"]
        assert (p.max_tokens, p.min_tokens, p.stop_token_ids, p.stop) == (9, 2, [9], ["q"])
        assert p.include_stop_str_in_output and p.ignore_eos and p.skip_reading_prefix_cache
        assert (p.logprobs, p.prompt_logprobs, p.skip_special_tokens, p.spaces_between_special_tokens) == (
            2,
            1,
            False,
            False,
        )
        assert request.cache_salt == "me" and request.prompt_token_ids == list(encode("abcd"))


async def test_logprobs_and_stop_strings(preparer: Preparer) -> None:
    """Logprobs keep the bytes of tokens that are no whole character; what stopped a choice is said."""
    async with running(preparer) as own:
        replies = [
            r
            async for r in own.generate(
                text="ab", output={"logprobs": 2, "prompt_logprobs": 1}, stopping={"stop": ["wör"]}
            )
        ]
        positions = [p for r in replies for p in r.choice.logprobs]
        assert b"".join(p.chosen.raw for p in positions).decode() == TEXT[: TEXT.index("wör") + 3]
        assert all(len(p.top) == 2 and p.chosen.rank == 2 for p in positions)
        (prompt,) = [r.choice.prompt_logprobs for r in replies if r.choice.prompt_logprobs]
        assert [p.HasField("chosen") for p in prompt] == [False, True]
        assert replies[-1].choice.finish.stop_string == "wör"
        assert "".join(r.choice.text for r in replies) == TEXT[: TEXT.index("wör")]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({}, Code.INVALID_ARGUMENT, "prompt"),
        ({"text": "a", "model": "other"}, Code.NOT_FOUND, "model"),
        ({"text": "a", "temperature": 3.0}, Code.INVALID_ARGUMENT, "temperature"),
        ({"text": "a", "temperature": float("nan")}, Code.INVALID_ARGUMENT, "temperature"),
        ({"text": "a", "sampling": {"top_p": 0.0}}, Code.INVALID_ARGUMENT, "sampling.top_p"),
        ({"text": "a", "sampling": {"n": 4_000_000_000}}, Code.INVALID_ARGUMENT, "sampling.n"),
        ({"text": "a", "stopping": {"stop_token_ids": [999]}}, Code.INVALID_ARGUMENT, "stopping.stop_token_ids"),
        ({"text": "a", "stopping": {"stop": [""]}}, Code.INVALID_ARGUMENT, "stopping.stop"),
        ({"text": "a", "decoding": {"logit_bias": {4_000_000_000: 1.0}}}, Code.INVALID_ARGUMENT, "decoding.logit_bias"),
        ({"text": "a", "decoding": {"choice": {"texts": []}}}, Code.INVALID_ARGUMENT, "decoding.choice"),
        ({"text": "a", "output": {"logprobs": 9999}}, Code.INVALID_ARGUMENT, "output.logprobs"),
        ({"text": "a", "cache": {"salt": ""}}, Code.INVALID_ARGUMENT, "cache.salt"),
        ({"text": "a", "priority": 3}, Code.INVALID_ARGUMENT, "priority"),
        ({"text": "a", "truncate_from_end": True}, Code.INVALID_ARGUMENT, "truncate_from_end"),
        ({"text": "a", "truncate_prompt_tokens": 0}, Code.INVALID_ARGUMENT, "truncate_prompt_tokens"),
        ({"text": "a", "request_id": "x" * 257}, Code.INVALID_ARGUMENT, "request_id"),
        ({"token_ids": {"ids": []}}, Code.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": {"ids": [4_000_000_000]}}, Code.INVALID_ARGUMENT, "token_ids"),
        ({"text": "a" * 600}, Code.INVALID_ARGUMENT, "text"),
    ],
)
async def test_refusals_name_the_field(preparer: Preparer, fields: dict[str, Any], code: Code, field: str) -> None:
    """Wrong values never reach the engine, and the message says which field of the interface it is."""
    async with running(preparer) as own:
        found, message, named = await _code(own.generate(**fields))
        assert (found, named) == (code, field), message
        assert not own.engine.requests


async def test_refusals_inside_a_form(preparer: Preparer) -> None:
    """What is wrong inside a pattern or a schema is told under the field's own name, once."""
    async with running(preparer) as own:
        for form, value in (("regex", "(?=a)b"), ("json", '{"not": {}}'), ("structural_tag", "null")):
            found, message, named = await _code(own.generate(text="a", decoding={form: value}))
            assert (found, named) == (Code.INVALID_ARGUMENT, f"decoding.{form}"), message
            assert message.startswith(f"decoding.{form}") and f"{form}.{form}" not in message


async def test_bytes_that_are_no_message(preparer: Preparer) -> None:
    """They are the client's fault: said so, and not in the log as an error of ours."""
    async with running(preparer) as own:
        for name, many in (("Generate", own.channel.unary_stream), ("Abort", own.channel.unary_unary)):
            call = many(f"/samovar.v1.Inference/{name}")(b"\xff\xff\xff\x01")
            found, message, _ = await _code(call)
            assert found is Code.INVALID_ARGUMENT and f"samovar.v1.{name}Request" in message
        assert not own.engine.requests


async def test_random_requests(preparer: Preparer) -> None:
    """H13: whatever the fields hold, a call is answered or refused by the name of a field; nothing of ours breaks."""
    rng = random.Random(7)
    async with running(preparer) as own:
        seen = set()
        for _ in range(400):
            request = TYPES["GenerateRequest"]()
            _fill(request, rng, 0.25)
            if rng.random() < 0.8:
                request.text = "abc"
            try:
                async with asyncio.timeout(20):
                    async for _reply in own.generate_from(request):
                        pass
                seen.add(Code.OK)
            except grpc.aio.AioRpcError as error:
                seen.add(error.code())
                assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), (error.details(), request)
                assert dict(error.trailing_metadata() or ()).get("samovar-field"), (error.details(), request)
        assert seen >= {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}
        assert own.state.num_calls == 0


def _fill(message: Any, rng: random.Random, share: float) -> None:
    """Give about a `share` of the fields random values, many of them at the ends of their range."""
    kinds = descriptor_pb2.FieldDescriptorProto
    choices: dict[int, list[Any]] = {
        kinds.TYPE_UINT32: [0, 1, 5, 258, 259, 2**31, 2**32 - 1],
        kinds.TYPE_INT32: [-(2**31), -1, 0, 1, 20, 2**31 - 1],
        kinds.TYPE_INT64: [-(2**63), -1, 0, 1, 2**63 - 1],
        kinds.TYPE_DOUBLE: [0.0, -0.0, 0.5, 1.0, -1.0, 1e308, float("inf"), float("nan"), 1e-320],
        kinds.TYPE_BOOL: [True, False],
        kinds.TYPE_STRING: ["", "a", "\0", "é🙂", "x" * 2000, "{}", "[a", "tiny"],
    }
    for field in message.DESCRIPTOR.fields:
        if rng.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(3):
                getattr(message, field.name)[rng.choice(choices[kinds.TYPE_UINT32])] = rng.choice(
                    choices[kinds.TYPE_DOUBLE]
                )
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), rng, share)
        elif field.is_repeated:
            getattr(message, field.name).extend(rng.choices(choices[field.type], k=rng.choice([1, 3, 300])))
        else:
            setattr(message, field.name, rng.choice(choices[field.type]))


@pytest.mark.parametrize(
    ("decoding", "is_refused"),
    [
        ({"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, False),
        ({"json_object": True}, False),
        ({"regex": "[ab]{3}"}, False),
        ({"choice": {"texts": ["yes", "no"]}}, False),
        ({"grammar": 'start: "a" | "b"'}, False),
        ({"json": "{"}, True),
        ({"json": '{"type": "object", "patternProperties": {"(?<=a)b": {}}}'}, True),
        ({"regex": "(?<=a)b"}, True),
        ({"json_object": False}, True),
        ({"grammar": "start: nothing"}, True),
    ],
)
async def test_structured_output(preparer: Preparer, decoding: dict[str, Any], is_refused: bool) -> None:
    """The same grammars as over HTTP: the engine gets a constraint, or the client the field that cannot be enforced."""
    async with running(preparer) as own:
        if is_refused:
            code, _, named = await _code(own.generate(text="a", decoding=decoding))
            assert code is Code.INVALID_ARGUMENT and named is not None
            assert named.startswith(f"decoding.{next(iter(decoding))}")
        else:
            assert [r async for r in own.generate(text="a", decoding=decoding)]
            assert own.engine.requests[0].constraint is not None


async def test_leaving_aborts(preparer: Preparer) -> None:
    """A cancelled call and a lost connection stop the request in the engine."""
    slow = lambda: ScriptedEngine(lambda r, i: [70] * 400, step_seconds=0.01)  # noqa: E731
    async with running(preparer, slow) as own:
        call = own.generate(text="abc", stopping={"max_tokens": 300})
        async for reply in call:
            if reply.choice.text:
                break
        call.cancel()
        await _until(lambda: not own.engine.num_running and own.state.num_calls == 0)
        other = grpc.aio.insecure_channel(f"127.0.0.1:{own.port}")
        lost = Running(own.port, other, own.engine, own.state).generate(text="abc", stopping={"max_tokens": 300})
        await lost.read()
        assert own.engine.num_running == 1
        await other.close()
        await _until(lambda: not own.engine.num_running)


async def test_abort(preparer: Preparer) -> None:
    """Abort ends the calls of that name, their last replies say so; names of others are unknown."""
    slow = lambda: ScriptedEngine(lambda r, i: [70] * 400, step_seconds=0.005)  # noqa: E731
    async with running(preparer, slow, api_key=["one", "two"]) as own:
        mine, other = (("authorization", "Bearer one"),), (("authorization", "Bearer two"),)
        call = own.generate(mine, text="abc", request_id="job", stopping={"max_tokens": 300}, sampling={"n": 2})
        replies = aiter(call)
        await anext(replies)
        abort = own.method("Abort", "AbortReply")
        asked = TYPES["AbortRequest"](request_ids=["job", "job", "nothing"])
        stranger = await abort(asked, metadata=other)
        assert (stranger.num_aborted, list(stranger.unknown)) == (0, ["job", "nothing"])
        answer = await abort(asked, metadata=mine)
        assert (answer.num_aborted, list(answer.unknown)) == (1, ["nothing"])
        last = [r async for r in replies]
        assert {r.choice.index: r.choice.finish.reason for r in last if r.choice.HasField("finish")} == {0: 3, 1: 3}
        await _until(lambda: not own.engine.num_running)


async def test_keys(preparer: Preparer) -> None:
    """H1: every method but the health checks needs a key, reflection and unknown methods too."""
    async with running(preparer, api_key=["sesame"], admin_api_key=["root"]) as own:
        assert (await _code(own.generate(text="a")))[0] is Code.UNAUTHENTICATED
        assert (await _code(own.generate((("authorization", "Bearer wrong"),), text="a")))[0] is Code.UNAUTHENTICATED
        for name, asked, answer in (
            ("Abort", "AbortRequest", "AbortReply"),
            ("GetModelInfo", "GetModelInfoRequest", "ModelInfo"),
            ("GetServerInfo", "GetServerInfoRequest", "ServerInfo"),
            ("Nothing", "AbortRequest", "AbortReply"),
        ):
            assert (await _code(own.method(name, answer)(TYPES[asked]())))[0] is Code.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _services(own, ())
        assert caught.value.code() is Code.UNAUTHENTICATED
        assert (await own.method("HealthCheck", "HealthCheckReply")(TYPES["HealthCheckRequest"]())).is_ready
        for metadata in ((("authorization", "Bearer sesame"),), (("x-api-key", "root"),)):
            assert [r async for r in own.generate(metadata, text="a")]
            assert "samovar.v1.Inference" in await _services(own, metadata)
        assert not own.engine.requests[2:]


async def test_what_a_key_gives_holds_here_too(preparer: Preparer, tmp_path: Path) -> None:
    """H11, H12: a key's own salt, and a priority that its owner may not choose."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: ka, salt: own}\n- {name: b, key: kb}\n")
    async with running(preparer, api_keys_file=str(keys)) as own:
        for key in ("ka", "kb"):
            assert [r async for r in own.generate((("x-api-key", key),), text="a")]
        first, second = own.engine.requests
        assert first.cache_salt and second.cache_salt is None
        refused = await _code(own.generate((("x-api-key", "kb"), ("x-vllm-priority", "1")), text="a"))
        assert refused[0] is Code.INVALID_ARGUMENT and refused[2] == "x-vllm-priority"


async def test_reflection_and_health(preparer: Preparer) -> None:
    """A client can list the services, fetch the interface, and watch the health protocol's status."""
    async with running(preparer) as own:
        assert set(await _services(own, ())) == {
            "samovar.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
        }  # fmt: skip
        stub = reflection_pb2_grpc.ServerReflectionStub(own.channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="samovar.v1.Inference")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            (raw,) = answer.file_descriptor_response.file_descriptor_proto
            assert descriptor_pb2.FileDescriptorProto.FromString(raw).package == "samovar.v1"
        health = health_pb2_grpc.HealthStub(own.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="samovar.v1.Inference"))
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        own.engine.refuses = "asleep"
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        check = own.method("HealthCheck", "HealthCheckReply")
        answer = await check(TYPES["HealthCheckRequest"]())
        assert answer.is_alive and not answer.is_ready and answer.status == "paused"
        assert (await _code(own.generate(text="a")))[:2] == (Code.UNAVAILABLE, "asleep")


async def test_facts(preparer: Preparer) -> None:
    """Model and server say what they are."""
    async with running(preparer, served_model_name=["a", "b"]) as own:
        model = await own.method("GetModelInfo", "ModelInfo")(TYPES["GetModelInfoRequest"]())
        assert (list(model.names), model.model, model.vocab_size, model.max_model_len) == (["a", "b"], "tiny", 259, 512)
        assert model.has_tokenizer and list(model.eos_token_ids) == [258]
        server = await own.method("GetServerInfo", "ServerInfo")(TYPES["GetServerInfoRequest"]())
        assert server.status == "ready" and server.version


async def test_limits(preparer: Preparer) -> None:
    """Too large a message, a full queue, a dead engine, a failed row: each has its status."""
    limits = SchedulerConfig(max_num_queued_reqs=1, max_num_seqs=1)
    fails = encode("!")[0]
    make = lambda: ScriptedEngine(  # noqa: E731
        lambda r, i: [70, -1] if r.prompt_token_ids[0] == fails else [70] * 400, delay=0.3, limits=limits
    )
    async with running(preparer, make, max_body_bytes=4096) as own:
        assert (await _code(own.generate(text="a" * 5000)))[0] is Code.RESOURCE_EXHAUSTED
        assert (await _code(own.generate(text="!")))[0] is Code.INTERNAL
        calls = [own.generate(text="abc", stopping={"max_tokens": 300}) for _ in range(20)]
        codes = [c for c in await asyncio.gather(*(_first(call) for call in calls)) if c is not None]
        assert codes and set(codes) == {Code.RESOURCE_EXHAUSTED}
        own.engine.die()
        assert (await _code(own.generate(text="abc")))[0] is Code.UNAVAILABLE
        assert own.state.num_calls == 0


async def test_a_taken_port(preparer: Preparer) -> None:
    """A port that is in use is a configuration error that names the flag."""
    async with running(preparer) as own:
        state = ServingState(ServerConfig(grpc_port=own.port))
        with pytest.raises(ConfigError, match="--grpc-port"):
            async with serving_grpc(state):
                pass
        state.close()


async def _first(call: Any) -> grpc.StatusCode | None:
    """The status of a call that fails at once; None for one that starts, which is then left."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return None


async def _until(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become so within 5 s")


async def _services(own: Running, metadata: Any) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(own.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([asked]), metadata=metadata):
        return [service.name for service in answer.list_services_response.service]
    return []
