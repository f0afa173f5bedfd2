"""Encoding of values in columns.

Bytes begin with a marker: plain, compressed or sealed. A sealed value contains the other two. With
a sealer, texts and JSON are sealed as well: see `inventory`. Values written in the clear stay
readable.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zstandard
from pydantic_core import from_json

from meshpoint.adapters.encryption import (
    DIGEST_PREFIX,
    MARKER,
    TEXT_PREFIX,
    compress,
    escape_text,
    expand,
    from_text,
    is_envelope,
    is_text_envelope,
    missing_key,
    to_text,
    unescape_text,
)
from meshpoint.adapters.sql.inventory import SEALED_KEY, Kind, Sealed
from meshpoint.errors import KeyMissing
from meshpoint.model.log_entries import LogEntries
from meshpoint.own_threads import run_in_own_thread
from meshpoint.ports.sealer import Sealer

Packed: TypeAlias = bytes | None
"""An encoded value: a marker and bytes, or `None` for NULL."""
RAW = b"\x00"
ZSTD = b"\x01"

EMPTY = frozenset({"", "[]", "{}"})
"""Texts that are never sealed. Most columns of most tasks have one."""

_MIN_COMPRESS_BYTES = 1024
_MAX_ENTRY_RATIO = 0.75
"""Log entries that compress less are stored plain, because each resume decodes all of them."""

_MIN_THREAD_BYTES = 256 * 1024


class _ThreadCodec(threading.local):
    """A compressor and decompressor per thread. Creating them costs more than using them."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_thread_codec = _ThreadCodec()


async def pack(value: bytes | None) -> bytes | None:
    """Encode `value` for a column, compressed if that makes it smaller.

    Large values are compressed in another thread.
    """
    if value is None or len(value) < _MIN_COMPRESS_BYTES:
        return None if value is None else RAW + value
    if len(value) < _MIN_THREAD_BYTES:
        return _compress(value)
    return await run_in_own_thread(_compress, value)


async def pack_all(values: Iterable[bytes | None]) -> list[bytes | None]:
    """Encode several values, as `pack` does, in the same order."""
    return [
        RAW + value
        if value is not None and len(value) < _MIN_COMPRESS_BYTES
        else await pack(value)
        for value in values
    ]


async def pack_entries(entries: Sequence[bytes]) -> tuple[bytes, ...]:
    """Encode the entries of a log, compressed if that saves a quarter."""
    return tuple([await _pack_entry(entry) for entry in entries])


async def _pack_entry(entry: bytes) -> bytes:
    packed = await pack(entry)
    if packed is None or len(packed) > len(entry) * _MAX_ENTRY_RATIO:
        return RAW + entry
    return packed


async def unpack_entries(stored: Sequence[bytes]) -> LogEntries:
    """Decode what `pack_entries` encoded.

    Raises:
        ValueError: This release does not know a marker.
    """
    # Entries without compression are not copied, since all of them together may take megabytes.
    marked = [each if each[:1] == RAW else RAW + (await unpack(each) or b"") for each in stored]
    return LogEntries(marked, len(RAW))


async def unpack(stored: bytes | None) -> bytes | None:
    """Decode what `pack` encoded.

    Raises:
        KeyMissing: It is sealed.
        ValueError: This release does not know the marker.
    """
    if stored is None:
        return None
    marker, rest = stored[:1], stored[1:]
    if marker == RAW:
        return rest
    if marker == MARKER:
        raise missing_key(bytes(stored))
    if marker != ZSTD:
        raise ValueError(f"a stored value begins with unknown marker {marker!r}")
    if len(rest) < _MIN_THREAD_BYTES:
        return _decompress(rest)
    return await run_in_own_thread(_decompress, rest)


def require_clear(text: str | None) -> None:
    """Check that a stored text is not sealed.

    Raises:
        KeyMissing: It is.
        ValueError: It is a damaged envelope.
    """
    if is_text_envelope(text):
        raise missing_key(from_text(str(text)))


def unpacked_size(stored: bytes) -> int:
    """Size in bytes of `stored` after unpacking, without unpacking it."""
    if stored[:1] != ZSTD:
        return len(stored) - 1
    return max(int(zstandard.frame_content_size(stored[1:])), 0)


def _compress(value: bytes) -> bytes:
    packed = _thread_codec.compress(value)
    return ZSTD + packed if len(packed) < len(value) else RAW + value


def _decompress(packed: bytes) -> bytes:
    return _thread_codec.decompress(packed)


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes the values of one store, and seals them if it has a sealer.

    `agent` is always a qualified name, and `keys` are the values of the key columns that the
    inventory names for the column.

    Methods that decode raise `KeyMissing` if the sealer lacks the key of a value, and `ValueError`
    if the value is damaged or belongs to another row.
    """

    sealer: Sealer | None = None

    def seals(self, agent: str) -> bool:
        """Whether it seals what belongs to `agent`."""
        return self.sealer is not None and self.sealer.key_id(agent) is not None

    def pack(
        self, value: bytes | None, column: Sealed, agent: str, *keys: str, seq: int = 0
    ) -> Awaitable[Packed]:
        """Encode bytes."""
        if self.sealer is None:
            return pack(value)
        return self._pack_sealed(value, column, agent, *keys, seq=seq)

    async def _pack_sealed(
        self, value: bytes | None, column: Sealed, agent: str, *keys: str, seq: int
    ) -> Packed:
        if value is not None and len(value) < _MIN_COMPRESS_BYTES:
            return self.seal(RAW + value, column, agent, *keys, seq=seq)
        return self.seal(await pack(value), column, agent, *keys, seq=seq)

    def seal(self, packed: Packed, column: Sealed, agent: str, *keys: str, seq: int = 0) -> Packed:
        """Seal bytes that are encoded already, or that need no encoding."""
        if packed is None or self.sealer is None or not self.seals(agent):
            return packed
        return self.sealer.seal(packed, (column.place, agent, *keys), seq)

    def unpack(
        self, stored: bytes | None, column: Sealed, agent: str, *keys: str
    ) -> Awaitable[bytes | None]:
        """Decode what `pack` encoded."""
        if self.sealer is not None:
            stored = self.open(stored, column, agent, *keys)
        return unpack(stored)

    def open(self, stored: bytes | None, column: Sealed, agent: str, *keys: str) -> bytes | None:
        """Undo `seal`. Bytes that are not sealed are returned as they are."""
        if stored is None or not is_envelope(stored):
            return stored
        return self._open(bytes(stored), column, agent, *keys)

    def _open(self, envelope: bytes, column: Sealed, agent: str, *keys: str) -> bytes:
        if self.sealer is None:
            raise missing_key(envelope)
        return self.sealer.open(envelope, (column.place, agent, *keys))

    def text(
        self, value: str | None, column: Sealed, agent: str, *keys: str, seq: int = 0
    ) -> str | None:
        """Encode a text."""
        if value is None or value in EMPTY:
            return value
        if self.sealer is None or not self.seals(agent):
            return escape_text(value)
        content, place = value.encode(errors="surrogatepass"), (column.place, agent, *keys)
        if column.kind is Kind.FIXED:
            return to_text(self.sealer.seal_fixed(compress(content), place))
        return to_text(self.sealer.seal(compress(content), place, seq))

    def read_text(self, stored: str | None, column: Sealed, agent: str, *keys: str) -> str | None:
        """Decode what `text` encoded."""
        if stored is None or not stored.startswith(TEXT_PREFIX):
            return stored
        if not is_text_envelope(stored):
            return unescape_text(stored)
        opened = self._open(from_text(stored), column, agent, *keys)
        return expand(opened).decode(errors="surrogatepass")

    def show_text(self, stored: str | None, column: Sealed, agent: str, *keys: str) -> str | None:
        """Decode a text for people. If that fails, the result says why."""
        try:
            return self.read_text(stored, column, agent, *keys)
        except (KeyMissing, ValueError) as error:
            return f"({error})"

    def variants(self, value: str, column: Sealed, agent: str) -> list[str]:
        """All stored forms of a text that can be searched."""
        clear = escape_text(value)
        if self.sealer is None:
            return [clear]
        content = compress(value.encode(errors="surrogatepass"))
        sealed = self.sealer.fixed_variants(content, (column.place, agent))
        return [clear, *map(to_text, sealed.values())]

    def json(
        self, value: str | None, column: Sealed, agent: str, *keys: str, seq: int = 0
    ) -> str | None:
        """Encode JSON text as the text of a JSON string."""
        if value is None or value in EMPTY or not self.seals(agent):
            return value
        return json.dumps(self.text(value, column, agent, *keys, seq=seq))

    def read_json(self, stored: Any, column: Sealed, agent: str, *keys: str) -> Any:
        """Decode and parse what `json` encoded. On PostgreSQL, the driver may have parsed it."""
        if not isinstance(stored, str):
            return stored
        if not is_text_envelope(stored):
            parsed = from_json(stored)
            if not is_text_envelope(parsed):
                return parsed
            stored = parsed
        return from_json(self.read_text(stored, column, agent, *keys) or "null")

    def memory(
        self, value: dict[str, Any], clear: str, column: Sealed, agent: str, key: str, seq: int
    ) -> dict[str, Any]:
        """Seal a JSON object, except its key `clear`, which SQL reads."""
        if not self.seals(agent):
            return value
        kept = {name: each for name, each in value.items() if name == clear}
        rest = {name: each for name, each in value.items() if name != clear}
        return kept | {SEALED_KEY: self.text(json.dumps(rest), column, agent, key, seq=seq)}

    def read_memory(
        self, value: dict[str, Any], column: Sealed, agent: str, key: str
    ) -> dict[str, Any]:
        """Undo `memory`."""
        if SEALED_KEY not in value:
            return value
        kept = {name: each for name, each in value.items() if name != SEALED_KEY}
        opened: dict[str, Any] = self.read_json(value[SEALED_KEY], column, agent, key)
        return kept | opened

    def digest(self, value: str | None, purpose: str, agent: str) -> str | None:
        """A copy of a value for people: keyed, so that it cannot be guessed."""
        if value is None or self.sealer is None or not self.seals(agent):
            return value
        return self.sealer.digest(value, purpose, agent)

    def digests(self, value: str, purpose: str) -> list[str]:
        """All stored forms of such a copy, to search for it."""
        if self.sealer is None or value.startswith(DIGEST_PREFIX):
            return [value]
        return [value, *self.sealer.digests(value, purpose)]


CLEAR_CODEC = Codec()
"""Seals nothing."""
