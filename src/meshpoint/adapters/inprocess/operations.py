"""Operations and their checkpoints, kept in the in-process rows."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace

from meshpoint.adapters.inprocess.rows import (
    OperationRow,
    Tables,
    TaskRow,
    next_keep_alive_at,
    without_memory,
)
from meshpoint.model.calls import ALL
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.operations import (
    DIFFERENT_INPUT,
    DIFFERENT_REQUESTER,
    NO_REQUESTER,
    RESUMED_SINCE,
    Adopted,
    LastPause,
    NotRevived,
    OperationStatus,
    OperationSummary,
    Refusal,
    Revive,
    Revived,
    ReviveResult,
)
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SaveCommitted,
    is_counted,
    latest_by_id,
    with_token_usage,
)
from meshpoint.model.tasks import (
    SUSPECT_AFTER_RESCUES,
    L1Snapshot,
    Requester,
    Run,
    TaskState,
    same_input,
)
from meshpoint.model.transitions import (
    BeginCommitted,
    BeginResult,
    CancelFound,
    Fenced,
    Save,
    SaveResult,
)


class InProcessOperations:
    """In-process implementation of `meshpoint.ports.task_store.Operations`."""

    _tables: Tables

    async def copy_key(self) -> bytes:
        """The key that authenticates cached copies.

        Like the tasks, it is lost with the process.
        """
        return self._tables.copy_key

    async def track(self, run: Run, operation: Operation) -> BeginResult:
        """Turn a running task into an operation."""
        row = self._owned_row(run)
        if row is None:
            return Fenced()
        if row.operation is None:
            if row.cancel_requested:
                return CancelFound(run)
            row.operation = OperationRow(operation, self._tables.clock.now(), operation.preserve)
            self._tables.put(row)
        return BeginCommitted(run)

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint within a segment. Repeating it changes nothing."""
        row = self._owned_row(command.run)
        if row is None or row.operation is None:
            return Fenced()
        if command.checkpoint.seq > row.operation.seq:
            if row.cancel_requested:
                return CancelFound(command.run)
            row.attempt = 1 if command.progressed else row.attempt
            row.rescues = (
                min(row.rescues, SUSPECT_AFTER_RESCUES) if command.progressed else row.rescues
            )
            save_checkpoint(
                self._tables, row.operation, command.checkpoint, command.checkpoint.seq
            )
            self._tables.put(row)
        return SaveCommitted()

    def _owned_row(self, run: Run) -> TaskRow | None:
        row = self._tables.live.get(run.task_id)
        owned = row is not None and row.state is TaskState.RUNNING and row.fence == run.fence
        return row if owned else None

    async def latest(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> AgentCheckpoint | None:
        """The operation's last checkpoint, without its working memory, or `None`."""
        found = self._checkpoints(task_id)[-1:]
        return next(
            (_copy_checkpoint(each) for each in found if agent in {None, each.agent}), None
        )

    async def l1_snapshot(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> L1Snapshot | None:
        """The latest working-memory snapshot stored with a checkpoint of the operation."""
        for each in reversed(self._checkpoints(task_id)):
            if each.l1_snapshot is not None and agent in {None, each.agent}:
                return L1Snapshot(each.seq, each.l1_snapshot_hash or "", each.l1_snapshot)
        return None

    async def history(self, task_id: TaskId) -> list[AgentCheckpoint]:
        """The operation's checkpoints, oldest first, from the archive once it is completed."""
        return [
            _copy_checkpoint(each)
            for each in self._checkpoints(task_id) or self._tables.archive.get(task_id, [])
        ]

    def _checkpoints(self, task_id: TaskId) -> list[AgentCheckpoint]:
        row = self._tables.tasks.get(task_id)
        return [] if row is None or row.operation is None else row.operation.checkpoints

    async def revive(self, command: Revive) -> ReviveResult:
        """Make an ended task ready again."""
        tables, row = self._tables, self._tables.tasks.get(command.task_id)
        if row is None or command.agent not in {None, row.agent}:
            return NotRevived(Refusal.NOT_FOUND)
        if (refusal := _requester_refusal(command, row)) is not None:
            return refusal
        if row.run_id == command.token or (
            command.order is not None and command.order == row.resume_token
        ):
            return Revived(row.task_id, row.agent, row.retry_count, repeated=True)
        if command.adopt and not row.state.is_final:
            row.adopt(command.requester, tables.clock.now(), tables.timings.parked_limit)
            row.resume_token = command.order or row.resume_token
            row.digest = row.digest or command.digest
            return Adopted()
        refusal = _refusal(command, row) or _other_active(row, tables.live.values())
        if refusal is not None:
            return refusal
        if command.pause is not None and command.pause.run.fence != row.fence:
            return NotRevived(Refusal.RUNNING, RESUMED_SINCE)
        _restart(row, command)
        row.due_at = tables.clock.now()
        row.keep_alive_at = next_keep_alive_at(row.requester, row.due_at)
        if command.pause is not None and row.operation is not None:
            row.generation = command.pause.run.generation
            pause = replace(command.pause, requester=row.requester)
            tables.write_checkpoint(row, pause, json.dumps(pause.context))
            row.operation.children = [*pause.children]
            if pause.checkpoint is not None and pause.checkpoint.seq > row.operation.seq:
                save_checkpoint(tables, row.operation, pause.checkpoint, pause.checkpoint.seq)
            for call in row.pending_calls:
                call.send_at = tables.clock.now()
        tables.put(row)
        return Revived(row.task_id, row.agent, row.retry_count)

    async def last_pause(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> LastPause | None:
        """The last pause of a failed or cancelled operation, or `None`."""
        row = self._tables.tasks.get(task_id)
        if row is None or row.operation is None or agent not in {None, row.agent}:
            return None
        return row.to_last_pause() if row.has_kept_pause else None

    async def preserve(self, task_id: TaskId, *, preserve: bool = True) -> bool:
        """Exempt an operation's checkpoints from deletion, or lift that exemption."""
        row = self._tables.tasks.get(task_id)
        if row is None or row.operation is None:
            return False
        row.operation.preserve = preserve
        if row.ended_at is not None:
            row.due_at = self._tables.expiry(row, row.ended_at)
            heapq.heappush(self._tables.tombstones, (row.due_at, task_id))
        return True

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        """Summary of one operation, or `None` if the task is not an operation."""
        row = self._tables.tasks.get(task_id)
        return None if row is None or row.operation is None else _summary(row, row.operation)

    async def operations(
        self,
        *,
        agent: AgentName | None = None,
        statuses: Sequence[OperationStatus] = (),
        limit: int = 100,
    ) -> list[OperationSummary]:
        """Summaries of operations, newest first."""
        found = [
            _summary(row, row.operation)
            for row in self._tables.tasks.values()
            if row.operation is not None and agent in {None, row.agent}
        ]
        found = [each for each in found if not statuses or each.status in statuses]
        return sorted(found, key=lambda each: (each.created_at, each.id), reverse=True)[:limit]


def close_operation(
    tables: Tables,
    row: TaskRow,
    state: TaskState,
    reason: str | None,
    checkpoint: AgentCheckpoint | None = None,
) -> None:
    """Delete, archive or extend the checkpoints of an operation that ends as `state`.

    A completed operation loses its checkpoints, unless they are preserved. Any other end appends
    `checkpoint`, or else a copy of the last one with the reason. Other tasks are left alone.
    """
    operation = row.operation
    if operation is None:
        return
    if state is TaskState.COMPLETED:
        if not operation.preserve:
            if tables.timings.checkpoint_archive and operation.checkpoints:
                tables.archive_checkpoints(row, operation.checkpoints)
            operation.checkpoints = []
    elif checkpoint is not None:
        save_checkpoint(tables, operation, checkpoint, max(checkpoint.seq, operation.seq + 1))
    elif operation.checkpoints:
        details = None if row.usage is None else with_token_usage(None, row.usage)
        why = {"failure_reason": reason, "error_details": details, "retry_count": row.retry_count}
        last = without_memory(operation.checkpoints[-1])
        records = [
            each.without_usage() if is_counted(each, row.retry_count, row.generation) else each
            for each in last.subtasks
        ]
        copied = last.model_copy(update={**why, "subtasks": tuple(records)})
        save_checkpoint(tables, operation, copied, operation.seq + 1)


def _copy_checkpoint(checkpoint: AgentCheckpoint) -> AgentCheckpoint:
    return deepcopy(without_memory(checkpoint))


def save_checkpoint(
    tables: Tables, operation: OperationRow, checkpoint: AgentCheckpoint, seq: int
) -> None:
    """Append a checkpoint with the number `seq`."""
    operation.save_checkpoint(
        checkpoint, seq, tables.clock.now(), tables.timings.checkpoint_history
    )


def _requester_refusal(command: Revive, row: TaskRow) -> NotRevived | None:
    """Why this requester may not resume the task. `None` if it may, or if an operator asks."""
    if command.order is None:
        return None
    if not row.is_early_cancel and row.requester.app_id not in {None, command.requester.app_id}:
        return NotRevived(Refusal.NOT_FOUND, DIFFERENT_REQUESTER)
    if not same_input(row.digest, command.digest):
        return NotRevived(Refusal.NOT_FOUND, DIFFERENT_INPUT)
    if row.resume_token is not None and command.order < row.resume_token:
        return NotRevived(Refusal.RUNNING, "asked again since")
    return None


def _refusal(command: Revive, row: TaskRow) -> NotRevived | None:
    if not (row.state.is_final or command.abandoned):
        return NotRevived(Refusal.RUNNING, _describe_state(row))
    if row.state is TaskState.COMPLETED:
        return NotRevived(Refusal.COMPLETED)
    if not (command.without_checkpoint or (row.operation is not None and row.operation.seq)):
        return NotRevived(Refusal.NO_CHECKPOINT)
    if row.request is None and command.request is None:
        return NotRevived(Refusal.NO_CHECKPOINT, "its request was not kept")
    return None


def _describe_state(row: TaskRow) -> str:
    if row.state is TaskState.RUNNING:
        return f"running, owned by {row.owner} until {row.due_at.isoformat()}"
    return "pending" if row.state is TaskState.READY else row.state.value


def _other_active(row: TaskRow, live: Iterable[TaskRow]) -> NotRevived | None:
    if row.operation is None or not row.operation.operation.exclusive:
        return None
    others = [other for other in live if other.agent == row.agent and other.operation is not None]
    ids = [other.task_id for other in others if other.task_id != row.task_id]
    return NotRevived(Refusal.OTHER_ACTIVE, ids[0]) if ids else None


def _restart(row: TaskRow, command: Revive) -> None:
    row.state, row.generation, row.fence, row.attempt, row.owner = (
        TaskState.READY,
        0,
        row.fence + 1,
        0,
        None,
    )
    row.rescues = 0
    row.run_id, row.resume_token = RunId(command.token), command.order or row.resume_token
    row.retry_count += 1
    row.requester = _requester(command, row)
    if command.request is not None:
        row.request, row.digest = command.request, command.digest
    # An ended operation kept the tokens of its attempts.
    usage = json.loads(row.context).get("token_usage") if row.ended_at is not None else None
    row.context, row.body = json.dumps({"token_usage": usage} if usage else {}), b""
    row.cancel_requested, row.suspended_at = False, None
    row.forget_parking()
    row.dead_reason = None
    row.join, row.join_deadline, row.expected, row.completed, row.succeeded = ALL, None, 0, 0, 0
    row.detach_cancels()
    row.reply, row.reply_sent, row.ended_at, row.send_at, row.sends = b"", False, None, None, 1


def _requester(command: Revive, row: TaskRow) -> Requester:
    if command.requester != NO_REQUESTER:
        return command.requester
    return command.kept_requester(row.requester, reply_sent=row.reply_sent)


def _reason(row: TaskRow, last: AgentCheckpoint | None) -> str | None:
    """Why an operation failed, was cancelled or is parked."""
    if row.state is TaskState.PARKED:
        return row.parked_reason
    if row.state.is_final and last is None:
        return row.dead_reason
    return last.failure_reason if row.state.is_final and last is not None else None


def _summary(row: TaskRow, operation: OperationRow) -> OperationSummary:
    running, last = row.state is TaskState.RUNNING, next(reversed(operation.checkpoints), None)
    completed = row.state is TaskState.COMPLETED
    progress = None if last is None else last.progress
    updated_at = None if last is None else last.checkpoint_time
    return OperationSummary(
        id=row.task_id,
        agent=row.agent,
        type=operation.operation.type,
        status=OperationStatus.PENDING
        if row.state is TaskState.READY
        else OperationStatus(row.state.value),
        phase=None if progress is None else progress.current,
        subject=operation.operation.subject,
        parameters=deepcopy(operation.operation.parameters),
        children=latest_by_id(operation.children),
        progress_pct=100.0 if completed else 0.0 if last is None else last.progress_pct,
        retry_count=row.retry_count,
        owner=row.owner if running else None,
        lease_until=row.due_at if running else None,
        created_at=operation.created_at,
        updated_at=updated_at or row.ended_at or operation.created_at,
        ended_at=row.ended_at,
        failure_reason=_reason(row, last),
        exclusive=operation.operation.exclusive,
        preserve=operation.preserve,
        checkpoint=None if last is None else last.seq,
        usage=row.usage,
    )
