"""The checkpoint store on PostgreSQL and SQLite: one transaction for each method of the port."""

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
from meshpoint.adapters.sql.batcher import Batcher, in_parts
from meshpoint.adapters.sql.claiming import Taken
from meshpoint.adapters.sql.codec import pack
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.due_rows import Pick, transact_due
from meshpoint.adapters.sql.engine import LANES, LOCK_TIMEOUT
from meshpoint.adapters.sql.expiring import Expiries
from meshpoint.adapters.sql.failures import driver_errors, refused
from meshpoint.adapters.sql.locked_rows import HeldRows
from meshpoint.adapters.sql.locking import Terms
from meshpoint.adapters.sql.operations import SqlOperations
from meshpoint.adapters.sql.owning import OwnedTasks
from meshpoint.adapters.sql.rows import Names, dispatch_of, known_of, outcome_columns, pairs, run_of
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
    from meshpoint.adapters.sql.fast_path import HotPath

log = logging.getLogger("meshpoint.store")

Item = TypeVar("Item")
Result = TypeVar("Result")
_LAST_MARKS_WITHIN = 2.0  # seconds
_SECOND_LOOKS = (0.02, 0.05, 0.1)  # seconds
_HELD_LONG = 1.0
"""Seconds for which a row is locked before that is logged."""
_RENEWED_APART = 4
"""Leases on locked rows that are waited for at once, each on its own connection."""
_MARKS_TOGETHER, _LOCKS_TOGETHER = 4096, 256
PackedRequestedPause: TypeAlias = tuple[checkpointing.PackedPause, bytes | None]
"""A checkpoint, and the request of its task, packed."""
PackedEnd: TypeAlias = tuple[End, bytes | None]
"""An end, and its reply, packed."""


class SqlCheckpointStore(SqlOperations):
    """Tasks in a SQL database. See `meshpoint.ports.task_store` for what each method promises.

    Args:
        url: `postgresql://user@host/name` or `sqlite:///file`.
        namespace: separates meshes that share a database.
        dispatch_lease: how long whoever commits something to be sent has it for itself.
        tombstone_ttl: how long an ended task's row stays after its end and its deadline.
        incompatible_limit: how long a task is offered whose state no replica can read, before it is parked.
        checkpoint_ttl: how long an operation that failed or was cancelled stays with its checkpoints.
        checkpoint_history: checkpoints of an operation that are kept, the last ones.
        checkpoint_archive: on success, checkpoints are moved to an archive instead of deleted.
        command_timeout: when a database that does not answer counts as away.
        pool_size: connections to PostgreSQL, in addition to the hot path's; SQLite has one to read and one to write.
        clock: for tests: replaces the database's clock.
        mark_within: how long marks may wait for others; whoever brings them does not. A crash loses them, and what
            they mark is sent again.
        hot_path: False sends everything through the general transactions, as on SQLite.
        max_join_bytes: limit for the unpacked outcomes of one join; tasks above it come without them, and fail.
        lock_timeout: how long a PostgreSQL statement waits for a lock. After that, locked rows are skipped.

    Raises:
        ConfigurationError: `url` names no database that Meshpoint runs on.
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
        hot_path: bool = True,
        mark_within: timedelta = timedelta(),
        lock_timeout: timedelta = LOCK_TIMEOUT,
        max_join_bytes: int = 2_000_000_000,
    ) -> None:
        self._database = Database(
            url,
            command_timeout=command_timeout,
            lock_timeout=lock_timeout,
            pool_size=pool_size + LANES,
            clock=clock,
        )
        self._terms = Terms(
            names=Names(namespace),
            dispatch_lease=dispatch_lease.total_seconds(),
            tombstone_ttl=tombstone_ttl.total_seconds(),
            incompatible_limit=incompatible_limit.total_seconds(),
            checkpoint_ttl=checkpoint_ttl.total_seconds(),
            checkpoint_history=checkpoint_history,
            checkpoint_archive=checkpoint_archive,
            max_join_bytes=max_join_bytes,
        )
        self._held = HeldRows()
        self._clock, self._time = clock, DatabaseTime()
        self._renewing: dict[Run, asyncio.Task[None]] = {}
        self._command_timeout = command_timeout
        self._hot = self._fast_path() if hot_path and not self._database.dialect.is_sqlite else None
        self._pauses: Batcher[PackedRequestedPause, PauseResult | None] = Batcher(
            self._pause_together, lambda wish: wish[0].size
        )
        self._ends: Batcher[PackedEnd, EndResult | None] = Batcher(
            self._end_together, lambda wish: len(wish[1] or b"")
        )
        self._mark_later = mark_within > timedelta()
        self._marks: Batcher[Send, None] = Batcher(
            self._mark_together, linger=mark_within.total_seconds(), most=_MARKS_TOGETHER
        )

    def _fast_path(self) -> HotPath:
        from meshpoint.adapters.sql.fast_path import HotPath  # imports PostgreSQL's driver

        return HotPath(self._database.engine, self._terms, self._clock, self._time)

    @property
    def durable(self) -> bool:
        """A task kept here outlives the process."""
        return True

    @property
    def present(self) -> datetime | None:
        """The current time by the database's clock, if known. SQLite uses the host's clock."""
        return self._time.present if self._clock is None else self._clock.now()

    async def open(self) -> None:
        """Connect and check the schema. A SQLite file that is empty gets it."""
        try:
            if self._database.dialect.is_sqlite:
                await self._database.write(lambda tx: tx.connection.run_sync(schema.create_if_empty))
            await self._database.check_session(self._time)
            revision = await self._database.read(lambda tx: tx.connection.run_sync(schema.recorded_revision))
        except driver_errors(StoreUnavailable) as error:
            refusal = refused(error.__cause__ if isinstance(error, StoreUnavailable) else error)
            if refusal is None:
                raise
            raise refusal from error
        if schema.behind(revision):
            problem = f"the database's tables are at revision {revision or 'none'}"
            fix = "run: meshpoint db upgrade --db URL (or --config FILE)"
            raise ConfigurationError("session_db_url", problem, fix)

    async def close(self) -> None:
        """Release every connection."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MARKS_WITHIN):
                    await self.marks_written()
        finally:
            self._database.hurry()
        for batcher in (self._pauses, self._ends, self._marks):
            await batcher.close()
        waiting = list(self._renewing.values())
        for renewing in waiting:
            renewing.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._hot is not None:
            await self._hot.close()
        await self._database.close()

    # ── transitions ────────────────────────────────────────────────────────────────────────────────

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, Known]:
        """The rows that exist, by id."""
        names, ids = self._terms.names, sorted(set(task_ids))
        if not ids:
            return {}
        if self._hot is not None:
            rows = await self._hot.lookup(ids)
        else:
            rows = await self._database.read(lambda tx: tx.rows(sql.LOOKUP, ids=ids))
        return {TaskId(row.logical_task_id): await known_of(row, names) for row in rows}

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Write tasks as running, in generation 0."""
        if not begins:
            return []
        packed = [(wish, await pack(wish.request)) for wish in begins]
        return self._none_held(await self._write(lambda tx: checkpointing.begin(tx, packed, self._terms)))

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Write checkpoints, together with those that others write now."""
        packed = [(await checkpointing.PackedPause.of(wish), await pack(wish.request)) for wish in pauses]
        held = self._held.among(wish.run.task_id for wish in pauses)
        if self._hot is not None and (held or not all(wish.ordinary for wish, _ in packed)):
            return await self._pause_in_general(packed)
        return await self._completed(packed, await self._pauses.put(packed), self._pause_in_general)

    async def _pause_together(self, packed: Sequence[PackedRequestedPause]) -> Sequence[PauseResult | None]:
        if self._hot is None:
            return await self._pause_in_general(packed)
        try:
            moved = await self._hot.pause(packed)
        except RowLocked:
            self._held.waited()
            moved = {}
        return [moved.get(place) for place in range(len(packed))]

    async def _pause_in_general(self, packed: Sequence[PackedRequestedPause]) -> list[PauseResult]:
        with self._noting_held(wish.pause.run.task_id for wish, _ in packed):
            return self._none_held(await self._write(lambda tx: checkpointing.pause(tx, packed, self._terms)))

    @contextmanager
    def _noting_held(self, task_ids: Iterable[TaskId]) -> Iterator[None]:
        """Remember tasks with a locked row, so that their next attempt does not delay others."""
        try:
            yield
        except RowLocked:
            self._held.note(task_ids)
            raise

    def _none_held(self, results: Sequence[Result | Locked]) -> list[Result]:
        """Return `results` if none of their tasks is locked by another session.

        Raises:
            RowLocked: one is locked. Repeating the call finds the writes for the other tasks.
        """
        held = {result.task_id for result in results if isinstance(result, Locked)}
        if held:
            self._held.note(held)
            raise RowLocked(f"another session holds {', '.join(sorted(held)[:3])}")
        return [result for result in results if not isinstance(result, Locked)]

    async def claim(self, claims: Sequence[Claim], replica: Replica, slots: int) -> list[Arrival]:
        """Record outcomes, one winner each."""
        if not claims:
            return []
        outcomes = await outcome_columns(wish.outcome for wish in claims)
        firsts: dict[str, tuple[Claim, bytes | None]] = {}
        for wish, outcome in zip(claims, outcomes, strict=True):
            firsts.setdefault(wish.id, (wish, outcome))
        packed = list(firsts.values())
        verdicts: list[Arrival | Taken] = []
        owned = OwnedTasks()
        for part in in_parts(packed, [len(outcome or b"") for _, outcome in packed]):
            arrivals = await self._claim_part(part, replica, slots - len(owned.tasks))
            verdicts += arrivals.verdicts
            owned = owned.and_also(arrivals.owned)
        if len(packed) < len(claims):
            verdicts = _with_repeated(claims, verdicts)
        if held := [each.task_id for each in verdicts if isinstance(each, Locked)]:
            self._held.note(held)
        return claiming.with_tasks(verdicts, await self._read_claimed(owned, replica))

    async def _read_claimed(self, owned: OwnedTasks, replica: Replica) -> dict[str, Resumable]:
        try:
            return await self._read(owned, replica)
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            raise CommitInDoubt(f"claimed, but not read: {error}") from error

    async def _claim_part(
        self, packed: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int
    ) -> claiming.Arrivals:
        moved: dict[int, Arrival | Taken] = {}
        owned = OwnedTasks()
        held = self._held.among(wish.task_id for wish, _ in packed)
        free = [place for place, (wish, _) in enumerate(packed) if wish.task_id not in held] if held else None
        if self._hot is not None and free != []:
            some = packed if free is None else [packed[place] for place in free]
            try:
                moved, owned = await self._hot.claim(some, replica, slots, skip_locked=self._held.skipping)
            except RowLocked:
                self._held.waited()
        if free is not None:
            moved = {free[place]: arrival for place, arrival in moved.items()}
        if len(moved) == len(packed):
            return claiming.Arrivals([moved[place] for place in range(len(packed))], owned)
        rest = [packed[place] for place in range(len(packed)) if place not in moved]
        arrivals = await self._claim_in_general(rest, replica, slots - len(owned.tasks))
        verdicts = iter(arrivals.verdicts)
        in_order = [moved[place] if place in moved else next(verdicts) for place in range(len(packed))]
        return claiming.Arrivals(in_order, owned.and_also(arrivals.owned))

    async def _claim_in_general(
        self, packed: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int
    ) -> claiming.Arrivals:
        arrivals = await self._write(lambda tx: claiming.claim(tx, packed, replica, slots, self._terms))
        for pause in _SECOND_LOOKS:  # replicas lock the rows of a join only briefly; longer locks belong to people
            locked = [place for place, each in enumerate(arrivals.verdicts) if isinstance(each, Locked)]
            known = self._held.among(packed[place][0].task_id for place in locked)
            again = [place for place in locked if packed[place][0].task_id not in known]
            if not again:
                break
            await asyncio.sleep(pause)
            wishes, left = [packed[place] for place in again], slots - len(arrivals.owned.tasks)
            found = await self._write(
                partial(claiming.claim, claims=wishes, replica=replica, slots=left, terms=self._terms)
            )
            for place, verdict in zip(again, found.verdicts, strict=True):
                arrivals.verdicts[place] = verdict
            arrivals = claiming.Arrivals(arrivals.verdicts, arrivals.owned.and_also(found.owned))
        return arrivals

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn running tasks into tombstones with their reply, together with those that others end now."""
        packed = [(wish, await pack(wish.reply)) for wish in ends]
        if self._hot is not None and self._held.among(wish.run.task_id for wish in ends):
            return await self._end_in_general(packed)
        return await self._completed(packed, await self._ends.put(packed), self._end_in_general)

    async def _end_together(self, packed: Sequence[PackedEnd]) -> Sequence[EndResult | None]:
        if self._hot is None:
            return await self._end_in_general(packed)
        try:
            moved = await self._hot.end(packed)
        except RowLocked:
            self._held.waited()
            moved = {}
        return [moved.get(place) for place in range(len(packed))]

    async def _end_in_general(self, packed: Sequence[PackedEnd]) -> list[EndResult]:
        with self._noting_held(wish.run.task_id for wish, _ in packed):
            return self._none_held(await self._write(lambda tx: ending.end(tx, packed, self._terms)))

    async def _completed(
        self,
        items: Sequence[Item],
        moved: Sequence[Result | None],
        general: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
    ) -> list[Result]:
        """Results in the order of `items`: those of the hot path, and what the general transaction says of the rest.

        What the hot path did not move it may have moved before the connection broke, so nobody may be told that
        certainly nothing was written.
        """
        rest = [item for item, result in zip(items, moved, strict=True) if result is None]
        if not rest:
            return [result for result in moved if result is not None]
        try:
            answers = iter(await general(rest))
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            raise CommitInDoubt(str(error)) from error
        return [next(answers) if result is None else result for result in moved]

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Give running tasks back."""
        if not releases:
            return []
        return self._none_held(await self._write(lambda tx: ending.release(tx, releases, self._terms)))

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks whatever their state."""
        if not cancels:
            return []
        packed = [(wish, await pack(wish.reply)) for wish in cancels]
        return await self._write(lambda tx: ending.cancel(tx, packed, self._terms))

    async def requested(self, calls: Sequence[tuple[TaskId, TaskId]]) -> list[Dispatch | None]:
        """The requests of calls, as sent."""
        keys = pairs(sorted(set(calls)))
        rows = await self._database.read(lambda tx: tx.rows(sql.READ_REQUESTS, pairs=keys)) if calls else []
        found = {
            (row.logical_task_id, row.sub_task_id): await dispatch_of(row, self._terms.names, row.send_attempts)
            for row in rows
        }
        return [found.get(call) for call in calls]

    async def progress(self, updates: Sequence[Progress]) -> list[ProgressNoted | None]:
        """Extend idle deadlines, and tell whom to forward to."""
        if not updates:
            return []
        calls = await self._database.read(lambda tx: progress.read(tx, updates))
        deadlines = progress.extensions(calls)
        if deadlines:
            await self._write(lambda tx: progress.extend(tx, deadlines))
        return [progress.noted(update, row) for update, row in zip(updates, calls, strict=True)]

    # ── due work ───────────────────────────────────────────────────────────────────────────────────

    async def due(self, replica: Replica, limit: int) -> Due:
        """Count the work of each kind that is due."""
        return await self._database.read(lambda tx: due.due(tx, replica, limit, self._terms))

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Close calls and joins past their deadline."""

        async def body(tx: Transaction, only: str | None, before: Sequence[Expiries]) -> Expiries:
            left = slots - len(Expiries.together(before).taken)
            return await expiring.expire(tx, replica, limit, left, self._terms, only)

        pick = expiring.expired(replica, limit, self._terms)
        found = await transact_due(self._write, [pick], [sql.PUT_OFF_TASK], body)
        expiries = Expiries.together(found)
        return expiries.with_tasks(await self._read(expiries.owned, replica))

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Own ready tasks."""
        return await self._acquired(
            due.take, due.ready(replica, limit, suspects, self._terms), replica, limit, suspects
        )

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Own running tasks whose lease is over."""
        pick = due.lost(replica, limit, self._terms)
        return await self._acquired(due.take_over, pick, replica, limit, suspects)

    async def _acquired(
        self, acquire: Callable[..., Awaitable[OwnedTasks]], pick: Pick, replica: Replica, limit: int, suspects: int
    ) -> list[Resumable]:
        async def body(tx: Transaction, only: str | None, before: Sequence[OwnedTasks]) -> OwnedTasks:
            left = suspects - OwnedTasks.together(before).suspects
            return await acquire(tx, replica, limit, left, self._terms, only)

        found = await transact_due(self._write, [pick], [sql.PUT_OFF_TASK], body)
        return list((await self._read(OwnedTasks.together(found), replica)).values())

    async def owned(self, run: Run) -> Resumable | None:
        """Read the task owned by exactly this run."""
        owned = await self._database.read(lambda tx: owning.read_run(tx, run))
        return (await self._read(owned)).get(run.task_id)  # its owner renews the lease

    async def _read(self, owned: OwnedTasks, replica: Replica | None = None) -> dict[str, Resumable]:
        """Decode owned tasks; unreadable ones are released to another replica. `replica` keeps the leases."""
        if not owned.large:
            return await self._decoded(owned)
        if replica is None:
            return await self._decoded(await self._read_large(owned))
        runs = [run_of(row, self._terms.names) for row in owned.tasks.values()]
        keeping = asyncio.create_task(self._keep(runs, replica))
        try:
            return await self._decoded(await self._read_large(owned))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _read_large(self, owned: OwnedTasks) -> OwnedTasks:
        tasks, calls = dict(owned.tasks), dict(owned.calls)
        for row in owned.large:
            if row.outcome_bytes <= self._terms.max_join_bytes:
                try:
                    calls[row.logical_task_id] = await owning.read_large(self._database, row)
                except LookupError:  # another run owns the task now
                    del tasks[row.logical_task_id]
                except StoreUnavailable:
                    raise
                except Exception:  # one damaged task must not stop the others
                    log.exception("task %s: its calls cannot be read here", row.logical_task_id)
                    del tasks[row.logical_task_id]
        return OwnedTasks(tasks, calls)

    async def _keep(self, runs: Sequence[Run], replica: Replica) -> None:
        """Extend the leases of tasks that take long to read."""
        while True:
            await asyncio.sleep(replica.lease.total_seconds() / 3)
            with suppress(StoreUnavailable):
                await self.renew(runs, replica)

    async def _decoded(self, owned: OwnedTasks) -> dict[str, Resumable]:
        again = timedelta(seconds=self._terms.dispatch_lease)
        readable, unreadable = await owned.decoded(self._terms.names, again, self._terms.max_join_bytes)
        for release in unreadable:
            try:
                await self.release([release])
            except Exception as error:  # then its lease runs out
                log.warning("task %s: it cannot be given back: %s", release.run.task_id, error)
        return readable

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases; return the runs that lost theirs.

        A lease on a locked row is extended separately, as soon as the row is free.
        """
        if not runs:
            return []
        renewals = await self._write(lambda tx: due.renew(tx, runs, replica))
        for run in renewals.held:
            if run not in self._renewing and len(self._renewing) < _RENEWED_APART:
                self._renewing[run] = asyncio.create_task(self._renew_when_free(run, replica))
        return renewals.lost

    async def _renew_when_free(self, run: Run, replica: Replica) -> None:
        patience = self._command_timeout * 0.9
        # This process's own transactions hold rows as well, for a moment: those are not worth a warning.
        text = "task %s: another session holds its row; its lease is extended later"
        warning = asyncio.get_running_loop().call_later(_HELD_LONG, log.warning, text, run.task_id)
        try:
            with suppress(StoreUnavailable):  # the next renewal tries again
                await self._database.write(lambda tx: due.renew_when_free(tx, run, replica, patience))
        finally:
            warning.cancel()
            del self._renewing[run]

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """Paused tasks whose requester is due to hear of them."""

        async def body(tx: Transaction, only: str | None, before: object) -> list[KeepAlive]:
            return await due.keep_alives(tx, replica, limit, self._terms, only)

        pick = due.quiet(replica, limit, self._terms)
        found = await transact_due(self._write, [pick], [sql.PUT_OFF_KEEP_ALIVE], body)
        return [*chain.from_iterable(found)]

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete tombstones whose time is over; how many."""
        name = self._terms.names.qualified(agent)

        async def body(tx: Transaction, only: str | None, before: object) -> int:
            return await due.purge(tx, name, limit, only)

        pick = due.over(name, limit)
        return sum(await transact_due(self._write, [pick], [sql.PUT_OFF_TASK], body))

    # ── outbox ─────────────────────────────────────────────────────────────────────────────────────

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        """What is due for sending, leased to the caller."""

        async def body(tx: Transaction, only: str | None, before: object) -> outbox.Due:
            return await outbox.unsent(tx, agent, limit, self._terms, only)

        picks = outbox.unsent_picks(agent, limit, self._terms)
        put_off = [sql.PUT_OFF_REPLY, sql.PUT_OFF_CALLS, sql.PUT_OFF_JOINS]
        leased = await transact_due(self._write, picks, put_off, body)
        return [send for each in leased for send in await each.decoded(self._terms.names)]

    async def keep_replies(self, wishes: Sequence[KeepReply]) -> list[bool]:
        """Keep replies for tasks without a row."""
        if not wishes:
            return []
        packed = [(wish, await pack(wish.reply.body)) for wish in wishes]
        return await self._database.write(lambda tx: outbox.keep_replies(tx, packed, self._terms))

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        """The broker has them."""
        if self._mark_later:
            self._marks.note(sent)
        else:
            await self._marks.put(sent)

    async def marks_written(self) -> None:
        """Return when all marks that were brought so far are written, or lost."""
        await self._marks.flush()

    async def _mark_together(self, sent: Sequence[Send]) -> Sequence[None]:
        rest = sent
        if self._hot is not None:
            left, held = await self._hot.mark_dispatched([send for send in sent if isinstance(send, Dispatch)])
            await self._hot.mark_replied([send for send in sent if isinstance(send, Reply)])
            if self._mark_later:
                self._marks.note(held)
            else:
                left += held
            rest = [*left, *(send for send in sent if isinstance(send, CancelNotice))]
        of_tasks: dict[TaskId, list[Send]] = {}
        for send in rest:
            of_tasks.setdefault(send.task_id, []).append(send)
        tasks = list(of_tasks.values())
        for first in range(0, len(tasks), _LOCKS_TOGETHER):
            part = [*chain.from_iterable(tasks[first : first + _LOCKS_TOGETHER])]
            await self._write(partial(outbox.mark_sent, sent=part))
        return [None] * len(sent)

    # ── catalog ────────────────────────────────────────────────────────────────────────────────────

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        """Tasks, newest first."""
        names, wanted = self._terms.names, [state.value for state in states]
        return await self._database.read(lambda tx: catalog.list_tasks(tx, names, agent, wanted, limit))

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls in call order."""
        return await self._database.read(lambda tx: catalog.show_task(tx, self._terms.names, task_id))


def _with_repeated(claims: Sequence[Claim], verdicts: Sequence[Arrival | Taken]) -> list[Arrival | Taken]:
    """Add verdicts on claims whose id came before; `verdicts` are those on the first claims of each id."""
    left, firsts = iter(verdicts), dict[str, Arrival | Taken]()
    found: list[Arrival | Taken] = []
    for claim in claims:
        first = firsts.get(claim.id)
        if first is None:
            first = firsts[claim.id] = next(left)
        elif not isinstance(first, Unknown | WrongSender | Locked):
            first = Duplicate(claim.task_id, claim.sub_task_id)
        found.append(first)
    return found
