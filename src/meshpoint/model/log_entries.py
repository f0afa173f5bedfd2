"""The entries of a task's log, read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import overload


class LogEntries(Sequence[bytes]):
    """Stored log entries without their first bytes, which say how an entry is stored or used.

    An entry is copied only when it is read, because all together may take megabytes.

    Attributes:
        stored: The whole entries.
        skipped: Number of bytes left out of each.
    """

    __slots__ = ("skipped", "stored")

    def __init__(self, stored: Sequence[bytes] = (), skipped: int = 0) -> None:
        self.stored, self.skipped = stored, skipped

    @classmethod
    def of(cls, entries: Sequence[bytes]) -> LogEntries:
        """Return `entries` themselves, without a copy."""
        return entries if isinstance(entries, LogEntries) else cls(entries)

    @property
    def size(self) -> int:
        """Total length in bytes."""
        return sum(map(len, self.stored)) - self.skipped * len(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> LogEntries: ...
    def __getitem__(self, index: int | slice) -> bytes | LogEntries:
        if isinstance(index, slice):
            return LogEntries(self.stored[index], self.skipped)
        return self.stored[index][self.skipped :]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(eq, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to sequences of other types

    def __repr__(self) -> str:
        return f"LogEntries({list(self)!r})"
