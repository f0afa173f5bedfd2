"""The methods of the SQL store for owners of tasks, and for work that becomes due by time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import (
    ending,
    expiring,
    operation_statements,
    outbox,
    timeline_statements,
)
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.due_rows import DueQuery, process_due
from meshpoint.adapters.sql.inventory import REASON
from meshpoint.adapters.sql.locking import lock_child_rows
from meshpoint.adapters.sql.owning import (
    OwnedTask,
    OwnedTasks,
    owner_columns,
    read_missing_parts,
    read_owned,
    ready_columns,
)
from meshpoint.adapters.sql.rows import (
    AgentNames,
    Columns,
    endable_from_row,
    is_suspended,
    requester_from_row,
    resumable_from_row,
    run_from_row,
    version_item,
)
from meshpoint.errors import KeyMissing, StoreUnavailable
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.secrets import mask_reason
from meshpoint.model.tasks import (
    KEEP_ALIVES_PER_TIMEOUT,
    SUSPECT_AFTER_RESCUES,
    DueCounts,
    KeepAlive,
    OutboxItem,
    Replica,
    Resumable,
    Run,
    TaskState,
    parked_until,
)
from meshpoint.model.transitions import ExpiryResult, Overdue, Release, SuspendResult

_log = logging.getLogger("meshpoint.store")

_SEALED_DELAY = timedelta(seconds=10)
_LOCK_WARNING_DELAY = 1.0
"""Seconds after which a lease that waits for a locked row is logged."""
_MAX_SEPARATE_RENEWALS = 4
"""Maximum leases that wait for locked rows at a time, each on its own connection."""


class SqlDueWork:
    """`meshpoint.ports.task_store.DueWork` on a SQL database; a base class of `SqlStore`."""

    _database: Database
    _command_timeout: timedelta
    _separate_renewals: dict[Run, asyncio.Task[None]]

    async def due(self, replica: Replica, limit: int) -> DueCounts:
        """Count the due work of each kind, up to `limit`, without locks."""
        (row,) = await self._database.fetch(
            sql.COUNT_DUE,
            agent=self._database.options.names.qualified(replica.agent),
            formats=sorted(replica.formats),
            fails_lost=replica.fails_lost,
            lease=replica.lease.total_seconds(),
            limit=limit,
        )
        unsent = min(row.unsent, limit)
        return DueCounts(
            row.ready,
            row.lapsed,
            row.expired,
            row.keep_alives,
            unsent,
            overdue=min(row.overdue, limit),
            parked=row.parked,
            lost_unread=row.lost_unread,
        )

    def _query(self, template: str, agent: AgentName, limit: int, **values: Any) -> DueQuery:
        qualified = self._database.options.names.qualified(agent)
        return DueQuery(template, {"agent": qualified, "limit": limit, **values})

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[ExpiryResult]:
        """Close calls and joins past their deadline, and acquire tasks whose joins are met."""
        query = self._query(sql.PICK_EXPIRED, replica.agent, limit)
        results, owned = list[ExpiryResult](), dict[str, OwnedTask]()

        async def body(tx: Transaction, only: str | None) -> tuple[list[ExpiryResult], OwnedTasks]:
            due = await query.fetch(tx, only)
            return await expiring.expire(tx, due, replica, slots - len(owned))

        async for expired, acquired in process_due(
            self._database, [query], [sql.POSTPONE_TASK], body
        ):
            results += expired
            owned |= acquired
        return expiring.with_tasks(results, await self._decode_owned(owned, replica))

    async def acquire(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire ready tasks, most overdue first, including at most `suspect_slots` suspects."""
        query = self._query(
            sql.PICK_READY,
            replica.agent,
            limit,
            formats=sorted(replica.formats),
            suspects=suspect_slots,
            suspect_from=SUSPECT_AFTER_RESCUES,
        )
        return await self._acquire_due(query, replica, suspect_slots, _acquire)

    async def acquire_parked(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire parked tasks that no replica with this version has tried, due ones first."""
        query = self._query(
            sql.PICK_PARKED,
            replica.agent,
            limit,
            formats=sorted(replica.formats),
            suspects=suspect_slots,
            suspect_from=SUSPECT_AFTER_RESCUES,
            tried=version_item(replica.version),
        )
        return await self._acquire_due(query, replica, suspect_slots, _acquire)

    async def acquire_overdue(self, replica: Replica, limit: int) -> list[Overdue]:
        """Acquire tasks in any format that only need to be ended."""
        parked_limit = self._database.options.parked_limit
        queries = [
            self._query(sql.PICK_PARKED_TOO_LONG, replica.agent, limit, parked_limit=parked_limit),
            self._query(sql.PICK_READY_TOO_LATE, replica.agent, limit),
        ]

        async def body(tx: Transaction, only: str | None) -> list[Overdue]:
            due = [row for query in queries for row in await query.fetch(tx, only)]
            owners = [_acquired_columns(replica, row) for row in due]
            await tx.execute_many(sql.UPDATE_OWNER, owners)
            return [
                await _overdue(tx, row, _new_run(row, owner, tx.options.names))
                for row, owner in zip(due, owners, strict=True)
            ]

        acquired = process_due(self._database, queries, [sql.POSTPONE_TASK], body)
        return [*chain.from_iterable([each async for each in acquired])]

    async def unread(self, replica: Replica, age: timedelta) -> dict[str, int]:
        """Count ready tasks that were due `age` ago, by the formats `replica` cannot read."""
        rows = await self._database.fetch(
            sql.COUNT_UNREAD,
            agent=self._database.options.names.qualified(replica.agent),
            formats=sorted(replica.formats),
            age=age.total_seconds(),
        )
        return {row.state_format: row.tasks for row in rows}

    async def unpark(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Make parked tasks ready for any version. `False` for a task that is not parked."""
        if not task_ids:
            return []
        return self._database.locked_rows.require_unlocked(
            await self._database.write(lambda tx: ending.unpark(tx, task_ids))
        )

    async def suspend(self, task_ids: Sequence[TaskId]) -> list[SuspendResult]:
        """Keep replicas from acquiring tasks until `unsuspend`. Running tasks reach a pause."""
        if not task_ids:
            return []
        return self._database.locked_rows.require_unlocked(
            await self._database.write(lambda tx: ending.suspend(tx, task_ids))
        )

    async def unsuspend(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Let replicas acquire suspended tasks again. `False` for a task that is not one."""
        if not task_ids:
            return []
        return self._database.locked_rows.require_unlocked(
            await self._database.write(lambda tx: ending.unsuspend(tx, task_ids))
        )

    async def rescue(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Rescue running tasks whose lease has expired.

        At most `suspect_slots` of them are suspects; further ones become ready instead, and so do
        suspended tasks, unless they are rescued only to end.
        """
        query = self._query(
            sql.PICK_LOST,
            replica.agent,
            limit,
            formats=sorted(replica.formats),
            fails_lost=replica.fails_lost,
        )
        rescue = partial(_rescue, parked_limit=self._database.options.parked_limit)
        return await self._acquire_due(query, replica, suspect_slots, rescue)

    async def release_unread(self, replica: Replica, limit: int) -> list[TaskId]:
        """Release tasks that no replica has rescued, and that `replica` cannot rescue."""
        query = self._query(
            sql.PICK_LOST_UNREAD,
            replica.agent,
            limit,
            formats=sorted(replica.formats),
            fails_lost=replica.fails_lost,
            lease=replica.lease.total_seconds(),
        )
        parked_limit = self._database.options.parked_limit

        async def body(tx: Transaction, only: str | None) -> list[TaskId]:
            rows = await query.fetch(tx, only)
            released = [_left_or_parked_columns(replica, row, parked_limit) for row in rows]
            await tx.execute_many(sql.UPDATE_RESCUED, released)
            return [TaskId(row.logical_task_id) for row in rows]

        due = process_due(self._database, [query], [sql.POSTPONE_TASK], body)
        return [*chain.from_iterable([each async for each in due])]

    async def _acquire_due(
        self,
        query: DueQuery,
        replica: Replica,
        suspect_slots: int,
        acquire: Callable[[Transaction, Sequence[Row[Any]], Replica, int], Awaitable[OwnedTasks]],
    ) -> list[Resumable]:
        owned: OwnedTasks = {}

        async def body(tx: Transaction, only: str | None) -> OwnedTasks:
            suspects = sum(task.row.rescues >= SUSPECT_AFTER_RESCUES for task in owned.values())
            due = await query.fetch(tx, only)
            return await acquire(tx, due, replica, suspect_slots - suspects)

        async for acquired in process_due(self._database, [query], [sql.POSTPONE_TASK], body):
            owned |= acquired
        return list((await self._decode_owned(owned, replica)).values())

    async def find_owned(self, run: Run) -> Resumable | None:
        """Read the task owned by exactly this run. `None` if the run has lost it."""
        owned = await self._database.read(lambda tx: read_owned(tx, [run.task_id]))
        mine = (TaskState.RUNNING, run.id, run.fence)
        if [(each.row.status, each.row.run_id, each.row.fence) for each in owned.values()] != [
            mine
        ]:
            return None
        return (await self._decode_owned(owned)).get(run.task_id)  # its owner renews the lease

    async def _decode_owned(
        self, owned: Mapping[str, OwnedTask], replica: Replica | None = None
    ) -> dict[str, Resumable]:
        """Decode owned tasks, and release the unreadable ones to other replicas.

        If outcomes are too large to read at once, the leases of `replica` are renewed meanwhile.
        """
        if all(task.is_complete for task in owned.values()):
            return await self._decode_or_release(owned, replica)
        names = self._database.options.names
        runs = [run_from_row(task.row, names) for task in owned.values()]
        renewal = asyncio.create_task(self._keep_renewing(runs, replica))
        try:
            max_bytes = self._database.options.max_join_bytes
            return await self._decode_or_release(
                await read_missing_parts(self._database, owned, max_bytes), replica
            )
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)

    async def _keep_renewing(self, runs: Sequence[Run], replica: Replica | None) -> None:
        """Extend the leases of `runs` every third of a lease, until cancelled."""
        while replica is not None:
            await asyncio.sleep(replica.lease.total_seconds() / 3)
            with suppress(StoreUnavailable):
                await self.renew(runs, replica)

    async def _decode_or_release(
        self, owned: Mapping[str, OwnedTask], replica: Replica | None
    ) -> dict[str, Resumable]:
        readable: dict[str, Resumable] = {}
        damaged: list[tuple[Run, Exception]] = []
        options = self._database.options
        for task_id, task in owned.items():
            try:
                readable[task_id] = await resumable_from_row(
                    task.row,
                    task.outcomes,
                    task.log,
                    options.names,
                    options.codec,
                    options.max_join_bytes,
                )
            except Exception as error:  # one damaged row must not stop the other tasks
                run = run_from_row(task.row, options.names)
                if task.row.cancel_requested:  # it only ends
                    _log.warning("task %s: cancelling it, damaged row: %s", run.task_id, error)
                    readable[task_id] = endable_from_row(task.row, run)
                else:
                    damaged.append((run, error))
        for run, reason in damaged:
            if isinstance(reason, KeyMissing):
                await self._return_sealed(run, reason)
            else:
                await self._park_damaged(run, reason, replica)
        return readable

    async def _return_sealed(self, run: Run, error: KeyMissing) -> None:
        """Leave a task to a replica that has its key. It is due again later, as it was."""
        _log.error("task %s: returning it: %s", run.task_id, error)
        try:
            await self.release([Release(run, delay=_SEALED_DELAY)])
        except Exception as failure:
            _log.warning("task %s: its lease will expire: %s", run.task_id, failure)

    async def _park_damaged(self, run: Run, error: Exception, replica: Replica | None) -> None:
        _log.error("task %s: cannot decode its row; parking it", run.task_id, exc_info=error)
        version = "" if replica is None else replica.version
        reason = mask_reason(f"the row cannot be read: {error}")
        try:
            await self.release([Release(run, parked_reason=reason, version=version)])
        except Exception as failure:
            _log.warning(
                "task %s: cannot park it; its lease will expire: %s", run.task_id, failure
            )

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Make running tasks ready again, or park them. `False` for a run that lost its task."""
        if not releases:
            return []
        return self._database.locked_rows.require_unlocked(
            await self._database.write(lambda tx: ending.release(tx, releases))
        )

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases, and return the runs that no longer own their task.

        A lease on a locked row is extended separately, as soon as the row is free.
        """
        if not runs:
            return []
        lost, locked = await self._database.write(lambda tx: _renew(tx, runs, replica))
        for run in locked:
            if (
                run not in self._separate_renewals
                and len(self._separate_renewals) < _MAX_SEPARATE_RENEWALS
            ):
                self._separate_renewals[run] = asyncio.create_task(
                    self._renew_when_unlocked(run, replica)
                )
        return lost

    async def _renew_when_unlocked(self, run: Run, replica: Replica) -> None:
        lock_timeout = self._command_timeout * 0.9
        # Delayed, because this process's own transactions also lock rows for a moment.
        text = "task %s: another session holds its row; its lease is extended later"
        warning = asyncio.get_running_loop().call_later(
            _LOCK_WARNING_DELAY, _log.warning, text, run.task_id
        )
        try:
            with suppress(StoreUnavailable):  # the next renewal tries again
                await self._database.transact(
                    lambda tx: _renew_when_unlocked(tx, run, replica, lock_timeout)
                )
        finally:
            warning.cancel()
            del self._separate_renewals[run]

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """Return the due keep-alives of tasks, and set when the next ones are due."""
        query = self._query(sql.PICK_KEEP_ALIVES, replica.agent, limit)

        async def body(tx: Transaction, only: str | None) -> list[KeepAlive]:
            rows = await query.fetch(tx, only)
            await tx.execute_many(
                sql.UPDATE_KEEP_ALIVE,
                [
                    {
                        "task_id": row.logical_task_id,
                        # At most one per second, so that one requester cannot keep the sweeper
                        # busy.
                        "keep_alive_at": row.now
                        + max(row.idle_timeout / KEEP_ALIVES_PER_TIMEOUT, 1.0),
                    }
                    for row in rows
                ],
            )
            return [
                KeepAlive(replica.agent, TaskId(row.logical_task_id), requester_from_row(row))
                for row in rows
            ]

        due = process_due(self._database, [query], [sql.POSTPONE_KEEP_ALIVE], body)
        return [*chain.from_iterable([each async for each in due])]

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete expired tombstones with everything that belongs to them, and return their number.

        Only tombstones with nothing left to send. Tasks with a row that another session holds are
        left for a later call.
        """
        query = self._query(sql.PICK_PURGEABLE, agent, limit)

        async def body(tx: Transaction, only: str | None) -> int:
            return await _purge(tx, await query.fetch(tx, only))

        due = process_due(self._database, [query], [sql.POSTPONE_TASK], body)
        return sum([each async for each in due])

    async def prune_timelines(self, agent: AgentName, limit: int) -> int:
        """Delete entries of timelines that are older than the retention; returns their number."""
        options = self._database.options
        timeline = options.timeline
        if timeline is None:
            return 0
        values = {
            "agent": options.names.qualified(agent),
            "age": timeline.retention.total_seconds(),
            "limit": limit,
        }

        async def prune(tx: Transaction) -> int:
            rows = await tx.fetch(timeline_statements.PICK_OLD_ENTRIES, **values)
            if rows:
                await tx.execute(timeline_statements.DELETE_ENTRIES, ids=[row.id for row in rows])
            return len(rows)

        return await self._database.write(prune)

    async def unsent(self, agent: AgentName, limit: int) -> list[OutboxItem]:
        """Lease due messages of the outbox to the caller."""
        picks = (sql.PICK_UNSENT_REPLIES, sql.PICK_UNSENT_CALLS, sql.PICK_UNSENT_JOINS)
        replies, calls, joins = queries = [self._query(pick, agent, limit) for pick in picks]

        async def body(tx: Transaction, only: str | None) -> list[Row[Any]]:
            return await outbox.unsent(tx, replies, calls, joins, limit, only)

        rows = process_due(self._database, queries, sql.POSTPONE_UNSENT, body)
        leased = [*chain.from_iterable([each async for each in rows])]
        options = self._database.options
        return await outbox.decode_unsent(leased, options.names, options.codec)


async def _acquire(
    tx: Transaction, due: Sequence[Row[Any]], replica: Replica, suspects: int
) -> OwnedTasks:
    mine, _ = _split_suspects(due, suspects, lambda row: int(row.rescues))
    await tx.execute_many(sql.UPDATE_OWNER, [_acquired_columns(replica, row) for row in mine])
    if resumed := [row.logical_task_id for row in mine if is_suspended(row)]:
        await tx.execute(sql.CLEAR_SUSPENSIONS, ids=resumed)
    return await read_owned(tx, [row.logical_task_id for row in mine])


async def _rescue(
    tx: Transaction,
    due: Sequence[Row[Any]],
    replica: Replica,
    suspects: int,
    *,
    parked_limit: float,
) -> OwnedTasks:
    def only_ends(row: Row[Any]) -> bool:
        return replica.fails_lost and row.checkpoint_seq is not None

    def rescues(row: Row[Any]) -> int:
        return 0 if only_ends(row) else row.rescues + 1

    def is_held(row: Row[Any]) -> bool:
        return is_suspended(row) and not only_ends(row)

    suspended = [row for row in due if is_held(row)]
    runnable = [row for row in due if not is_held(row)]
    mine, others = _split_suspects(runnable, suspects, rescues)
    rescued = [
        *({**_acquired_columns(replica, row), **_lost_attempt(replica, row)} for row in mine),
        *(_left_columns(replica, row) for row in others),
        *(_left_or_parked_columns(replica, row, parked_limit) for row in suspended),
    ]
    await tx.execute_many(sql.UPDATE_RESCUED, rescued)
    return await read_owned(tx, [row.logical_task_id for row in mine])


def _left_columns(replica: Replica, row: Row[Any]) -> Columns:
    """The columns that take a task from its lost owner and leave it to any replica."""
    return {**ready_columns(row, new_id(), row.now), **_lost_attempt(replica, row)}


def _lost_attempt(replica: Replica, row: Row[Any]) -> Columns:
    # A replica that does not isolate suspects cannot count deaths, so each lost owner counts as an
    # attempt.
    return {"attempt": max(row.attempt, 1) + (not replica.isolates)}


def _left_or_parked_columns(replica: Replica, row: Row[Any], parked_limit: float) -> Columns:
    """Like `_left_columns`, but a task that was parked since its last pause is parked again."""
    left = _left_columns(replica, row)
    if row.incompatible_since is None:
        return left
    due_at = parked_until(row.incompatible_since + parked_limit, row.task_deadline)
    return {**left, "status": TaskState.PARKED.value, "wake_at": due_at}


async def _overdue(tx: Transaction, picked: Row[Any], run: Run) -> Overdue:
    """Build a task to end. If its requester cannot be read, its end is not answered."""
    try:
        deadline = picked.task_deadline
        past_deadline = deadline is not None and deadline <= picked.now
        return Overdue(
            endable_from_row(picked, run),
            past_deadline,
            _shown_reason(tx, picked),
            is_suspended=is_suspended(picked),
        )
    except Exception as error:
        _log.error(
            "task %s: it ends without a reply, because its requester cannot be read: %s",
            run.task_id,
            error,
        )
        await tx.execute(sql.UPDATE_UNANSWERABLE, task_id=run.task_id)
        unknown = dict.fromkeys(("reply_to", "task_deadline", "idle_timeout", "result_ttl"))
        row = SimpleNamespace(**{**picked._mapping, **unknown})
        return Overdue(endable_from_row(row, run), False, _shown_reason(tx, picked))


def _shown_reason(tx: Transaction, row: Row[Any]) -> str | None:
    return tx.options.codec.show_text(row.parked_reason, REASON, row.agent_name)


def _new_run(row: Row[Any], owner: Columns, names: AgentNames) -> Run:
    """The run that became the owner of a row by `owner_columns`."""
    return Run(
        task_id=TaskId(row.logical_task_id),
        agent=names.plain(row.agent_name),
        id=RunId(owner["run_id"]),
        fence=owner["fence"],
        generation=row.generation,
    )


def _split_suspects(
    rows: Sequence[Row[Any]], suspects: int, rescues: Callable[[Row[Any]], int]
) -> tuple[list[Row[Any]], list[Row[Any]]]:
    """Split rows into tasks that fit a replica with room for `suspects` suspects, and the rest."""
    mine, others = list[Row[Any]](), list[Row[Any]]()
    for row in rows:
        suspect = rescues(row) >= SUSPECT_AFTER_RESCUES
        (others if suspect and suspects <= 0 else mine).append(row)
        suspects -= suspect
    return mine, others


def _acquired_columns(replica: Replica, row: Row[Any]) -> Columns:
    return owner_columns(replica, row, new_id(), attempt=max(row.attempt, 1), now=row.now)


async def _renew(
    tx: Transaction, runs: Sequence[Run], replica: Replica
) -> tuple[list[Run], list[Run]]:
    """Extend leases. Rows that another session holds are skipped, so that they delay no others.

    Returns the runs that no longer own their task, and the runs with a locked row.
    """
    ids = sorted({run.task_id for run in runs})
    locked = await tx.fetch(sql.LOCK_TASKS_SKIP_LOCKED, ids=ids)
    mine, others = _split_by_ownership(runs, locked)
    if mine:
        wake_at = max(row.now for row in locked) + replica.lease.total_seconds()
        await tx.execute(
            sql.UPDATE_LEASES, ids=sorted({run.task_id for run in mine}), wake_at=wake_at
        )
    if not others:
        return [], []
    free = {row.logical_task_id for row in locked}
    unseen = [run for run in others if run.task_id not in free]
    locked_runs = _split_by_ownership(unseen, await tx.fetch(sql.READ_OWNERS, ids=ids))[0]
    return [run for run in others if run not in locked_runs], locked_runs


async def _renew_when_unlocked(
    tx: Transaction, run: Run, replica: Replica, lock_timeout: timedelta
) -> None:
    """Wait for a locked row, then extend its lease if the run still owns it."""
    await tx.execute(
        sql.SET_LOCK_TIMEOUT, limit=f"{math.ceil(lock_timeout.total_seconds() * 1000)}ms"
    )
    locked = await tx.fetch(sql.LOCK_TASKS, ids=[run.task_id])
    if _split_by_ownership([run], locked)[0]:
        wake_at = locked[0].now + replica.lease.total_seconds()
        await tx.execute(sql.UPDATE_LEASES, ids=[run.task_id], wake_at=wake_at)


def _split_by_ownership(
    runs: Sequence[Run], rows: Sequence[Row[Any]]
) -> tuple[list[Run], list[Run]]:
    """Split runs into owners of a task in `rows`, and others."""
    owned = {(row.logical_task_id, row.fence) for row in rows if row.status == TaskState.RUNNING}
    mine = [run for run in runs if (run.task_id, run.fence) in owned]
    return mine, [run for run in runs if (run.task_id, run.fence) not in owned]


async def _purge(tx: Transaction, due: Sequence[Row[Any]]) -> int:
    locked_elsewhere = await lock_child_rows(tx, [row.logical_task_id for row in due])
    rows = [row for row in due if row.logical_task_id not in locked_elsewhere]
    if rows:
        ids = sorted(row.logical_task_id for row in rows)
        for statement in (sql.DELETE_CALLS, sql.DELETE_JOINS, sql.DELETE_TASKS):
            await tx.execute(statement, ids=ids)
        operations = sorted(row.logical_task_id for row in rows if row.checkpoint_seq is not None)
        if operations:
            await tx.execute(operation_statements.DELETE_CHECKPOINTS, ids=operations)
            await tx.execute(operation_statements.DELETE_OPERATIONS, ids=operations)
    return len(rows)
