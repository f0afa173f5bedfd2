"""The working memory of one segment: recovered at first use, stored with each checkpoint.

`states` has its states, and a diagram of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from meshpoint.errors import (
    AgentMisbehaved,
    ConsistencyError,
    MemoryFenced,
    MemoryLost,
    MemoryRefused,
    MemoryUnavailable,
)
from meshpoint.model.memory import Answer, Command, MemoryRecovery, Owner
from meshpoint.model.recorded_work import current_step
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.working_memory.digests import EMPTY_FINGERPRINT
from meshpoint.working_memory.recovery import (
    UNRECOVERABLE,
    FetchSnapshot,
    RecoveredMemory,
)
from meshpoint.working_memory.snapshots import MemoryRef, MemoryServices, Snapshot
from meshpoint.working_memory.states import (
    Clearing,
    InDoubt,
    Open,
    Recovered,
    State,
    Unrecovered,
    Untouched,
)
from meshpoint.working_memory.write_log import (
    MemoryWriteLog,
    WritePosition,
    commands_digest,
    decode_writes,
    keys_digest,
    remember_read,
    write_position,
)

T = TypeVar("T")

_CLEAR = (Command("CLEAR", ""),)


class TaskMemory:
    """The `MemoryRunner` of one segment.

    Each write is done once, however often the code runs: see `MemoryWriteLog`.

    Args:
        services: Returns the services, which depend on where the task is stored.
        ref: The memory in the last checkpoint.
        logged_notes: Encoded writes in the task's log.
        finished_subtasks: Subtasks that were finished at the last checkpoint.
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
        logged_notes: Sequence[bytes] = (),
        finished_subtasks: Collection[str] = (),
        *,
        owner: Callable[[], Owner],
        position: Callable[[], tuple[int, int]],
        ensure_operation: Callable[[], Awaitable[None]],
        fetch_sql: FetchSnapshot,
        is_owner: Callable[[], Awaitable[bool]],
        on_lost: Callable[[], NoReturn],
    ) -> None:
        self._get_services, self._ref, self._owner = services, ref, owner
        self._position = position
        logged = () if ref.writes_replace_log else decode_writes(logged_notes)
        self._write_log = MemoryWriteLog(
            ref.writes,
            logged,
            finished_subtasks=finished_subtasks,
            replaces_log=ref.writes_replace_log,
        )
        self._ensure_operation, self._fetch_sql = ensure_operation, fetch_sql
        self._is_owner, self._on_lost = is_owner, on_lost
        self._state: State = Untouched()
        self._stored_digest: str | None = None  # of the snapshot in the store, `None` if unknown
        # Held while the state changes, and for a write with its record: a checkpoint has both.
        self._lock = asyncio.Lock()
        self._pending_writes: set[asyncio.Task[Any]] = set()

    @property
    def _services(self) -> MemoryServices:
        return self._get_services()

    @property
    def _l1(self) -> WorkingMemory:
        return self._services.l1

    @property
    def _agent_id(self) -> str:
        return self._owner().agent_id

    def _report_problem(self, what: str, reason: str) -> None:
        self._services.report_problem(self._agent_id, what, reason)

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How the memory was recovered; `None` if it was not needed yet."""
        match self._state:
            case Open(recovery=recovery) | InDoubt(recovery=recovery):
                return recovery
            case Untouched() | Clearing():
                return None

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Run commands atomically, in order."""
        is_write = any(command.is_write for command in commands)
        if is_write:
            _refuse_in_step()
        memory = self._state
        if isinstance(memory, Unrecovered):
            memory = await self._guard_fence(self._ensure_recovered())
        if is_write:
            position = write_position(*self._position())
            if not self._pending_writes:  # without an asyncio task, which costs most of a replay
                recorded = self._write_log.recorded_answers(position, commands)
                if recorded is not None:
                    return recorded
            return await self._run_to_completion(self._write(position, commands))
        remember_read(*self._position(), commands_digest(commands))
        _, answers = await self._guard_fence(
            self._l1.execute(self._owner(), commands, expected_version=memory.version)
        )
        return answers

    async def keys(self) -> list[str]:
        """Return all keys."""
        memory = await self._guard_fence(self._ensure_recovered())
        keys = await self._guard_fence(
            self._l1.keys(self._owner(), expected_version=memory.version)
        )
        remember_read(*self._position(), keys_digest(keys))  # one read for all the writes after it
        return keys

    async def clear(self) -> None:
        """Replace the memory with an empty one."""
        _refuse_in_step()
        # Before the lock: a subtask's checkpoint acquires it under the operation's lock.
        await self._ensure_operation()
        await self._run_to_completion(self._clear(write_position(*self._position())))

    async def _write(self, position: WritePosition, commands: Sequence[Command]) -> list[Answer]:
        async with self._lock:
            if (answers := self._write_log.recorded_answers(position, commands)) is not None:
                return answers
            memory = await self._open()
            # An error leaves it in doubt, also a refused command: those before it are done.
            self._state = writing = memory.writing()
            version, answers = await self._l1.execute(
                self._owner(), commands, expected_version=memory.version
            )
            self._state = writing.answered(version)
            self._write_log.record(position, commands, answers)
            return answers

    async def _clear(self, position: WritePosition) -> None:
        async with self._lock:
            if self._write_log.recorded_answers(position, _CLEAR) is None:
                await self._replace_with_empty()
                self._write_log.record(position, _CLEAR, [])

    async def _replace_with_empty(self) -> None:
        current = await self._l1.read(self._agent_id)
        force = current.fence > self._owner().fence and await self._is_owner()
        self._state = writing = self._state.writing()
        contents = await self._l1.replace(
            self._owner(), (), expected_version=current.version, force=force
        )
        self._state = writing.answered(contents.version)
        if isinstance(writing, Clearing):  # the snapshots of the old memory may be damaged
            self._write_log.discard_after(0)
            self._stored_digest = None
            self._ref = replace(self._ref, sql_digest=None)
        self._ref = replace(self._ref, digest=self._ref.digest or EMPTY_FINGERPRINT, version=None)

    async def _ensure_recovered(self) -> Recovered:
        """Recover the memory at its first use."""
        match self._state:
            case Open() | InDoubt() as memory:
                return memory
            case Untouched() | Clearing():
                await self._ensure_operation()
                async with self._lock:
                    return await self._recover()

    async def _open(self) -> Open:
        """Return the memory with the current version of L1. The caller holds the lock."""
        match await self._recover():
            case Open() as memory:
                return memory
            case InDoubt(version=last_version) as in_doubt:
                version, _ = await self._l1.execute(
                    self._owner(), (), expected_version=last_version
                )
                self._state = memory = in_doubt.answered(version)
                return memory

    async def _recover(self) -> Recovered:
        """Return the recovered memory. The caller holds the lock."""
        match self._state:
            case Open() | InDoubt() as memory:
                return memory
            case Untouched() | Clearing() as unrecovered:
                return await self._use(unrecovered, await self._find())

    async def _find(self) -> RecoveredMemory:
        found = await self._services.recovery.recover_as_owner(
            self._owner(),
            self._ref.digest,
            self._fetch_sql,
            last_seq=self._ref.order,
            is_owner=self._is_owner,
        )
        self._services.on_recovered(self._agent_id, found.recovery)
        return found

    async def _use(self, unrecovered: Unrecovered, found: RecoveredMemory) -> Recovered:
        if found.recovery.behind:
            self._write_log.discard_after(found.order)
        self._ref = replace(self._ref, digest=found.digest, version=found.version)
        self._state = memory = unrecovered.recovered(found)
        if self._l1.durable and await self._services.snapshotter.has_snapshot(
            self._agent_id, found.digest
        ):
            self._stored_digest = found.digest
        return memory

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
        return self._differs_from_checkpoint or self._ref.digest != self._ref.sql_digest

    @property
    def _differs_from_checkpoint(self) -> bool:
        """Whether this segment may have changed L1 since the last checkpoint."""
        match self._state:
            case Untouched() | Clearing():
                return False
            case Open(version=version):
                return version != self._ref.version
            case InDoubt():
                return True

    @property
    def _lacks_snapshot(self) -> bool:
        """Whether the snapshot store may lack the snapshot of the last checkpoint."""
        return self._l1.durable and self._stored_digest != self._ref.digest

    async def prepare_ref(
        self, order: int, *, durable: bool, finished_subtasks: Collection[str] = ()
    ) -> MemoryRef:
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
        if isinstance(self._state, Unrecovered) and not (
            durable and await self._recover_for_sql()
        ):
            return self._ref  # at once, even if the code is recovering the memory
        async with self._lock:
            memory = await self._recover()
            ref = self._with_writes(order, finished_subtasks)
            durable = durable or not self._l1.durable
            missing = durable and self._ref.digest != self._ref.sql_digest
            if not (self._differs_from_checkpoint or missing or self._lacks_snapshot):
                return ref
            try:
                snapshot = await self._take_snapshot(memory, order)
            except MemoryLost:
                raise
            except (MemoryUnavailable, MemoryFenced) as error:
                return self._unreadable_ref(order, str(error))
            return ref.with_snapshot(snapshot, to_sql=durable, to_store=self._lacks_snapshot)

    def _with_writes(self, order: int, finished_subtasks: Collection[str] = ()) -> MemoryRef:
        """The memory of the last checkpoint, with the writes for checkpoint `order`."""
        writes = self._write_log.for_checkpoint(order, finished_subtasks)
        return replace(
            self._ref,
            writes=writes,
            writes_replace_log=self._write_log.replaces_log,
            finished_in_log=frozenset(self._write_log.finished_in_log),
        )

    async def _recover_for_sql(self) -> bool:
        """Recover an unused memory if the database has no snapshot of it; `True` on success."""
        ref = self._ref
        if ref.digest == ref.sql_digest or (
            ref.digest == UNRECOVERABLE and ref.sql_digest is None
        ):
            return False
        try:
            await self._ensure_operation()
            async with self._lock:
                return await self._recover_unless_behind()
        except (MemoryUnavailable, MemoryFenced, ConsistencyError) as error:
            self._report_problem("absent", str(error))
            return False

    async def _recover_unless_behind(self) -> bool:
        if isinstance(self._state, Unrecovered):
            found = await self._find()
            if found.recovery.behind:
                # The agent does not know about it: the next segment must find it behind again.
                await self._free()
                return False
            await self._use(self._state, found)
        return True

    async def _take_snapshot(self, memory: Recovered, order: int) -> Snapshot:
        snapshot = await self._services.snapshotter.snapshot_on_checkpoint(
            self._owner(), order, seen=memory.version
        )
        self._state = memory.answered(snapshot.version)
        return snapshot

    def _unreadable_ref(self, order: int, reason: str) -> MemoryRef:
        self._report_problem("absent", reason)
        version = self._state.version if isinstance(self._state, Open) else 0
        return self._with_writes(order).unreadable(order, version)

    async def final_ref(self, order: int, finished_subtasks: Collection[str] = ()) -> MemoryRef:
        """Prepare the memory for the checkpoint of a failed task, as far as it can be read.

        It has all writes, so that a release without logs can resume the task.
        """
        self._write_log.take_over_log()
        try:
            ref = await self.prepare_ref(order, durable=True, finished_subtasks=finished_subtasks)
        except (MemoryLost, MemoryRefused) as error:
            ref = self._unreadable_ref(order, str(error))
        writes = self._write_log.for_checkpoint(order, finished_subtasks)
        replaces = self._write_log.replaces_log
        return replace(
            ref, writes=writes, writes_replace_log=replaces, finished_in_log=frozenset()
        )

    async def on_stored(self, ref: MemoryRef) -> None:
        """Called when the checkpoint with `ref` is durable."""
        self._ref = replace(ref, packed=None, content=None)
        if ref.packed is not None and self._l1.durable:
            self._stored_digest = None
            if await self._services.snapshotter.store_snapshot(self._agent_id, ref.packed):
                self._stored_digest = ref.packed.digest

    async def on_paused(self) -> None:
        """Extend the TTL of the memory of a paused task."""
        if self._ref.digest is not None:
            await self._services.ttl.extend_ttl_on_pause(self._owner())

    async def on_completed(self) -> None:
        """Delete the memory of a completed task, or keep it until it expires."""
        if isinstance(self._state, Unrecovered) and self._ref.digest is None:
            return
        if self._services.keep_completed:
            await self._services.ttl.extend_ttl_on_pause(self._owner())
            return
        try:
            await self._l1.forget(self._owner())
            if self._services.snapshots is not None:
                await self._services.snapshots.forget(self._agent_id)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._report_problem("not_forgotten", str(error))

    async def close(self) -> None:
        """Free a memory that exists only in this process."""
        if not isinstance(self._state, Unrecovered):
            await self._free()

    async def _free(self) -> None:
        if not self._l1.durable:
            await self._l1.forget(self._owner())


def _refuse_in_step() -> None:
    """Refuse a write in a step: a memory restored without it could not get it back."""
    if (step := current_step()) is not None:
        raise AgentMisbehaved(
            f"step {step!r} changes ctx.memory: return the value and write it after the step, "
            "or use ctx.subtask"
        )
