"""Keys that encrypt what is stored, from settings, variables or files."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.files import read_bounded

KEY_BYTES = 32
CLEAR = "clear"
_FILE = "file:"
_MAX_FILE_BYTES = 64 * 1024
_NEW_KEY = "create one with: openssl rand -base64 32"

Keys = Annotated[tuple[str, ...], Field(repr=False)]


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A key of a ring.

    Attributes:
        secret: 32 bytes; empty for `clear`.
        tenant: The tenant for whom another key is derived from it.
        agent: The agent that it belongs to, in the ring of a command that reads all agents.
    """

    secret: bytes = field(repr=False)
    tenant: str | None = None
    agent: str | None = None


def read_keys(value: Any, setting: str) -> tuple[str, ...]:
    """Return the keys in `value`, newest first: a list, or a text that separates them by commas.

    `file:PATH` stands for the keys in a file, one per line. `clear` before the first key says that
    nothing is encrypted any more, or not yet. No message contains a key.

    Raises:
        ConfigurationError: A key or a file cannot be used, or a library is missing.
    """
    given = value.split(",") if isinstance(value, str) else value
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ConfigurationError(setting, "is not a list of keys", _NEW_KEY)
    entries = [key for each in given for key in _resolve(each.strip(), setting) if key]
    keys = entries[1:] if entries[:1] == [CLEAR] else entries
    if entries and not keys:
        raise ConfigurationError(setting, f"has no key after {CLEAR!r}", "add one, or remove it")
    for number, key in enumerate(keys, 1):
        _decode(key, f"{setting}[{number}]" if len(keys) > 1 else setting)
    if len({_decode(key, setting) for key in keys}) < len(keys):
        raise ConfigurationError(setting, "has the same key twice", "remove one of them")
    if keys:
        extras.ENCRYPTION.require(setting)
    return tuple(entries)


def _resolve(entry: str, setting: str) -> Iterable[str]:
    if not entry.startswith(_FILE):
        return [entry]
    path = Path(entry.removeprefix(_FILE))
    try:
        lines = read_bounded(path, _MAX_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        fix = "name a file with one key per line, the newest first"
        raise ConfigurationError(setting, f"{path} cannot be read: {reason}", fix) from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigurationError(setting, f"{path} has no key", _NEW_KEY)
    return keys


def _decode(key: str, setting: str) -> bytes:
    try:
        decoded = base64.b64decode(key.translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(setting, "is not a key in Base64", _NEW_KEY) from None
    if len(decoded) != KEY_BYTES:
        problem = f"has {len(decoded)} bytes; a key has {KEY_BYTES}"
        raise ConfigurationError(setting, problem, _NEW_KEY)
    return decoded


def to_ring(keys: Iterable[str], tenant: str | None = None) -> tuple[EncryptionKey, ...]:
    """The ring of validated keys."""
    return tuple(
        EncryptionKey(b"" if key == CLEAR else _decode(key, "encryption_keys"), tenant)
        for key in keys
    )


def environment_keys(variables: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The keys in the `MESHPOINT_` variables, for commands that read no file.

    Raises:
        ConfigurationError: A key cannot be used.
    """
    agent, mesh = variables.get("agent", {}), variables.get("mesh", {})
    name, found = "MESHPOINT_AGENT__ENCRYPTION_KEYS", agent.get("encryption_keys")
    if found is None:
        name, found = "MESHPOINT_MESH__ENCRYPTION_KEYS", mesh.get("encryption_keys")
    return read_keys(found, name)
