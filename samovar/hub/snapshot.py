"""Files of a hub repository through huggingface_hub: one commit for all of them, no pickles, honest when offline."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from samovar.config.checkpoint import PICKLE_SUFFIXES
from samovar.errors import CheckpointError

SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files beside the weights that may be needed; all small."""

TOKENIZERS = ("tokenizer.json", "tekken.json")
WEIGHTS = ("model*.safetensors", "*-of-*.safetensors")
PICKLES = tuple(f"*{suffix}" for suffix in PICKLE_SUFFIXES)
"""Never downloaded: opening one can run code."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed hub reference: `owner/name`, `owner/name:QUANT` or `owner/name/path/file.gguf`."""

    repo: str
    quant: str | None = None
    file: str | None = None


def parse_reference(text: str) -> Reference:
    """Split a hub reference into repository, quantization and file."""
    repo, _, quant = text.partition(":")
    owner, name, *rest = repo.split("/", 2)
    return Reference(f"{owner}/{name}", quant or None, rest[0] if rest else None)


def hub_path(
    text: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Folder (safetensors) or file (GGUF) of a hub model, downloaded if need be; resumable through the hub's own cache.

    If the hub cannot be reached, files that are already here are used. Raises `CheckpointError` naming what is missing.
    """
    reference = parse_reference(text)
    try:
        names = _names(reference, revision, offline, endpoint)
    except _UnreachableError as why:
        return _cached(reference, revision, cache_dir, str(why))
    patterns = _patterns(reference, names)
    return _inside(_snapshot(reference, revision, cache_dir, endpoint, patterns), reference)


def tokenizer_path(
    text: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Folder with the tokenizer files of a hub repository, without its weights; the model file where that is GGUF.

    If the hub cannot be reached, files that are already here are used. Raises `CheckpointError` naming what is missing.
    """
    reference = parse_reference(text)
    where: dict[str, Any] = {"revision": revision, "offline": offline, "cache_dir": cache_dir, "endpoint": endpoint}
    if reference.quant or reference.file:
        return hub_path(text, **where)
    try:
        names = _names(reference, revision, offline, endpoint)
    except _UnreachableError as why:
        folder = _cached_folder(reference, revision, cache_dir, str(why))
        if any((folder / name).exists() for name in TOKENIZERS):
            return folder
        if any(folder.rglob("*.gguf")):
            return hub_path(text, **where)
        raise CheckpointError(f"{reference.repo}: its tokenizer is not on this machine, and {why}") from None
    if _has(names, TOKENIZERS):
        return _snapshot(reference, revision, cache_dir, endpoint, list(SETTINGS))
    if any(name.endswith(".gguf") for name in names):
        return hub_path(text, **where)
    raise CheckpointError(f"{reference.repo}: holds no tokenizer ({', '.join(TOKENIZERS)} or a GGUF file)")


class _UnreachableError(Exception):
    """The hub cannot or must not be asked; the text says why."""


def _names(reference: Reference, revision: str | None, offline: bool, endpoint: str | None) -> list[str]:
    """Files of a repository, as the hub lists them."""
    if offline:
        raise _UnreachableError("--offline forbids downloading it")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    at = f"{reference.repo} (revision {revision or 'main'})"
    try:
        facts = HfApi(endpoint=endpoint).model_info(reference.repo, revision=revision)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{at}: access must be granted on the hub first, then set a token: {_line(error)}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise CheckpointError(
            f"{at}: the hub has no such model or revision, or it is private: {_line(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{at}: the hub answered with an error: {_line(error)}") from error
    except Exception as error:  # the HTTP library, and so the connection errors, differ by version
        raise _UnreachableError(f"the hub cannot be reached ({_line(error)})") from error
    return [entry.rfilename for entry in facts.siblings or []]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _snapshot(
    reference: Reference, revision: str | None, cache_dir: Path | None, endpoint: str | None, patterns: list[str]
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            reference.repo,
            revision=revision,  # resolved to one commit before the first file
            cache_dir=cache_dir,
            endpoint=endpoint,
            allow_patterns=patterns,
            ignore_patterns=[*PICKLES, "original/*", "onnx/*"],
        )
    except Exception as error:  # see above; files that arrived stay in the cache and are not fetched again
        raise CheckpointError(f"{reference.repo}: download failed, a new try continues: {_line(error)}") from error
    return Path(folder)


def _patterns(reference: Reference, names: list[str]) -> list[str]:
    """Which files to fetch; refuses a repository that holds only pickles, or nothing."""
    if reference.quant or reference.file or not _has(names, WEIGHTS):
        ggufs = [name for name in names if name.endswith(".gguf")]
        if ggufs or reference.quant or reference.file:
            return gguf_parts(reference, ggufs)
        if pickles := [name for name in names if any(fnmatch(name, p) for p in PICKLES)]:
            raise CheckpointError(f"{reference.repo}: holds pickle weights only ({pickles[0]}), which are refused")
        if not _has(names, ("*.safetensors",)):
            raise CheckpointError(f"{reference.repo}: holds no weights (.safetensors or .gguf)")
        return [*SETTINGS, "*.safetensors"]
    return [*SETTINGS, *WEIGHTS]


def _has(names: list[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for name in names for pattern in patterns if "/" not in name)


def gguf_parts(reference: Reference, names: list[str]) -> list[str]:
    """The parts, in order, of the one GGUF model among `names` that the reference means."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.rpartition("/")[2].startswith("mmproj"):
            models.setdefault(_SPLIT.sub(".gguf", name), []).append(name)
    if reference.file is not None:
        chosen = [model for model, parts in models.items() if reference.file in (model, *parts)]
    elif reference.quant is not None:
        quant = re.compile(rf"(^|[-._/]){re.escape(reference.quant)}($|[-./])", re.IGNORECASE)
        chosen = [model for model in models if quant.search(model.removesuffix(".gguf"))]
    else:
        chosen = list(models)
    if len(chosen) != 1:
        what = reference.file or reference.quant or "a GGUF model without a name"
        found = "several match" if chosen else "it is not there"
        choice = ", ".join(chosen or models) or "none"
        raise CheckpointError(f"{reference.repo}: {what!r} is wanted, {found}; GGUF models: {choice[:600]}")
    return models[chosen[0]]


def _inside(folder: Path, reference: Reference) -> Path:
    """The first GGUF part or the folder itself, judged by the files that are here."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.exists()]
    if reference.quant or reference.file or not _has(names, ("*.safetensors",)):
        return folder / gguf_parts(reference, [name for name in names if name.endswith(".gguf")])[0]
    return folder


def _cached(reference: Reference, revision: str | None, cache_dir: Path | None, why: str) -> Path:
    """The model that an earlier download left in the hub's cache."""
    folder = _cached_folder(reference, revision, cache_dir, why)
    if not any(p.exists() for kind in ("*.safetensors", "*.gguf") for p in folder.rglob(kind)):
        at = f"{reference.repo} (revision {revision or 'main'})"
        raise CheckpointError(f"{at}: its weights are not on this machine, and {why}")
    try:
        return _inside(folder, reference)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {why}") from None


def _cached_folder(reference: Reference, revision: str | None, cache_dir: Path | None, why: str) -> Path:
    """Where the hub's cache has a repository's files, those that were ever fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    at = f"{reference.repo} (revision {revision or 'main'})"
    try:
        # No file of a repository has this name: only the folder is wanted, part of its files may do.
        return Path(
            snapshot_download(
                reference.repo, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=["*/\\*"]
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{at}: not on this machine, and {why}") from error
