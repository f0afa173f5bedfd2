"""Checks of the sweeper's methods: work that becomes due by time, and the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from machines.ledger import Ledger
from machines.task_model import KEEP_ALIVES_PER_TIMEOUT, PendingSend, TaskModel
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import FailureKind
from meshpoint.model.tasks import (
    SUSPECT_AFTER_RESCUES,
    CancelNotice,
    Dispatch,
    KeepAlive,
    OutboxItem,
    Replica,
    Reply,
    Resumable,
    Run,
    TaskState,
)
from meshpoint.model.transitions import (
    ExpiryResult,
    JoinCompleted,
    Overdue,
    Progress,
    ProgressRecorded,
    StillWaiting,
    TaskReady,
)
from meshpoint.testing.conformance.build import AGENT


def check_expired(
    ledger: Ledger, replica: Replica, slots: int, results: Sequence[ExpiryResult]
) -> None:
    """Check that everything past its deadline was closed once and that its tasks continue."""
    for model in ledger.in_state(TaskState.WAITING):
        model.extend_late_calls(ledger.now)
    late = {model.task_id: model.overdue_calls(ledger.now) for model in ledger.models.values()}
    due = {task_id: calls for task_id, calls in late.items() if calls}
    assert sorted(result.task_id for result in results) == sorted(due), (
        "expire missed a task, or ended one too early"
    )
    acquired = sum(isinstance(result.join_result, JoinCompleted) for result in results)
    assert acquired <= slots, f"{acquired} tasks were acquired with {slots} slots"
    for result in results:
        story, calls = ledger.models[result.task_id], due[result.task_id]
        retried = {each.sub_task_id: each for each in result.retried}
        cancels = [story.notice(call) for call in calls if call.is_sent]
        for call in calls:
            wait = story.next_wait(call, FailureKind.TIMEOUT, ledger.now)
            call.expire(ledger.now)
            if wait is not None:
                following = retried.pop(call.id)
                ledger.add_attempt(story, call, FailureKind.TIMEOUT, wait, following)
        assert not retried, retried
        assert result.timed_out == tuple(call.id for call in calls)
        assert list(result.cancels[: len(cancels)]) == cancels
        if not story.is_join_met:
            assert result.join_result == StillWaiting(story.task_id, calls[-1].id)
            assert len(result.cancels) == len(cancels)
        else:
            assert isinstance(result.join_result, JoinCompleted | TaskReady)
            assert result.join_result.cancels == ()
            may_run = story.is_readable_by(replica) and story.suspended_at is None
            left_ready = isinstance(result.join_result, TaskReady) and may_run
            assert not left_ready or acquired >= slots, (
                "a task became ready although a slot was free"
            )
            closed = replace(result.join_result, cancels=result.cancels[len(cancels) :])
            ledger.check_join(story, None, replica, closed)


def runnable(ledger: Ledger, replica: Replica, state: TaskState) -> list[TaskModel]:
    """Ready tasks or running ones with an expired lease that `replica` may take, oldest first."""
    due = [
        (model.due_at, model)
        for model in ledger.in_state(state)
        if model.is_readable_by(replica)
        and model.due_at is not None
        and model.due_at <= ledger.now
    ]
    return [story for _, story in sorted(due, key=lambda pair: pair[0])]


def limit_with_ties(due: Sequence[TaskModel], limit: int) -> int:
    """`limit`, raised to the end of a tie: among equally old tasks a store may take any."""
    while 0 < limit < len(due) and due[limit - 1].due_at == due[limit].due_at:
        limit += 1
    return limit


def acquirable(ledger: Ledger, replica: Replica, suspects: int) -> list[TaskModel]:
    """Ready tasks that `replica` may acquire, with all suspects or none."""
    due = runnable(ledger, replica, TaskState.READY)
    return [model for model in due if suspects or model.rescues < SUSPECT_AFTER_RESCUES]


def check_acquired(
    ledger: Ledger, replica: Replica, limit: int, suspects: int, tasks: Sequence[Resumable]
) -> None:
    """Check that the oldest ready tasks were acquired, up to `limit`."""
    _check_owned(ledger, replica, acquirable(ledger, replica, suspects)[:limit], tasks)


def untried(ledger: Ledger, replica: Replica, suspects: int) -> list[TaskModel]:
    """Parked tasks that `replica` may try, with all suspects or none."""
    return [
        model
        for model in ledger.in_state(TaskState.PARKED)
        if model.is_readable_by(replica)
        and model.suspended_at is None
        and replica.version not in model.tried_versions
        and (suspects or model.rescues < SUSPECT_AFTER_RESCUES)
    ]


def check_parked_acquired(
    ledger: Ledger, replica: Replica, suspects: int, tasks: Sequence[Resumable]
) -> None:
    """Check that all parked tasks that the replica may try were acquired."""
    _check_owned(ledger, replica, untried(ledger, replica, suspects), tasks)


def check_overdue(ledger: Ledger, replica: Replica, overdue: Sequence[Overdue]) -> None:
    """Check that exactly the tasks that only need to be ended were acquired."""
    due = [model for model in ledger.models.values() if model.is_overdue(ledger.now)]
    for each in overdue:
        model = ledger.models[each.task.run.task_id]
        reason = model.parked_reason if model.state is TaskState.PARKED else None
        past_deadline = model.is_past_deadline(ledger.now)
        is_suspended = model.suspended_at is not None
        assert (each.past_deadline, each.parked_reason) == (past_deadline, reason)
        assert each.is_suspended == is_suspended
    tasks = [each.task for each in overdue]
    assert sorted(task.run.task_id for task in tasks) == sorted(model.task_id for model in due)
    for task in tasks:
        model = ledger.models[task.run.task_id]
        ledger.grant(model, task.run, replica)
        assert task == model.to_resumable().without_content()


def check_rescued(
    ledger: Ledger, replica: Replica, limit: int, suspects: int, tasks: Sequence[Resumable]
) -> None:
    """Check that the tasks with the oldest expired leases were rescued, up to `limit`.

    A task that must run isolated but cannot becomes ready, and so does a suspended one, unless it
    was parked before.
    """
    due = runnable(ledger, replica, TaskState.RUNNING)[:limit]
    for model in due:
        model.rescues += 1
        model.attempt += not replica.isolates
    continued = [
        story
        for story in due
        if story.suspended_at is None and (suspects or story.rescues < SUSPECT_AFTER_RESCUES)
    ]
    _check_owned(ledger, replica, continued, tasks)
    for model in due:
        if model not in continued:
            _leave(model, ledger, may_park=model.suspended_at is not None)


def lost_unread(ledger: Ledger, replica: Replica) -> list[TaskModel]:
    """Running tasks that were not rescued for a lease, in formats that `replica` cannot read."""
    return [
        model
        for model in ledger.in_state(TaskState.RUNNING)
        if not model.is_readable_by(replica)
        and model.due_at is not None
        and model.due_at <= ledger.now - replica.lease
    ]


def check_unread_released(ledger: Ledger, replica: Replica, released: Sequence[TaskId]) -> None:
    """Check that the lost tasks without a reader became ready, or parked if they had been."""
    due = lost_unread(ledger, replica)
    assert sorted(released) == sorted(model.task_id for model in due)
    for model in due:
        model.rescues += 1
        model.attempt += not replica.isolates
        _leave(model, ledger, may_park=True)


def _leave(model: TaskModel, ledger: Ledger, *, may_park: bool) -> None:
    """Make a lost task ready, or park it again if it was parked before."""
    model.make_ready(ledger.now, None)
    if may_park and model.parked_since is not None:
        model.state, model.due_at = TaskState.PARKED, model.parked_until(model.parked_since)


def _check_owned(
    ledger: Ledger, replica: Replica, due: Sequence[TaskModel], tasks: Sequence[Resumable]
) -> None:
    assert sorted(task.run.task_id for task in tasks) == sorted(model.task_id for model in due)
    for task in tasks:
        ledger.check_resumed(ledger.models[task.run.task_id], task, replica)


def check_renewed(
    ledger: Ledger, runs: Sequence[Run], replica: Replica, lost: Sequence[Run]
) -> None:
    """Check that exactly the owning runs got their leases extended."""
    for run in runs:
        model = ledger.models.get(run.task_id)
        if model is not None and model.is_owned_by(run):
            assert run not in lost, f"{run} owns its task and lost its lease"
            model.due_at = ledger.now + replica.lease
        else:
            assert run in lost, f"{run} does not own its task and was renewed"


def check_progress(
    ledger: Ledger, updates: Sequence[Progress], results: Sequence[ProgressRecorded | None]
) -> None:
    """Check that idle deadlines moved, but never past absolute ones."""
    for update, result in zip(updates, results, strict=True):
        model = ledger.models.get(update.task_id)
        call = (
            next((call for call in model.pending_calls if call.id == update.sub_task_id), None)
            if model
            else None
        )
        if model is None or call is None or call.planned.peer != update.sender:
            assert result is None
            continue
        assert result == ProgressRecorded(
            model.task_id, model.requester, followers=model.further_addresses
        )
        idle_timeout = call.planned.idle_timeout
        if idle_timeout is not None:
            extended = min(ledger.now + idle_timeout, call.deadline)
            call.due_at = extended if extended - call.due_at >= idle_timeout / 10 else call.due_at


def check_keep_alives(ledger: Ledger, notes: Sequence[KeepAlive]) -> None:
    """Check that each requester that is due a keep-alive gets one."""
    expected = []
    for model in ledger.in_state(
        TaskState.WAITING, TaskState.READY, TaskState.PARKED, TaskState.RUNNING
    ):
        idle_timeout = model.requester.idle_timeout
        if (
            idle_timeout is not None
            and model.keep_alive_at is not None
            and model.keep_alive_at <= ledger.now
        ):
            expected.append(model.task_id)
            model.keep_alive_at = ledger.now + idle_timeout / KEEP_ALIVES_PER_TIMEOUT
    assert sorted(note.task_id for note in notes) == sorted(expected)


def check_purged(ledger: Ledger, count: int) -> None:
    """Check that tombstones are purged once expired and with nothing left to send."""
    purgeable = [model for model in ledger.models.values() if _purgeable(model, ledger)]
    assert count == len(purgeable), f"{count} purged, not {[story.task_id for story in purgeable]}"
    for story in purgeable:
        ledger.purged[story.task_id] = ledger.models.pop(story.task_id)


def _purgeable(model: TaskModel, ledger: Ledger) -> bool:
    over = model.expires_at is not None and model.expires_at <= ledger.now
    return over and model.reply_sending is None and not model.calls_with_row


def check_unsent(ledger: Ledger, sends: Sequence[OutboxItem]) -> None:
    """Check that exactly the due sends were offered, and lease them."""
    due: list[tuple[str, TaskId]] = []
    for model in ledger.models.values():
        for call in model.calls_with_row:
            is_sendable = call.outcome is None and not call.dispatched and call.due_at > ledger.now
            if (is_sendable or call.cancelling) and _offer_if_due(call.sending, ledger):
                due.append(("CancelNotice" if call.cancelling else "Dispatch", call.id))
        if model.reply_sending is not None and _offer_if_due(model.reply_sending, ledger):
            due.append(("Reply", model.task_id))
    assert sorted(_identity(send) for send in sends) == sorted(due)
    for send in sends:
        if isinstance(send, Reply):
            assert send == ledger.models[send.task_id].reply_at(ledger.now)


def _offer_if_due(sending: PendingSend, ledger: Ledger) -> bool:
    if sending.due_at > ledger.now:
        return False
    sending.offer(ledger.now)
    return True


def _identity(send: OutboxItem) -> tuple[str, TaskId]:
    assert send.agent == AGENT
    return type(send).__name__, send.task_id if isinstance(send, Reply) else send.sub_task_id


def record_confirmed(ledger: Ledger, sends: Sequence[OutboxItem]) -> None:
    """Record that the broker has confirmed these sends."""
    for send in sends:
        model = ledger.models.get(send.task_id)
        if model is None:
            continue
        match send:
            case Reply():
                model.confirm_reply(send)
            case Dispatch() | CancelNotice():
                call = next(
                    (call for call in model.calls_with_row if call.id == send.sub_task_id), None
                )
                if call is not None and isinstance(send, CancelNotice):
                    call.cancelling = False
                elif call is not None and call.outcome is None:
                    call.dispatched = True
