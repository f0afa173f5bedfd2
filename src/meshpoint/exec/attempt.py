"""One attempt: make the session's operation ready, serve the agents, wait for its end.

The order makes it safe to kill an attempt at any time. The operation is made ready, with this
process as its requester, before anything is served. Runs left behind by an earlier attempt are
then zombies, and no request is queued.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

from meshpoint.adapters.embedded_leftovers import delete_unserved_queues
from meshpoint.client import Client, Reply
from meshpoint.engine.receive import requester_of
from meshpoint.errors import MeshpointError
from meshpoint.exec.embedded import ExecConfig, begin_operation, embedded_store
from meshpoint.exec.report import StepLog
from meshpoint.exec.session import Session
from meshpoint.local import local_mesh
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.checkpoint import Release
from meshpoint.model.envelopes import pack
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Message
from meshpoint.model.operations import NotRevived, Refusal, Revive
from meshpoint.model.outcomes import Failed, Outcome
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.subtasks.resuming import refusal_error
from meshpoint.wiring import make_broker

_FAST_SETTINGS = {
    "ack_policy": "on_receipt",  # the lease detects a killed owner faster than the broker
    "lease_seconds": 2,
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.05,
    "settle_time_seconds": 0.05,
    "dispatch_lease_seconds": 1,
    "reply_retry_time_seconds": 1,
}
_NOT_SERVED = re.compile(r"no replica of agent '([^']+)' ever declared its queue")


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The result of an attempt, and the operation's last checkpoint; `None` if it completed."""

    outcome: Outcome
    checkpoint: AgentCheckpoint | None


async def execute_attempt(config: ExecConfig, session: Session, log: StepLog, stop: asyncio.Event) -> AttemptOutcome:
    """Run the operation of a session to its end. This process must have locked the session.

    Setting `stop` cancels the operation.

    Raises:
        IncompatibleState: No migration leads from its checkpoint to this version of the agent.
        ResumeRefused: It cannot be resumed.
        ConfigurationError: An agent cannot be served here.
        Unavailable: The embedded store does not answer.
    """
    task_id = session.operation_id
    async with embedded_store(config, session.namespace) as store:
        checkpoint = await store.latest(task_id, config.agent_name)
        if checkpoint is not None:
            checkpoint = migrate_checkpoint(checkpoint, config.plan.version, config.plan.migrations)
        log.track(config.agent_name, task_id, previous_steps=_subtask_names(checkpoint), rerun_reasons=session.again)
        delete_unserved_queues(config.store_file, session.namespace, [each.name for each in config.agents])
        async with Client(make_broker(config.mesh_settings(session.namespace))) as client:
            reply = client.expect(config.agent_name, task_id)
            outcome = await _submit(store, client.request(session.input, task_id), config.agent_name)
            if outcome is not None:
                log.reuse_all()
            else:
                outcome = await _serve_until_done(config, session, log, client, reply, stop)
        return AttemptOutcome(_add_advice(outcome), await store.latest(task_id, config.agent_name))


def _subtask_names(checkpoint: AgentCheckpoint | None) -> list[str]:
    return [record.name for record in checkpoint.subtasks] if checkpoint is not None else []


async def _submit(store: CheckpointStore, request: Message, agent: AgentName) -> Outcome | None:
    """Make the operation ready, with this client as its requester.

    Returns its outcome if it has already completed without anyone receiving the reply.
    """
    task_id, packed, requester = TaskId(request.correlation_id), pack(request), requester_of(request)
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
        case NotRevived(refusal=Refusal.NOT_FOUND):
            run = await begin_operation(store, task_id, agent, requester, packed)
            if run is None or not all(await store.release([Release(run)])):
                raise MeshpointError(f"operation {task_id} belongs to another agent")
        case NotRevived(refusal=Refusal.COMPLETED):
            existing = (await store.lookup([task_id])).get(task_id)
            if existing is None or existing.reply is None:
                raise refusal_error(task_id, result)
            return parse(ResponseBody, existing.reply.body).outcome()
        case NotRevived():
            raise refusal_error(task_id, result)
    return None


async def _serve_until_done(
    config: ExecConfig,
    session: Session,
    log: StepLog,
    client: Client,
    reply: asyncio.Future[Reply],
    stop: asyncio.Event,
) -> Outcome:
    async with local_mesh(
        *config.agents,
        broker_url=config.store_url,
        db_url=config.store_url,
        namespace=session.namespace,
        observer=log,
        checkpoint_ttl_seconds=config.retention_seconds,
        tombstone_ttl_seconds=config.retention_seconds,
        secret_keys=list(config.secret_keys),
        **_FAST_SETTINGS,
    ):
        stopped = asyncio.ensure_future(stop.wait())
        waits: tuple[asyncio.Future[Any], ...] = (reply, stopped)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                await client.cancel(config.agent_name, session.operation_id)
            return (await reply).outcome
        finally:
            stopped.cancel()


def _add_advice(outcome: Outcome) -> Outcome:
    """Add advice to the error about a peer that is not served."""
    if isinstance(outcome, Failed) and (peer := _NOT_SERVED.search(outcome.message)):
        advice = f"serve it in the same process: add --with MODULE:{peer[1]}"
        return replace(outcome, message=f"{outcome.message}; {advice}")
    return outcome
