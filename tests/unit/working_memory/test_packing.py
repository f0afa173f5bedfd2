"""A stored snapshot: any damage is detected, and the affected keys are named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest
import zstandard

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import Item, Kind, PackedSnapshot
from meshpoint.working_memory import packing
from meshpoint.working_memory.packing import from_bytes, pack, size_of, to_bytes, unpack

from .items import ITEMS, memory_contents


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> PackedSnapshot:
    """A snapshot with chunks of one or two items."""
    monkeypatch.setattr(packing, "CHUNK", 8)
    return pack(memory_contents(*ITEMS), 7)


def keys_per_chunk(packed: PackedSnapshot) -> list[list[str]]:
    all_keys = {item.key for item in ITEMS}
    found = []
    for index in range(len(packed.chunks)):
        without = replace(packed, chunks=packed.chunks[:index] + packed.chunks[index + 1 :])
        with pytest.raises(ConsistencyError) as raised:
            unpack(without, "it")
        found.append(list(raised.value.missing))
        assert set(raised.value.missing) <= all_keys
    return found


def test_a_packed_memory_is_unpacked_unchanged(packed: PackedSnapshot) -> None:
    out = unpack(from_bytes(to_bytes(packed), "it"), "it")
    assert out.items == ITEMS
    assert out.taken_at == 1_000
    assert from_bytes(to_bytes(packed), "it") == packed
    assert len(packed.chunks) > 2


def test_an_empty_memory_can_be_packed() -> None:
    assert unpack(pack(memory_contents(), 1), "it").items == ()


def test_a_snapshot_is_described_without_its_content(packed: PackedSnapshot) -> None:
    described = packing.describe(replace(packed, chunks=()), "snapshot")
    assert (described.checkpoint, described.digest) == (packed.order, packed.digest)
    assert described.key_count == len(ITEMS)
    assert described.taken_at.timestamp() * 1000 == packed.taken_at


@pytest.mark.parametrize("changed", [{"taken_at": 1}, {"key_count": 1}], ids=str)
def test_metadata_must_match_the_manifest(packed: PackedSnapshot, changed: dict[str, int]) -> None:
    forged = replace(packed, **changed)  # type: ignore[arg-type]
    for read in (packing.describe, unpack):
        with pytest.raises(ConsistencyError, match="is not the one in its manifest"):
            read(forged, "snapshot")


def test_a_missing_chunk_names_its_keys(packed: PackedSnapshot) -> None:
    assert sorted(key for keys in keys_per_chunk(packed) for key in keys) == sorted(
        item.key for item in ITEMS
    )


def test_an_extra_chunk_names_its_keys(packed: PackedSnapshot) -> None:
    with pytest.raises(ConsistencyError) as raised:
        unpack(replace(packed, chunks=(*packed.chunks, packed.chunks[0])), "it")
    assert raised.value.extra == tuple(sorted(keys_per_chunk(packed)[0]))
    other = pack(memory_contents(Item("other", Kind.STRING, b"x")), 7)
    with pytest.raises(ConsistencyError, match="extra: 'other'"):
        unpack(replace(packed, chunks=(*packed.chunks, *other.chunks)), "it")


def test_a_chunk_of_another_snapshot_names_its_keys(packed: PackedSnapshot) -> None:
    other = pack(memory_contents(replace(ITEMS[0], content=b"another"), *ITEMS[1:]), 7)
    with pytest.raises(ConsistencyError) as raised:
        unpack(replace(packed, chunks=(other.chunks[0], *packed.chunks[1:])), "it")
    assert raised.value.changed == ("text",)


@pytest.mark.parametrize("field", ["digest", "order", "manifest"])
def test_altered_metadata_is_detected(packed: PackedSnapshot, field: str) -> None:
    other = pack(memory_contents(*ITEMS[1:]), 8)
    with pytest.raises(ConsistencyError):
        unpack(replace(packed, **{field: getattr(other, field)}), "it")


def damaged_copies(whole: bytes) -> Iterator[bytes]:
    """`whole` with every bit flipped, every byte replaced, and every truncation."""
    for index in range(len(whole)):
        for byte in {whole[index] ^ 1 << bit for bit in range(8)} | {0, 255, whole[index] ^ 255}:
            if byte != whole[index]:
                yield whole[:index] + bytes([byte]) + whole[index + 1 :]
        yield whole[:index]
    yield whole + b"\x00"


def test_every_flipped_byte_and_every_truncation_is_detected(packed: PackedSnapshot) -> None:
    """Undetected damage must be harmless, such as an unused bit of a frame header."""
    found = harmless = 0
    for bytes_ in damaged_copies(to_bytes(packed)):
        try:
            out, order = unpack(from_bytes(bytes_, "it"), "it"), from_bytes(bytes_, "it").order
        except ConsistencyError:
            found += 1
        else:
            harmless += 1
            assert (out.items, out.taken_at, order) == (ITEMS, 1_000, 7)
    assert found > 100 * harmless


def summarize(packed: PackedSnapshot) -> list[str]:
    """Keys reported as missing or changed; none if the snapshot is intact."""
    try:
        out = unpack(packed, "it")
    except ConsistencyError as error:
        return sorted({*error.missing, *error.changed})
    return [item.key for item in out.items if item not in ITEMS]


def test_damage_in_a_chunk_names_its_keys(packed: PackedSnapshot) -> None:
    keys = keys_per_chunk(packed)
    for index, chunk in enumerate(packed.chunks):
        for bytes_ in damaged_copies(chunk):
            chunks = (*packed.chunks[:index], bytes_, *packed.chunks[index + 1 :])
            assert summarize(replace(packed, chunks=chunks)) in ([], sorted(keys[index]))


def unpack_peak(packed: PackedSnapshot) -> int:
    """Peak memory in bytes while unpacking `packed`."""
    tracemalloc.start()
    try:
        with pytest.raises(ConsistencyError):
            unpack(packed, "it")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [True, False])
def test_a_chunk_that_expands_beyond_its_size_is_damaged(
    packed: PackedSnapshot, declared: bool
) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=declared)
    bomb = compressor.compress(msgpack.packb([["text", "string", bytes(200_000_000), None]]))
    assert len(bomb) < 50_000
    assert unpack_peak(replace(packed, chunks=(bomb, *packed.chunks[1:]))) < 10_000_000


def test_many_expanding_chunks_are_damaged(packed: PackedSnapshot) -> None:
    sizes = [len(zstandard.decompress(chunk)) for chunk in packed.chunks]
    filling = zstandard.compress(msgpack.packb([["x", "string", bytes(max(sizes) - 30), None]]))
    assert unpack_peak(replace(packed, chunks=(*packed.chunks, *[filling] * 100_000))) < 20_000_000


@pytest.mark.parametrize("content", [b"", b"\xc1", b"junk", b"\x90", b"\x94\x01\x02\x03\x04"])
def test_garbage_is_not_a_snapshot(content: bytes) -> None:
    with pytest.raises(ConsistencyError, match="the copy"):
        unpack(from_bytes(content, "the copy"), "the copy")


def test_an_unknown_format_is_named(
    packed: PackedSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FORMAT", 2)
    with pytest.raises(ConsistencyError, match="has format 1, but this release reads 2"):
        unpack(packed, "it")


def test_the_size_of_an_item_is_computed() -> None:
    assert [size_of(item) for item in ITEMS] == [9, 7, 8, 5, 22]
