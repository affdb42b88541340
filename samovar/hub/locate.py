"""A model reference -> a local path: an existing path, an embedded alias, or a hub id, in this order."""

from __future__ import annotations

import re
from pathlib import Path

from samovar.config.checkpoint import PICKLE_SUFFIXES, describe
from samovar.config.description import ModelDescription
from samovar.config.field import cache_root
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.hub.aliases import ALIASES
from samovar.hub.download import Progress, alias_path, fetch_alias, is_cached
from samovar.hub.snapshot import hub_path, tokenizer_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+|(/[\w.-]+)+\.gguf)?")


def locate(model_config: ModelConfig, *, progress: Progress | None = None) -> Path:
    """The files of `model_config.model` on this machine, downloaded if need be.

    An existing path is returned as it is and never touches the network. Aliases are kept under `download_dir` (default:
    the user's cache folder), hub models in the hub's own cache or `download_dir`. With `offline` nothing is downloaded,
    and what is not there is named. Raises `CheckpointError`, `ConfigError` for a revision of something that has none.
    """
    reference = model_config.model
    if not _is_on_hub(reference):
        _refuse_revision("--revision", model_config.revision, reference)
    if (path := _without_hub(reference, model_config, progress)) is not None:
        return path
    folder = _download_dir(model_config)
    return hub_path(reference, revision=model_config.revision, offline=model_config.offline, cache_dir=folder)


def find_model(model_config: ModelConfig, *, progress: Progress | None = None) -> ModelDescription:
    """What the model says about itself, downloaded if need be; an alias brings the sampling its card recommends.

    Raises what `locate` and `config.checkpoint.describe` raise.
    """
    reference = model_config.model
    path = locate(model_config, progress=progress)
    is_alias = reference in ALIASES and not Path(reference).expanduser().exists()
    return describe(path, model_config, recommended=ALIASES[reference].sampling if is_alias else {})


def locate_tokenizer(model_config: ModelConfig, *, progress: Progress | None = None) -> Path | None:
    """The files of a tokenizer that is not the model's own, found as `locate` finds models; None if none is named.

    `tokenizer_revision` alone means the model's repository at another revision. Weights beside the tokenizer are not
    fetched. Raises `CheckpointError`, `ConfigError` for a revision of something that has none.
    """
    reference, revision = model_config.tokenizer, model_config.tokenizer_revision
    if reference is None and revision is None:
        return None
    if reference is None or reference == model_config.model:
        reference, revision = model_config.model, revision or model_config.revision
    if not _is_on_hub(reference):
        _refuse_revision("--tokenizer-revision", model_config.tokenizer_revision, reference)
    path = _without_hub(reference, model_config, progress)
    if path is None:
        folder = _download_dir(model_config)
        return tokenizer_path(reference, revision=revision, offline=model_config.offline, cache_dir=folder)
    return path


def _is_on_hub(reference: str) -> bool:
    """Whether a reference is neither something here nor an alias."""
    return not (reference and Path(reference).expanduser().exists()) and reference not in ALIASES


def _refuse_revision(flag: str, revision: str | None, reference: str) -> None:
    if revision is not None:
        raise ConfigError(f"{flag} {revision}: {reference} is not on the hub and has no revisions; leave the flag out")


def _download_dir(model_config: ModelConfig) -> Path | None:
    return Path(model_config.download_dir).expanduser() if model_config.download_dir else None


def _without_hub(reference: str, model_config: ModelConfig, progress: Progress | None) -> Path | None:
    """The files of a path or an alias; None for a hub id."""
    path = Path(reference).expanduser()
    if reference and path.exists():
        return path.absolute()
    if reference in ALIASES:
        root = _download_dir(model_config) or cache_root()
        return _locate_alias(reference, root, model_config.offline, progress)
    if _looks_local(path, reference):
        raise CheckpointError(f"{reference}: there is no such file or folder")
    if _HUB_ID.fullmatch(reference) is None:
        known = ", ".join(ALIASES)
        raise CheckpointError(f"{reference!r} is no path, no hub id (owner/name) and none of the aliases: {known}")
    return None


def _looks_local(path: Path, reference: str) -> bool:
    """Whether a reference that names nothing here was meant as a path all the same."""
    if reference.startswith(("/", "./", "../", "~")):
        return True
    is_file_name = path.suffix in (".gguf", ".safetensors", ".json", *PICKLE_SUFFIXES)
    return is_file_name and (len(path.parts) < 3 or Path(path.parts[0]).is_dir())


def _locate_alias(name: str, root: Path, offline: bool, progress: Progress | None) -> Path:
    alias = ALIASES[name]
    if is_cached(alias, root):
        return alias_path(alias, root)
    if offline:
        raise CheckpointError(
            f"{alias_path(alias, root)}: not there, and --offline forbids a download; run 'samovar pull {name}' once"
        )
    return fetch_alias(alias, root, progress=progress)
