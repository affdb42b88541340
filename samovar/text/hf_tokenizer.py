"""Tokenizer of a Hugging Face directory: tokenizer.json, with the settings files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from samovar.config.checkpoint import read_json
from samovar.config.description import ModelDescription
from samovar.errors import CheckpointError
from samovar.text.fast_tokenizer import FastTokenizer, Framing

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_hf(path: Path, description: ModelDescription) -> FastTokenizer:
    """Read `path` (a tokenizer.json) and its neighbours. Raises `CheckpointError` if the file is not usable."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise CheckpointError(f"{path}: not a usable tokenizer.json: {error}") from error
    settings = read_settings(path.parent)
    _add_missing(backend, settings)
    named = named_tokens(settings)
    lists = (settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
    extra = [text for items in lists for text in _texts(items)]
    backend.add_special_tokens([text for text in [*named.values(), *extra] if backend.token_to_id(text) is not None])
    bos = _id_of(backend, named.get("bos_token"))
    eos = _id_of(backend, named.get("eos_token"))
    if eos is None and description.eos_token_ids:
        eos = description.eos_token_ids[0]
    prefix, suffix = _framing(backend)
    if bos is not None and (wanted := settings.get("add_bos_token")) is not None:
        prefix = [bos, *(i for i in prefix if i != bos)] if wanted else [i for i in prefix if i != bos]
    if eos is not None and (wanted := settings.get("add_eos_token")) is not None:
        suffix = [*(i for i in suffix if i != eos), eos] if wanted else [i for i in suffix if i != eos]
    size = max([backend.get_vocab_size() - 1, *backend.get_added_tokens_decoder()]) + 1
    framing = Framing(prefix=tuple(prefix), suffix=tuple(suffix), bos=bos, eos=eos, named=named)
    return FastTokenizer(backend, framing, vocab_size=size)


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json laid over special_tokens_map.json; empty if there is neither."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            values = read_json(folder / name)
            settings.update({key: value for key, value in values.items() if value is not None})
    return settings


def named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like -> text."""
    return {name: texts[0] for name in NAMED if (texts := _texts([settings.get(name)]))}


def _texts(value: Any) -> list[str]:
    """The texts in a list (or object) of strings and AddedToken objects."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    texts = (item.get("content") if isinstance(item, dict) else item for item in items)
    return [text for text in texts if isinstance(text, str) and text]


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _add_missing(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json declares. They must land on the ids it says."""
    declared = settings.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    known = backend.get_added_tokens_decoder()
    for key in sorted((k for k in declared if str(k).isdigit()), key=int):
        entry = declared[key]
        if int(key) in known or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            continue
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        flags = {name: bool(entry.get(name, False)) for name in names}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != int(key):
            raise CheckpointError(
                f"tokenizer_config.json gives {entry['content']!r} the id {key}, "
                f"tokenizer.json gives it {backend.token_to_id(entry['content'])}"
            )


def _framing(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts around a text, found by encoding one."""
    inner = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []
