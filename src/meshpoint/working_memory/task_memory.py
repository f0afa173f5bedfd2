"""The working memory of one segment: recovered at first use, stored with each checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from meshpoint.errors import ConsistencyError, MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.agent_memory import MemoryRecovery, MemorySource
from meshpoint.model.memory import Answer, Command, Owner, Packed
from meshpoint.model.subtasking import current_subtask
from meshpoint.model.subtasks import AgentCheckpoint, MemoryWrite
from meshpoint.ports.working_memory import ReportProblem, SnapshotStore, WorkingMemory
from meshpoint.working_memory.digests import EMPTY_FINGERPRINT
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import (
    UNREADABLE_PREFIX,
    UNRECOVERABLE,
    DualRecoveryStrategy,
    FetchSnapshot,
    RecoveredMemory,
)
from meshpoint.working_memory.snapshots import L1CacheSnapshotter, Snapshot
from meshpoint.working_memory.ttl import L1TTLManager
from meshpoint.working_memory.write_log import MemoryWriteLog, WritePosition, commands_digest, keys_digest

T = TypeVar("T")

_last_read: ContextVar[WritePosition] = ContextVar("meshpoint_last_read", default=(-1, -1, ""))
"""Position and digest of the last read by the running code."""

_CLEAR = (Command("CLEAR", ""),)


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
        self.l1, self.snapshots, self.keep_completed, self.report_problem, self.on_recovered = (
            l1,
            snapshots,
            keep_completed,
            report_problem,
            on_recovered,
        )
        self.recovery = DualRecoveryStrategy(l1, snapshots, report_problem)
        self.snapshotter = L1CacheSnapshotter(l1, snapshots, max_bytes, report_problem)
        self.ttl = L1TTLManager(l1, report_problem)


@dataclass(frozen=True, slots=True)
class MemoryRef:
    """The memory in a checkpoint: its digest (`None`: no memory) and its snapshot.

    `sql_digest` is the digest of the snapshot in the database. `packed` is set if the memory
    differs from the last checkpoint, `content` if this checkpoint writes it to the database.
    `version` is the version of L1 at the snapshot.
    """

    digest: str | None = None
    sql_digest: str | None = None
    order: int | None = None
    version: int = 0
    packed: Packed | None = None
    content: bytes | None = None
    writes: tuple[MemoryWrite, ...] = ()

    @classmethod
    def from_checkpoint(cls, checkpoint: AgentCheckpoint | None) -> MemoryRef:
        """Create the reference from the task's last checkpoint."""
        if checkpoint is None:
            return cls()
        last = checkpoint.l1_snapshot_hash, checkpoint.l1_in_sql, checkpoint.seq
        return cls(*last, writes=checkpoint.memory_writes)

    def apply_to(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """Return `checkpoint` with this memory."""
        return checkpoint.model_copy(
            update={
                "l1_snapshot_hash": self.digest,
                "l1_snapshot": self.content,
                "l1_in_sql": self.sql_digest,
                "memory_writes": self.writes,
            }
        )


class TaskMemory:
    """The `MemoryRunner` of one segment.

    Each write is done once, however often the code runs: see `MemoryWriteLog`.

    Args:
        services: Returns the services, which depend on where the task is stored.
        ref: The memory in the last checkpoint.
        owner: Returns the run, which has a fence once the task has a row.
        position: Returns the position of the running code.
        ensure_operation: Makes the task an operation. After that, `services` and `owner` are
            valid.
        fetch_sql: Fetches the newest snapshot from the database.
        is_owner: Checks in the database whether this run still owns the task.
        on_lost: Called when another run owns the task.
    """

    def __init__(
        self,
        services: Callable[[], MemoryServices],
        ref: MemoryRef,
        *,
        owner: Callable[[], Owner],
        position: Callable[[], tuple[int, int]],
        ensure_operation: Callable[[], Awaitable[None]],
        fetch_sql: FetchSnapshot,
        is_owner: Callable[[], Awaitable[bool]],
        on_lost: Callable[[], NoReturn],
    ) -> None:
        self._get_services, self._ref, self._write_log = services, ref, MemoryWriteLog(ref.writes)
        self._owner, self._get_position, self._ensure_operation, self._fetch_sql = (
            owner,
            position,
            ensure_operation,
            fetch_sql,
        )
        self._is_owner, self._on_lost = is_owner, on_lost
        self._recovery_lock = asyncio.Lock()
        self._write_lock = asyncio.Lock()  # a checkpoint has a write and its record, or neither
        self._pending_writes: set[asyncio.Task[Any]] = set()
        self._recovered: RecoveredMemory | None = None
        self._version = 0  # of L1, after the last write
        self._in_doubt = False  # a write failed after the last snapshot, and may have been done
        self._snapshot_missing = False  # the snapshot store lacks the last checkpoint's

    @property
    def _services(self) -> MemoryServices:
        return self._get_services()

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How the memory was recovered; `None` if it was not needed yet."""
        return None if self._recovered is None else self._recovered.recovery

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Run commands atomically, in order."""
        await self._guard_fence(self._ensure_recovered())
        if not any(command.writes for command in commands):
            self._remember_read(commands_digest(commands))
            _, answers = await self._guard_fence(self._l1.execute(self._owner(), commands, seen=self._version))
            return answers
        return await self._run_to_completion(self._write(self._write_position(), commands))

    def _write_position(self) -> WritePosition:
        calls, subtasks = self._code_position()
        *where, read = _last_read.get()
        return calls, subtasks, read if where == [calls, subtasks] else ""

    def _code_position(self) -> tuple[int, int | str]:
        calls, subtasks = self._get_position()
        return calls, current_subtask() or subtasks

    def _remember_read(self, digest: str) -> None:
        _last_read.set((*self._code_position(), digest))

    async def _write(self, position: WritePosition, commands: Sequence[Command]) -> list[Answer]:
        async with self._write_lock:
            if (answers := self._write_log.recorded_answers(position, commands)) is not None:
                return answers
            await self._resolve_doubt()
            self._in_doubt = True  # until answered; commands before a refused one are done as well
            self._version, answers = await self._l1.execute(self._owner(), commands, seen=self._version)
            self._in_doubt = False
            self._write_log.record(position, commands, answers)
            return answers

    async def _resolve_doubt(self) -> None:
        """Determine the version of L1 after a write without an answer."""
        if self._in_doubt:
            self._version, _ = await self._l1.execute(self._owner(), (), seen=self._version)
            self._in_doubt = False

    async def keys(self) -> list[str]:
        """Return all keys."""
        await self._guard_fence(self._ensure_recovered())
        keys = await self._guard_fence(self._l1.keys(self._owner(), seen=self._version))
        self._remember_read(keys_digest(keys))  # one read for all the writes after it
        return keys

    async def clear(self) -> None:
        """Replace the memory with an empty one."""
        await (
            self._ensure_operation()
        )  # before the locks: a subtask's checkpoint acquires them under the operation's lock
        await self._run_to_completion(self._clear(self._write_position()))

    @property
    def _l1(self) -> WorkingMemory:
        return self._services.l1

    async def _clear(self, position: WritePosition) -> None:
        async with self._write_lock:
            if self._write_log.recorded_answers(position, _CLEAR) is None:
                await self._reset()
                self._write_log.record(position, _CLEAR, [])

    async def _reset(self) -> None:
        async with self._recovery_lock:
            current = await self._l1.read(self._owner().agent_id)
            self._in_doubt = True
            force = current.fence > self._owner().fence and await self._is_owner()
            contents = await self._l1.replace(self._owner(), (), seen=current.version, force=force)
            self._in_doubt = False
            if self._recovered is None:  # the old memory was not recovered, and may be damaged
                self._write_log.discard_after(0)
                self._ref = replace(self._ref, sql_digest=None)
                self._snapshot_missing = self._services.l1.survives
            recovery = self.recovery or MemoryRecovery(MemorySource.NONE, verified=False, behind=True)
            self._recovered = RecoveredMemory(recovery, contents.version, EMPTY_FINGERPRINT)
            self._version = contents.version
            self._ref = replace(self._ref, digest=self._ref.digest or EMPTY_FINGERPRINT, version=-1)

    async def _ensure_recovered(self) -> None:
        if self._recovered is not None:
            return
        await self._ensure_operation()
        async with self._recovery_lock:
            if self._recovered is not None:
                return
            recovered = await self._recover_as_owner()
            if recovered.recovery.behind:
                self._write_log.discard_after(recovered.order)
            self._version = recovered.version
            self._ref = replace(self._ref, digest=recovered.digest, version=recovered.version)
            self._recovered = recovered
            self._snapshot_missing = self._l1.survives and not await self._services.snapshotter.has_snapshot(
                self._owner().agent_id, recovered.digest
            )
            self._services.on_recovered(self._owner().agent_id, recovered.recovery)

    async def _recover_as_owner(self) -> RecoveredMemory:
        try:
            return await self._recover()
        except MemoryFenced:
            if not await self._is_owner():
                raise
        await self._force_ownership()
        return await self._recover()

    async def _force_ownership(self) -> None:
        """Own the memory although L1 knows a later run.

        That run was lost with the database's recent past, or belongs to another task with this id.
        """
        contents = await self._l1.read(self._owner().agent_id)
        await self._l1.replace(self._owner(), contents.items, force=True)

    async def _recover(self) -> RecoveredMemory:
        recovery, ref = self._services.recovery, self._ref
        return await recovery.recover(self._owner(), ref.digest, self._fetch_sql, last_seq=ref.order)

    async def _run_to_completion(self, write: Coroutine[Any, Any, T]) -> T:
        # Even if the caller is cancelled: otherwise a write may be done, but not recorded.
        writing = asyncio.create_task(write)
        self._pending_writes.add(writing)
        writing.add_done_callback(self._write_done)
        return await self._guard_fence(asyncio.shield(writing))

    def _write_done(self, writing: asyncio.Task[Any]) -> None:
        self._pending_writes.discard(writing)
        if not writing.cancelled():
            writing.exception()  # mark it as retrieved: the caller may have been cancelled

    async def _guard_fence(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except MemoryFenced:
            self._on_lost()

    @property
    def changed(self) -> bool:
        """Whether the memory may differ from the last checkpoint or from the database."""
        return (
            self._recovered is not None and self._differs_from_checkpoint
        ) or self._ref.digest != self._ref.sql_digest

    @property
    def _differs_from_checkpoint(self) -> bool:
        """Whether L1 may differ from the last checkpoint."""
        return self._in_doubt or self._version != self._ref.version

    async def prepare_ref(self, order: int, *, durable: bool, finished_subtasks: Collection[str] = ()) -> MemoryRef:
        """Prepare the memory for checkpoint `order`, which commits next.

        If the memory cannot be read now, it is marked as absent, so that the checkpoint can still
        commit.

        Args:
            order: Number of the checkpoint.
            durable: Whether the database also needs a snapshot.
            finished_subtasks: Subtasks that will not run again from their start.

        Raises:
            MemoryLost: It was emptied, or keys were evicted: the last checkpoint has more.
            MemoryRefused: It is too large. The message has the largest keys.
        """
        if self._recovered is None and not (durable and await self._recover_for_sql()):
            return self._ref
        async with self._write_lock:
            writes = self._write_log.for_checkpoint(order, finished_subtasks)
            durable = durable or not self._services.l1.survives
            missing = durable and self._ref.digest != self._ref.sql_digest
            if not (self._differs_from_checkpoint or missing or self._snapshot_missing):
                return replace(self._ref, writes=writes)
            try:
                snapshot = await self._take_snapshot(order)
            except MemoryLost:
                raise
            except (MemoryUnavailable, MemoryFenced) as error:
                return self._unreadable_ref(order, str(error))
            return self._make_ref(snapshot, writes, durable=durable)

    async def _recover_for_sql(self) -> bool:
        """Recover an unused memory if the database has no snapshot of it; `True` on success."""
        ref = self._ref
        if ref.digest == ref.sql_digest or (ref.digest == UNRECOVERABLE and ref.sql_digest is None):
            return False
        try:
            await self._ensure_recovered()
        except (MemoryUnavailable, MemoryFenced, ConsistencyError) as error:
            self._services.report_problem(self._owner().agent_id, "absent", str(error))
            return False
        if self.recovery is not None and self.recovery.behind:
            # The agent does not know about it: the next segment must find it behind again.
            await self.close()
            self._ref, self._recovered, self._write_log = ref, None, MemoryWriteLog(ref.writes)
            return False
        return True

    async def _take_snapshot(self, order: int) -> Snapshot:
        in_doubt, self._in_doubt = self._in_doubt, False
        try:
            snapshot = await self._services.snapshotter.snapshot_on_checkpoint(
                self._owner(), order, seen=self._version
            )
        except BaseException:
            self._in_doubt = in_doubt
            raise
        self._version = max(self._version, snapshot.version)
        return snapshot

    def _make_ref(self, snapshot: Snapshot, writes: tuple[MemoryWrite, ...], *, durable: bool) -> MemoryRef:
        packed, ref = snapshot.packed, self._ref
        to_sql = durable and packed.digest != ref.sql_digest
        return MemoryRef(
            digest=packed.digest,
            sql_digest=packed.digest if to_sql else ref.sql_digest,
            order=packed.order,
            version=snapshot.version,
            packed=None if packed.digest == ref.digest and not self._snapshot_missing else packed,
            content=to_bytes(packed) if to_sql else None,
            writes=writes,
        )

    def _unreadable_ref(self, order: int, reason: str) -> MemoryRef:
        self._services.report_problem(self._owner().agent_id, "absent", reason)
        version = 0 if self._in_doubt else self._version
        return MemoryRef(
            f"{UNREADABLE_PREFIX}{version}",
            self._ref.sql_digest,
            order,
            version=-1,
            writes=self._write_log.for_checkpoint(order),
        )

    async def final_ref(self, order: int, finished_subtasks: Collection[str] = ()) -> MemoryRef:
        """Prepare the memory for the checkpoint of a failed task, as far as it can be read."""
        try:
            return await self.prepare_ref(order, durable=True, finished_subtasks=finished_subtasks)
        except (MemoryLost, MemoryRefused) as error:
            return self._unreadable_ref(order, str(error))

    async def on_stored(self, ref: MemoryRef) -> None:
        """Called when the checkpoint with `ref` is durable."""
        self._ref = replace(ref, packed=None, content=None)
        if ref.packed is not None and self._l1.survives:
            self._snapshot_missing = True
            self._snapshot_missing = not await self._services.snapshotter.store_snapshot(
                self._owner().agent_id, ref.packed
            )

    async def on_paused(self) -> None:
        """Extend the TTL of the memory of a paused task."""
        if self._ref.digest is not None:
            await self._services.ttl.extend_ttl_on_pause(self._owner())

    async def on_completed(self) -> None:
        """Delete the memory of a completed task, or keep it until it expires."""
        if self._recovered is None and self._ref.digest is None:
            return
        if self._services.keep_completed:
            await self._services.ttl.extend_ttl_on_pause(self._owner())
            return
        try:
            await self._services.l1.forget(self._owner())
            if self._services.snapshots is not None:
                await self._services.snapshots.forget(self._owner().agent_id)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._services.report_problem(self._owner().agent_id, "not_forgotten", str(error))

    async def close(self) -> None:
        """Free a memory that exists only in this process."""
        if self._recovered is not None and not self._services.l1.survives:
            await self._services.l1.forget(self._owner())
