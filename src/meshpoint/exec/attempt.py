"""Run one attempt: make the session's operation ready, serve the agents, record its end.

The order makes it safe to kill an attempt at any time. The operation is made ready, with this
process as its requester, before anything is served. Runs left behind by an earlier attempt are
then zombies, and no request is queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from meshpoint.client.open_task import OpenTask
from meshpoint.client.requests import check_request
from meshpoint.client.transport import Transport
from meshpoint.engine.parsing import parse_requester
from meshpoint.engine.task_log import StepEntry, TaskLog
from meshpoint.errors import MeshpointError
from meshpoint.exec.embedded import ExecConfig, begin_operation
from meshpoint.exec.report import StepLog, StepProgress, StepReport
from meshpoint.exec.session import AttemptStatus, Session
from meshpoint.exec.sessions import LockedSession
from meshpoint.local import local_mesh
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.envelopes import encode_request
from meshpoint.model.ids import ReplicaId, TaskId, new_id
from meshpoint.model.messages import Message
from meshpoint.model.operations import NotRevived, Refusal, Revive, Revived
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.secrets import mask_secrets
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.model.tasks import Replica
from meshpoint.model.transitions import Append, Release
from meshpoint.ports.agent import readable_formats
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import MeshSettings
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.subtasks.resuming import refusal_error
from meshpoint.wiring import delete_unserved_queues, make_broker

_FAST_SETTINGS = {
    "ack_policy": "on_receipt",  # the lease detects a killed owner faster than the broker
    "lease_seconds": 2,
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.05,
    "settle_time_seconds": 0.05,
    "dispatch_lease_seconds": 1,
    "reply_retry_time_seconds": 1,
    "undeliverable_after_seconds": 0,  # all peers are in this process
    "parked_limit_seconds": 0,  # in the foreground, no other release follows
}


_MAX_READY = 1000
"""Tasks to acquire: the operation, and older ones if its agent calls itself."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt.

    `checkpoint` is set if it did not complete and had begun a step.
    """

    session: Session
    attempt_number: int
    status: AttemptStatus
    outcome: Outcome
    steps: list[StepReport]
    checkpoint: AgentCheckpoint | None


async def run_attempt(
    config: ExecConfig,
    locked: LockedSession,
    on_change: Callable[[StepLog, StepProgress], None],
    stop: asyncio.Event,
) -> AttemptResult:
    """Run one attempt of a session and record its result in the session.

    Setting `stop` cancels the operation. `on_change` is called with each step that changed.

    Raises:
        MeshpointError: The attempt has no outcome: its checkpoint is incompatible, it cannot be
            resumed, an agent cannot be served here, or the embedded store does not answer. The
            session has the reason.
    """
    session, entry = locked.session, locked.begin_attempt(config.sources)
    log = StepLog(
        config.agent_name,
        session.operation_id,
        planned=config.plan.subtasks,
        rerun_reasons=session.again,
        secret_keys=config.secret_keys,
        on_change=on_change,
    )
    try:
        outcome, checkpoint = await _execute(
            config, session, log, stop, keeps_steps=locked.continues_killed
        )
    except MeshpointError as error:
        reason = mask_secrets(str(error), config.secret_keys)
        locked.end_attempt(AttemptStatus.FAILED, reason, log.finish(None))
        raise
    if isinstance(outcome, Failed):
        outcome = replace(outcome, message=mask_secrets(outcome.message, config.secret_keys))
    status, steps = _attempt_status(outcome), log.finish(outcome)
    locked.end_attempt(status, outcome.message if isinstance(outcome, Failed) else None, steps)
    unfinished = None if isinstance(outcome, Ok) else checkpoint
    return AttemptResult(session, entry.number, status, outcome, steps, unfinished)


def _attempt_status(outcome: Outcome) -> AttemptStatus:
    match outcome:
        case Ok():
            return AttemptStatus.COMPLETED
        case Failed(kind=FailureKind.CANCELLED):
            return AttemptStatus.CANCELLED
        case _:
            return AttemptStatus.FAILED


async def _execute(
    config: ExecConfig, session: Session, log: StepLog, stop: asyncio.Event, *, keeps_steps: bool
) -> tuple[Outcome, AgentCheckpoint | None]:
    """Run the operation to its end; return its outcome and, unless completed, last checkpoint.

    With `keeps_steps`, the records of `ctx.step` in a killed attempt count.
    """
    task_id = session.operation_id
    async with config.open_store(session.namespace) as store:
        checkpoint = await store.latest(task_id, config.agent_name)
        if checkpoint is not None:
            checkpoint = migrate_checkpoint(
                checkpoint, config.plan.version, config.plan.migrations
            )
            log.add_previous(record.name for record in checkpoint.subtasks)
        delete_unserved_queues(
            config.store_file, session.namespace, [each.name for each in config.agents]
        )
        mesh = MeshSettings(
            namespace=session.namespace,
            broker_url=config.store_url,
            encryption_keys=tuple(config.encryption_keys),
        )
        async with Transport(make_broker(mesh)) as transport:
            task, message = transport.prepare(
                check_request(config.agent_name, session.input, {"task_id": task_id})
            )
            outcome = await _submit(config, store, message, keeps_steps=keeps_steps)
            if outcome is not None:
                log.reuse_all()
            else:
                outcome = await _serve_until_done(config, session, log, transport, task, stop)
                outcome = _add_advice(outcome, log.unserved_agents)
        return outcome, await store.latest(task_id, config.agent_name)


async def _submit(
    config: ExecConfig, store: CheckpointStore, request: Message, *, keeps_steps: bool
) -> Outcome | None:
    """Make the operation ready, with this client as its requester.

    Returns its outcome if it has already completed without anyone receiving the reply.
    """
    agent, task_id, packed, requester = (
        config.agent_name,
        TaskId(request.correlation_id),
        encode_request(request),
        parse_requester(request),
    )
    existing = (await store.lookup([task_id])).get(task_id)
    command = Revive(
        task_id=task_id,
        token=new_id(),
        agent=agent,
        request=packed,
        requester=requester,
        without_checkpoint=True,
        abandoned=True,
    )
    result = await store.revive(command)
    match result:
        case Revived(retry_count=retry_count):
            if keeps_steps and existing is not None and not existing.state.is_final:
                await _keep_steps(config, store, task_id, retry_count)
        case NotRevived(refusal=Refusal.NOT_FOUND):
            run = await begin_operation(store, task_id, agent, requester, packed)
            if not all(await store.release([Release(run)])):
                raise MeshpointError(f"operation {task_id} belongs to another agent")
        case NotRevived(refusal=Refusal.COMPLETED):
            if existing is None or existing.reply is None:
                raise refusal_error(task_id, result)
            return parse_body(ResponseBody, existing.reply.body).outcome()
        case NotRevived():
            raise refusal_error(task_id, result)
    return None


async def _keep_steps(
    config: ExecConfig, store: CheckpointStore, task_id: TaskId, retry_count: int
) -> None:
    """Record the steps of the killed attempt again, for attempt `retry_count`.

    A new attempt drops step records, because they say nothing about code and inputs. But a kill is
    a crash, and neither the flow nor its input has changed since then.
    """
    replica = Replica(
        ReplicaId(new_id()),
        config.agent_name,
        readable_formats(config.agent),
        lease=timedelta(seconds=10),
    )
    acquired = await store.acquire(replica, _MAX_READY)
    try:
        for task in (each for each in acquired if each.run.task_id == task_id):
            killed = TaskLog.of(replace(task, retry_count=retry_count - 1))
            steps = [StepEntry(retry_count, each.record) for each in killed.steps]
            if steps:
                await store.append([Append(task.run, TaskLog.of(task).append(steps))])
    finally:
        await store.release([Release(each.run) for each in acquired])


async def _serve_until_done(
    config: ExecConfig,
    session: Session,
    log: StepLog,
    transport: Transport,
    task: OpenTask,
    stop: asyncio.Event,
) -> Outcome:
    async with local_mesh(
        *config.agents,
        broker_url=config.store_url,
        db_url=config.store_url,
        namespace=session.namespace,
        observer=log,
        checkpoint_ttl_seconds=config.retention.total_seconds(),
        tombstone_ttl_seconds=config.retention.total_seconds(),
        secret_keys=list(config.secret_keys),
        encryption_keys=list(config.encryption_keys),
        encryption_tenant=config.encryption_tenant,
        **_FAST_SETTINGS,
    ):
        stopped = asyncio.ensure_future(stop.wait())
        ended = asyncio.ensure_future(task.wait_outcome())
        waits: tuple[asyncio.Future[Any], ...] = (ended, stopped)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await transport.cancel(config.agent_name, session.operation_id)
            return await ended
        finally:
            stopped.cancel()
            ended.cancel()


def _add_advice(outcome: Outcome, unserved_agents: Iterable[str]) -> Outcome:
    """Add how to serve called agents without a replica to the error of a failed operation."""
    names = list(unserved_agents)
    if not isinstance(outcome, Failed) or not names:
        return outcome
    options = " ".join(f"--with MODULE:{name}" for name in names)
    advice = f"to serve {' and '.join(names)} in the same process, add {options}"
    return replace(outcome, message=f"{outcome.message}; {advice}")
