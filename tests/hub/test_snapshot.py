"""Hub ids through the real huggingface_hub client against a local server that speaks its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.hub import locate as locate_module
from samovar.hub.locate import locate, locate_tokenizer
from samovar.hub.snapshot import Reference, gguf_parts, hub_path, parse_reference, tokenizer_path
from tests.hub.file_server import FileServer, commit_of, running

REPO = "owner/name"
SAFETENSORS = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"a pickle",
    "README.md": b"hello",
}
GGUF = {
    "README.md": b"hello",
    "m.Q4_K_M.gguf": b"GGUF four",
    "m.Q8_0.gguf": b"GGUF eight",
    "big/m.F16-00001-of-00002.gguf": b"GGUF first",
    "big/m.F16-00002-of-00002.gguf": b"GGUF second",
    "mmproj-m.gguf": b"GGUF eyes",
}


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with running() as server:
        server.repos[REPO] = dict(SAFETENSORS)
        server.repos["owner/gguf"] = dict(GGUF)
        yield server


def fetch(hub: FileServer, text: str, cache: Path, revision: str | None = None) -> Path:
    return hub_path(text, revision=revision, cache_dir=cache, endpoint=hub.address)


def test_weights_and_settings_but_no_pickles(hub: FileServer, tmp_path: Path) -> None:
    folder = fetch(hub, REPO, tmp_path)
    got = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert got == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    assert not any(
        name in path for _, path, _ in hub.requests for name in ("pytorch_model.bin", ".pth", "consolidated")
    )


def test_every_file_comes_from_one_commit(hub: FileServer, tmp_path: Path) -> None:
    """The revision is resolved once; every file is asked for by that commit."""
    commit = commit_of(hub.repos[REPO])
    folder = fetch(hub, REPO, tmp_path, revision="v1")
    assert folder.name == commit
    resolved = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert resolved and all(f"/resolve/{commit}/" in path for path in resolved)


def test_offline_uses_what_is_there_and_says_what_is_not(hub: FileServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"owner/name \(revision main\): not on this machine, and --offline"):
        hub_path(REPO, offline=True, cache_dir=tmp_path)
    folder = fetch(hub, REPO, tmp_path)
    count = len(hub.requests)
    assert hub_path(REPO, offline=True, cache_dir=tmp_path) == folder
    assert hub_path(REPO, offline=True, cache_dir=tmp_path, revision=folder.name) == folder
    with pytest.raises(CheckpointError, match=r"revision v2.*not on this machine"):
        hub_path(REPO, offline=True, cache_dir=tmp_path, revision="v2")
    assert len(hub.requests) == count


def test_offline_with_half_a_download(hub: FileServer, tmp_path: Path) -> None:
    folder = fetch(hub, REPO, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="its weights are not on this machine"):
        hub_path(REPO, offline=True, cache_dir=tmp_path)


def test_a_hub_that_cannot_be_reached(hub: FileServer, tmp_path: Path) -> None:
    folder = fetch(hub, REPO, tmp_path)
    with running() as gone:
        address = gone.address
    assert hub_path(REPO, cache_dir=tmp_path, endpoint=address) == folder
    with pytest.raises(CheckpointError, match="cannot be reached") as error:
        hub_path("owner/other", cache_dir=tmp_path, endpoint=address)
    assert "\n" not in str(error.value)


def test_a_broken_download_goes_on_with_what_is_missing(hub: FileServer, tmp_path: Path) -> None:
    hub.hidden.add("model.safetensors")
    with pytest.raises(CheckpointError, match="a new try continues") as error:
        fetch(hub, REPO, tmp_path)
    assert "\n" not in str(error.value)
    hub.hidden.clear()
    hub.requests.clear()
    folder = fetch(hub, REPO, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(fetched) == 1 and fetched[0].endswith("/model.safetensors")


def test_no_such_repository(hub: FileServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no/where \(revision main\)") as error:
        fetch(hub, "no/where", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("owner/gguf:Q4_K_M", "m.Q4_K_M.gguf"),
        ("owner/gguf:q8_0", "m.Q8_0.gguf"),
        ("owner/gguf/m.Q8_0.gguf", "m.Q8_0.gguf"),
        ("owner/gguf:F16", "big/m.F16-00001-of-00002.gguf"),
        ("owner/gguf/big/m.F16-00002-of-00002.gguf", "big/m.F16-00001-of-00002.gguf"),
    ],
)
def test_gguf_repositories(text: str, file: str, hub: FileServer, tmp_path: Path) -> None:
    path = fetch(hub, text, tmp_path)
    assert path.as_posix().endswith(file) and path.read_bytes() == GGUF[file]
    here = sorted(p.name for p in path.parents[file.count("/")].rglob("*.gguf"))
    assert len(here) == (2 if "F16" in text else 1)
    assert hub_path(text, offline=True, cache_dir=tmp_path) == path
    with pytest.raises(CheckpointError, match=r"'Q2_K'.*--offline"):
        hub_path("owner/gguf:Q2_K", offline=True, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("owner/gguf", r"several match.*m.Q4_K_M.gguf"),
        ("owner/gguf:Q2_K", r"'Q2_K' is wanted, it is not there.*m.Q8_0.gguf"),
        ("owner/gguf/x.gguf", r"'x.gguf' is wanted"),
        ("owner/name:Q4_0", r"'Q4_0' is wanted.*none"),
        ("owner/pickles", r"pickle weights only \(pytorch_model.bin\)"),
        ("owner/nothing", "holds no weights"),
    ],
)
def test_what_a_repository_does_not_have(text: str, message: str, hub: FileServer, tmp_path: Path) -> None:
    hub.repos["owner/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b""}
    hub.repos["owner/nothing"] = {"README.md": b""}
    with pytest.raises(CheckpointError, match=message):
        fetch(hub, text, tmp_path)


def test_quantization_names_match_as_words() -> None:
    names = ["m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-IQ4_K.gguf", "m-UD-Q4_K_XL.gguf"]
    assert gguf_parts(Reference("a/b", quant="Q4_K"), names) == ["m-Q4_K.gguf"]
    assert gguf_parts(Reference("a/b", quant="UD-Q4_K_XL"), names) == ["m-UD-Q4_K_XL.gguf"]


def test_references() -> None:
    assert parse_reference("a/b") == Reference("a/b")
    assert parse_reference("a/b:Q4_0") == Reference("a/b", quant="Q4_0")
    assert parse_reference("a/b/c/d.gguf") == Reference("a/b", file="c/d.gguf")


def test_locate_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    def record(text: str, **settings: object) -> Path:
        seen.update(settings, text=text)
        return tmp_path

    monkeypatch.setattr(locate_module, "hub_path", record)
    monkeypatch.chdir(tmp_path)
    config = ModelConfig(model="owner/name:Q4_0", revision="v1", download_dir=str(tmp_path / "d"), offline=True)
    assert locate(config) == tmp_path
    assert seen == {"text": "owner/name:Q4_0", "revision": "v1", "cache_dir": tmp_path / "d", "offline": True}
    assert json.dumps(sorted(map(str, seen)))


def fetch_tokenizer(hub: FileServer, text: str, cache: Path) -> Path:
    return tokenizer_path(text, cache_dir=cache, endpoint=hub.address)


def test_a_tokenizer_without_its_weights(hub: FileServer, tmp_path: Path) -> None:
    """Settings only; found again offline and when the hub is gone; the weights are still honestly not there."""
    folder = fetch_tokenizer(hub, REPO, tmp_path)
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    assert not any("model.safetensors" in path for _, path, _ in hub.requests)
    assert tokenizer_path(REPO, offline=True, cache_dir=tmp_path) == folder
    with running() as gone:
        address = gone.address
    assert tokenizer_path(REPO, cache_dir=tmp_path, endpoint=address) == folder
    with pytest.raises(CheckpointError, match="its weights are not on this machine"):
        hub_path(REPO, offline=True, cache_dir=tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="its tokenizer is not on this machine, and --offline"):
        tokenizer_path(REPO, offline=True, cache_dir=tmp_path)


def test_a_tokenizer_in_a_gguf_file(hub: FileServer, tmp_path: Path) -> None:
    path = fetch_tokenizer(hub, "owner/gguf:Q8_0", tmp_path)
    assert path.read_bytes() == GGUF["m.Q8_0.gguf"]
    hub.repos["owner/one"] = {"m.gguf": b"GGUF one"}
    assert fetch_tokenizer(hub, "owner/one", tmp_path).read_bytes() == b"GGUF one"
    assert tokenizer_path("owner/one", offline=True, cache_dir=tmp_path).name == "m.gguf"
    hub.repos["owner/none"] = {"model.safetensors": b""}
    with pytest.raises(CheckpointError, match="owner/none: holds no tokenizer"):
        fetch_tokenizer(hub, "owner/none", tmp_path)


def test_which_tokenizer_is_located(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model's revision counts for its own repository only: a commit of one means nothing in another."""
    seen: list[tuple[str, object]] = []

    def record(text: str, **settings: object) -> Path:
        seen.append((text, settings["revision"]))
        return tmp_path

    monkeypatch.setattr(locate_module, "tokenizer_path", record)
    monkeypatch.chdir(tmp_path)
    cases: list[dict[str, str]] = [
        {"revision": "r"},
        {"tokenizer": "a/b"},
        {"tokenizer": "a/b", "revision": "r"},
        {"tokenizer": "a/b", "tokenizer_revision": "t"},
        {"tokenizer_revision": "t", "revision": "r"},
        {"tokenizer": "owner/name", "revision": "r"},
    ]
    found = [locate_tokenizer(ModelConfig(model="owner/name", **case)) for case in cases]
    assert found == [None] + 5 * [tmp_path]
    assert seen == [("a/b", None), ("a/b", None), ("a/b", "t"), ("owner/name", "t"), ("owner/name", "r")]
