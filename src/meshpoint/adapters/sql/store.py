"""The task store on PostgreSQL and SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from meshpoint.adapters.sql import (
    appending,
    attaching,
    checkpointing,
    claiming,
    ending,
    expiring,
    inventory,
    key_register,
    mailbox,
    outbox,
    sessions,
    tables,
)
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.appending import PackedAppend
from meshpoint.adapters.sql.array_literals import NotSeparable
from meshpoint.adapters.sql.batcher import Batcher, split_by_size
from meshpoint.adapters.sql.catalog import SqlCatalog
from meshpoint.adapters.sql.codec import Codec, Packed
from meshpoint.adapters.sql.database import Database, OnLock, StoreOptions, Transaction
from meshpoint.adapters.sql.due import SqlDueWork
from meshpoint.adapters.sql.engine import FAST_PATH_CONNECTIONS, LOCK_TIMEOUT
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors
from meshpoint.adapters.sql.fleet import SqlFleet
from meshpoint.adapters.sql.hand_over import size_of
from meshpoint.adapters.sql.inventory import Sealed
from meshpoint.adapters.sql.operations import SqlOperations
from meshpoint.adapters.sql.owning import OwnedTask, OwnedTasks
from meshpoint.adapters.sql.rows import (
    AgentNames,
    dispatch_from_row,
    existing_task_from_row,
    followers_from_row,
    outcome_columns,
    requester_from_row,
)
from meshpoint.errors import CommitInDoubt, ConfigurationError, RowLocked, StoreUnavailable
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.mailbox import (
    Mailbox,
    MailResult,
    RecordAnswer,
    SendSignal,
    SetValue,
    StoredValue,
    TooManyValues,
)
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.tasks import (
    Dispatch,
    OutboxItem,
    Replica,
    Reply,
    Resumable,
    Run,
)
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import (
    Append,
    Attach,
    AttachResult,
    Begin,
    BeginResult,
    Cancel,
    CancelResult,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    End,
    EndResult,
    ExistingTask,
    Pause,
    PauseResult,
    Progress,
    ProgressRecorded,
    SaveResult,
    StoreReply,
    TaskLocked,
    UnknownCall,
    UnroutableCall,
    WrongSender,
)
from meshpoint.ports.clock import Clock
from meshpoint.ports.sealer import Sealer

if TYPE_CHECKING:
    from meshpoint.adapters.sql.fast_path import FastPath

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_CLOSE_FLUSH_TIMEOUT = 2.0  # seconds
_LOCK_RETRY_DELAYS = (0.02, 0.05, 0.1)  # seconds
_CONFIRM_BATCH_ITEMS, _CONFIRM_LOCK_BATCH = 4096, 256
_MAX_SHARED_BYTES = 256 * 1024
"""An item with more bytes is not written in a general transaction with others."""
_PackedClaim: TypeAlias = tuple[Claim, Packed]
"""A claim, and its packed outcome."""


class _BatchedStep(Generic[_Item, _Result]):
    """A step of tasks, in batches that concurrent callers share.

    What the fast path does not write is written by general transactions, in batches too. A batch
    waits for no locked row: the items of locked tasks, and large items, have a transaction each.

    Args:
        database: Runs `transact`.
        fast: The step on the fast path, which returns results by position. `None` without one.
        transact: The step as a general transaction.
        task_id: The task of an item.
        size: The size of an item in bytes.
    """

    def __init__(
        self,
        database: Database,
        fast: Callable[[Sequence[_Item]], Awaitable[dict[int, _Result]]] | None,
        transact: Callable[
            [Transaction, Sequence[_Item]], Awaitable[Sequence[_Result | TaskLocked]]
        ],
        task_id: Callable[[_Item], TaskId],
        size: Callable[[_Item], int],
    ) -> None:
        self._database, self._fast, self._transact = database, fast, transact
        self._task_id, self._size = task_id, size
        self._fast_batcher: Batcher[_Item, _Result | None] = Batcher(self._flush_fast, size)
        self._batcher: Batcher[_Item, _Result | None] = Batcher(self._flush, size)

    async def run(self, items: Sequence[_Item], *, fits_fast_path: bool = True) -> list[_Result]:
        """Run the step, and return the results in the order of `items`.

        Raises:
            StoreUnavailable: Nothing was written.
            CommitInDoubt: The store is unavailable, and some items may be written: another
                transaction wrote them, or the fast path did before its connection broke.
        """
        if self._database.locked_rows.recently_locked(map(self._task_id, items)):
            return await self._run_in_transaction(items)
        if self._fast is not None and fits_fast_path:
            results = await self._fast_batcher.put(items)
            if None in results and self._may_share(items):
                await self._write_rest(self._batcher.put, items, results)
        else:
            results = await self._batcher.put(items) if self._may_share(items) else []
            if all(result is None for result in results):  # nothing is written yet
                return await self._run_in_transaction(items)
        if None in results:
            await self._write_rest(self._run_in_transaction, items, results)
        return cast("list[_Result]", results)

    def _may_share(self, items: Sequence[_Item]) -> bool:
        return all(self._size(item) <= _MAX_SHARED_BYTES for item in items)

    async def _write_rest(
        self,
        write: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result | None]]],
        items: Sequence[_Item],
        results: list[_Result | None],
    ) -> None:
        """Write the items without a result, and add their results."""
        places = [place for place, result in enumerate(results) if result is None]
        try:
            written = await write([items[place] for place in places])
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            raise CommitInDoubt(str(error)) from error
        for place, result in zip(places, written, strict=True):
            results[place] = result

    async def close(self) -> None:
        """Abort the batches in progress, and accept no more items."""
        await self._fast_batcher.close()
        await self._batcher.close()

    async def _flush(self, items: Sequence[_Item]) -> Sequence[_Result | None]:
        if self._database.dialect.is_sqlite:
            return await self._run_in_transaction(items)
        locked_rows = self._database.locked_rows
        on_lock = OnLock.SKIP if locked_rows.skip_locked else OnLock.SKIP_TASKS
        try:
            results = await self._database.transact(lambda tx: self._transact(tx, items), on_lock)
        except RowLocked:
            locked_rows.record_timeout()
            return [None] * len(items)
        return [None if isinstance(each, TaskLocked) else each for each in results]

    async def _flush_fast(self, items: Sequence[_Item]) -> Sequence[_Result | None]:
        assert self._fast is not None
        try:
            written = await self._fast(items)
        except RowLocked:
            self._database.locked_rows.record_timeout()
            written = {}
        except NotSeparable:  # the general transaction takes any text
            written = {}
        return [written.get(place) for place in range(len(items))]

    async def _run_in_transaction(self, items: Sequence[_Item]) -> list[_Result]:
        try:
            return self._database.locked_rows.require_unlocked(
                await self._database.write(lambda tx: self._transact(tx, items))
            )
        except RowLocked:
            # The next attempt of these tasks delays no others.
            self._database.locked_rows.record_locked(map(self._task_id, items))
            raise


class SqlStore(SqlDueWork, SqlCatalog, SqlOperations, SqlFleet):
    """Tasks in a SQL database. See `meshpoint.ports.task_store` for the contract of each method.

    On PostgreSQL, ordinary pauses, claims, ends and saves use the fast path. All other steps, and
    all steps on SQLite, run as general transactions.

    Args:
        url: `postgresql://user@host/name` or `sqlite:///file`.
        namespace: Separates meshes that share a database.
        dispatch_lease: How long the replica that commits a message has to send it, before other
            replicas may.
        tombstone_ttl: How long an ended task's row is kept after its end and its deadline.
        parked_limit: How long a task may be parked before it is failed.
        checkpoint_ttl: How long a failed or cancelled operation is kept with its checkpoints.
        checkpoint_history: Number of an operation's latest checkpoints to keep.
        checkpoint_archive: Move checkpoints to an archive on success instead of deleting them.
        keep_security_context: Keep the security context in the last pause of an operation that
            does not complete.
        command_timeout: How long to wait for the database before it counts as unavailable.
        pool_size: Connections to PostgreSQL, in addition to the fast path's. SQLite has one for
            reads and one for writes.
        clock: Replaces the database's clock in tests.
        confirm_linger: How long confirms may wait to be written together; callers do not wait. A
            crash loses them, which only causes resends.
        fast_path: `False` runs every step as a general transaction, as on SQLite.
        max_join_bytes: Limit for the unpacked outcomes of one join. A task above it is resumed
            without them, and fails.
        timeline: Which changes of tasks to record in their timelines. `None`: none.
        lock_timeout: How long a statement on PostgreSQL waits for a lock. After a timeout, the
            step is repeated and skips locked rows.
        sealer: Encrypts what `inventory` lists. Rows in the clear stay readable.
        agent: The agent whose replica uses it. `open` registers its key, and refuses to open
            without a key that has sealed values of the agent.

    Raises:
        ConfigurationError: `url` names no database that Meshpoint supports.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        dispatch_lease: timedelta = timedelta(seconds=5),
        tombstone_ttl: timedelta = timedelta(hours=24),
        parked_limit: timedelta = timedelta(days=30),
        checkpoint_ttl: timedelta = timedelta(days=30),
        checkpoint_history: int = 5,
        checkpoint_archive: bool = False,
        keep_security_context: bool = False,
        command_timeout: timedelta = timedelta(seconds=30),
        pool_size: int = 5,
        clock: Clock | None = None,
        fast_path: bool = True,
        confirm_linger: timedelta = timedelta(),
        lock_timeout: timedelta = LOCK_TIMEOUT,
        max_join_bytes: int = 2_000_000_000,
        timeline: TimelineOptions | None = None,
        sealer: Sealer | None = None,
        agent: AgentName | None = None,
    ) -> None:
        options = StoreOptions(
            names=AgentNames(namespace),
            dispatch_lease=dispatch_lease.total_seconds(),
            tombstone_ttl=tombstone_ttl.total_seconds(),
            parked_limit=parked_limit.total_seconds(),
            checkpoint_ttl=checkpoint_ttl.total_seconds(),
            checkpoint_history=checkpoint_history,
            checkpoint_archive=checkpoint_archive,
            keep_security_context=keep_security_context,
            max_join_bytes=max_join_bytes,
            timeline=timeline,
            codec=Codec(sealer),
        )
        self._database = Database(
            url,
            options=options,
            command_timeout=command_timeout,
            lock_timeout=lock_timeout,
            pool_size=pool_size + FAST_PATH_CONNECTIONS,
            clock=clock,
        )
        self._locked_rows = self._database.locked_rows
        self._agent = agent
        self._clock, self._time = clock, sessions.DatabaseTime()
        self._separate_renewals: dict[Run, asyncio.Task[None]] = {}
        self._command_timeout = command_timeout
        self._fast_path: FastPath | None = None
        if fast_path and not self._database.dialect.is_sqlite:
            from meshpoint.adapters.sql.fast_path import FastPath  # imports PostgreSQL's driver

            self._fast_path = FastPath(
                self._database.engine, options, clock, self._time, self._database.logs
            )
        self._begins: _BatchedStep[tuple[Begin, Packed], BeginResult] = _BatchedStep(
            self._database,
            None,
            checkpointing.begin,
            lambda packed: packed[0].run.task_id,
            lambda packed: len(packed[1] or b""),
        )
        self._pauses = _BatchedStep(
            self._database,
            self._fast_path.pause if self._fast_path else None,
            checkpointing.pause,
            lambda packed: packed.pause.run.task_id,
            lambda packed: packed.size,
        )
        self._appends = _BatchedStep(
            self._database,
            self._fast_path.append if self._fast_path else None,
            appending.append,
            lambda packed: packed.command.run.task_id,
            lambda packed: packed.size,
        )
        self._ends = _BatchedStep(
            self._database,
            self._fast_path.end if self._fast_path else None,
            ending.end,
            lambda packed: packed[0].run.task_id,
            lambda packed: len(packed[1] or b"") + size_of(packed[0].hand_over),
        )
        self._defer_confirms = confirm_linger > timedelta()
        self._confirm_batcher: Batcher[OutboxItem, None] = Batcher(
            self._confirm_batch,
            linger=confirm_linger.total_seconds(),
            max_items=_CONFIRM_BATCH_ITEMS,
        )

    @property
    def database(self) -> Database:
        """The connections, for commands that read or change rows themselves."""
        return self._database

    @property
    def durable(self) -> bool:
        """`True`: tasks in this store outlive the process."""
        return True

    @property
    def current_time(self) -> datetime | None:
        """The current time by the database's clock, without I/O.

        `None` if unknown, and on SQLite, where the database uses the host's clock.
        """
        return self._time.current_time if self._clock is None else self._clock.now()

    @property
    def clock_offset(self) -> timedelta | None:
        """How far the database's clock is ahead of this host's, without I/O. `None` if unknown."""
        known = None if self._clock is not None else self._time.current_time
        return None if known is None else known - datetime.now(UTC)

    async def open(self) -> None:
        """Connect and check the schema. Creates it in an empty SQLite file.

        Raises:
            ConfigurationError: The schema is outdated, or the database refuses the connection.
            StoreUnavailable: The database does not respond.
        """
        try:
            if self._database.dialect.is_sqlite:
                await self._database.transact(
                    lambda tx: tx.connection.run_sync(tables.create_if_empty)
                )
            else:
                await sessions.check_session(self._database.engine, self._time)
            revision = await self._database.read(
                lambda tx: tx.connection.run_sync(tables.recorded_revision)
            )
        except driver_errors(StoreUnavailable) as error:
            refusal = as_configuration_error(
                error.__cause__ if isinstance(error, StoreUnavailable) else error
            )
            if refusal is None:
                raise
            raise refusal from error
        if tables.is_outdated(revision):
            problem = f"the database's tables are at revision {revision or 'none'}"
            fix = "run: meshpoint db upgrade --db URL (or --config FILE)"
            raise ConfigurationError("database", problem, fix)
        if self._agent is not None:
            agent = self._database.options.names.qualified(self._agent)
            await self._database.transact(lambda tx: key_register.check(tx, agent))

    async def finds_lease(self, lease_id: int) -> bool:
        """Whether the queues that have this lease are in this database, and can be written."""
        return self._fast_path is not None and await self._fast_path.finds_lease(lease_id)

    async def close(self) -> None:
        """Write the pending confirms for up to two seconds, then release every connection."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_FLUSH_TIMEOUT):
                    await self.flush_confirms()
        finally:
            self._database.stop_waiting()
        for batched in (
            self._begins,
            self._pauses,
            self._appends,
            self._ends,
            self._confirm_batcher,
        ):
            await batched.close()
        waiting = list(self._separate_renewals.values())
        for renewing in waiting:
            renewing.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._fast_path is not None:
            await self._fast_path.close()
        await self._database.close()

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, ExistingTask]:
        """Read the tasks that have a row, by id."""
        names, ids = self._database.options.names, sorted(set(task_ids))
        if not ids:
            return {}
        if self._fast_path is not None:
            rows = await self._fast_path.lookup(ids)
        else:
            rows = await self._database.fetch(sql.LOOKUP, ids=ids)
        found: dict[TaskId, ExistingTask] = {}
        for row in rows:
            found[row.logical_task_id] = await existing_task_from_row(
                row, names, self._database.options.codec
            )
        return found

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Insert tasks before their first segment, as running or, if queued, as ready.

        In batches shared with concurrent callers.
        """
        if not begins:
            return []
        packed = [
            (
                command,
                await self._pack(
                    command.request, inventory.REQUEST, command.run.agent, command.run.task_id
                ),
            )
            for command in begins
        ]
        return await self._begins.run(packed)

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Write checkpoints, in batches shared with concurrent callers."""
        options = self._database.options
        packed = [await checkpointing.PackedPause.pack(command, options) for command in pauses]
        fits = all(command.fits_fast_path for command in packed)
        return await self._pauses.run(packed, fits_fast_path=fits)

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        """Append to the logs of running tasks, in batches shared with concurrent callers."""
        options = self._database.options
        return await self._appends.run(
            [await PackedAppend.pack(command, options) for command in appends]
        )

    async def _pack(
        self, value: bytes | None, column: Sealed, agent: AgentName, *keys: str
    ) -> Packed:
        options = self._database.options
        return await options.codec.pack(value, column, options.names.qualified(agent), *keys)

    async def claim(
        self, claims: Sequence[Claim], replica: Replica, slots: int
    ) -> list[ClaimResult]:
        """Record outcomes, one claim per call, and acquire tasks whose joins are met."""
        if not claims:
            return []
        options = self._database.options
        outcomes = await outcome_columns(
            ((command.task_id, command.sub_task_id, command.outcome) for command in claims),
            options.codec,
            options.names.qualified(replica.agent),
        )
        packed = list(zip(claims, outcomes, strict=True))
        if len({command.id for command in claims}) < len(claims):
            firsts: dict[str, _PackedClaim] = {}
            for command, outcome in packed:
                firsts.setdefault(command.id, (command, outcome))
            packed = list(firsts.values())
        results, owned = list[ClaimResult](), dict[str, OwnedTask]()
        for part in split_by_size(packed, [len(outcome or b"") for _, outcome in packed]):
            recorded, acquired = await self._claim_part(part, replica, slots - len(owned))
            results += recorded
            owned |= acquired
        if len(packed) < len(claims):
            results = _add_duplicates(claims, results)
        if locked_ids := [each.task_id for each in results if isinstance(each, TaskLocked)]:
            self._locked_rows.record_locked(locked_ids)
        return claiming.with_tasks(results, await self._read_claimed(owned, replica))

    async def _read_claimed(self, owned: OwnedTasks, replica: Replica) -> dict[str, Resumable]:
        try:
            return await self._decode_owned(owned, replica)
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            raise CommitInDoubt(f"recorded outcomes, but cannot read tasks: {error}") from error

    async def _claim_part(
        self, packed: Sequence[_PackedClaim], replica: Replica, slots: int
    ) -> tuple[list[ClaimResult], OwnedTasks]:
        results, owned = dict[int, ClaimResult](), dict[str, OwnedTask]()
        if self._fast_path is not None:
            try:
                results, owned = await self._fast_path.claim(
                    packed, replica, slots, self._locked_rows
                )
            except RowLocked:
                self._locked_rows.record_timeout()
            except NotSeparable:  # the general transaction takes any text
                pass
        if rest := [place for place in range(len(packed)) if place not in results]:
            others, acquired = await self._claim_in_transaction(
                [packed[place] for place in rest], replica, slots - len(owned), owned
            )
            results.update(zip(rest, others, strict=True))
            owned |= acquired
        return [results[place] for place in range(len(packed))], owned

    async def _claim_in_transaction(
        self,
        packed: Sequence[_PackedClaim],
        replica: Replica,
        slots: int,
        acquired_before: OwnedTasks,
    ) -> tuple[list[ClaimResult], OwnedTasks]:
        unread = {task_id: task.row.fence for task_id, task in acquired_before.items()}
        results, owned = await self._database.write(
            lambda tx: claiming.claim(tx, packed, replica, slots, unread)
        )
        # Replicas lock a join's rows only briefly; longer locks belong to people.
        for pause in _LOCK_RETRY_DELAYS:
            locked = [place for place, each in enumerate(results) if isinstance(each, TaskLocked)]
            known = self._locked_rows.recently_locked(packed[place][0].task_id for place in locked)
            again = [place for place in locked if packed[place][0].task_id not in known]
            if not again:
                break
            await asyncio.sleep(pause)
            others, acquired = await self._database.write(
                partial(
                    claiming.claim,
                    claims=[packed[place] for place in again],
                    replica=replica,
                    slots=slots - len(owned),
                    unread=unread,
                )
            )
            for place, result in zip(again, others, strict=True):
                results[place] = result
            owned |= acquired
        return results, owned

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn running tasks into tombstones, in batches shared with concurrent callers."""
        packed = [
            (
                command,
                await self._pack(
                    command.reply, inventory.REPLY, command.run.agent, command.run.task_id
                ),
            )
            for command in ends
        ]
        return await self._ends.run(packed)

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks in any state. Unknown tasks get a tombstone."""
        if not cancels:
            return []
        packed = [
            (
                command,
                await self._pack(command.reply, inventory.REPLY, command.agent, command.task_id),
            )
            for command in cancels
        ]
        return await self._database.write(lambda tx: ending.cancel(tx, packed))

    async def attach(self, attaches: Sequence[Attach]) -> list[AttachResult]:
        """Add a reply address to tasks that have not ended."""
        if not attaches:
            return []
        return await self._database.write(lambda tx: attaching.attach(tx, attaches))

    async def find_dispatches(
        self, calls: Sequence[tuple[TaskId, TaskId]]
    ) -> list[Dispatch | None]:
        """Read the requests of calls as they were sent; `None` if a call is not pending."""
        if not calls:
            return []
        keys = json.dumps(sorted(set(calls)))
        found = {
            (row.logical_task_id, row.sub_task_id): await dispatch_from_row(
                row, self._database.options.names, self._database.options.codec, row.send_attempts
            )
            for row in await self._database.fetch(sql.READ_REQUESTS, pairs=keys)
        }
        return [found.get(call) for call in calls]

    async def find_questions(self, keys: Sequence[QuestionKey]) -> list[AskedQuestion | None]:
        """Read the questions with these keys; `None` for a key that its task has not asked."""
        if not keys:
            return []
        found = await mailbox.find_questions(self._database, keys)
        return [found.get(key) for key in keys]

    async def signal(self, signals: Sequence[SendSignal]) -> list[MailResult]:
        """Keep signals, and deliver them to tasks that wait for them."""
        if not signals:
            return []
        packed = [
            (
                command,
                await self._pack(
                    command.value,
                    inventory.SIGNAL_VALUE,
                    command.agent,
                    command.task_id,
                    command.id,
                ),
            )
            for command in signals
        ]
        return await self._database.write(lambda tx: mailbox.signal(tx, packed))

    async def answer(self, answers: Sequence[RecordAnswer]) -> list[MailResult]:
        """Record answers to questions, or keep them for the next wait."""
        if not answers:
            return []
        options = self._database.options
        packed = [
            (command, outcome)
            for command in answers
            for outcome in await outcome_columns(
                [(command.key.task_id, command.key.sub_task_id, command.outcome)],
                options.codec,
                options.names.qualified(command.key.agent),
                inventory.ANSWER,
            )
        ]
        return await self._database.write(lambda tx: mailbox.answer(tx, packed))

    async def set_value(self, command: SetValue) -> SaveResult | TooManyValues:
        """Set a value of the task running under exactly this fence."""
        run = command.run
        packed = await self._pack(
            command.value, inventory.VALUE, run.agent, run.task_id, command.key
        )
        return await self._database.write(lambda tx: mailbox.set_value(tx, command, packed))

    async def value(self, task_id: TaskId, agent: AgentName, key: str) -> StoredValue | None:
        """Read a value of a task; `None` if the agent has no such task."""
        return await mailbox.read_value(self._database, task_id, agent, key)

    async def mailbox(self, task_id: TaskId) -> Mailbox:
        """Read what is kept for a task."""
        return await mailbox.read_mailbox(self._database, task_id)

    async def record_progress(self, updates: Sequence[Progress]) -> list[ProgressRecorded | None]:
        """Extend idle deadlines, and return the requesters to forward the updates to."""
        if not updates:
            return []
        keys = json.dumps(sorted({(update.task_id, update.sub_task_id) for update in updates}))
        pending = {
            (row.logical_task_id, row.sub_task_id, row.peer_agent): row
            for row in await self._database.fetch(sql.READ_PROGRESS, pairs=keys)
        }
        calls = [
            pending.get((update.task_id, update.sub_task_id, update.sender)) for update in updates
        ]
        if deadlines := expiring.extensions(calls):
            await self._database.write(
                lambda tx: tx.execute_many(sql.EXTEND_IDLE_DEADLINE, deadlines)
            )
        return [
            None
            if row is None
            else ProgressRecorded(
                update.task_id,
                requester_from_row(row),
                None
                if row.call_idle_timeout is None
                else timedelta(seconds=row.call_idle_timeout),
                followers_from_row(row),
            )
            for update, row in zip(updates, calls, strict=True)
        ]

    async def store_replies(self, replies: Sequence[StoreReply]) -> list[bool]:
        """Store replies of tasks without a row, to be sent later. Returns whether each will be."""
        if not replies:
            return []
        packed = [
            (
                command,
                await self._pack(
                    command.reply.body,
                    inventory.REPLY,
                    command.reply.agent,
                    command.reply.task_id,
                ),
            )
            for command in replies
        ]
        return self._locked_rows.require_unlocked(
            await self._database.transact(lambda tx: outbox.store_replies(tx, packed))
        )

    async def confirm_sent(self, sent: Sequence[OutboxItem]) -> None:
        """Record messages as sent, since the broker confirmed them.

        With `confirm_linger`, returns at once, and the records are written later with others.
        """
        if self._defer_confirms:
            self._confirm_batcher.put_nowait(sent)
        else:
            await self._confirm_batcher.put(sent)

    async def record_unroutable(self, calls: Sequence[UnroutableCall]) -> None:
        """Record that the broker returned requests because their peers have no queues."""
        if calls:
            await self._database.write(lambda tx: outbox.record_unroutable(tx, calls))

    async def flush_confirms(self) -> None:
        """Wait until all confirms added so far are written or lost."""
        await self._confirm_batcher.flush()

    async def _confirm_batch(self, sent: Sequence[OutboxItem]) -> Sequence[None]:
        rest = sent
        if self._fast_path is not None:
            dispatches, replies, singly = _by_kind(sent)
            left, locked_sends = await self._fast_path.confirm_dispatched(dispatches)
            await self._fast_path.confirm_replied(replies)
            if self._defer_confirms:
                self._confirm_batcher.put_back(locked_sends)
            else:
                left += locked_sends
            rest = [*left, *singly]
        by_task: dict[TaskId, list[OutboxItem]] = {}
        for send in rest:
            by_task.setdefault(send.task_id, []).append(send)
        tasks = list(by_task.values())
        for first in range(0, len(tasks), _CONFIRM_LOCK_BATCH):
            part = [*chain.from_iterable(tasks[first : first + _CONFIRM_LOCK_BATCH])]
            await self._database.write(partial(outbox.confirm_sent, sent=part))
        return [None] * len(sent)


def _by_kind(
    sent: Sequence[OutboxItem],
) -> tuple[list[Dispatch], list[Reply], list[OutboxItem]]:
    """Separate the requests and replies that are confirmed together from the other messages."""
    dispatches, replies, others = list[Dispatch](), list[Reply](), list[OutboxItem]()
    for send in sent:
        if isinstance(send, Reply):
            replies.append(send)
        elif isinstance(send, Dispatch) and not send.is_retry:
            dispatches.append(send)
        else:
            others.append(send)
    return dispatches, replies, others


def _add_duplicates(claims: Sequence[Claim], results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Add results for claims with an id that occurred before in the batch.

    `results` has one result per id, in order of first occurrence.
    """
    left, firsts = iter(results), dict[str, ClaimResult]()
    found: list[ClaimResult] = []
    for claim in claims:
        first = firsts.get(claim.id)
        if first is None:
            first = firsts[claim.id] = next(left)
        elif not isinstance(first, UnknownCall | WrongSender | TaskLocked):
            first = DuplicateOutcome(claim.task_id, claim.sub_task_id)
        found.append(first)
    return found
