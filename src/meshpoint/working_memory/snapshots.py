"""Read L1 and store snapshots of it with each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from meshpoint.errors import (
    ConsistencyError,
    MemoryFenced,
    MemoryLost,
    MemoryRefused,
    MemoryUnavailable,
)
from meshpoint.model.memory import Item, MemoryContents, Owner, PackedSnapshot
from meshpoint.own_threads import run_in_own_thread
from meshpoint.ports.working_memory import ReportProblem, SnapshotStore, WorkingMemory
from meshpoint.working_memory.packing import pack, size_of

_MIN_THREAD_BYTES = 256 * 1024
_MAX_NAMED_KEYS = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory at one point in time. `version` is the version of L1 then."""

    packed: PackedSnapshot
    version: int


class L1CacheSnapshotter:
    """Takes snapshots of L1 and stores them in the snapshot store.

    A memory of more than `max_bytes` is refused, since every checkpoint would contain it.
    """

    def __init__(
        self,
        l1: WorkingMemory,
        snapshots: SnapshotStore | None,
        max_bytes: int,
        report_problem: ReportProblem,
    ) -> None:
        self._l1, self._snapshots = l1, snapshots
        self._max_bytes, self._report_problem = max_bytes, report_problem

    async def snapshot_on_checkpoint(self, owner: Owner, order: int, *, seen: int = 0) -> Snapshot:
        """Return a consistent snapshot of the memory of `owner`.

        Args:
            owner: The run that owns the memory.
            order: Number of the checkpoint.
            seen: The highest version that this run has observed. A lower one means that writes
                were lost.

        Raises:
            MemoryUnavailable: L1 did not answer.
            MemoryLost: Contents are missing.
            MemoryFenced: Another run owns the memory.
            MemoryRefused: The memory is too large. The message has the largest keys.
        """
        contents = await self._l1.read(owner.agent_id)
        _check_complete(contents, owner, seen)
        if contents.oversized_keys:
            raise MemoryRefused(
                "the working memory is too large to read "
                f"(memory_max_bytes is {self._max_bytes:,}); "
                f"oversized keys: {_format_keys(contents.oversized_keys)}"
            )
        size = self._check_size(contents)
        packed = (
            pack(contents, order)
            if size < _MIN_THREAD_BYTES
            else await run_in_own_thread(pack, contents, order)
        )
        return Snapshot(packed, contents.version)

    def _check_size(self, contents: MemoryContents) -> int:
        size = sum(map(size_of, contents.items))
        if size > self._max_bytes:
            largest = islice(sorted(contents.items, key=size_of, reverse=True), _MAX_NAMED_KEYS)
            named = ", ".join(f"{_format_key(item)}: {size_of(item):,}" for item in largest)
            raise MemoryRefused(
                f"the working memory has {size:,} bytes, "
                f"and memory_max_bytes is {self._max_bytes:,}; its largest keys are {named}"
            )
        return size

    async def has_snapshot(self, agent_id: str, digest: str) -> bool:
        """Whether the snapshot store is known to have this snapshot."""
        try:
            return self._snapshots is None or await self._snapshots.digest(agent_id) == digest
        except (MemoryUnavailable, ConsistencyError):
            return False

    async def store_snapshot(self, agent_id: str, packed: PackedSnapshot) -> bool:
        """Store the snapshot of a durable checkpoint; `False` if that is not possible now."""
        try:
            if self._snapshots is not None and not await self._snapshots.put(agent_id, packed):
                self._report_problem(
                    agent_id,
                    "not_kept",
                    "a later one exists, for a checkpoint that the database has lost",
                )
                return False
        except (MemoryUnavailable, ConsistencyError) as error:
            self._report_problem(agent_id, "not_kept", str(error))
            return False
        return True


def _check_complete(contents: MemoryContents, owner: Owner, seen: int) -> None:
    """Raise `MemoryLost` or `MemoryFenced` unless it has all that `owner` wrote."""
    if contents.run_id is None or (
        contents.run_id != owner.run_id and contents.fence < owner.fence
    ):
        raise MemoryLost(f"memory {owner.agent_id}: all of it was lost")
    if contents.run_id == owner.run_id and contents.version < seen:
        raise MemoryLost(f"memory {owner.agent_id}: its latest writes were lost")
    if contents.run_id != owner.run_id:
        raise MemoryFenced(f"memory {owner.agent_id}: another run owns it")
    if contents.lost_keys:
        raise MemoryLost(
            f"memory {owner.agent_id}: {_format_keys(contents.lost_keys)} were evicted"
        )


def _format_keys(keys: tuple[str, ...]) -> str:
    return ", ".join(map(repr, keys[:_MAX_NAMED_KEYS])) + (
        f" and {len(keys) - _MAX_NAMED_KEYS} more" if len(keys) > _MAX_NAMED_KEYS else ""
    )


def _format_key(item: Item) -> str:
    return repr(item.key if len(item.key) <= 60 else f"{item.key[:60]}…")
