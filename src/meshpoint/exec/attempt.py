"""One attempt: let the session's operation go on, serve the agents, wait for its end.

The order is what makes an attempt safe to kill. The operation is made ready, with this process as its requester,
before anything is served: what an earlier attempt left behind is a zombie by then, and no request lies in a queue.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

from meshpoint.adapters.embedded_leftovers import forget_queues
from meshpoint.client import Client, Reply
from meshpoint.engine.receive import requester_of
from meshpoint.errors import MeshpointError
from meshpoint.exec.embedded import Exec, begin, embedded_store
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
from meshpoint.subtasks.migrating import migrated
from meshpoint.subtasks.resuming import refusal_of
from meshpoint.wiring import make_broker

_QUICK = {
    "ack_policy": "on_receipt",  # an owner that was killed is missed after its lease, sooner than by the broker
    "lease_seconds": 2,
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.05,
    "settle_time_seconds": 0.05,
    "dispatch_lease_seconds": 1,
    "reply_retry_time_seconds": 1,
}
_NOBODY_SERVES = re.compile(r"no replica of agent '([^']+)' ever declared its queue")


@dataclass(frozen=True, slots=True)
class Ended:
    """What an attempt came to. `checkpoint` is the operation's last one; a completed one has none any more."""

    outcome: Outcome
    checkpoint: AgentCheckpoint | None


async def attempt(run: Exec, session: Session, log: StepLog, stop: asyncio.Event) -> Ended:
    """Let the operation of a session, which this process holds, come to an end. `stop` cancels it.

    Raises:
        IncompatibleState: no migration leads from its checkpoint to this version of the agent.
        ResumeRefused: it cannot go on.
        ConfigurationError: an agent cannot be served here.
        Unavailable: the embedded store does not answer.
    """
    task_id = session.operation_id
    async with embedded_store(run, session.namespace) as store:
        last = await store.latest(task_id, run.name)
        if last is not None:
            last = migrated(last, run.plan.version, run.plan.migrations)
        log.follow(run.name, task_id, earlier=_names(last), again=session.again)
        forget_queues(run.file, session.namespace, [each.name for each in run.served])
        async with Client(make_broker(run.mesh(session.namespace))) as client:
            reply = client.expect(run.name, task_id)
            outcome = await _handed_in(store, client.request(session.input, task_id), run.name)
            if outcome is not None:
                log.had_completed()
            else:
                outcome = await _served(run, session, log, client, reply, stop)
        return Ended(_explained(outcome), await store.latest(task_id, run.name))


def _names(checkpoint: AgentCheckpoint | None) -> list[str]:
    return [record.name for record in checkpoint.subtasks] if checkpoint is not None else []


async def _handed_in(store: CheckpointStore, request: Message, agent: AgentName) -> Outcome | None:
    """Make the operation ready, for this client; its outcome, if it has completed and nobody was told."""
    task_id, packed, requester = TaskId(request.correlation_id), pack(request), requester_of(request)
    wish = Revive(
        task_id=task_id,
        token=new_id(),
        agent=agent,
        request=packed,
        requester=requester,
        without_checkpoint=True,
        abandoned=True,
    )
    result = await store.revive(wish)
    match result:
        case NotRevived(refusal=Refusal.NOT_FOUND):
            begun = await begin(store, task_id, agent, requester, packed)
            if begun is None or not all(await store.release([Release(begun)])):
                raise MeshpointError(f"operation {task_id} is another agent's")
        case NotRevived(refusal=Refusal.COMPLETED):
            known = (await store.lookup([task_id])).get(task_id)
            if known is None or known.reply is None:
                raise refusal_of(task_id, result)
            return parse(ResponseBody, known.reply.body).outcome()
        case NotRevived():
            raise refusal_of(task_id, result)
    return None


async def _served(
    run: Exec, session: Session, log: StepLog, client: Client, reply: asyncio.Future[Reply], stop: asyncio.Event
) -> Outcome:
    async with local_mesh(
        *run.served,
        broker_url=run.url,
        db_url=run.url,
        namespace=session.namespace,
        observer=log,
        checkpoint_ttl_seconds=run.kept_seconds,
        tombstone_ttl_seconds=run.kept_seconds,
        secret_keys=list(run.secret_keys),
        **_QUICK,
    ):
        stopped = asyncio.ensure_future(stop.wait())
        either: tuple[asyncio.Future[Any], ...] = (reply, stopped)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                await client.cancel(run.name, session.operation_id)
            return (await reply).outcome
        finally:
            stopped.cancel()


def _explained(outcome: Outcome) -> Outcome:
    """`outcome`, with what to do about a peer that nobody serves."""
    if isinstance(outcome, Failed) and (peer := _NOBODY_SERVES.search(outcome.message)):
        advice = f"serve it in the same process: add --with MODULE:{peer[1]}"
        return replace(outcome, message=f"{outcome.message}; {advice}")
    return outcome
