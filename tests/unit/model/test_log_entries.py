"""Log entries that are read one at a time."""

from __future__ import annotations

from meshpoint.model.log_entries import LogEntries

ENTRIES = LogEntries([b"--a", b"--", b"--bc"], 2)


def test_entries_are_read_without_their_first_bytes() -> None:
    assert list(ENTRIES) == [b"a", b"", b"bc"]
    assert ENTRIES[-1] == b"bc"
    assert (len(ENTRIES), ENTRIES.size) == (3, 3)
    assert repr(ENTRIES) == "LogEntries([b'a', b'', b'bc'])"


def test_a_slice_leaves_out_the_same_bytes() -> None:
    assert ENTRIES[1:] == [b"", b"bc"]
    assert ENTRIES[1:].size == 2


def test_entries_equal_any_sequence_of_the_same_bytes() -> None:
    assert ENTRIES == (b"a", b"", b"bc")
    assert LogEntries([b"a"]) == LogEntries([b"-a"], 1)
    assert ENTRIES != (b"a", b"")
    assert ENTRIES != (b"a", b"", b"bd")
    assert ENTRIES != 3


def test_entries_are_made_of_entries_without_a_copy() -> None:
    assert LogEntries.of(ENTRIES) is ENTRIES
    stored = (b"a",)
    assert LogEntries.of(stored).stored is stored
