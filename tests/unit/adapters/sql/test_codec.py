"""Encoding of log entries."""

from __future__ import annotations

import os

import pytest

from meshpoint.adapters.sql.codec import RAW, ZSTD, pack, pack_entries, unpack_entries

REPETITIVE = b"one text " * 1000
HARD = os.urandom(4000) + bytes(500)  # compression saves a ninth


async def test_entries_that_hardly_compress_are_stored_plain() -> None:
    packed = await pack_entries([b"", b"short", HARD, REPETITIVE])
    assert [entry[:1] for entry in packed] == [RAW, RAW, RAW, ZSTD]
    assert packed[2] == RAW + HARD
    assert await unpack_entries(packed) == (b"", b"short", HARD, REPETITIVE)


async def test_entries_that_hardly_compress_may_be_compressed() -> None:
    """Earlier entries of a task are."""
    packed = await pack(HARD)
    assert packed is not None
    assert packed[:1] == ZSTD
    assert await unpack_entries([packed]) == (HARD,)


async def test_an_entry_with_an_unknown_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown marker"):
        await unpack_entries([RAW, b"\x09sealed"])
