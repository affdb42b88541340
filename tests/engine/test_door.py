"""load_text: tokenizers from elsewhere, found through a hub, a path or an alias; and how templates take content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM, SamplingParams
from samovar.config.engine import EngineConfig
from samovar.config.groups import ModelConfig, ServerConfig
from samovar.engine.build import find_model
from samovar.engine.door import load_text
from samovar.errors import CheckpointError, ConfigError, ValidationError
from samovar.hub import locate as locate_module
from samovar.hub.snapshot import tokenizer_path
from samovar.server import run
from tests.checkpoints import write_tokenizer
from tests.hub.file_server import FileServer, running
from tests.server.scripted_engine import engine_facts

SHOUT = "{% for m in messages %}SHOUT {{ m.content }}{% endfor %}"
FORMATS = "{{ messages[0].content if messages[0].content is string else messages[0].content | length }}"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 64, "threads": 1}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer that has a token for "samovar", with a template of its own."""
    folder = tmp_path / "words"
    folder.mkdir()
    write_tokenizer(folder, chat_template=SHOUT)
    return with_token(folder, "samovar")


def with_token(folder: Path, text: str) -> Path:
    """Give the tokenizer one more added token."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": len(content["model"]["vocab"]), "content": text, **flags})
    path.write_text(json.dumps(content), "utf-8")
    return folder


@pytest.fixture
def hub(words: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A hub that has the tokenizer beside weights that nobody needs."""
    with running() as server:
        files = {path.name: path.read_bytes() for path in words.iterdir()}
        server.repos["owner/words"] = {**files, "model.safetensors": b"w" * 5000, "config.json": b"{}"}
        monkeypatch.setattr(locate_module, "tokenizer_path", partial(tokenizer_path, endpoint=server.address))
        yield server


def test_llm_takes_a_tokenizer_from_the_hub(hub: FileServer, words: Path, tiny_model: Path, tmp_path: Path) -> None:
    """--tokenizer as a hub id: its ids, its template, the revision asked for, and no byte of weights."""
    elsewhere: dict[str, Any] = {
        "tokenizer": "owner/words",
        "tokenizer_revision": "v7",
        "download_dir": str(tmp_path / "cache"),
    }
    with LLM(str(tiny_model), **OPTIONS, **elsewhere) as llm:
        tokenizer = llm.get_tokenizer()
        assert len(tokenizer.encode("samovar")) == 1
        messages = [{"role": "user", "content": "hi"}]
        output = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert output.prompt == "SHOUT hi"
    paths = [path for _, path, _ in hub.requests]
    assert any("/revision/v7" in path for path in paths)
    assert not any(path.endswith("model.safetensors") for path in paths)
    count = len(hub.requests)
    with LLM(str(tiny_model), **OPTIONS, **(elsewhere | {"offline": True})) as llm:
        assert len(llm.get_tokenizer().encode("samovar")) == 1
    assert len(hub.requests) == count
    with LLM(str(tiny_model), **OPTIONS, tokenizer=str(words)) as llm:
        assert len(llm.get_tokenizer().encode("samovar")) == 1
    with LLM(str(tiny_model), **OPTIONS) as llm:
        assert len(llm.get_tokenizer().encode("samovar")) > 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tokenizer": "owner/nowhere"}, CheckpointError, r"owner/nowhere \(revision main\)"),
        ({"tokenizer": "nonsense"}, CheckpointError, "'nonsense' is no path"),
        ({"tokenizer": "./nothing.json"}, CheckpointError, "no such file"),
        ({"tokenizer_revision": "v1"}, ConfigError, "--tokenizer-revision v1: .* is not on the hub"),
        ({"tokenizer": "owner/words", "offline": True}, CheckpointError, "not on this machine, and --offline"),
    ],
)
def test_a_tokenizer_that_cannot_be_had(
    settings: dict[str, Any], error: Any, message: str, hub: FileServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The name is in the error, and no weight was read: the tokenizer comes first."""
    model = ModelConfig(model=str(tiny_model), download_dir=str(tmp_path / "cache"), **settings)
    config = EngineConfig(model=model)
    with pytest.raises(error, match=message):
        load_text(config, find_model(config))


@pytest.mark.usefixtures("smollm2")
def test_an_alias_is_a_tokenizer(tiny_model: Path) -> None:
    """--tokenizer smollm2: the vocabulary of the GGUF file."""
    config = EngineConfig(model=ModelConfig(model=str(tiny_model), tokenizer="smollm2"))
    text = load_text(config, find_model(config))
    assert text.tokenizer is not None and text.tokenizer.vocab_size == 49152
    assert (
        text.template is not None and "You are a helpful AI assistant named SmolLM" in text.template.sources["default"]
    )


class StartedClient:
    """An engine process that needs no starting."""

    info = engine_facts()

    async def start(self) -> None:
        """Be ready."""


@pytest.mark.parametrize(("content_format", "rendered"), [("string", "a\nb"), ("openai", "2")])
async def test_the_servers_content_format(content_format: str, rendered: str, tiny_model: Path) -> None:
    """--chat-template-content-format decides what a template sees that would take either."""
    server = ServerConfig(chat_template=FORMATS, chat_template_content_format=content_format)
    config = EngineConfig(model=ModelConfig(model=str(tiny_model)))
    preparer = await run.load_model(config, server, StartedClient())  # type: ignore[arg-type]
    assert preparer.render(PARTS).text == rendered


async def test_the_servers_tokenizer(hub: FileServer, tiny_model: Path, tmp_path: Path) -> None:
    """--tokenizer reaches the server's door as it reaches `LLM`."""
    model = ModelConfig(model=str(tiny_model), tokenizer="owner/words", download_dir=str(tmp_path / "cache"))
    preparer = await run.load_model(EngineConfig(model=model), ServerConfig(), StartedClient())  # type: ignore[arg-type]
    assert len(preparer.encode_text("samovar")) == 1
    assert preparer.render([{"role": "user", "content": "hi"}]).text == "SHOUT hi"


def test_llm_content_format_and_template(tiny_model: Path) -> None:
    """LLM.chat: another template and another content format for one call; wrong values are named."""
    params = SamplingParams(max_tokens=1)
    with LLM(str(tiny_model), **OPTIONS) as llm:

        def prompt(**options: Any) -> str | None:
            return llm.chat(PARTS, params, use_tqdm=False, **options)[0].prompt

        assert prompt(chat_template=FORMATS, chat_template_content_format="string") == "a\nb"
        assert prompt(chat_template=FORMATS, chat_template_content_format="openai") == "2"
        assert prompt(chat_template="{{ messages[0].content }}{{ x }}", chat_template_kwargs={"x": 1}) == "a\nb1"
        assert prompt(chat_template_content_format="auto") == prompt()
        for name in ("self", "messages", "tools", "documents", "add_generation_prompt", "chat_template"):
            with pytest.raises(ValidationError, match=f"chat_template_kwargs: '{name}'"):
                prompt(chat_template_kwargs={name: 1})
        for field, value in (("chat_template_content_format", "xml"), ("chat_template_kwargs", ["x"])):
            with pytest.raises(ValidationError, match=field) as error:
                prompt(**{field: value})
            assert error.value.parameter == field
