"""Encoding of bytes in a column: one marker byte, then the bytes, plain or compressed.

The marker leaves room for other formats, so that a later release can encrypt values and still read
those written in the clear.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import zstandard

from meshpoint.model.log_entries import LogEntries
from meshpoint.own_threads import run_in_own_thread

Packed: TypeAlias = bytes | None
"""An encoded value: a marker and bytes, or `None` for NULL."""
RAW = b"\x00"
ZSTD = b"\x01"

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
        ValueError: This release does not know the marker.
    """
    if stored is None:
        return None
    marker, rest = stored[:1], stored[1:]
    if marker == RAW:
        return rest
    if marker != ZSTD:
        raise ValueError(f"a stored value begins with unknown marker {marker!r}")
    if len(rest) < _MIN_THREAD_BYTES:
        return _decompress(rest)
    return await run_in_own_thread(_decompress, rest)


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
