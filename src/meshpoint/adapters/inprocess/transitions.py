"""Transitions of a task, on the in-process rows.

No method awaits anything, so each is a transaction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import assert_never

from meshpoint.adapters.inprocess.operations import close_operation, save_checkpoint
from meshpoint.adapters.inprocess.rows import (
    CallRow,
    OperationRow,
    Tables,
    TaskRow,
    continue_task,
    next_keep_alive_at,
)
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, encode_outcome
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import (
    MAX_ROW_BYTES,
    SUSPECT_AFTER_RESCUES,
    CallState,
    Dispatch,
    Replica,
    Requester,
    Run,
    TaskState,
    add_canceller,
    add_reply_address,
    cancel_applies,
    dropped_address,
    has_log,
    logged_format,
    same_requester,
)
from meshpoint.model.transitions import (
    Append,
    Attach,
    Attached,
    AttachEnded,
    AttachRefused,
    AttachResult,
    AttachUnknown,
    Begin,
    BeginCommitted,
    BeginResult,
    Cancel,
    CancelBeforeRequest,
    CancelCommitted,
    CancelFound,
    CancelRefused,
    CancelRequested,
    CancelResult,
    CancelStale,
    CancelTooLate,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    End,
    EndCommitted,
    EndResult,
    ExistingTask,
    Fenced,
    JoinCompleted,
    PastDeadline,
    Pause,
    PauseCommitted,
    PauseResult,
    Progress,
    ProgressRecorded,
    Release,
    SaveResult,
    StillWaiting,
    TaskReady,
    UnknownCall,
    WrongSender,
)


class InProcessTransitions:
    """In-process implementation of `meshpoint.ports.task_store.Transitions`."""

    _tables: Tables

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, ExistingTask]:
        """The known tasks among `task_ids`, by id."""
        found: dict[TaskId, ExistingTask] = {}
        for task_id in task_ids:
            if (row := self._tables.tasks.get(task_id)) is not None:
                reply = row.to_reply(self._tables.clock.now()) if row.state.is_final else None
                found[task_id] = row.to_existing_task(reply)
            elif (ended := self._tables.recently_ended.get(task_id)) is not None:
                found[task_id] = ended
        return found

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Write tasks as running before their first segment."""
        return [self._begin(begin) for begin in begins]

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Write checkpoints: tasks, calls and joins."""
        return [self._pause(pause) for pause in pauses]

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        """Append entries to the logs of running tasks."""
        return [self._append(append) for append in appends]

    async def claim(
        self, claims: Sequence[Claim], replica: Replica, slots: int
    ) -> list[ClaimResult]:
        """Record outcomes, and acquire the tasks whose join they meet while `slots` last."""
        arrivals: list[ClaimResult] = []
        for claim in claims:
            arrival = self._claim_response(claim, replica, slots)
            slots -= isinstance(arrival, JoinCompleted)
            arrivals.append(arrival)
        return arrivals

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn running tasks into tombstones with their reply."""
        return [self._end(end) for end in ends]

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Turn running tasks back into ready ones. Returns `False` for a fenced run."""
        return [self._release(release) for release in releases]

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks in any state."""
        return [self._cancel(cancel) for cancel in cancels]

    async def attach(self, attaches: Sequence[Attach]) -> list[AttachResult]:
        """Add reply addresses to tasks that have not ended."""
        return [self._attach(attach) for attach in attaches]

    async def find_dispatches(
        self, calls: Sequence[tuple[TaskId, TaskId]]
    ) -> list[Dispatch | None]:
        """The requests of calls as they were sent; `None` if a call is not pending."""
        found: list[Dispatch | None] = []
        for task_id, sub_task_id in calls:
            row = self._tables.tasks.get(task_id)
            call = None if row is None else row.calls.get(sub_task_id)
            is_pending = call is not None and call.state is CallState.PENDING
            found.append(row.to_dispatch(call) if row and call and is_pending else None)
        return found

    async def record_progress(self, updates: Sequence[Progress]) -> list[ProgressRecorded | None]:
        """Extend the idle deadlines of pending calls."""
        return [self._progress(update) for update in updates]

    def _begin(self, begin: Begin) -> BeginResult:
        tables, run = self._tables, begin.run
        row = self._row_of_run(run, begin.requester)
        if row is not None:
            if _is_cancelled(row, run, begin.requester):
                return CancelFound(None)
            is_repeat = (row.run_id, row.fence, row.generation) == (run.id, 1, 0)
            queued = row.state is TaskState.READY and row.attempt == 0
            return (
                BeginCommitted(row.run, queued)
                if is_repeat and (queued or row.state is TaskState.RUNNING)
                else Fenced()
            )
        now = tables.clock.now()
        lapses_at = now + begin.replica.lease
        row = TaskRow(
            run.task_id, run.agent, run.id, begin.requester, TaskState.RUNNING, now, lapses_at
        )
        row.owner, row.attempt = begin.replica.id, 1
        row.request, row.digest, row.resume_token = begin.request, begin.digest, begin.order
        row.state_format = begin.state_format or ""
        if begin.queued:
            row.state, row.owner, row.attempt = TaskState.READY, None, 0
            row.due_at = max(now, begin.start_at or now)
        row.keep_alive_at = next_keep_alive_at(begin.requester, now)
        if begin.operation is not None:
            row.operation = OperationRow(begin.operation, now, begin.operation.preserve)
        tables.put(row)
        return BeginCommitted(row.run, begin.queued)

    def _row_of_run(self, run: Run, requester: Requester) -> TaskRow | None:
        """The task's row, unless it is an early cancel that does not apply to this first run."""
        row = self._tables.tasks.get(run.task_id)
        if row is None or run.fence > 0 or not row.is_early_cancel:
            return row
        if row.agent == run.agent and cancel_applies(row.requester.app_id, requester.app_id):
            return row
        return None

    def _pause(self, pause: Pause) -> PauseResult:
        tables, run, now = self._tables, pause.run, self._tables.clock.now()
        row = self._row_of_run(run, pause.requester)
        early_result = _check_pause(row, pause)
        if early_result is not None:
            return early_result
        # A resumed requester may have given the task another deadline than its run knows.
        if (pause.requester if row is None else row.requester).is_overdue(now):
            return PastDeadline()
        context = json.dumps(pause.context)
        log_bytes = 0 if pause.log is None else pause.log.log_bytes
        if (size := len(context) + len(pause.state) + log_bytes) > MAX_ROW_BYTES:
            raise AgentMisbehaved(
                f"the task's state has {size} bytes; a checkpoint keeps {MAX_ROW_BYTES} at most"
            )
        if row is None:
            row = TaskRow(
                run.task_id, run.agent, run.id, pause.requester, TaskState.WAITING, now, now
            )
            row.request, row.digest = pause.request, pause.digest
        tables.write_checkpoint(row, pause, context)
        if row.operation is not None:
            row.operation.children += pause.children
            if pause.checkpoint is not None and pause.checkpoint.seq > row.operation.seq:
                save_checkpoint(tables, row.operation, pause.checkpoint, pause.checkpoint.seq)
        tables.put(row)
        return _committed_pause(row)

    def _append(self, append: Append) -> SaveResult:
        run, log = append.run, append.log
        row = self._tables.live.get(run.task_id)
        if row is None or row.state is not TaskState.RUNNING or row.fence != run.fence:
            return Fenced()
        is_repeat = row.log_seq == log.after + len(log.entries) and row.log[-1][0] == run.id
        if not is_repeat:
            if row.log_seq != log.after:
                return Fenced()
            row.change_log(run.id, log)
            if row.generation > 0 and not has_log(row.state_format):
                row.state_format = logged_format(row.state_format)
            row.attempt, row.rescues = 1, min(row.rescues, SUSPECT_AFTER_RESCUES)
            self._tables.put(row)
        return CancelFound(run) if row.cancel_requested else SaveCommitted()

    def _claim_response(self, claim: Claim, replica: Replica, slots: int) -> ClaimResult:
        task_id, sub_task_id = claim.task_id, claim.sub_task_id
        row = self._tables.tasks.get(task_id)
        call = row.calls.get(sub_task_id) if row else None
        if row is None or call is None:
            return UnknownCall(task_id, sub_task_id)
        if claim.sender is not None and claim.sender != call.peer:
            return WrongSender(task_id, sub_task_id, call.peer)
        if call.state is not CallState.PENDING:
            if call.claim_id == claim.id:
                return _repeated_result(row, call, claim, replica)
            now = self._tables.clock.now()
            if isinstance(claim.outcome, Failed) or not row.let_win(call, now):
                row.count_late_usage(call, claim.outcome.usage)
                return DuplicateOutcome(task_id, sub_task_id)
        elif (retried := row.retry(call, claim, self._tables.clock.now())) is not None:
            call.outcome, call.state = encode_outcome(claim.outcome), CallState.DONE
            call.claim_id = claim.id
            self._tables.put(row)
            return retried
        row.record_outcome(call, claim.outcome, claim.id)
        if not row.is_join_met:
            self._tables.put(row)
            return StillWaiting(task_id, sub_task_id)
        return continue_task(self._tables, row, call, replica, run_id=claim.id, slots=slots)

    def _end(self, end: End) -> EndResult:
        row, run = self._tables.tasks.get(end.run.task_id), end.run
        if row is None or row.fence != run.fence:
            return Fenced()
        if row.state is TaskState.RUNNING:
            close_operation(
                self._tables, row, end.state, end.reason or end.dead_reason, end.checkpoint
            )
            self._tables.write_tombstone(
                row, end.state, run.id, end.reply, end.dead_reason, end.usage
            )
        elif not row.state.is_final or row.run_id != run.id:
            return Fenced()
        return EndCommitted(row.to_reply(self._tables.clock.now()))

    def _release(self, release: Release) -> bool:
        run, now = release.run, self._tables.clock.now()
        row = self._tables.live.get(run.task_id)
        if row is None or row.fence != run.fence:
            return False
        if row.state is not TaskState.RUNNING:
            return (row.run_id, row.generation) == (run.id, run.generation)
        row.run_id = run.id
        row.make_ready(now + release.delay)
        row.dead_reason = release.crash_reason or row.dead_reason
        row.attempt += release.counts_as_attempt
        if release.parked_reason is not None and not row.cancel_requested:
            limit = self._tables.timings.parked_limit
            row.park(release.parked_reason, release.version, now, limit)
        self._tables.put(row)
        return True

    def _cancel(self, cancel: Cancel) -> CancelResult:
        tables, now = self._tables, self._tables.clock.now()
        row = tables.tasks.get(cancel.task_id)
        if row is None:
            state, canceller = TaskState.CANCELLED, Requester(app_id=cancel.sender)
            row = TaskRow(cancel.task_id, cancel.agent, cancel.run_id, canceller, state, now, now)
            row.fence = 0  # no run ever owned the task
            tables.write_tombstone(row, state, cancel.run_id, cancel.reply)
            return CancelBeforeRequest()
        if row.agent != cancel.agent:  # this agent has no such task
            return CancelBeforeRequest()
        if row.is_early_cancel:
            return _repeat_cancel(row, cancel, now)
        if cancel.sender not in {None, cancel.agent} and not same_requester(
            row.requester.app_id, cancel.sender
        ):
            if row.state is TaskState.CANCELLED:
                return CancelTooLate(row.to_reply(now))
            requested = row.state is TaskState.RUNNING and row.cancel_requested
            return CancelRequested(row.owner) if requested else CancelRefused()
        if cancel.parent is not None and row.requester.parent_task_id not in {None, cancel.parent}:
            return CancelStale()
        match row.state:
            case TaskState.COMPLETED | TaskState.FAILED | TaskState.CANCELLED:
                return CancelTooLate(row.to_reply(now))
            case TaskState.RUNNING:
                row.cancel_requested, row.suspended_at = True, None
                return CancelRequested(row.owner)
            case TaskState.WAITING | TaskState.READY | TaskState.PARKED:
                notices = tables.close_calls(
                    row, row.pending_calls, FailureKind.CANCELLED, "the task was cancelled"
                )
                close_operation(tables, row, TaskState.CANCELLED, "cancelled on request")
                tables.write_tombstone(row, TaskState.CANCELLED, cancel.run_id, cancel.reply)
                return CancelCommitted(row.to_reply(now), notices)
        assert_never(row.state)

    def _attach(self, command: Attach) -> AttachResult:
        row = self._tables.tasks.get(command.task_id)
        if row is None or row.agent != command.agent:
            return AttachUnknown()
        if row.is_early_cancel and not cancel_applies(row.requester.app_id, command.sender):
            return AttachUnknown()
        if not row.is_early_cancel and not same_requester(row.requester.app_id, command.sender):
            return AttachRefused(row.requester.app_id)
        if row.state.is_final:
            return AttachEnded(row.to_reply(self._tables.clock.now()))
        before = row.reply_addresses
        if command.reply_to not in before:
            row.set_reply_addresses(
                add_reply_address(
                    before,
                    command.reply_to,
                    keeps_first=row.requester.parent_task_id is not None,
                )
            )
        return Attached(row.state, dropped_address(before, row.reply_addresses))

    def _progress(self, update: Progress) -> ProgressRecorded | None:
        row = self._tables.live.get(update.task_id)
        call = row.calls.get(update.sub_task_id) if row else None
        if (
            row is None
            or call is None
            or call.state is not CallState.PENDING
            or call.peer != update.sender
        ):
            return None
        if call.idle_timeout is not None:
            extended = min(self._tables.clock.now() + call.idle_timeout, call.deadline)
            if extended - call.due_at >= call.idle_timeout / 10:
                call.due_at = extended
        return ProgressRecorded(
            row.task_id, row.requester, call.idle_timeout, row.further_reply_to
        )


def _check_pause(row: TaskRow | None, pause: Pause) -> PauseResult | None:
    """The result of `pause` if it must not or need not be written, or `None` if it must be."""
    run = pause.run
    if row is None:
        return None if run.fence == 0 and pause.checkpoint is None else Fenced()
    if _is_cancelled(row, run, pause.requester):
        return CancelFound(None)
    if row.state in {TaskState.WAITING, TaskState.READY}:
        written = run.id, max(run.fence, 1), run.generation + 1
        is_repeat = (row.run_id, row.fence, row.generation) == written
        return _committed_pause(row) if is_repeat else Fenced()
    if row.state is not TaskState.RUNNING or row.fence != run.fence:
        return Fenced()
    if row.operation is None and pause.checkpoint is not None:  # only an operation has checkpoints
        return Fenced()
    if pause.log is not None and pause.log.after != row.log_seq:
        return Fenced()
    return CancelFound(row.run) if row.cancel_requested else None


def _is_cancelled(row: TaskRow, run: Run, requester: Requester) -> bool:
    """Whether this requester's task was cancelled, rather than another task with the same id."""
    if row.state is not TaskState.CANCELLED:
        return False
    same = row.agent == run.agent and same_requester(row.requester.app_id, requester.app_id)
    return run.fence > 0 or row.is_early_cancel or same


def _repeat_cancel(row: TaskRow, cancel: Cancel, now: datetime) -> CancelResult:
    """Record a further cancel that arrives before the request."""
    previous = row.requester.app_id
    row.requester = replace(row.requester, app_id=add_canceller(previous, cancel.sender))
    if row.requester.app_id != previous or row.run_id == cancel.run_id:  # maybe not broadcast yet
        return CancelBeforeRequest()
    return CancelTooLate(row.to_reply(now))


def _committed_pause(row: TaskRow) -> PauseCommitted:
    unsent = [row.to_dispatch(call) for call in row.pending_calls if call.dispatched_at is None]
    return PauseCommitted(
        row.state, tuple(replace(each, attempt=1) for each in unsent if not each.is_retry)
    )


def _repeated_result(
    row: TaskRow, call: CallRow, claim: Claim, replica: Replica
) -> StillWaiting | TaskReady | JoinCompleted:
    """The result of a claim that is repeated because its answer was lost.

    A task that the claim acquired is returned only to the same replica, and only while no other
    run has acquired it.
    """
    cancels = tuple(
        row.to_cancel_notice(each)
        for each in row.current_calls
        if each.state is CallState.CANCELLING
    )
    if row.run_id == claim.id and row.state is TaskState.READY:
        return TaskReady(row.task_id, call.sub_task_id, cancels)
    if row.run_id == claim.id and row.state is TaskState.RUNNING and row.owner == replica.id:
        return JoinCompleted(row.task_id, call.sub_task_id, row.to_resumable(), cancels)
    return StillWaiting(row.task_id, call.sub_task_id)
