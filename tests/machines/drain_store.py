"""From any state, replicas that keep sweeping end every task and empty the tables."""

from __future__ import annotations

from dataclasses import replace

from machines import mail_checks, sweeper_checks
from machines.inputs import READS_ALL, RETRY, InputFactory
from machines.ledger import Ledger
from meshpoint.model.tasks import OutboxItem, Resumable, TaskState
from meshpoint.model.transitions import JoinCompleted
from meshpoint.model.waits import SIGNAL_PREFIX, is_question, is_signal
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import AGENT, HOUR, SECOND

BATCH_LIMIT = 1_000
_OPEN_STATES = (TaskState.WAITING, TaskState.READY, TaskState.PARKED, TaskState.RUNNING)


async def drain_store(
    store: CheckpointStore, ledger: Ledger, inputs: InputFactory, clock: FakeClock
) -> None:
    """Sweep until every task has ended, everything is sent, and all rows are purged."""
    await _resume_suspended(store, ledger)
    await _answer_questions(store, ledger, inputs)
    await _send_signals(store, ledger, inputs)
    # exceeds any timeout, lease or back-off, so everything that can be due is due in the first
    # round, apart from parked tasks, later attempts at calls, and calls that are only limited by
    # their peer's silence, which starts again when found late
    for delay in (4 * HOUR, *[4 * HOUR, 13 * SECOND] * RETRY.max_attempts):
        clock.advance(delay)
        await _sweep(store, ledger, inputs)
    assert await store.tasks(states=_OPEN_STATES, limit=BATCH_LIMIT) == [], "tasks are still open"
    clock.advance(12 * HOUR)
    await _send(store, ledger)
    clock.advance(12 * HOUR)
    assert await store.unsent(AGENT, BATCH_LIMIT) == [], "messages are still unsent"
    sweeper_checks.check_purged(ledger, await store.purge(AGENT, BATCH_LIMIT))
    assert await store.tasks(limit=BATCH_LIMIT) == [], "rows are left"
    assert ledger.models == {}


async def _resume_suspended(store: CheckpointStore, ledger: Ledger) -> None:
    models = ledger.models.values()
    task_ids = [model.task_id for model in models if model.suspended_at is not None]
    ledger.check_unsuspended(task_ids, await store.unsuspend(task_ids))


async def _answer_questions(store: CheckpointStore, ledger: Ledger, inputs: InputFactory) -> None:
    """Answer all open questions, which may have no deadline."""
    claims = [
        inputs.make_claim(model.task_id, call.id, call.planned.peer, 0)
        for model in ledger.in_state(TaskState.WAITING)
        for call in model.pending_calls
        if is_question(call.planned.peer)
    ]
    ledger.check_claims(claims, READS_ALL, 0, await store.claim(claims, READS_ALL, 0))


async def _send_signals(store: CheckpointStore, ledger: Ledger, inputs: InputFactory) -> None:
    """Send a signal for each wait, since some have no deadline."""
    commands = [
        replace(
            inputs.make_signal(
                model.task_id, call.planned.peer.removeprefix(SIGNAL_PREFIX), number=0
            ),
            is_trusted=True,
        )
        for model in ledger.in_state(TaskState.WAITING)
        for call in model.pending_calls
        if is_signal(call.planned.peer)
    ]
    mail_checks.check_signals(ledger, commands, await store.signal(commands))


async def _sweep(store: CheckpointStore, ledger: Ledger, inputs: InputFactory) -> None:
    """One sweep, as the sweeper does it, by a replica that reads every format."""
    overdue = await store.acquire_overdue(READS_ALL, BATCH_LIMIT)
    sweeper_checks.check_overdue(ledger, READS_ALL, overdue)
    ready = await store.acquire(READS_ALL, BATCH_LIMIT, BATCH_LIMIT)
    sweeper_checks.check_acquired(ledger, READS_ALL, BATCH_LIMIT, BATCH_LIMIT, ready)
    expired = await store.expire(READS_ALL, BATCH_LIMIT, BATCH_LIMIT)
    sweeper_checks.check_expired(ledger, READS_ALL, BATCH_LIMIT, expired)
    abandoned = await store.rescue(READS_ALL, BATCH_LIMIT, BATCH_LIMIT)
    sweeper_checks.check_rescued(ledger, READS_ALL, BATCH_LIMIT, BATCH_LIMIT, abandoned)
    resumed = [
        result.join_result.task
        for result in expired
        if isinstance(result.join_result, JoinCompleted)
    ]
    tasks = [*(each.task for each in overdue), *ready, *resumed, *abandoned]
    await _end(tasks, store, ledger, inputs)
    await _send(store, ledger)


async def _end(
    tasks: list[Resumable], store: CheckpointStore, ledger: Ledger, inputs: InputFactory
) -> None:
    ends = [inputs.make_end(task.run, number) for number, task in enumerate(tasks)]
    for end, result in zip(ends, await store.end(ends), strict=True):
        ledger.check_end(end, result)


async def _send(store: CheckpointStore, ledger: Ledger) -> None:
    """Send what is due; once a reply is confirmed, it is due to the next attached address."""
    sends: list[OutboxItem] | None = None
    while sends is None or sends:
        sends = await store.unsent(AGENT, BATCH_LIMIT)
        sweeper_checks.check_unsent(ledger, sends)
        await store.confirm_sent(sends)
        sweeper_checks.record_confirmed(ledger, sends)
