"""States of the working memory of one segment.

                       ┌─────── answered ───────┐
                       ▼                        │
    Untouched ─────► Open ─────── writing ──► InDoubt
        │  recovered   ▲                        ▲
     writing           │ answered               │
        ▼              │                        │
    Clearing ──────────┴────── recovered ───────┘

`Untouched` accepts one kind of write, `clear`, which does not need the old memory. A write that
fails leaves the memory in `Clearing` or `InDoubt`: L1 may have done it, or may still do it. An
answer with the version of L1 ends the doubt: to the write, to a query or to the next snapshot.

There are no states for a lost or closed memory. Each use of a lost memory raises the error again,
which ends the segment, and the next segment starts with `Untouched`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from meshpoint.model.memory import MemoryRecovery, MemorySource
from meshpoint.working_memory.recovery import RecoveredMemory

_CLEARED = MemoryRecovery(MemorySource.NONE, verified=False, behind=True)


@dataclass(frozen=True, slots=True)
class Untouched:
    """The segment has not used its memory, and does not know what L1 has."""

    def writing(self) -> Clearing:
        """`clear` is sent without recovering the memory, which may be damaged."""
        return Clearing()

    def recovered(self, found: RecoveredMemory) -> Open:
        """The memory of the last checkpoint is in L1."""
        return Open(found.recovery, found.version)


@dataclass(frozen=True, slots=True)
class Clearing:
    """`clear` was sent before the memory was recovered, and has no answer."""

    def writing(self) -> Clearing:
        """`clear` is sent again."""
        return self

    def answered(self, version: int) -> Open:
        """L1 is empty."""
        return Open(_CLEARED, version)

    def recovered(self, found: RecoveredMemory) -> InDoubt:
        """The memory of the last checkpoint is in L1, but the clear may still reach it."""
        return InDoubt(found.recovery, found.version)


@dataclass(frozen=True, slots=True)
class Open:
    """The memory is recovered. L1 has `version`."""

    recovery: MemoryRecovery
    version: int

    def writing(self) -> InDoubt:
        """A write is sent."""
        return InDoubt(self.recovery, self.version)

    def answered(self, version: int) -> Open:
        """L1 has `version`."""
        return Open(self.recovery, version)


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The memory is recovered. A write after `version` has no answer."""

    recovery: MemoryRecovery
    version: int

    def writing(self) -> InDoubt:
        """Another write is sent."""
        return self

    def answered(self, version: int) -> Open:
        """L1 has `version`, with or without the write."""
        return Open(self.recovery, version)


Unrecovered: TypeAlias = Untouched | Clearing
Recovered: TypeAlias = Open | InDoubt
State: TypeAlias = Unrecovered | Recovered
