"""The stored form of a snapshot: a manifest with the digest of every key, and compressed chunks.

Chunks are compressed separately, so that local damage is reported by the keys it affects, and a
large memory does not need one value of its full size. Both are MessagePack, which preserves bytes
and scores exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import zstandard

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import (
    Content,
    Item,
    Kind,
    MemoryContents,
    PackedSnapshot,
    SnapshotInfo,
    snapshot_time,
)
from meshpoint.working_memory.digests import (
    FORMAT,
    ConsistencyVerifier,
    fingerprint,
    item_digests,
    memory_digest,
)

CHUNK = 1024 * 1024
"""Bytes of items per chunk, before compression. A single larger value makes a larger chunk."""

_MAX_VALUE_BYTES = 2**31 - 1
_MAX_CHUNK_BYTES = 512 * 1024 * 1024  # if the manifest has no sizes: the limit of a Redis value
_MAX_MANIFEST_BYTES = 256 * 1024 * 1024  # about three million keys
_MAX_WINDOW_BYTES = 8 * 1024 * 1024  # level 1 writes windows of at most half a megabyte
_UNPACK_OPTIONS: dict[str, Any] = {
    "strict_map_key": False,
    "max_str_len": _MAX_VALUE_BYTES,
    "max_bin_len": _MAX_VALUE_BYTES,
}


@dataclass(frozen=True, slots=True)
class VerifiedSnapshot:
    """A snapshot whose digests have been verified."""

    items: tuple[Item, ...]
    digests: Mapping[str, bytes]
    taken_at: int  # milliseconds since the epoch


def size_of(item: Item) -> int:
    """Return the approximate size of an item in bytes."""
    match item.content:
        case bytes() as value:
            return len(item.key) + len(value)
        case Mapping() as pairs:
            values = (len(value) if isinstance(value, bytes) else 8 for value in pairs.values())
            return len(item.key) + sum(map(len, pairs)) + sum(values)
        case members:
            return len(item.key) + sum(map(len, members))


def pack(contents: MemoryContents, order: int) -> PackedSnapshot:
    """Pack the contents of a memory for storage."""
    digests = item_digests(contents.items)
    chunks = list(_split_chunks(contents.items))
    digest = fingerprint(contents.items, digests)
    manifest = {
        "format": FORMAT,
        "digest": digest,
        "order": order,
        "taken_at": contents.now,
        "chunks": [[[item.key, digests[item.key]] for item in chunk] for chunk in chunks],
    }
    encoded = [_encode(chunk) for chunk in chunks]
    manifest["sizes"] = [len(each) for each in encoded]
    return PackedSnapshot(
        digest,
        order,
        _compress(_encode(manifest)),
        tuple(map(_compress, encoded)),
        taken_at=contents.now,
        key_count=len(contents.items),
    )


def unpack(packed: PackedSnapshot, label: str) -> VerifiedSnapshot:
    """Decode and verify a snapshot.

    Raises:
        ConsistencyError: It is damaged. The message has `label` and the affected keys, if known.
    """
    manifest, digests = _verify_manifest(packed, label)
    items = tuple(_read_items(packed.chunks, manifest.get("sizes")))
    ConsistencyVerifier(digests).verify(items, label)
    if fingerprint(items, digests) != packed.digest:
        raise ConsistencyError(f"{label}: the expiry times of its keys are damaged")
    return VerifiedSnapshot(items, digests, manifest["taken_at"])


def describe(packed: PackedSnapshot, label: str) -> SnapshotInfo:
    """Describe a snapshot by its verified manifest, without reading its content.

    Raises:
        ConsistencyError: Its manifest is damaged.
    """
    manifest, digests = _verify_manifest(packed, label)
    taken_at = snapshot_time(manifest["taken_at"])
    return SnapshotInfo(packed.order, packed.digest, taken_at, len(digests))


def _verify_manifest(
    packed: PackedSnapshot, label: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and its digests, by key, after comparing it with `packed`."""
    manifest = _read_manifest(packed, label)
    digests = {key: digest for chunk in manifest["chunks"] for key, digest in chunk}
    declared = (manifest["digest"], manifest["order"])
    if (
        declared != (packed.digest, packed.order)
        or memory_digest(digests) != packed.digest.partition("@")[0]
    ):
        raise ConsistencyError(f"{label}: its manifest is damaged")
    shown = (packed.taken_at, packed.key_count)
    for name, value, true in zip(
        ("timestamp", "key_count"), shown, (manifest["taken_at"], len(digests)), strict=True
    ):
        if value not in (None, true):
            raise ConsistencyError(f"{label}: its {name} is not the one in its manifest")
    return manifest, digests


def to_bytes(packed: PackedSnapshot) -> bytes:
    """Serialize a snapshot as a single value."""
    return cast(
        bytes, msgpack.packb([packed.order, packed.digest, packed.manifest, list(packed.chunks)])
    )


def from_bytes(content: bytes, label: str) -> PackedSnapshot:
    """Parse the bytes that `to_bytes` returned. The chunks are not verified yet.

    Raises:
        ConsistencyError: It is not a snapshot.
    """
    try:
        order, digest, manifest, chunks = msgpack.unpackb(content, **_UNPACK_OPTIONS)
        packed = PackedSnapshot(digest, order, manifest, tuple(chunks))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ConsistencyError(f"{label} cannot be decoded: {_first_line(error)}") from error
    return packed


def _read_manifest(packed: PackedSnapshot, label: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = msgpack.unpackb(
            _decompress(packed.manifest, _MAX_MANIFEST_BYTES), **_UNPACK_OPTIONS
        )
        written = manifest["format"]
        if written == FORMAT:
            return manifest
    except (
        ValueError,
        TypeError,
        KeyError,
        zstandard.ZstdError,
        msgpack.UnpackException,
    ) as error:
        raise ConsistencyError(f"{label} cannot be decoded: {_first_line(error)}") from error
    raise ConsistencyError(f"{label} has format {written}, but this release reads {FORMAT}")


def _split_chunks(items: Sequence[Item]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _read_items(chunks: Sequence[bytes], sizes: Sequence[int] | None) -> Iterator[Item]:
    """Decode the items of all chunks.

    They are decompressed to little more than the manifest's `sizes`, in bytes. Damaged chunks
    yield no items; the manifest shows which are missing. The previous release wrote no sizes.
    """
    largest = _MAX_CHUNK_BYTES if sizes is None else max(sizes, default=0)
    budget = _MAX_VALUE_BYTES if sizes is None else sum(sizes) + largest
    for chunk in chunks:
        try:
            size, found = _read_chunk(chunk, min(largest, budget))
        except (ValueError, TypeError, zstandard.ZstdError, msgpack.UnpackException):
            continue
        budget -= size
        yield from found


def _read_chunk(chunk: bytes, max_bytes: int) -> tuple[int, list[Item]]:
    plain = _decompress(chunk, max_bytes)
    rows = msgpack.unpackb(plain, **_UNPACK_OPTIONS)
    return len(plain), [
        Item(key, Kind(kind), _decode_content(Kind(kind), rest), until)
        for key, kind, rest, until in rows
    ]


def _encode(value: object) -> bytes:
    plain = [_encode_item(item) for item in value] if isinstance(value, list) else value
    return cast(bytes, msgpack.packb(plain))


def _compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plain)


def _decompress(stored: bytes, max_bytes: int) -> bytes:
    """Decompress `stored` to at most `max_bytes` bytes.

    A few kilobytes of zstd can expand to gigabytes.
    """
    size = zstandard.frame_content_size(stored)
    if not 0 <= size <= max_bytes:
        raise ValueError(f"its frame has {size} bytes; the limit is {max_bytes}")
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(
        stored, allow_extra_data=False
    )


def _encode_item(item: Item) -> list[Any]:
    content: Any = item.content
    match item.kind:
        case Kind.HASH | Kind.ZSET:
            content = [part for pair in content.items() for part in pair]
        case Kind.LIST | Kind.SET:
            content = list(content)
        case Kind.STRING:
            pass
    return [item.key, item.kind.value, content, item.expires_at]


def _decode_content(kind: Kind, raw: Any) -> Content:
    match kind:
        case Kind.STRING:
            return cast(bytes, raw)
        case Kind.LIST:
            return tuple(raw)
        case Kind.SET:
            return frozenset(raw)
        case Kind.HASH | Kind.ZSET:
            flat = iter(raw)
            return dict(zip(flat, flat, strict=True))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
