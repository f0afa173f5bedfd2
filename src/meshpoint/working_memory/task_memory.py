"""The working memory of one segment: recovered when it is first used, kept with each checkpoint."""

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
from meshpoint.ports.working_memory import SnapshotStore, Tell, WorkingMemory
from meshpoint.working_memory.digests import EMPTY
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import ABSENT, NOWHERE, DualRecoveryStrategy, Fetch, Recovered
from meshpoint.working_memory.snapshots import L1CacheSnapshotter, Snapshot
from meshpoint.working_memory.ttl import L1TTLManager
from meshpoint.working_memory.write_log import MemoryWrites, Place, digest_of_commands, digest_of_keys

T = TypeVar("T")

_last_read: ContextVar[Place] = ContextVar("meshpoint_last_read", default=(-1, -1, ""))
"""What the code that asks has read last, and where."""

_CLEAR = (Command("CLEAR", ""),)


class Memories:
    """What the memories of all tasks of one replica share.

    `keep` lets them outlive a completed task for a while. `found` hears of each recovery.
    """

    def __init__(
        self,
        l1: WorkingMemory,
        snapshots: SnapshotStore | None,
        *,
        max_bytes: int,
        keep: bool,
        tell: Tell,
        found: Callable[[str, MemoryRecovery], None],
    ) -> None:
        self.l1, self.snapshots, self.keep, self.tell, self.found = l1, snapshots, keep, tell, found
        self.recovery = DualRecoveryStrategy(l1, snapshots, tell)
        self.snapshotter = L1CacheSnapshotter(l1, snapshots, max_bytes, tell)
        self.ttl = L1TTLManager(l1, tell)


@dataclass(frozen=True, slots=True)
class Mark:
    """A memory as a checkpoint has it: its digest (None: the task has none), and that of the one in the database.

    `packed` is set when it differs from what the last checkpoint had, `content` when it goes to the database with
    this one. `version` is that of L1 then.
    """

    digest: str | None = None
    in_sql: str | None = None
    order: int | None = None
    version: int = 0
    packed: Packed | None = None
    content: bytes | None = None
    writes: tuple[MemoryWrite, ...] = ()

    @classmethod
    def of(cls, checkpoint: AgentCheckpoint | None) -> Mark:
        """What the task's last checkpoint says."""
        if checkpoint is None:
            return cls()
        last = checkpoint.l1_snapshot_hash, checkpoint.l1_in_sql, checkpoint.seq
        return cls(*last, writes=checkpoint.memory_writes)

    def on(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """`checkpoint` with this memory."""
        return checkpoint.model_copy(
            update={
                "l1_snapshot_hash": self.digest,
                "l1_snapshot": self.content,
                "l1_in_sql": self.in_sql,
                "memory_writes": self.writes,
            }
        )


class TaskMemory:
    """The `MemoryRunner` of one segment.

    `owner` tells the run, which has a fence once the task has a row, and `memories` where its memory is, once it has
    a home: `open_` sees to both. `lost` is called when another run has the task. A write is done once, however often
    the code runs: see `MemoryWrites`.
    """

    def __init__(
        self,
        memories: Callable[[], Memories],
        kept: Mark,
        *,
        owner: Callable[[], Owner],
        place: Callable[[], tuple[int, int]],
        open_: Callable[[], Awaitable[None]],
        from_sql: Fetch,
        ours: Callable[[], Awaitable[bool]],
        lost: Callable[[], NoReturn],
    ) -> None:
        self._where, self._kept, self._writes = memories, kept, MemoryWrites(kept.writes)
        self._owner, self._place, self._open, self._from_sql = owner, place, open_, from_sql
        self._ours, self._lost = ours, lost
        self._opening = asyncio.Lock()
        self._writing = asyncio.Lock()  # a write and its note: a checkpoint has both or neither
        self._under_way: set[asyncio.Task[Any]] = set()
        self._recovered: Recovered | None = None
        self._version = 0  # of L1, as of the last write
        self._in_doubt = False  # a write has raised since the last snapshot: it may have been done all the same
        self._put_again = False  # the second place lacks what the last checkpoint has

    @property
    def _memories(self) -> Memories:
        return self._where()

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How the segment came by it; None: it did not need it yet."""
        return None if self._recovered is None else self._recovered.how

    # ── for agents ─────────────────────────────────────────────────────────────────────────────────

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Do commands together, in order."""
        await self._mine(self._ready())
        if not any(command.writes for command in commands):
            self._note_read(digest_of_commands(commands))
            _, answers = await self._mine(self._l1.execute(self._owner(), commands, seen=self._version))
            return answers
        return await self._to_its_end(self._write(self._here(), commands))

    def _here(self) -> Place:
        calls, subtasks = self._whereabouts()
        *where, read = _last_read.get()
        return calls, subtasks, read if where == [calls, subtasks] else ""

    def _whereabouts(self) -> tuple[int, int | str]:
        calls, subtasks = self._place()
        return calls, current_subtask() or subtasks

    def _note_read(self, digest: str) -> None:
        _last_read.set((*self._whereabouts(), digest))

    async def _write(self, place: Place, commands: Sequence[Command]) -> list[Answer]:
        async with self._writing:
            if (answers := self._writes.done(place, commands)) is not None:
                return answers
            await self._know_version()
            self._in_doubt = True  # until it is answered; also of what is refused, those before it are done
            self._version, answers = await self._l1.execute(self._owner(), commands, seen=self._version)
            self._in_doubt = False
            self._writes.note(place, commands, answers)
            return answers

    async def _know_version(self) -> None:
        """Find out what came of a write that nobody has heard of."""
        if self._in_doubt:
            self._version, _ = await self._l1.execute(self._owner(), (), seen=self._version)
            self._in_doubt = False

    async def keys(self) -> list[str]:
        """The keys that are there."""
        await self._mine(self._ready())
        keys = await self._mine(self._l1.keys(self._owner(), seen=self._version))
        self._note_read(digest_of_keys(keys))  # code that does what is missing reads this once for all of it
        return keys

    async def clear(self) -> None:
        """Begin anew with an empty memory."""
        await self._open()  # before the locks, which a subtask's checkpoint takes within that of the operation
        await self._to_its_end(self._clear(self._here()))

    @property
    def _l1(self) -> WorkingMemory:
        return self._memories.l1

    async def _clear(self, place: Place) -> None:
        async with self._writing:
            if self._writes.done(place, _CLEAR) is None:
                await self._begin_anew()
                self._writes.note(place, _CLEAR, [])

    async def _begin_anew(self) -> None:
        async with self._opening:
            there = await self._l1.read(self._owner().agent_id)
            self._in_doubt = True
            force = there.fence > self._owner().fence and await self._ours()
            held = await self._l1.replace(self._owner(), (), seen=there.version, force=force)
            self._in_doubt = False
            if self._recovered is None:  # nobody has looked at what was there, which may be damaged everywhere
                self._writes.forget_after(0)
                self._kept = replace(self._kept, in_sql=None)
                self._put_again = self._memories.l1.survives
            how = self.recovery or MemoryRecovery(MemorySource.NONE, verified=False, behind=True)
            self._recovered = Recovered(how, held.version, EMPTY)
            self._version = held.version
            self._kept = replace(self._kept, digest=self._kept.digest or EMPTY, version=-1)

    async def _ready(self) -> None:
        if self._recovered is not None:
            return
        await self._open()
        async with self._opening:
            if self._recovered is not None:
                return
            recovered = await self._found()
            if recovered.how.behind:
                self._writes.forget_after(recovered.order)
            self._version = recovered.version
            self._kept = replace(self._kept, digest=recovered.digest, version=recovered.version)
            self._recovered = recovered
            self._put_again = self._l1.survives and not await self._memories.snapshotter.has(
                self._owner().agent_id, recovered.digest
            )
            self._memories.found(self._owner().agent_id, recovered.how)

    async def _found(self) -> Recovered:
        try:
            return await self._recover()
        except MemoryFenced:
            if not await self._ours():
                raise
        await self._take_over()
        return await self._recover()

    async def _take_over(self) -> None:
        """Own what is there, though L1 knows of a later run: one of a past that the database has lost, or of another
        task of this id.
        """
        held = await self._l1.read(self._owner().agent_id)
        await self._l1.replace(self._owner(), held.items, force=True)

    async def _recover(self) -> Recovered:
        recovery, kept = self._memories.recovery, self._kept
        return await recovery.recover(self._owner(), kept.digest, self._from_sql, newest=kept.order)

    async def _to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        # Also when the code that waits for it is cancelled: else the write may be done, and its note missing.
        writing = asyncio.create_task(write)
        self._under_way.add(writing)
        writing.add_done_callback(self._ended)
        return await self._mine(asyncio.shield(writing))

    def _ended(self, writing: asyncio.Task[Any]) -> None:
        self._under_way.discard(writing)
        if not writing.cancelled():
            writing.exception()  # nobody may be left to hear of it

    async def _mine(self, doing: Awaitable[T]) -> T:
        try:
            return await doing
        except MemoryFenced:
            self._lost()

    # ── for checkpoints ────────────────────────────────────────────────────────────────────────────

    @property
    def changed(self) -> bool:
        """Whether it may differ from what the last checkpoint has, in the database."""
        return (self._recovered is not None and self._written) or self._kept.digest != self._kept.in_sql

    @property
    def _written(self) -> bool:
        """Whether L1 may have something else than the last checkpoint."""
        return self._in_doubt or self._version != self._kept.version

    async def mark(self, order: int, *, durable: bool, over: Collection[str] = ()) -> Mark:
        """The memory for the checkpoint `order`, which commits next. `durable`: for the database as well.

        `over` are the subtasks that will not run again from their start.

        A memory that cannot be read now is marked as absent, so that the checkpoint commits all the same.

        Raises:
            MemoryLost: it was emptied, or keys of it were evicted: the last checkpoint has more.
            MemoryRefused: it is too large; names the largest keys.
        """
        if self._recovered is None and not (durable and await self._found_for_sql()):
            return self._kept
        async with self._writing:
            writes = self._writes.so_far(order, over)
            durable = durable or not self._memories.l1.survives
            missing = durable and self._kept.digest != self._kept.in_sql
            if not (self._written or missing or self._put_again):
                return replace(self._kept, writes=writes)
            try:
                snapshot = await self._snapshot(order)
            except MemoryLost:
                raise
            except (MemoryUnavailable, MemoryFenced) as error:
                return self._absent(order, str(error))
            return self._mark(snapshot, writes, durable=durable)

    async def _found_for_sql(self) -> bool:
        """Find a memory that this segment has not used, if the database has not got it yet; whether it is there."""
        kept = self._kept
        if kept.digest == kept.in_sql or (kept.digest == NOWHERE and kept.in_sql is None):
            return False
        try:
            await self._ready()
        except (MemoryUnavailable, MemoryFenced, ConsistencyError) as error:
            self._memories.tell(self._owner().agent_id, "absent", str(error))
            return False
        if self.recovery is not None and self.recovery.behind:
            # Nobody was told: whoever uses it next is to find it behind, too.
            await self.left()
            self._kept, self._recovered, self._writes = kept, None, MemoryWrites(kept.writes)
            return False
        return True

    async def _snapshot(self, order: int) -> Snapshot:
        in_doubt, self._in_doubt = self._in_doubt, False
        try:
            snapshot = await self._memories.snapshotter.take(self._owner(), order, seen=self._version)
        except BaseException:
            self._in_doubt = in_doubt
            raise
        self._version = max(self._version, snapshot.version)
        return snapshot

    def _mark(self, snapshot: Snapshot, writes: tuple[MemoryWrite, ...], *, durable: bool) -> Mark:
        packed, kept = snapshot.packed, self._kept
        to_sql = durable and packed.digest != kept.in_sql
        return Mark(
            digest=packed.digest,
            in_sql=packed.digest if to_sql else kept.in_sql,
            order=packed.order,
            version=snapshot.version,
            packed=None if packed.digest == kept.digest and not self._put_again else packed,
            content=to_bytes(packed) if to_sql else None,
            writes=writes,
        )

    def _absent(self, order: int, why: str) -> Mark:
        self._memories.tell(self._owner().agent_id, "absent", why)
        last = 0 if self._in_doubt else self._version
        return Mark(f"{ABSENT}{last}", self._kept.in_sql, order, version=-1, writes=self._writes.so_far(order))

    async def last(self, order: int, over: Collection[str] = ()) -> Mark:
        """The memory for the checkpoint that a task leaves behind when it fails: whatever can be had of it."""
        try:
            return await self.mark(order, durable=True, over=over)
        except (MemoryLost, MemoryRefused) as error:
            return self._absent(order, str(error))

    async def stored(self, mark: Mark) -> None:
        """The checkpoint with `mark` is durable."""
        self._kept = replace(mark, packed=None, content=None)
        if mark.packed is not None and self._l1.survives:
            self._put_again = True
            self._put_again = not await self._memories.snapshotter.keep(self._owner().agent_id, mark.packed)

    # ── at the end of the segment ──────────────────────────────────────────────────────────────────

    async def paused(self) -> None:
        """The task waits: its memory is to live longer."""
        if self._kept.digest is not None:
            await self._memories.ttl.extend_on_pause(self._owner())

    async def completed(self) -> None:
        """The task has ended well: nobody will ask for its memory."""
        if self._recovered is None and self._kept.digest is None:
            return
        if self._memories.keep:
            await self._memories.ttl.extend_on_pause(self._owner())
            return
        try:
            await self._memories.l1.forget(self._owner())
            if self._memories.snapshots is not None:
                await self._memories.snapshots.forget(self._owner().agent_id)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._memories.tell(self._owner().agent_id, "not_forgotten", str(error))

    async def left(self) -> None:
        """The segment is over: what lives only in this process is not needed any more."""
        if self._recovered is not None and not self._memories.l1.survives:
            await self._memories.l1.forget(self._owner())
