"""KeyRing: who a key belongs to, and what its owner may ask for. Keys are kept as SHA-256 digests only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from starlette.types import Scope

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.core.validation import MAX_PRIORITY, MAX_SALT_CHARS, MIN_PRIORITY
from samovar.errors import ConfigError, ValidationError

MAX_FILE_BYTES = 1 << 20
CALLER = "samovar.key"
"""Where a request's scope holds its `Caller`."""
PRIORITY_HEADER = b"x-vllm-priority"

_FLAG = "--api-keys-file"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a request. `priority` and `salt` are what the key's requests get (None: what they ask for).

    Only a trusted caller chooses priorities. The salt is made from the key, so that no other client can name it.
    """

    name: str = ""
    priority: int | None = None
    salt: str | None = None
    is_trusted: bool = True
    is_admin: bool = False


ANYONE = Caller()
"""Who calls a server without keys: whoever can reach it owns it."""


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One item of the keys file. Give `key`, or its SHA-256 in hex as `sha256`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    priority: Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    salt: Literal["own", "shared"] | None = None
    trusted: bool = False


class KeyRing:
    """The keys of one server. Finding one compares with all of them, so that time tells nothing."""

    def __init__(self, callers: Iterable[tuple[bytes, Caller]]) -> None:
        self._callers = list(callers)
        self.has_users = any(not caller.is_admin for _, caller in self._callers)
        self.has_admins = any(caller.is_admin for _, caller in self._callers)
        self.prioritized = [caller.name for _, caller in self._callers if caller.priority is not None]
        """Names of the keys that have a priority of their own."""

    @classmethod
    def load(cls, config: ServerConfig) -> KeyRing:
        """The keys of flags and file. Raises `ConfigError`."""
        own = config.salt_by_key
        found = [_plain(key, f"key-{at}", own) for at, key in enumerate(config.api_key)]
        found += [(digest_of(key.encode()), Caller(name="admin", is_admin=True)) for key in config.admin_api_key]
        taken = {caller.name for _, caller in found}
        if config.api_keys_file is not None:
            found += [_described(entry, own) for entry in read_keys_file(Path(config.api_keys_file), taken)]
        seen: dict[bytes, Caller] = {}
        for digest, caller in found:
            # A user key that is an admin key as well would open the admin's routes to users.
            if (other := seen.setdefault(digest, caller)) is not caller and other != caller:
                raise ConfigError(
                    f"the keys {other.name!r} and {caller.name!r} are the same; give everybody a key of their own"
                )
        return cls(seen.items())

    def check(self, scheduler: SchedulerConfig) -> None:
        """Raise `ConfigError` if a key has a priority that the scheduler would not look at."""
        if self.prioritized and scheduler.scheduling_policy != "priority":
            message = (
                f"{_FLAG}: {self.prioritized[0]} has a priority, but requests are scheduled first come, first served"
            )
            raise ConfigError(f"{message}; add --scheduling-policy priority, or take the priority out of the file")

    def find(self, scope: Scope) -> Caller | None:
        """The owner of the key that a request carries: a bearer token, or an x-api-key header."""
        found: Caller | None = None
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                value = value[7:].strip()
            elif name != b"x-api-key":
                continue
            caller = self.owner(value)
            if caller is not None and (found is None or caller.is_admin):
                found = caller
        return found

    def owner(self, key: bytes) -> Caller | None:
        """The owner of a key."""
        digest, found = digest_of(key), None
        for known, caller in self._callers:  # all: no early way out to time
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def _salt(digest: bytes) -> str:
    return hashlib.sha256(b"samovar cache salt\0" + digest).hexdigest()


def _plain(key: str, name: str, own: bool) -> tuple[bytes, Caller]:
    """A key of the command line: as much trusted as the server's only user would be."""
    digest = digest_of(key.encode())
    return digest, Caller(name=name, salt=_salt(digest) if own else None)


def _described(entry: KeyEntry, own: bool) -> tuple[bytes, Caller]:
    digest = bytes.fromhex(entry.sha256) if entry.sha256 is not None else digest_of((entry.key or "").encode())
    is_own = entry.salt == "own" or (entry.salt is None and own)
    salt = _salt(digest) if is_own else None
    return digest, Caller(name=entry.name, priority=entry.priority, salt=salt, is_trusted=entry.trusted)


def read_keys_file(path: Path, taken: Collection[str] = ()) -> list[KeyEntry]:
    """The entries of a keys file: a YAML list of mappings. Raises `ConfigError` naming the entry; never shows a key.

    What is stored belongs to a name, so that none of the `taken` ones, which other keys have, may come again.
    """
    try:
        facts = path.stat()
        if facts.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{_FLAG} {path}: is larger than {MAX_FILE_BYTES} bytes")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{_FLAG} {path}: is not YAML; write a list of entries with name and key") from None
    if facts.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _logger.warning("%s %s: other users of this machine can read it; chmod 600 keeps the keys secret", _FLAG, path)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{_FLAG} {path}: must be a list of entries with name and key")
    entries = [_entry(path, at, raw) for at, raw in enumerate(content, 1)]
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{_FLAG} {path}: the name {twice!r} appears twice; give every key its own")
    if other := next((name for name in names if name in taken), None):
        raise ConfigError(f"{_FLAG} {path}: the name {other!r} is that of a key of the command line; choose another")
    return entries


def _entry(path: Path, at: int, raw: Any) -> KeyEntry:
    try:
        entry = msgspec.convert(raw, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_FLAG} {path}: entry {at}: {error}") from None
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{_FLAG} {path}: entry {at} ({entry.name}): give either key or sha256")
    if entry.key is not None and entry.key != entry.key.strip():
        raise ConfigError(f"{_FLAG} {path}: entry {at} ({entry.name}): the key begins or ends with blanks; remove them")
    return entry


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Who sent this request."""
    caller = scope.get(CALLER, ANYONE)
    assert isinstance(caller, Caller)
    return caller


def routing_of(scope: Scope, *, priority: int | None = None, cache_salt: str | None = None) -> dict[str, Any]:
    """`priority` and `cache_salt` of a request: what its body asks for, its header, and its key, in one answer.

    Raises `ValidationError` for a priority that the caller may not choose. A key's own salt is always part of the
    result: a client's salt divides its own cache further.
    """
    caller = caller_of(scope)
    field = "priority"
    if priority is None and (header := _header(scope, PRIORITY_HEADER)) is not None:
        field = PRIORITY_HEADER.decode()
        priority = _integer(field, header)
    own = caller.priority or 0
    if priority is not None and priority != own and not caller.is_trusted:
        message = (
            f"{field}: this key's requests have priority {own}; leave it out, or ask the operator for a trusted key"
        )
        raise ValidationError(message, parameter=field, value=priority)
    salt = cache_salt
    if caller.salt is not None and (cache_salt is None or 1 <= len(cache_salt) <= MAX_SALT_CHARS):
        salt = (
            caller.salt if cache_salt is None else hashlib.sha256(f"{caller.salt}\0{cache_salt}".encode()).hexdigest()
        )
    return {"priority": own if priority is None else priority, "cache_salt": salt}


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


def _integer(field: str, text: str) -> int:
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise ValidationError(f"{field} must be a 64-bit integer, got {text[:50]!r}", parameter=field, value=text[:50])
    return int(text)
