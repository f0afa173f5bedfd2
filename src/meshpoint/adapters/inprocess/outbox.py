"""The outbox and the task catalog, kept in the in-process rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import assert_never

from meshpoint.adapters.inprocess.rows import MAX_BACKOFF, CallRow, Tables, TaskRow
from meshpoint.model.checkpoint import (
    CallState,
    CallSummary,
    CancelNotice,
    Dispatch,
    KeepReply,
    Reply,
    Send,
    TaskState,
    TaskSummary,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, decode_outcome


class InProcessOutbox:
    """In-process implementation of `meshpoint.ports.task_store.Outbox`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        """Requests, cancels and replies that are due, each leased to the caller with back-off."""
        now, lease = self._tables.clock.now(), self._tables.timings.dispatch_lease
        sends: list[Send] = []
        for row in self._tables.sending.values():
            if row.agent == agent and len(sends) < limit:
                sends += _lease_sends(row, now, lease, limit - len(sends))
        return sends

    async def keep_replies(self, replies: Sequence[KeepReply]) -> list[bool]:
        """Keep undelivered replies. Returns, for each, whether the outbox will send it."""
        return [self._store_reply(command) for command in replies]

    def _store_reply(self, command: KeepReply) -> bool:
        reply, tables = command.reply, self._tables
        row = tables.tasks.get(reply.task_id)
        if row is None or (row.is_early_cancel and not command.again):
            tables.store_reply(command)
            return True
        if command.again and row.state.ended and row.agent == reply.agent:
            if row.reply_sent or row.requester.reply_to != reply.requester.reply_to:
                tables.make_reply_due(row, reply.requester)
            return True
        return row.state.ended and (row.run_id, row.fence) == (command.run_id, 0)

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        """Record that the broker confirmed these messages."""
        for send in sent:
            row = self._tables.tasks.get(send.task_id)
            if row is not None:
                _confirm(row, send, self._tables.clock.now())
                self._tables.put(row)
                self._tables.forget_if_finished(row)


class InProcessCatalog:
    """In-process implementation of `meshpoint.ports.task_store.Catalog`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        """Tasks, newest first."""
        rows = [
            row
            for row in self._tables.tasks.values()
            if agent in {None, row.agent} and (not states or row.state in states)
        ]
        rows.sort(key=lambda row: (row.checkpointed_at, row.task_id), reverse=True)
        return [_summary(row) for row in rows[:limit]]

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls, in call order, or `None`."""
        row = self._tables.tasks.get(task_id)
        return None if row is None else (_summary(row), [_call_summary(call) for call in row.calls.values()])


def count_due_sends(row: TaskRow, now: datetime) -> int:
    """Number of requests, cancels and replies of `row` that are due."""
    calls = sum(_is_call_due(call, now) for call in row.calls.values())
    return calls + _is_reply_due(row, now)


def _is_call_due(call: CallRow, now: datetime) -> bool:
    # A request past its deadline is not sent, because the call is about to expire.
    expired = call.state is CallState.PENDING and call.due_at <= now
    return call.unsent and not expired and call.send_at <= now


def _is_reply_due(row: TaskRow, now: datetime) -> bool:
    return row.state.ended and not row.reply_sent and row.send_at is not None and row.send_at <= now


def _lease_sends(row: TaskRow, now: datetime, lease: timedelta, limit: int) -> list[Send]:
    sends: list[Send] = []
    for call in row.calls.values():
        if _is_call_due(call, now) and len(sends) < limit:
            call.postpone(now, lease)
            sends.append(row.to_dispatch(call) if call.state is CallState.PENDING else row.to_cancel_notice(call))
    if _is_reply_due(row, now) and len(sends) < limit:
        row.send_at = now + lease * min(2**row.sends, MAX_BACKOFF)
        row.sends += 1
        sends.append(row.to_reply(now))
    return sends


def _confirm(row: TaskRow, send: Send, now: datetime) -> None:
    match send:
        case Reply():
            same = row.fence == send.fence and row.requester.reply_to == send.requester.reply_to
            row.reply_sent = row.reply_sent or (row.state.ended and same)
        case Dispatch(sub_task_id=sub_task_id):
            call = row.calls.get(sub_task_id)
            if call is not None and call.state is CallState.PENDING:
                call.dispatched_at = now
        case CancelNotice(sub_task_id=sub_task_id):
            call = row.calls.get(sub_task_id)
            if call is not None and call.state is CallState.CANCELLING:
                _confirm_cancel(row, call)
        case _:
            assert_never(send)


def _confirm_cancel(row: TaskRow, call: CallRow) -> None:
    if row.state.ended or call.generation < row.generation:
        del row.calls[call.sub_task_id]
    else:
        call.state = CallState.DONE  # its outcome has not been read yet


def _summary(row: TaskRow) -> TaskSummary:
    return TaskSummary(
        row.task_id,
        row.agent,
        row.state,
        row.generation,
        row.fence,
        row.attempt,
        row.owner,
        row.completed,
        row.expected,
        row.checkpointed_at,
        row.wake_at,
        row.dead_reason,
        row.rescues,
    )


def _call_summary(call: CallRow) -> CallSummary:
    outcome = decode_outcome(call.outcome) if call.outcome is not None else None
    return CallSummary(
        call.sub_task_id,
        call.call_id,
        call.peer,
        call.generation,
        call.state,
        None if outcome is None else outcome.kind.value if isinstance(outcome, Failed) else "ok",
        call.dispatched_at,
        call.due_at,
    )
