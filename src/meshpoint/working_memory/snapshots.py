"""Snapshots of L1: taken and stored with each checkpoint, which refers to them.

`MemoryServices` has all that the memories of one replica share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from meshpoint.errors import (
    ConsistencyError,
    MemoryFenced,
    MemoryLost,
    MemoryRefused,
    MemoryUnavailable,
)
from meshpoint.model.memory import Item, MemoryContents, MemoryRecovery, Owner, PackedSnapshot
from meshpoint.model.subtasks import AgentCheckpoint, MemoryWrite
from meshpoint.own_threads import run_in_own_thread
from meshpoint.ports.working_memory import ReportProblem, SnapshotStore, WorkingMemory
from meshpoint.working_memory.packing import pack, size_of, to_bytes
from meshpoint.working_memory.recovery import UNREADABLE_PREFIX, DualRecoveryStrategy
from meshpoint.working_memory.write_log import encode_writes

_MIN_THREAD_BYTES = 256 * 1024
_MAX_NAMED_KEYS = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory at one point in time. `version` is the version of L1 then."""

    packed: PackedSnapshot
    version: int


@dataclass(frozen=True, slots=True)
class MemoryRef:
    """The memory in a checkpoint: its digest (`None`: no memory) and its snapshot.

    `sql_digest` is the digest of the snapshot in the database. `packed` is set if the memory
    differs from the last checkpoint, `content` if this checkpoint writes it to the database.
    `version` is the version of L1 at the snapshot, `None` without a snapshot. `writes` are the
    writes that are not in the task's log, or all writes if they replace those in the log.
    """

    digest: str | None = None
    sql_digest: str | None = None
    order: int | None = None
    version: int | None = None
    packed: PackedSnapshot | None = None
    content: bytes | None = None
    writes: tuple[MemoryWrite, ...] = ()
    writes_replace_log: bool = False
    finished_in_log: frozenset[str] = frozenset()

    @classmethod
    def from_checkpoint(cls, checkpoint: AgentCheckpoint | None) -> MemoryRef:
        """Create the reference from the task's last checkpoint."""
        if checkpoint is None:
            return cls()
        last = checkpoint.l1_snapshot_hash, checkpoint.l1_in_sql, checkpoint.seq
        return cls(
            *last,
            writes=checkpoint.memory_writes,
            writes_replace_log=checkpoint.memory_writes_replace_log,
        )

    def split_log(self) -> tuple[MemoryRef, bytes | None]:
        """The memory without its writes, and what a pause adds to the task's log instead."""
        if not (self.writes or self.finished_in_log or self.writes_replace_log):
            return self, None
        encoded = encode_writes(self.writes, self.finished_in_log)
        kept = replace(self, writes=(), writes_replace_log=False, finished_in_log=frozenset())
        return kept, encoded

    def apply_to(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """Return `checkpoint` with this memory."""
        return checkpoint.model_copy(
            update={
                "l1_snapshot_hash": self.digest,
                "l1_snapshot": self.content,
                "l1_in_sql": self.sql_digest,
                "memory_writes": self.writes,
                "memory_writes_replace_log": self.writes_replace_log,
            }
        )

    def with_snapshot(self, snapshot: Snapshot, *, to_sql: bool, to_store: bool) -> MemoryRef:
        """Return the next checkpoint's memory, which is `snapshot`.

        Args:
            snapshot: The memory for the checkpoint.
            to_sql: Write it to the database if it is not already there.
            to_store: Write it to the snapshot store even if it equals the last checkpoint's.
        """
        packed = snapshot.packed
        to_sql = to_sql and packed.digest != self.sql_digest
        return replace(
            self,
            digest=packed.digest,
            sql_digest=packed.digest if to_sql else self.sql_digest,
            order=packed.order,
            version=snapshot.version,
            packed=packed if to_store or packed.digest != self.digest else None,
            content=to_bytes(packed) if to_sql else None,
        )

    def unreadable(self, order: int, version: int) -> MemoryRef:
        """Return the next checkpoint's memory if L1 cannot be read.

        It is then recognized by the `version` of L1; 0 matches none.
        """
        digest = f"{UNREADABLE_PREFIX}{version}"
        return replace(self, digest=digest, order=order, version=None, packed=None, content=None)


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


class L1TTLManager:
    """Extends the TTL of a paused task's memory: two weeks by default, instead of one day.

    An expired memory is restored from its snapshot, so a failure is only reported.
    """

    def __init__(self, l1: WorkingMemory, report_problem: ReportProblem) -> None:
        self._l1, self._report_problem = l1, report_problem

    async def extend_ttl_on_pause(self, owner: Owner) -> None:
        """Extend the TTL of a paused task's memory.

        The next segment sets the normal TTL again when it adopts the memory.
        """
        try:
            await self._l1.retain(owner, paused=True)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._report_problem(owner.agent_id, "not_retained", str(error))


class MemoryServices:
    """What the memories of all tasks of one replica share.

    `keep_completed` keeps the memory of completed tasks until it expires. `on_recovered` is called
    for each recovery.
    """

    def __init__(
        self,
        l1: WorkingMemory,
        snapshots: SnapshotStore | None,
        *,
        max_bytes: int,
        keep_completed: bool,
        report_problem: ReportProblem,
        on_recovered: Callable[[str, MemoryRecovery], None],
    ) -> None:
        self.l1, self.snapshots, self.keep_completed = l1, snapshots, keep_completed
        self.report_problem, self.on_recovered = report_problem, on_recovered
        self.recovery = DualRecoveryStrategy(l1, snapshots, report_problem)
        self.snapshotter = L1CacheSnapshotter(l1, snapshots, max_bytes, report_problem)
        self.ttl = L1TTLManager(l1, report_problem)


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
