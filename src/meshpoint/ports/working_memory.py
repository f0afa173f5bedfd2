"""L1, where working memories live, and the second place where their snapshots lie. Either may lose anything.

Any method may raise `MemoryUnavailable`: for one that writes, it is not known then whether it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from meshpoint.model.memory import Answer, Command, Held, Item, Owner, Packed

ReportProblem: TypeAlias = Callable[[str, str, str], None]
"""Hears of what went wrong with a memory and loses nothing: its agent_id, a word for scripts, and why. Must not raise
or block."""


class WorkingMemory(Protocol):
    """L1: the memories of all tasks of one agent, each under its `agent_id`."""

    @property
    def survives(self) -> bool:
        """Whether a memory outlives its process. If not, every checkpoint in SQL carries the snapshot."""

    async def open(self) -> None:
        """Check that the memory answers and can be written.

        Raises:
            ConfigurationError: it refuses the login, or the login lacks a right.
            MemoryUnavailable: it does not answer or cannot be written; the message names the setting to check.
        """

    async def execute(self, owner: Owner, commands: Sequence[Command], *, seen: int = 0) -> tuple[int, list[Answer]]:
        """Do commands together, in order, with nothing of anybody else between them; the version then, and answers.

        A key that is written without a time of its own lives as long as the memory, whose time begins anew.

        `seen` is the version that the caller has met last. Commands that write are done only if it is still the one,
        so that one that comes late undoes nothing; 0: whatever it is. Without commands, the answer is the version.

        Raises:
            MemoryFenced: the memory has another owner by now, or one with a higher fence.
            MemoryLost: it has no owner, or an earlier one; its version is below `seen`, which the caller has met
                before; or a key that a command names was evicted.
            MemoryRefused: a command does not fit what its key holds; names the key. Those before it are done.
            MemoryUnavailable: it has a higher version than `seen`, and commands write: nothing is done.
        """

    async def keys(self, owner: Owner, *, seen: int = 0) -> list[str]:
        """The keys that are there, in no order. Raises as `execute`."""

    async def read(self, agent_id: str) -> Held:
        """All that is there at one instant, whoever writes meanwhile. Changes nothing."""

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of what is there, if it still has this version; its time begins anew, as active.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """

    async def replace(
        self, owner: Owner, items: Sequence[Item], *, seen: int | None = None, force: bool = False
    ) -> Held:
        """Put `items` in place of all that is there, become the owner, and read them back.

        They are put beside what is there and take its place at one instant, so that a crash leaves the one or the
        other. What has expired by its own time meanwhile is left out. If the memory is this very run's already, it
        must have the version `seen`, which is never 0: so one that comes late undoes nothing; None: whatever it is.
        `force` is for a run that knows that it owns the task, whatever the memory says.

        Raises:
            MemoryFenced: its owner has a higher fence, and `force` is not set.
            MemoryUnavailable: it has another version than `seen`.
        """

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Let the memory live as long as that of a paused, or of an active, task from now on.

        Nothing happens if another run with the same or a higher fence has it.
        """

    async def forget(self, owner: Owner) -> None:
        """Delete it, unless another run with the same or a higher fence has it."""

    async def close(self) -> None:
        """Release every connection."""


class SnapshotStore(Protocol):
    """The last snapshot of each memory, apart from L1."""

    async def put(self, agent_id: str, packed: Packed) -> bool:
        """Replace the stored snapshot atomically. Returns `False` if that has a higher `order`.

        Raises:
            ConsistencyError: it is too large to be read back.
        """

    async def get(self, agent_id: str) -> Packed | None:
        """The one that is there; None: none. What it holds may be damaged: whoever reads it verifies it.

        Raises:
            ConsistencyError: there is something, but nothing that could be a snapshot.
        """

    async def digest(self, agent_id: str) -> str | None:
        """That of the one that is there, as it says itself; None: none."""

    async def forget(self, agent_id: str) -> None:
        """Delete it."""

    async def close(self) -> None:
        """Release every connection."""
