"""The outbox, kept in the in-process rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import assert_never

from meshpoint.adapters.inprocess.rows import CallRow, Tables, TaskRow, postpone
from meshpoint.model.call_attempts import superseded
from meshpoint.model.ids import AgentName
from meshpoint.model.tasks import (
    MAX_SWEEP_DELAY,
    CallState,
    CancelNotice,
    Dispatch,
    OutboxItem,
    Reply,
)
from meshpoint.model.transitions import StoreReply, UnroutableCall


class InProcessOutbox:
    """In-process implementation of `meshpoint.ports.task_store.Outbox`."""

    _tables: Tables

    async def unsent(self, agent: AgentName, limit: int) -> list[OutboxItem]:
        """Requests, cancels and replies that are due, each leased to the caller with back-off."""
        now, lease = self._tables.clock.now(), self._tables.timings.dispatch_lease
        sends: list[OutboxItem] = []
        for row in self._tables.sending.values():
            if row.agent == agent and len(sends) < limit:
                sends += _lease_sends(row, now, lease, limit - len(sends))
        return sends

    async def store_replies(self, replies: Sequence[StoreReply]) -> list[bool]:
        """Keep undelivered replies. Returns, for each, whether the outbox will send it."""
        return [self._store_reply(command) for command in replies]

    def _store_reply(self, command: StoreReply) -> bool:
        reply, tables = command.reply, self._tables
        row = tables.tasks.get(reply.task_id)
        if row is None or (row.is_early_cancel and not command.is_redelivery):
            tables.store_reply(command)
            return True
        if command.is_redelivery and row.state.is_final and row.agent == reply.agent:
            if row.reply_sent or row.requester.reply_to != reply.requester.reply_to:
                tables.make_reply_due(row, reply.requester)
            return True
        return row.state.is_final and (row.run_id, row.fence) == (command.run_id, 0)

    async def confirm_sent(self, sent: Sequence[OutboxItem]) -> None:
        """Record that the broker confirmed these messages."""
        for send in sent:
            row = self._tables.tasks.get(send.task_id)
            if row is not None:
                _confirm(row, send, self._tables.clock.now())
                self._tables.put(row)
                self._tables.forget_if_finished(row)

    async def record_unroutable(self, calls: Sequence[UnroutableCall]) -> None:
        """Record that the broker returned requests because their peers have no queues."""
        now = self._tables.clock.now()
        for unroutable in calls:
            row = self._tables.tasks.get(unroutable.task_id)
            call = None if row is None else row.calls.get(unroutable.sub_task_id)
            if call is not None and call.state is CallState.PENDING and call.unsent:
                call.send_at = min(call.send_at, now + unroutable.retry_after)
                if unroutable.starts:
                    call.unroutable_since = now


def count_due_sends(row: TaskRow, now: datetime) -> int:
    """Number of requests, cancels and replies of `row` that are due."""
    calls = sum(_is_call_due(call, now) for call in row.calls.values())
    return calls + _is_reply_due(row, now)


def _is_call_due(call: CallRow, now: datetime) -> bool:
    # A request past its deadline is not sent, because the call is about to expire.
    expired = call.state is CallState.PENDING and call.due_at <= now
    return call.unsent and not expired and call.send_at <= now


def _is_reply_due(row: TaskRow, now: datetime) -> bool:
    return (
        row.state.is_final
        and not row.reply_sent
        and row.send_at is not None
        and row.send_at <= now
    )


def _lease_sends(row: TaskRow, now: datetime, lease: timedelta, limit: int) -> list[OutboxItem]:
    sends: list[OutboxItem] = []
    for call in row.calls.values():
        if _is_call_due(call, now) and len(sends) < limit:
            is_late = now - call.send_at > MAX_SWEEP_DELAY
            postpone(call, now, lease)
            sends.append(
                row.to_dispatch(call, None if is_late else now)
                if call.state is CallState.PENDING
                else row.to_cancel_notice(call)
            )
    if _is_reply_due(row, now) and len(sends) < limit:
        postpone(row, now, lease)
        sends.append(row.to_reply(now))
    return sends


def _confirm(row: TaskRow, send: OutboxItem, now: datetime) -> None:
    match send:
        case Reply():
            same = row.fence == send.fence and row.requester.reply_to == send.requester.reply_to
            if not row.state.is_final or not same or row.reply_sent:
                pass
            elif row.further_reply_to:
                row.set_reply_addresses(row.further_reply_to)
                row.sends, row.send_at = 1, now
            else:
                row.reply_sent = True
        case Dispatch(sub_task_id=sub_task_id):
            call = row.calls.get(sub_task_id)
            if call is not None and call.state is CallState.PENDING:
                call.dispatched_at = now
        case CancelNotice(sub_task_id=sub_task_id):
            call = row.calls.get(sub_task_id)
            if call is not None and call.state is CallState.CANCELLING:
                is_ended = row.state.is_final and not row.has_kept_pause
                kept = {row.generation, superseded(row.generation)}
                if is_ended or call.generation not in kept:
                    del row.calls[sub_task_id]
                else:
                    call.state = CallState.DONE  # its outcome has not been read yet
        case _:
            assert_never(send)
