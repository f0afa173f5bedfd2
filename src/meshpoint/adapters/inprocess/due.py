"""Work that becomes due with time, found in the in-process rows."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import repeat

from meshpoint.adapters.inprocess.outbox import count_due_sends
from meshpoint.adapters.inprocess.rows import Tables, TaskRow, continue_task, next_keep_alive_at
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok, peer_missing
from meshpoint.model.tasks import (
    MAX_SWEEP_DELAY,
    SUSPECT_AFTER_RESCUES,
    CancelNotice,
    DueCounts,
    KeepAlive,
    Replica,
    Resumable,
    Run,
    TaskState,
    parked_until,
)
from meshpoint.model.transitions import (
    CallRetried,
    Claim,
    ExpiryResult,
    JoinCompleted,
    Overdue,
    StillWaiting,
    SuspendRefused,
    SuspendResult,
    TaskSuspended,
)
from meshpoint.model.waits import SLEEP_PEER, is_wait, overdue_outcome

log = logging.getLogger("meshpoint.store")


@contextmanager
def _skip_damaged(row: TaskRow) -> Iterator[None]:
    """Log an exception raised by one row, so that the remaining rows are still processed."""
    try:
        yield
    except Exception:
        log.exception("task %s: a row is damaged", row.task_id)


class InProcessDueWork:
    """In-process implementation of `meshpoint.ports.task_store.DueWork`."""

    _tables: Tables

    async def due(self, replica: Replica, limit: int) -> DueCounts:
        """Count the due work of each kind, up to `limit`."""
        now, own_rows = self._tables.clock.now(), self._live_rows(replica)
        readable = [row for row in own_rows if row.readable_by(replica)]
        sending = [row for row in self._tables.sending.values() if row.agent == replica.agent]
        return DueCounts(
            ready=len(self._due_rows(TaskState.READY, limit, readable)),
            lapsed=len(self._due_rows(TaskState.RUNNING, limit, self._rescuable(replica))),
            expired=len(self._due_rows(TaskState.WAITING, limit, own_rows)),
            keep_alives=min(limit, sum(_owes_keep_alive(row, now) for row in own_rows)),
            unsent=min(limit, sum(map(count_due_sends, sending, repeat(now)))),
            overdue=min(limit, sum(_is_overdue(row, now) for row in own_rows)),
            parked=int(any(row.state is TaskState.PARKED for row in own_rows)),
            lost_unread=min(limit, len(self._lost_unread(replica))),
        )

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[ExpiryResult]:
        """Close overdue calls and joins, and acquire the tasks whose join is now met."""
        results: list[ExpiryResult] = []
        for row in self._due_rows(TaskState.WAITING, limit, self._live_rows(replica)):
            with _skip_damaged(row):
                _extend_late_calls(row, self._tables.clock.now())
                if row.wake_at > self._tables.clock.now():
                    continue
                expired = self._expire(row, replica, slots)
                slots -= isinstance(expired.join_result, JoinCompleted)
                results.append(expired)
        return results

    async def acquire(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire ready tasks, oldest first."""
        readable = [row for row in self._live_rows(replica) if row.readable_by(replica)]
        due = self._due_rows(
            TaskState.READY,
            limit,
            [row for row in readable if suspect_slots or row.rescues < SUSPECT_AFTER_RESCUES],
        )
        return self._acquire(due, replica, suspect_slots)

    async def acquire_parked(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire parked tasks that no replica with this version has tried, due ones first."""
        untried = [
            row
            for row in self._live_rows(replica)
            if row.state is TaskState.PARKED
            and not row.is_suspended
            and row.readable_by(replica)
            and replica.version not in row.tried_versions
            and (suspect_slots or row.rescues < SUSPECT_AFTER_RESCUES)
        ]
        untried.sort(key=lambda row: (row.due_at, row.task_id))
        return self._acquire(untried[:limit], replica, suspect_slots)

    async def acquire_overdue(self, replica: Replica, limit: int) -> list[Overdue]:
        """Acquire tasks in any format that only need to be ended."""
        now, found = self._tables.clock.now(), list[Overdue]()
        for row in [row for row in self._live_rows(replica) if _is_overdue(row, now)][:limit]:
            with _skip_damaged(row):
                reason = row.parked_reason if row.state is TaskState.PARKED else None
                task = self._tables.assign_owner(row, replica, RunId(new_id()))
                past_deadline = _is_past_deadline(row, now)
                overdue = Overdue(
                    task.without_content(), past_deadline, reason, is_suspended=row.is_suspended
                )
                found.append(overdue)
        return found

    async def unread(self, replica: Replica, age: timedelta) -> dict[str, int]:
        """Count ready tasks that were due `age` ago, by the formats `replica` cannot read."""
        due_before = self._tables.clock.now() - age
        return dict(
            Counter(
                row.state_format
                for row in self._live_rows(replica)
                if row.state is TaskState.READY
                and row.due_at <= due_before
                and not row.readable_by(replica)
            )
        )

    async def unpark(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Make parked tasks ready for any version. `False` for a task that is not parked."""
        return [self._unpark(self._tables.live.get(task_id)) for task_id in task_ids]

    def _unpark(self, row: TaskRow | None) -> bool:
        if row is None or row.state is not TaskState.PARKED:
            return False
        row.suspended_at = None
        row.make_ready(self._tables.clock.now())
        row.forget_parking()
        self._tables.put(row)
        return True

    async def suspend(self, task_ids: Sequence[TaskId]) -> list[SuspendResult]:
        """Keep replicas from acquiring tasks, until `unsuspend`."""
        return [self._suspend(self._tables.tasks.get(task_id)) for task_id in task_ids]

    def _suspend(self, row: TaskRow | None) -> SuspendResult:
        if row is None:
            return SuspendRefused(None)
        if row.cancel_requested and not row.state.is_final:
            return SuspendRefused(row.state, is_cancelled=True)
        repeated = row.is_suspended
        if not (row.state.can_be_suspended or repeated):
            return SuspendRefused(row.state)
        row.suspend(self._tables.clock.now())
        self._tables.put(row)
        return TaskSuspended(row.state, repeated=repeated)

    async def unsuspend(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Let replicas acquire suspended tasks again. `False` for a task that is not one."""
        return [self._unsuspend(self._tables.live.get(task_id)) for task_id in task_ids]

    def _unsuspend(self, row: TaskRow | None) -> bool:
        if row is None or not row.is_suspended:
            return False
        row.unsuspend(self._tables.clock.now())
        self._tables.put(row)
        return True

    def _acquire(
        self, due: Sequence[TaskRow], replica: Replica, suspect_slots: int
    ) -> list[Resumable]:
        owned: list[Resumable] = []
        for row in due:
            suspect = row.rescues >= SUSPECT_AFTER_RESCUES
            if not suspect or suspect_slots > 0:
                with _skip_damaged(row):
                    owned.append(self._tables.assign_owner(row, replica, RunId(new_id())))
            suspect_slots -= suspect
        return owned

    async def rescue(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Rescue running tasks whose lease has expired."""
        owned: list[Resumable] = []
        for row in self._due_rows(TaskState.RUNNING, limit, self._rescuable(replica)):
            will_run = not row.only_ends_at(replica)
            is_suspect = will_run and row.rescues + 1 >= SUSPECT_AFTER_RESCUES
            if will_run and row.is_suspended:
                self._leave_or_park(row, replica)
            elif not is_suspect or suspect_slots > 0:
                row.rescues += 1
                row.attempt += not replica.isolates
                suspect_slots -= is_suspect
                with _skip_damaged(row):
                    owned.append(self._tables.assign_owner(row, replica, RunId(new_id())))
            else:
                self._leave(row, replica)
        return owned

    def _leave(self, row: TaskRow, replica: Replica) -> None:
        """Take a task from its lost owner, and leave it to any replica."""
        row.rescues += 1
        row.attempt += not replica.isolates
        row.run_id = RunId(new_id())
        row.make_ready(self._tables.clock.now())
        self._tables.put(row)

    def _leave_or_park(self, row: TaskRow, replica: Replica) -> None:
        """Like `_leave`, but a task that was parked since its last pause is parked again."""
        self._leave(row, replica)
        if row.parked_since is not None:
            row.state = TaskState.PARKED
            limit_at = row.parked_since + self._tables.timings.parked_limit
            row.due_at = parked_until(limit_at, row.requester.deadline)

    async def release_unread(self, replica: Replica, limit: int) -> list[TaskId]:
        """Release tasks that no replica has rescued, and that `replica` cannot rescue."""
        released = self._lost_unread(replica)[:limit]
        for row in released:
            self._leave_or_park(row, replica)
        return [row.task_id for row in released]

    def _lost_unread(self, replica: Replica) -> list[TaskRow]:
        expired_before = self._tables.clock.now() - replica.lease
        return [
            row
            for row in self._live_rows(replica)
            if row.state is TaskState.RUNNING
            and row.due_at <= expired_before
            and not _can_rescue(replica, row)
        ]

    async def find_owned(self, run: Run) -> Resumable | None:
        """The task owned by exactly this run, or `None` if the run lost it."""
        row = self._tables.live.get(run.task_id)
        if row is None or row.state is not TaskState.RUNNING or row.run != run:
            return None
        return row.to_resumable()

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
        """Keep-alives that tasks owe their requesters.

        Schedules the next ones.
        """
        now, keep_alives = self._tables.clock.now(), list[KeepAlive]()
        for row in self._live_rows(replica):
            if len(keep_alives) < limit and _owes_keep_alive(row, now):
                with _skip_damaged(row):
                    row.keep_alive_at = max(
                        next_keep_alive_at(row.requester, now) or now, now + timedelta(seconds=1)
                    )
                    keep_alives.append(KeepAlive(row.agent, row.task_id, row.requester))
        return keep_alives

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete up to `limit` expired tombstones of `agent`. Returns the number deleted."""
        tables, now, skipped, deleted = self._tables, self._tables.clock.now(), list[TaskRow](), 0
        while tables.tombstones and tables.tombstones[0][0] <= now and deleted < limit:
            due_at, task_id = heapq.heappop(tables.tombstones)
            row = tables.tasks.get(task_id)
            if row is None or not row.state.is_final or row.due_at != due_at:
                continue
            if row.unsent or row.agent != agent:
                skipped.append(row)
            else:
                tables.remove(row)
                deleted += 1
        for row in skipped:
            heapq.heappush(tables.tombstones, (row.due_at, row.task_id))
        return deleted

    async def prune_timelines(self, agent: AgentName, limit: int) -> int:
        """Nothing: the tasks of a process have no timelines."""
        return 0

    def _live_rows(self, replica: Replica) -> list[TaskRow]:
        return [row for row in self._tables.live.values() if row.agent == replica.agent]

    def _rescuable(self, replica: Replica) -> list[TaskRow]:
        return [row for row in self._live_rows(replica) if _can_rescue(replica, row)]

    def _due_rows(self, state: TaskState, limit: int, rows: Iterable[TaskRow]) -> list[TaskRow]:
        now = self._tables.clock.now()
        due = [
            (row.wake_at, row.task_id, row)
            for row in rows
            if row.state is state and row.wake_at <= now
        ]
        return [row for _, _, row in heapq.nsmallest(limit, due)]

    def _expire(self, row: TaskRow, replica: Replica, slots: int) -> ExpiryResult:
        now = self._tables.clock.now()
        join_expired = row.join_deadline is not None and row.join_deadline <= now
        late = [call for call in row.pending_calls if join_expired or call.due_at <= now]
        message = "the join's deadline passed" if join_expired else "no answer in time"
        notices: tuple[CancelNotice, ...] = ()
        retried: list[CallRetried] = []
        for call in late:
            if call.peer == SLEEP_PEER and call.deadline <= now:
                row.record_outcome(call, Ok(None), None)
                continue
            if is_wait(call.peer):
                overdue = overdue_outcome(call.peer)
                self._tables.close_calls(row, [call], overdue.kind, overdue.message)
                continue
            failed = Failed(FailureKind.TIMEOUT, message)
            if call.unroutable_since is not None and call.unsent:
                failed = peer_missing(call.peer)
            claim = Claim(RunId(new_id()), row.task_id, call.sub_task_id, failed, None)
            if (following := row.retry(call, claim, now)) is not None:
                retried.append(following)
            notices += self._tables.close_calls(row, [call], failed.kind, failed.message)
        timed_out = tuple(call.sub_task_id for call in late)
        if not row.is_join_met:
            self._tables.put(row)
            waiting = StillWaiting(row.task_id, timed_out[-1])
            return ExpiryResult(row.task_id, timed_out, waiting, notices, tuple(retried))
        then = continue_task(
            self._tables, row, late[-1], replica, run_id=RunId(new_id()), slots=slots
        )
        notices += then.cancels
        return ExpiryResult(
            row.task_id, timed_out, replace(then, cancels=()), notices, tuple(retried)
        )


def _extend_late_calls(row: TaskRow, now: datetime) -> None:
    """Restart idle deadlines that are found late: no replica received what the peers sent."""
    for call in row.pending_calls:
        if call.idle_timeout is not None and now - call.due_at > MAX_SWEEP_DELAY:
            call.due_at = min(now + call.idle_timeout, call.deadline)


def _can_rescue(replica: Replica, row: TaskRow) -> bool:
    return row.readable_by(replica) or row.only_ends_at(replica)


def _is_overdue(row: TaskRow, now: datetime) -> bool:
    """Whether a ready or parked task only needs to be ended."""
    if row.state is TaskState.PARKED:
        return row.due_at <= now
    return row.state is TaskState.READY and _is_past_deadline(row, now)


def _is_past_deadline(row: TaskRow, now: datetime) -> bool:
    return row.requester.deadline is not None and row.requester.deadline <= now


def _owes_keep_alive(row: TaskRow, now: datetime) -> bool:
    return not row.state.is_final and row.keep_alive_at is not None and row.keep_alive_at <= now
