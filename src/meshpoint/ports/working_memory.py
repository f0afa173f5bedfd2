"""Working memories (L1), and the store of their snapshots. Either may lose anything.

Every method may raise `MemoryUnavailable`. A write that raises it may or may not have happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from meshpoint.model.memory import Answer, Command, Item, MemoryContents, Owner, PackedSnapshot

ReportProblem: TypeAlias = Callable[[str, str, str], None]
"""Called for problems that lose nothing, with an agent_id, a code for scripts, and the reason.

Must neither raise nor block.
"""


class WorkingMemory(Protocol):
    """L1: the working memories of all tasks of one agent, each under its `agent_id`."""

    @property
    def durable(self) -> bool:
        """Whether memories outlive their process.

        If not, every checkpoint in SQL carries a snapshot.
        """

    async def open(self) -> None:
        """Check that the memory can be read and written.

        Raises:
            ConfigurationError: the login was rejected or lacks a permission.
            MemoryUnavailable: there was no answer, or writing failed; the message names the
                setting to check.
        """

    async def execute(
        self, owner: Owner, commands: Sequence[Command], *, expected_version: int = 0
    ) -> tuple[int, list[Answer]]:
        """Execute commands atomically and in order; return the new version and the answers.

        A write restarts the memory's time to live. A key without its own TTL lives as long as the
        memory.

        Args:
            owner: the run that must own the memory.
            commands: commands to execute. Empty to read the version only.
            seen: the last version that the caller knows. Writes happen only if it is still
                current, so that a delayed command cannot undo newer ones. 0 matches any version.

        Raises:
            MemoryFenced: another run owns the memory, or its owner has a higher fence.
            MemoryLost: the memory has no owner or an earlier one, its version is below
                `expected_version`, or a key named by a command was evicted.
            MemoryRefused: a command does not fit the kind of its key; the message names the key.
                Earlier commands have taken effect.
            MemoryUnavailable: commands write and the version is higher than `expected_version`;
                nothing was done.
        """

    async def keys(self, owner: Owner, *, expected_version: int = 0) -> list[str]:
        """The existing keys, in no particular order. Raises the same errors as `execute`."""

    async def read(self, agent_id: str) -> MemoryContents:
        """A consistent copy of the whole memory, even under concurrent writes. Changes nothing."""

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of the existing memory if it still has this version.

        On success the memory's time to live restarts as for an active task. Returns `False` if the
        version differs or the memory does not exist.

        Raises:
            MemoryFenced: the current owner has a higher fence.
        """

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        """Replace the whole memory with `items`, become its owner, and return its contents.

        The items are staged separately and swapped in atomically, so that a crash leaves either
        the old or the new contents. Items that have expired in the meantime are dropped.

        Args:
            owner: the new owner.
            items: the new contents.
            seen: if `owner` already owns the memory, the version that it must have, so that a
                delayed call cannot undo newer writes. Never 0; `None` matches any version.
            force: replace even if the owner has a higher fence, for a run that knows it owns the
                task.

        Raises:
            MemoryFenced: the current owner has a higher fence and `force` is not set.
            MemoryUnavailable: the version is not `expected_version`.
        """

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Restart the time to live as for a paused or an active task.

        Does nothing if another run with the same or a higher fence owns the memory.
        """

    async def forget(self, owner: Owner) -> None:
        """Delete the memory, unless another run with the same or a higher fence owns it."""

    async def close(self) -> None:
        """Release all connections."""


class SnapshotStore(Protocol):
    """The latest snapshot of each memory, kept outside L1."""

    async def put(self, agent_id: str, packed: PackedSnapshot) -> bool:
        """Replace the stored snapshot atomically, unless it has a higher `order`.

        Returns `False` if it has.

        Raises:
            ConsistencyError: the snapshot is too large to be read back.
        """

    async def get(self, agent_id: str) -> PackedSnapshot | None:
        """The stored snapshot, or `None`. Its content may be damaged: the caller must verify it.

        Raises:
            ConsistencyError: the stored value cannot be a snapshot.
        """

    async def digest(self, agent_id: str) -> str | None:
        """The digest that the stored snapshot claims to have. `None` without a snapshot."""

    async def forget(self, agent_id: str) -> None:
        """Delete the stored snapshot."""

    async def close(self) -> None:
        """Release all connections."""
