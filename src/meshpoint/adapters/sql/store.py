"""The task store on PostgreSQL and SQLite."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from meshpoint.adapters.sql import (
    catalog,
    checkpointing,
    claiming,
    due,
    ending,
    expiring,
    outbox,
    owning,
    progress,
    schema,
)
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.batcher import Batcher, split_by_size
from meshpoint.adapters.sql.claiming import Acquired
from meshpoint.adapters.sql.codec import pack
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.due_rows import DueQuery, process_due
from meshpoint.adapters.sql.engine import FAST_PATH_CONNECTIONS, LOCK_TIMEOUT
from meshpoint.adapters.sql.expiring import ExpireResults
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors
from meshpoint.adapters.sql.locked_rows import LockedRows
from meshpoint.adapters.sql.locking import StoreOptions
from meshpoint.adapters.sql.operations import SqlOperations
from meshpoint.adapters.sql.owning import OwnedTasks
from meshpoint.adapters.sql.rows import (
    AgentNames,
    dispatch_from_row,
    encode_pairs,
    existing_task_from_row,
    outcome_columns,
    run_from_row,
)
from meshpoint.adapters.sql.time import DatabaseTime
from meshpoint.errors import CommitInDoubt, ConfigurationError, RowLocked, StoreUnavailable
from meshpoint.model.checkpoint import (
    Arrival,
    Begin,
    BeginResult,
    CallSummary,
    Cancel,
    CancelNotice,
    CancelResult,
    Claim,
    Dispatch,
    Due,
    Duplicate,
    End,
    EndResult,
    Expired,
    KeepAlive,
    KeepReply,
    Known,
    Locked,
    Pause,
    PauseResult,
    Progress,
    ProgressNoted,
    Release,
    Replica,
    Reply,
    Resumable,
    Run,
    Send,
    TaskState,
    TaskSummary,
    Unknown,
    WrongSender,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.ports.clock import Clock

if TYPE_CHECKING:
    from meshpoint.adapters.sql.fast_path import FastPath

log = logging.getLogger("meshpoint.store")

Item = TypeVar("Item")
Result = TypeVar("Result")
_CLOSE_FLUSH_TIMEOUT = 2.0  # seconds
_LOCK_RETRY_DELAYS = (0.02, 0.05, 0.1)  # seconds
_LOCK_WARNING_DELAY = 1.0
"""Seconds after which a lease that waits for a locked row is logged."""
_MAX_SEPARATE_RENEWALS = 4
"""Maximum leases that wait for locked rows at a time, each on its own connection."""
_CONFIRM_BATCH_ITEMS, _CONFIRM_LOCK_BATCH = 4096, 256
PackedPauseAndRequest: TypeAlias = tuple[checkpointing.PackedPause, bytes | None]
"""A packed pause, and the packed request of its task."""
PackedEnd: TypeAlias = tuple[End, bytes | None]
"""An end, and its packed reply."""


class SqlStore(SqlOperations):
    """Tasks in a SQL database. See `meshpoint.ports.task_store` for the contract of each method.

    On PostgreSQL, ordinary pauses, claims, ends and saves use the fast path. All other steps, and
    all steps on SQLite, run as general transactions.

    Args:
        url: `postgresql://user@host/name` or `sqlite:///file`.
        namespace: Separates meshes that share a database.
        dispatch_lease: How long the replica that commits a message has to send it, before other
            replicas may.
        tombstone_ttl: How long an ended task's row is kept after its end and its deadline.
        incompatible_limit: How long replicas may fail to read a task's state before it is parked.
        checkpoint_ttl: How long a failed or cancelled operation is kept with its checkpoints.
        checkpoint_history: Number of an operation's latest checkpoints to keep.
        checkpoint_archive: Move checkpoints to an archive on success instead of deleting them.
        command_timeout: How long to wait for the database before it counts as unavailable.
        pool_size: Connections to PostgreSQL, in addition to the fast path's. SQLite has one for
            reads and one for writes.
        clock: Replaces the database's clock in tests.
        confirm_linger: How long sent marks may wait to be written together; callers do not wait. A
            crash loses them, which only causes resends.
        fast_path: `False` runs every step as a general transaction, as on SQLite.
        max_join_bytes: Limit for the unpacked outcomes of one join. A task above it is resumed
            without them, and fails.
        lock_timeout: How long a statement on PostgreSQL waits for a lock. After a timeout, the
            step is repeated and skips locked rows.

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
        incompatible_limit: timedelta = timedelta(hours=1),
        checkpoint_ttl: timedelta = timedelta(days=30),
        checkpoint_history: int = 5,
        checkpoint_archive: bool = False,
        command_timeout: timedelta = timedelta(seconds=30),
        pool_size: int = 5,
        clock: Clock | None = None,
        fast_path: bool = True,
        confirm_linger: timedelta = timedelta(),
        lock_timeout: timedelta = LOCK_TIMEOUT,
        max_join_bytes: int = 2_000_000_000,
    ) -> None:
        self._database = Database(
            url,
            command_timeout=command_timeout,
            lock_timeout=lock_timeout,
            pool_size=pool_size + FAST_PATH_CONNECTIONS,
            clock=clock,
        )
        self._options = StoreOptions(
            names=AgentNames(namespace),
            dispatch_lease=dispatch_lease.total_seconds(),
            tombstone_ttl=tombstone_ttl.total_seconds(),
            incompatible_limit=incompatible_limit.total_seconds(),
            checkpoint_ttl=checkpoint_ttl.total_seconds(),
            checkpoint_history=checkpoint_history,
            checkpoint_archive=checkpoint_archive,
            max_join_bytes=max_join_bytes,
        )
        self._locked_rows = LockedRows()
        self._clock, self._time = clock, DatabaseTime()
        self._separate_renewals: dict[Run, asyncio.Task[None]] = {}
        self._command_timeout = command_timeout
        self._fast_path = self._make_fast_path() if fast_path and not self._database.dialect.is_sqlite else None
        self._pause_batcher: Batcher[PackedPauseAndRequest, PauseResult | None] = Batcher(
            self._pause_batch, lambda command: command[0].size
        )
        self._end_batcher: Batcher[PackedEnd, EndResult | None] = Batcher(
            self._end_batch, lambda wish: len(wish[1] or b"")
        )
        self._defer_confirms = confirm_linger > timedelta()
        self._confirm_batcher: Batcher[Send, None] = Batcher(
            self._confirm_batch, linger=confirm_linger.total_seconds(), max_items=_CONFIRM_BATCH_ITEMS
        )

    def _make_fast_path(self) -> FastPath:
        from meshpoint.adapters.sql.fast_path import FastPath  # imports PostgreSQL's driver

        return FastPath(self._database.engine, self._options, self._clock, self._time)

    @property
    def durable(self) -> bool:
        """`True`: tasks in this store outlive the process."""
        return True

    @property
    def present(self) -> datetime | None:
        """The current time by the database's clock, without I/O.

        `None` if unknown, and on SQLite, where the database uses the host's clock.
        """
        return self._time.current_time if self._clock is None else self._clock.now()

    async def open(self) -> None:
        """Connect and check the schema. Creates it in an empty SQLite file.

        Raises:
            ConfigurationError: The schema is outdated, or the database refuses the connection.
            StoreUnavailable: The database does not respond.
        """
        try:
            if self._database.dialect.is_sqlite:
                await self._database.write(lambda tx: tx.connection.run_sync(schema.create_if_empty))
            await self._database.check_session(self._time)
            revision = await self._database.read(lambda tx: tx.connection.run_sync(schema.recorded_revision))
        except driver_errors(StoreUnavailable) as error:
            refusal = as_configuration_error(error.__cause__ if isinstance(error, StoreUnavailable) else error)
            if refusal is None:
                raise
            raise refusal from error
        if schema.is_outdated(revision):
            problem = f"the database's tables are at revision {revision or 'none'}"
            fix = "run: meshpoint db upgrade --db URL (or --config FILE)"
            raise ConfigurationError("session_db_url", problem, fix)

    async def close(self) -> None:
        """Write pending sent marks for up to two seconds, then release every connection."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_FLUSH_TIMEOUT):
                    await self.marks_written()
        finally:
            self._database.stop_waiting()
        for batcher in (self._pause_batcher, self._end_batcher, self._confirm_batcher):
            await batcher.close()
        waiting = list(self._separate_renewals.values())
        for renewing in waiting:
            renewing.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._fast_path is not None:
            await self._fast_path.close()
        await self._database.close()

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, Known]:
        """Read the tasks that have a row, by id."""
        names, ids = self._options.names, sorted(set(task_ids))
        if not ids:
            return {}
        if self._fast_path is not None:
            rows = await self._fast_path.lookup(ids)
        else:
            rows = await self._database.read(lambda tx: tx.fetch(sql.LOOKUP, ids=ids))
        return {TaskId(row.logical_task_id): await existing_task_from_row(row, names) for row in rows}

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Insert tasks before their first segment, as running or, if queued, as ready."""
        if not begins:
            return []
        packed = [(command, await pack(command.request)) for command in begins]
        return self._require_unlocked(await self._write(lambda tx: checkpointing.begin(tx, packed, self._options)))

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Write checkpoints, in batches shared with concurrent callers."""
        packed = [(await checkpointing.PackedPause.pack(command), await pack(command.request)) for command in pauses]
        locked_ids = self._locked_rows.recently_locked(wish.run.task_id for wish in pauses)
        if self._fast_path is not None and (locked_ids or not all(wish.fits_fast_path for wish, _ in packed)):
            return await self._pause_in_transaction(packed)
        return await self._complete_in_transaction(
            packed, await self._pause_batcher.put(packed), self._pause_in_transaction
        )

    async def _pause_batch(self, packed: Sequence[PackedPauseAndRequest]) -> Sequence[PauseResult | None]:
        if self._fast_path is None:
            return await self._pause_in_transaction(packed)
        try:
            moved = await self._fast_path.pause(packed)
        except RowLocked:
            self._locked_rows.record_timeout()
            moved = {}
        return [moved.get(place) for place in range(len(packed))]

    async def _pause_in_transaction(self, packed: Sequence[PackedPauseAndRequest]) -> list[PauseResult]:
        with self._recording_locked(command.pause.run.task_id for command, _ in packed):
            return self._require_unlocked(
                await self._write(lambda tx: checkpointing.pause(tx, packed, self._options))
            )

    @contextmanager
    def _recording_locked(self, task_ids: Iterable[TaskId]) -> Iterator[None]:
        """Remember the tasks if a row is locked, so that their next attempt delays no others."""
        try:
            yield
        except RowLocked:
            self._locked_rows.record_locked(task_ids)
            raise

    def _require_unlocked(self, results: Sequence[Result | Locked]) -> list[Result]:
        """Return `results` if no other session holds a task among them.

        Raises:
            RowLocked: Another session holds a task. The other tasks are written; repeating the
                call finds them.
        """
        locked_ids = {result.task_id for result in results if isinstance(result, Locked)}
        if locked_ids:
            self._locked_rows.record_locked(locked_ids)
            raise RowLocked(f"another session holds {', '.join(sorted(locked_ids)[:3])}")
        return [result for result in results if not isinstance(result, Locked)]

    async def claim(self, claims: Sequence[Claim], replica: Replica, slots: int) -> list[Arrival]:
        """Record outcomes, one claim per call, and acquire tasks whose joins are met."""
        if not claims:
            return []
        outcomes = await outcome_columns(wish.outcome for wish in claims)
        firsts: dict[str, tuple[Claim, bytes | None]] = {}
        for command, outcome in zip(claims, outcomes, strict=True):
            firsts.setdefault(command.id, (command, outcome))
        packed = list(firsts.values())
        results: list[Arrival | Acquired] = []
        owned = OwnedTasks()
        for part in split_by_size(packed, [len(outcome or b"") for _, outcome in packed]):
            arrivals = await self._claim_part(part, replica, slots - len(owned.tasks))
            results += arrivals.results
            owned = owned.merged_with(arrivals.owned)
        if len(packed) < len(claims):
            results = _add_duplicates(claims, results)
        if locked_ids := [each.task_id for each in results if isinstance(each, Locked)]:
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
        self, packed: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int
    ) -> claiming.ClaimResults:
        moved: dict[int, Arrival | Acquired] = {}
        owned = OwnedTasks()
        locked_ids = self._locked_rows.recently_locked(command.task_id for command, _ in packed)
        free = (
            [place for place, (wish, _) in enumerate(packed) if wish.task_id not in locked_ids]
            if locked_ids
            else None
        )
        if self._fast_path is not None and free != []:
            some = packed if free is None else [packed[place] for place in free]
            try:
                moved, owned = await self._fast_path.claim(
                    some, replica, slots, skip_locked=self._locked_rows.skip_locked
                )
            except RowLocked:
                self._locked_rows.record_timeout()
        if free is not None:
            moved = {free[place]: arrival for place, arrival in moved.items()}
        if len(moved) == len(packed):
            return claiming.ClaimResults([moved[place] for place in range(len(packed))], owned)
        rest = [packed[place] for place in range(len(packed)) if place not in moved]
        arrivals = await self._claim_in_transaction(rest, replica, slots - len(owned.tasks))
        results = iter(arrivals.results)
        in_order = [moved[place] if place in moved else next(results) for place in range(len(packed))]
        return claiming.ClaimResults(in_order, owned.merged_with(arrivals.owned))

    async def _claim_in_transaction(
        self, packed: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int
    ) -> claiming.ClaimResults:
        arrivals = await self._write(lambda tx: claiming.claim(tx, packed, replica, slots, self._options))
        # Replicas lock a join's rows only briefly; longer locks belong to people.
        for pause in _LOCK_RETRY_DELAYS:
            locked = [place for place, each in enumerate(arrivals.results) if isinstance(each, Locked)]
            known = self._locked_rows.recently_locked(packed[place][0].task_id for place in locked)
            again = [place for place in locked if packed[place][0].task_id not in known]
            if not again:
                break
            await asyncio.sleep(pause)
            commands, left = [packed[place] for place in again], slots - len(arrivals.owned.tasks)
            found = await self._write(
                partial(claiming.claim, claims=commands, replica=replica, slots=left, options=self._options)
            )
            for place, verdict in zip(again, found.results, strict=True):
                arrivals.results[place] = verdict
            arrivals = claiming.ClaimResults(arrivals.results, arrivals.owned.merged_with(found.owned))
        return arrivals

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn running tasks into tombstones, in batches shared with concurrent callers."""
        packed = [(command, await pack(command.reply)) for command in ends]
        if self._fast_path is not None and self._locked_rows.recently_locked(wish.run.task_id for wish in ends):
            return await self._end_in_transaction(packed)
        return await self._complete_in_transaction(
            packed, await self._end_batcher.put(packed), self._end_in_transaction
        )

    async def _end_batch(self, packed: Sequence[PackedEnd]) -> Sequence[EndResult | None]:
        if self._fast_path is None:
            return await self._end_in_transaction(packed)
        try:
            moved = await self._fast_path.end(packed)
        except RowLocked:
            self._locked_rows.record_timeout()
            moved = {}
        return [moved.get(place) for place in range(len(packed))]

    async def _end_in_transaction(self, packed: Sequence[PackedEnd]) -> list[EndResult]:
        with self._recording_locked(command.run.task_id for command, _ in packed):
            return self._require_unlocked(await self._write(lambda tx: ending.end(tx, packed, self._options)))

    async def _complete_in_transaction(
        self,
        items: Sequence[Item],
        fast_results: Sequence[Result | None],
        in_transaction: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
    ) -> list[Result]:
        """Process items without a fast-path result in a general transaction.

        Returns all results in the order of `items`.

        Raises:
            CommitInDoubt: The store is unavailable. The fast path may have written an item before
                its connection broke, so `StoreUnavailable` would be wrong.
        """
        rest = [item for item, result in zip(items, fast_results, strict=True) if result is None]
        if not rest:
            return [result for result in fast_results if result is not None]
        try:
            answers = iter(await in_transaction(rest))
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            raise CommitInDoubt(str(error)) from error
        return [next(answers) if result is None else result for result in fast_results]

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Make running tasks ready again, or park them. `False` for a run that lost its task."""
        if not releases:
            return []
        return self._require_unlocked(await self._write(lambda tx: ending.release(tx, releases, self._options)))

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks in any state. Unknown tasks get a tombstone."""
        if not cancels:
            return []
        packed = [(command, await pack(command.reply)) for command in cancels]
        return await self._write(lambda tx: ending.cancel(tx, packed, self._options))

    async def requested(self, calls: Sequence[tuple[TaskId, TaskId]]) -> list[Dispatch | None]:
        """Read the requests of calls as they were sent; `None` for a missing call."""
        keys = encode_pairs(sorted(set(calls)))
        rows = await self._database.read(lambda tx: tx.fetch(sql.READ_REQUESTS, pairs=keys)) if calls else []
        found = {
            (row.logical_task_id, row.sub_task_id): await dispatch_from_row(
                row, self._options.names, row.send_attempts
            )
            for row in rows
        }
        return [found.get(call) for call in calls]

    async def progress(self, updates: Sequence[Progress]) -> list[ProgressNoted | None]:
        """Extend idle deadlines, and return the requesters to forward the updates to."""
        if not updates:
            return []
        calls = await self._database.read(lambda tx: progress.read_calls(tx, updates))
        deadlines = progress.extensions(calls)
        if deadlines:
            await self._write(lambda tx: progress.extend(tx, deadlines))
        return [progress.progress_result(update, row) for update, row in zip(updates, calls, strict=True)]

    async def due(self, replica: Replica, limit: int) -> Due:
        """Count the due work of each kind, up to `limit`, without locks."""
        return await self._database.read(lambda tx: due.count_due(tx, replica, limit, self._options))

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Close calls and joins past their deadline, and acquire tasks whose joins are met."""

        async def body(tx: Transaction, only: str | None, before: Sequence[ExpireResults]) -> ExpireResults:
            left = slots - len(ExpireResults.merge(before).acquired)
            return await expiring.expire(tx, replica, limit, left, self._options, only)

        query = expiring.pick_expired(replica, limit, self._options)
        found = await process_due(self._write, [query], [sql.POSTPONE_TASK], body)
        expiries = ExpireResults.merge(found)
        return expiries.with_tasks(await self._decode_owned(expiries.owned, replica))

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Acquire ready tasks, including at most `suspects` suspects."""
        return await self._acquire_due(
            due.acquire, due.pick_ready(replica, limit, suspects, self._options), replica, limit, suspects
        )

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Rescue running tasks whose lease has expired, including at most `suspects` suspects."""
        query = due.pick_lost(replica, limit, self._options)
        return await self._acquire_due(due.rescue, query, replica, limit, suspects)

    async def _acquire_due(
        self,
        acquire: Callable[..., Awaitable[OwnedTasks]],
        query: DueQuery,
        replica: Replica,
        limit: int,
        suspects: int,
    ) -> list[Resumable]:
        async def body(tx: Transaction, only: str | None, before: Sequence[OwnedTasks]) -> OwnedTasks:
            left = suspects - OwnedTasks.merge(before).suspect_count
            return await acquire(tx, replica, limit, left, self._options, only)

        found = await process_due(self._write, [query], [sql.POSTPONE_TASK], body)
        return list((await self._decode_owned(OwnedTasks.merge(found), replica)).values())

    async def owned(self, run: Run) -> Resumable | None:
        """Read the task owned by exactly this run. `None` if the run has lost it."""
        owned = await self._database.read(lambda tx: owning.read_owned_by(tx, run))
        return (await self._decode_owned(owned)).get(run.task_id)  # its owner renews the lease

    async def _decode_owned(self, owned: OwnedTasks, replica: Replica | None = None) -> dict[str, Resumable]:
        """Decode owned tasks, and release the unreadable ones to other replicas.

        If outcomes are too large to read at once, the leases of `replica` are renewed meanwhile.
        """
        if not owned.with_unread_outcomes:
            return await self._decode_or_release(owned)
        if replica is None:
            return await self._decode_or_release(await self._read_large_outcomes(owned))
        runs = [run_from_row(row, self._options.names) for row in owned.tasks.values()]
        renewal = asyncio.create_task(self._keep_renewing(runs, replica))
        try:
            return await self._decode_or_release(await self._read_large_outcomes(owned))
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)

    async def _read_large_outcomes(self, owned: OwnedTasks) -> OwnedTasks:
        tasks, calls = dict(owned.tasks), dict(owned.calls)
        for row in owned.with_unread_outcomes:
            if row.outcome_bytes <= self._options.max_join_bytes:
                try:
                    calls[row.logical_task_id] = await owning.read_outcomes_in_parts(self._database, row)
                except LookupError:  # another run owns the task now
                    del tasks[row.logical_task_id]
                except StoreUnavailable:
                    raise
                except Exception:  # one damaged task must not stop the others
                    log.exception("task %s: cannot read its calls' outcomes", row.logical_task_id)
                    del tasks[row.logical_task_id]
        return OwnedTasks(tasks, calls)

    async def _keep_renewing(self, runs: Sequence[Run], replica: Replica) -> None:
        """Extend the leases of `runs` every third of a lease, until cancelled."""
        while True:
            await asyncio.sleep(replica.lease.total_seconds() / 3)
            with suppress(StoreUnavailable):
                await self.renew(runs, replica)

    async def _decode_or_release(self, owned: OwnedTasks) -> dict[str, Resumable]:
        again = timedelta(seconds=self._options.dispatch_lease)
        readable, unreadable = await owned.decode(self._options.names, again, self._options.max_join_bytes)
        for release in unreadable:
            try:
                await self.release([release])
            except Exception as error:
                log.warning(
                    "task %s: cannot release it; its lease will expire: %s",
                    release.run.task_id,
                    error,
                )
        return readable

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases, and return the runs that no longer own their task.

        A lease on a locked row is extended separately, as soon as the row is free.
        """
        if not runs:
            return []
        renewals = await self._write(lambda tx: due.renew(tx, runs, replica))
        for run in renewals.locked:
            if run not in self._separate_renewals and len(self._separate_renewals) < _MAX_SEPARATE_RENEWALS:
                self._separate_renewals[run] = asyncio.create_task(self._renew_when_unlocked(run, replica))
        return renewals.lost

    async def _renew_when_unlocked(self, run: Run, replica: Replica) -> None:
        lock_timeout = self._command_timeout * 0.9
        # Delayed, because this process's own transactions also lock rows for a moment.
        text = "task %s: another session holds its row; its lease is extended later"
        warning = asyncio.get_running_loop().call_later(_LOCK_WARNING_DELAY, log.warning, text, run.task_id)
        try:
            with suppress(StoreUnavailable):  # the next renewal tries again
                await self._database.write(lambda tx: due.renew_when_unlocked(tx, run, replica, lock_timeout))
        finally:
            warning.cancel()
            del self._separate_renewals[run]

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """Return due keep-alives of paused tasks, and set when the next ones are due."""

        async def body(tx: Transaction, only: str | None, before: object) -> list[KeepAlive]:
            return await due.keep_alives(tx, replica, limit, self._options, only)

        query = due.pick_keep_alives(replica, limit, self._options)
        found = await process_due(self._write, [query], [sql.POSTPONE_KEEP_ALIVE], body)
        return [*chain.from_iterable(found)]

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete expired tombstones with nothing left to send, and return their number."""
        name = self._options.names.qualified(agent)

        async def body(tx: Transaction, only: str | None, before: object) -> int:
            return await due.purge(tx, name, limit, only)

        query = due.pick_purgeable(name, limit)
        return sum(await process_due(self._write, [query], [sql.POSTPONE_TASK], body))

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        """Lease due messages of the outbox to the caller."""

        async def body(tx: Transaction, only: str | None, before: object) -> outbox.UnsentRows:
            return await outbox.unsent(tx, agent, limit, self._options, only)

        queries = outbox.unsent_queries(agent, limit, self._options)
        postpone = [sql.POSTPONE_REPLY, sql.POSTPONE_CALLS, sql.POSTPONE_JOINS]
        leased = await process_due(self._write, queries, postpone, body)
        return [send for each in leased for send in await each.decode(self._options.names)]

    async def keep_replies(self, replies: Sequence[KeepReply]) -> list[bool]:
        """Store replies of tasks without a row, to be sent later. Returns whether each will be."""
        if not replies:
            return []
        packed = [(command, await pack(command.reply.body)) for command in replies]
        return await self._database.write(lambda tx: outbox.store_replies(tx, packed, self._options))

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        """Mark messages as sent, since the broker confirmed them.

        With `confirm_linger`, returns at once, and the marks are written later with others.
        """
        if self._defer_confirms:
            self._confirm_batcher.put_nowait(sent)
        else:
            await self._confirm_batcher.put(sent)

    async def marks_written(self) -> None:
        """Wait until all sent marks added so far are written or lost."""
        await self._confirm_batcher.flush()

    async def _confirm_batch(self, sent: Sequence[Send]) -> Sequence[None]:
        rest = sent
        if self._fast_path is not None:
            left, locked_sends = await self._fast_path.confirm_dispatched(
                [send for send in sent if isinstance(send, Dispatch)]
            )
            await self._fast_path.confirm_replied([send for send in sent if isinstance(send, Reply)])
            if self._defer_confirms:
                self._confirm_batcher.put_nowait(locked_sends)
            else:
                left += locked_sends
            rest = [*left, *(send for send in sent if isinstance(send, CancelNotice))]
        by_task: dict[TaskId, list[Send]] = {}
        for send in rest:
            by_task.setdefault(send.task_id, []).append(send)
        tasks = list(by_task.values())
        for first in range(0, len(tasks), _CONFIRM_LOCK_BATCH):
            part = [*chain.from_iterable(tasks[first : first + _CONFIRM_LOCK_BATCH])]
            await self._write(partial(outbox.confirm_sent, sent=part))
        return [None] * len(sent)

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        """List tasks, newest first. Without `states`, in every state."""
        names, wanted = self._options.names, [state.value for state in states]
        return await self._database.read(lambda tx: catalog.list_tasks(tx, names, agent, wanted, limit))

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls in call order, or `None` if it does not exist."""
        return await self._database.read(lambda tx: catalog.show_task(tx, self._options.names, task_id))


def _add_duplicates(claims: Sequence[Claim], results: Sequence[Arrival | Acquired]) -> list[Arrival | Acquired]:
    """Add results for claims with an id that occurred before in the batch.

    `results` has one result per id, in order of first occurrence.
    """
    left, firsts = iter(results), dict[str, Arrival | Acquired]()
    found: list[Arrival | Acquired] = []
    for claim in claims:
        first = firsts.get(claim.id)
        if first is None:
            first = firsts[claim.id] = next(left)
        elif not isinstance(first, Unknown | WrongSender | Locked):
            first = Duplicate(claim.task_id, claim.sub_task_id)
        found.append(first)
    return found
