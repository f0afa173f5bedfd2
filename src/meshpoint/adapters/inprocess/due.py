"""Work that becomes due with time, found in the in-process rows."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import repeat

from meshpoint.adapters.inprocess.joins import continue_task
from meshpoint.adapters.inprocess.outbox import count_due_sends
from meshpoint.adapters.inprocess.rows import CallRow, Tables, TaskRow, next_keep_alive_at
from meshpoint.model.checkpoint import (
    SUSPECT_FROM,
    AllArrived,
    Due,
    Expired,
    KeepAlive,
    Replica,
    Resumable,
    Run,
    StillWaiting,
    TaskState,
)
from meshpoint.model.ids import AgentName, RunId, new_id
from meshpoint.model.outcomes import FailureKind

log = logging.getLogger("meshpoint.store")


@contextmanager
def _skip_damaged(row: TaskRow) -> Iterator[None]:
    """Log an exception raised by one row, so that the remaining rows are still processed."""
    try:
        yield
    except Exception:
        log.exception("task %s: a row of it is damaged", row.task_id)


class InProcessDueWork:
    """In-process implementation of `meshpoint.ports.task_store.DueWork`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def due(self, replica: Replica, limit: int) -> Due:
        """Count the due work of each kind, up to `limit`."""
        now, own_rows = self._tables.clock.now(), [row for row in self._live() if row.agent == replica.agent]
        readable = [row for row in own_rows if row.readable_by(replica)]
        asleep = [row for row in own_rows if row.state in {TaskState.WAITING, TaskState.READY}]
        sending = [row for row in self._tables.sending.values() if row.agent == replica.agent]
        return Due(
            ready=len(self._due_rows(TaskState.READY, limit, readable)),
            lapsed=len(self._due_rows(TaskState.RUNNING, limit, readable)),
            expired=len(self._due_rows(TaskState.WAITING, limit, own_rows)),
            keep_alives=min(limit, sum(bool(row.keep_alive_at and row.keep_alive_at <= now) for row in asleep)),
            unsent=min(limit, sum(map(count_due_sends, sending, repeat(now)))),
        )

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Close overdue calls and joins, and acquire the tasks whose join is now met."""
        results: list[Expired] = []
        for row in self._due_rows(
            TaskState.WAITING, limit, [row for row in self._live() if row.agent == replica.agent]
        ):
            with _skip_damaged(row):
                expired = self._expire(row, replica, slots)
                slots -= isinstance(expired.then, AllArrived)
                results.append(expired)
        return results

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Acquire ready tasks, oldest first."""
        readable = [row for row in self._live() if row.readable_by(replica)]
        due = self._due_rows(
            TaskState.READY, limit, [row for row in readable if suspects or row.rescues < SUSPECT_FROM]
        )
        owned: list[Resumable] = []
        for row in due:
            suspect = row.rescues >= SUSPECT_FROM
            if not suspect or suspects > 0:
                with _skip_damaged(row):
                    owned.append(self._tables.assign_owner(row, replica, RunId(new_id())))
            suspects -= suspect
        return owned

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Rescue running tasks whose lease has expired."""
        readable, owned = [row for row in self._live() if row.readable_by(replica)], list[Resumable]()
        for row in self._due_rows(TaskState.RUNNING, limit, readable):
            row.rescues += 1
            row.attempt += not replica.isolates
            if row.rescues < SUSPECT_FROM or suspects > 0:
                suspects -= row.rescues >= SUSPECT_FROM
                with _skip_damaged(row):
                    owned.append(self._tables.assign_owner(row, replica, RunId(new_id())))
            else:
                row.state, row.owner, row.run_id = TaskState.READY, None, RunId(new_id())
                row.due_at = self._tables.clock.now()
                self._tables.put(row)
        return owned

    async def owned(self, run: Run) -> Resumable | None:
        """The task owned by exactly this run, or `None` if the run lost it."""
        row = self._tables.live.get(run.task_id)
        return row.to_resumable() if row is not None and row.state is TaskState.RUNNING and row.run == run else None

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases. Returns the runs that have lost theirs."""
        lost: list[Run] = []
        for run in runs:
            row = self._tables.live.get(run.task_id)
            if row is None or row.state is not TaskState.RUNNING or row.fence != run.fence:
                lost.append(run)
            else:
                row.due_at = self._tables.clock.now() + replica.lease
        return lost

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """Keep-alives that waiting and ready tasks owe their requesters.

        Schedules the next ones.
        """
        now, keep_alives = self._tables.clock.now(), list[KeepAlive]()
        for row in self._live():
            asleep = row.agent == replica.agent and row.state in {TaskState.WAITING, TaskState.READY}
            if len(keep_alives) < limit and asleep and row.keep_alive_at and row.keep_alive_at <= now:
                with _skip_damaged(row):
                    row.keep_alive_at = max(next_keep_alive_at(row.requester, now) or now, now + timedelta(seconds=1))
                    keep_alives.append(KeepAlive(row.agent, row.task_id, row.requester))
        return keep_alives

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete up to `limit` expired tombstones of `agent`. Returns the number deleted."""
        tables, now, skipped, deleted = self._tables, self._tables.clock.now(), list[TaskRow](), 0
        while tables.tombstones and tables.tombstones[0][0] <= now and deleted < limit:
            due_at, task_id = heapq.heappop(tables.tombstones)
            row = tables.tasks.get(task_id)
            if row is None or not row.state.ended or row.due_at != due_at:
                continue
            if row.unsent or row.agent != agent:
                skipped.append(row)
            else:
                tables.remove(row)
                deleted += 1
        for row in skipped:
            heapq.heappush(tables.tombstones, (row.due_at, row.task_id))
        return deleted

    def _live(self) -> Iterable[TaskRow]:
        return self._tables.live.values()

    def _due_rows(self, state: TaskState, limit: int, rows: Iterable[TaskRow]) -> list[TaskRow]:
        now = self._tables.clock.now()
        due = [(row.wake_at, row.task_id, row) for row in rows if row.state is state and row.wake_at <= now]
        return [row for _, _, row in heapq.nsmallest(limit, due)]

    def _expire(self, row: TaskRow, replica: Replica, slots: int) -> Expired:
        now = self._tables.clock.now()
        join_expired = row.join_deadline is not None and row.join_deadline <= now
        late = [call for call in row.pending_calls if join_expired or call.due_at <= now]
        for call in late:
            self._time_out(call, now, "the join's deadline passed" if join_expired else "no answer in time")
            row.completed += 1
        timed_out = tuple(call.sub_task_id for call in late)
        notices = tuple(row.to_cancel_notice(call) for call in late)
        if not row.is_join_met:
            self._tables.put(row)
            return Expired(row.task_id, timed_out, StillWaiting(row.task_id, timed_out[-1]), notices)
        then = continue_task(self._tables, row, late[-1], replica, run_id=RunId(new_id()), slots=slots)
        return Expired(row.task_id, timed_out, then, notices)

    def _time_out(self, call: CallRow, now: datetime, message: str) -> None:
        call.close(FailureKind.TIMEOUT, message, now + self._tables.timings.dispatch_lease)
