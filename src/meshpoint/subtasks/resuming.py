"""Resume an operation, or raise the exact reason why it cannot be resumed."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.errors import (
    ConfigurationError,
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    ResumeRefused,
)
from meshpoint.model.bodies import RequestBody, parse_body, renamed_request
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.json_values import json_digest
from meshpoint.model.messages import Header
from meshpoint.model.operations import (
    NO_REQUESTER,
    Adopted,
    LastPause,
    NotRevived,
    OperationStatus,
    Refusal,
    Revive,
    Revived,
)
from meshpoint.model.outcomes import Ok
from meshpoint.model.subtasks import AgentCheckpoint, Child
from meshpoint.model.tasks import PlannedCall
from meshpoint.model.transitions import Pause
from meshpoint.model.usage import TokenUsage
from meshpoint.model.waits import QUESTION_PREFIX, is_wait
from meshpoint.ports.agent import RESUME_FROM, ResumeFrom
from meshpoint.ports.task_store import Operations

_RESUMABLE = {OperationStatus.FAILED, OperationStatus.CANCELLED}
_MAX_ID_BYTES = 248  # bytes, as on the wire


def parse_operation_id(text: str) -> TaskId:
    """Return `text` as the id of an operation.

    Raises:
        ConfigurationError: It is not a valid task id.
    """
    if not text or not text.isprintable() or len(text.encode(errors="replace")) > _MAX_ID_BYTES:
        fix = (
            f"ids are printable and have 1 to {_MAX_ID_BYTES} bytes; "
            "`meshpoint tasks list` shows them"
        )
        raise ConfigurationError("operation id", f"{text!r} is not a valid id", fix)
    return TaskId(text)


async def resume_operation(
    store: Operations,
    id_: TaskId,
    *,
    agent: AgentName | None = None,
    resume_from: ResumeFrom | None = None,
) -> Revived:
    """Make a failed or cancelled operation ready to resume, in any replica of its agent.

    From the start, its code runs again from its request, and recorded subtasks are skipped. From
    the last pause, its code continues there: results are reused, and calls without one are made
    again under new ids. Without `resume_from`, the agent's own choice counts, as its last
    checkpoint records it. An operation that has not paused starts from its request, unless
    `resume_from` asks for the pause.

    Of two concurrent callers, one succeeds and the other gets `OperationRunning`. The new outcome
    is stored in the database, and sent to the requester, in a message of its own.

    Raises:
        OperationNotFound, OperationRunning, OperationCompleted, NoCheckpoint, OperationConflict:
            It cannot be resumed; checked in this order.
        Unavailable: The database did not answer. Trying again is safe.
    """
    command = Revive(task_id=id_, token=new_id(), agent=agent)
    command = await at_last_pause(store, command, resume_from)
    if resume_from == "last-pause" and command.pause is None:
        operation = await store.operation(id_)
        if operation is not None and operation.status in _RESUMABLE:
            raise NoCheckpoint(id_, f"operation {id_} has not paused; resume it from its start")
    result = await store.revive(command)
    match result:
        case Revived():
            return result
        case NotRevived():
            raise refusal_error(id_, result)
        case Adopted():  # it is active, and this command did not ask to adopt it
            raise refusal_error(id_, NotRevived(Refusal.RUNNING))


async def at_last_pause(
    store: Operations, command: Revive, resume_from: ResumeFrom | None = None
) -> Revive:
    """Let `command` resume its task at the last pause, if that is asked for and there is one.

    Without `resume_from`, the agent's choice in the operation's last checkpoint counts.
    """
    checkpoint = await store.latest(command.task_id, command.agent)
    chosen = resume_from or (checkpoint and checkpoint.agent_config.get(RESUME_FROM))
    if chosen != "last-pause":
        return command
    last = await store.last_pause(command.task_id, command.agent)
    if last is None:
        return command
    pause = _repeated_pause(last, command.token)
    if checkpoint is not None:
        pause = replace(pause, checkpoint=_resumed_checkpoint(checkpoint, last))
    return replace(command, pause=pause)


def _resumed_checkpoint(checkpoint: AgentCheckpoint, last: LastPause) -> AgentCheckpoint:
    """The checkpoint of the new attempt.

    It does not compare records from before the pause, because the pause depends on them.
    """
    retry = last.retry_count + 1
    records = [
        record.model_copy(update={"reused_in": retry})
        if record.belongs_to(last.retry_count) and record.generation < last.run.generation
        else record
        for record in checkpoint.subtasks
    ]
    return checkpoint.model_copy(
        update={
            "seq": checkpoint.seq + 1,
            "subtasks": tuple(records),
            "retry_count": retry,
            "failure_reason": None,
            "error_details": None,
        }
    )


def _repeated_pause(last: LastPause, token: str) -> Pause:
    """The last pause again: calls with a result have it, and the others are made again.

    A call is made again only if the results do not complete the join. The context already
    counts the tokens of all calls.
    """
    retry = last.retry_count + 1
    succeeded = sum(isinstance(call.outcome, Ok) for call in last.calls)
    is_met = last.join.met(total=len(last.calls), completed=succeeded, succeeded=succeeded)
    children = [child.model_copy(update={"retry": retry}) for child in last.children]
    calls: list[PlannedCall] = []
    for kept in last.calls:
        counted = replace(kept.outcome, usage=TokenUsage())
        if isinstance(counted, Ok):
            calls.append(replace(kept.planned, outcome=counted))
            continue
        if is_met:  # under another id, because a cancel may still be due for the earlier one
            unsent_id = TaskId(new_id())
            calls.append(replace(kept.planned, sub_task_id=unsent_id, outcome=counted))
            continue
        call = _new_call(kept.planned)
        calls.append(call)
        if is_wait(call.peer):
            continue
        digest = json_digest(parse_body(RequestBody, call.body).input())
        children.append(Child(id=call.sub_task_id, peer=call.peer, digest=digest, retry=retry))
    run = replace(last.run, id=RunId(token), generation=last.run.generation - 1)
    return Pause(
        run=run,
        context=last.context,
        state=last.state,
        state_format=last.state_format,
        calls=tuple(calls),
        join=last.join,
        requester=NO_REQUESTER,
        children=tuple(children),
    )


def _new_call(planned: PlannedCall) -> PlannedCall:
    """The same request as a new task of the peer, or the same wait again."""
    task_id = TaskId(new_id())
    if planned.peer.startswith(QUESTION_PREFIX):
        return planned  # it keeps its id
    if is_wait(planned.peer):
        return replace(planned, sub_task_id=task_id)
    headers = {
        name: value for name, value in planned.headers.items() if name != Header.RESUME.value
    }
    body = renamed_request(planned.body, task_id)
    return replace(planned, sub_task_id=task_id, body=body, headers=headers)


def refusal_error(id_: TaskId, refused: NotRevived) -> ResumeRefused:
    """Return the exception for `refused`."""
    detail = f": {refused.detail}" if refused.detail else ""
    match refused.refusal:
        case Refusal.NOT_FOUND:
            return OperationNotFound(id_, f"there is no operation {id_}{detail}")
        case Refusal.RUNNING:
            return OperationRunning(
                id_, f"operation {id_} is active{detail}; wait for it to end, or cancel it first"
            )
        case Refusal.COMPLETED:
            return OperationCompleted(
                id_, f"operation {id_} has completed; there is nothing to resume"
            )
        case Refusal.NO_CHECKPOINT:
            return NoCheckpoint(
                id_, f"operation {id_} has no checkpoint to resume from; send its request again"
            )
        case Refusal.OTHER_ACTIVE:
            problem = f"its agent is exclusive, and operation {refused.detail} is active"
            return OperationConflict(id_, f"operation {id_} cannot be resumed: {problem}")
