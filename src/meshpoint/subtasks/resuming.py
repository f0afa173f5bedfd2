"""Resume an operation, or raise the exact reason why it cannot be resumed."""

from __future__ import annotations

from meshpoint.errors import (
    ConfigurationError,
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    ResumeRefused,
)
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.operations import Adopted, NotRevived, Refusal, Revive, Revived
from meshpoint.ports.task_store import Operations

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
    store: Operations, id_: TaskId, *, agent: AgentName | None = None
) -> Revived:
    """Make a failed or cancelled operation ready to resume, in any replica of its agent.

    It resumes from its checkpoint. Of two concurrent callers, one succeeds and the other gets
    `OperationRunning`. The original requester already has its reply and is not sent another one;
    the new outcome is stored in the database. If the first reply was not sent yet, the new one
    replaces it.

    Raises:
        OperationNotFound, OperationRunning, OperationCompleted, NoCheckpoint, OperationConflict:
            It cannot be resumed; checked in this order.
        Unavailable: The database did not answer. Trying again is safe.
    """
    result = await store.revive(Revive(task_id=id_, token=new_id(), agent=agent))
    match result:
        case Revived():
            return result
        case NotRevived():
            raise refusal_error(id_, result)
        case Adopted():  # it is active, and this command did not ask to adopt it
            raise refusal_error(id_, NotRevived(Refusal.RUNNING))


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
