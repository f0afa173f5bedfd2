"""Resume an operation, or say precisely why not."""

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
from meshpoint.model.operations import NotRevived, Refusal, Revive, Revived
from meshpoint.ports.operations import Operations

_MAX_ID_BYTES = 248  # bytes, as on the wire


def parse_operation_id(text: str) -> TaskId:
    """`text` as the id of an operation.

    Raises:
        ConfigurationError: no task can have it.
    """
    if not text or not text.isprintable() or len(text.encode(errors="replace")) > _MAX_ID_BYTES:
        fix = f"ids are printable and have 1 to {_MAX_ID_BYTES} bytes; `meshpoint tasks list` shows them"
        raise ConfigurationError("operation id", f"{text!r} is none", fix)
    return TaskId(text)


async def resume_operation(store: Operations, id_: TaskId, *, agent: AgentName | None = None) -> Revived:
    """Make a failed or cancelled operation ready to go on from its checkpoint, in any replica of its agent.

    Of two callers at the same time one wins, and the other hears that it runs. Who asked for the operation has its
    reply already, and its new end stands in the database; if that reply was still to be sent, the new one is sent
    instead.

    Raises:
        OperationNotFound, OperationRunning, OperationCompleted, NoCheckpoint, OperationConflict: it is not resumed;
            checked in this order.
        Unavailable: the database did not answer; asking again is safe.
    """
    result = await store.revive(Revive(task_id=id_, token=new_id(), agent=agent))
    if isinstance(result, NotRevived):
        raise refusal_error(id_, result)
    assert isinstance(result, Revived)
    return result


def refusal_error(id_: TaskId, refused: NotRevived) -> ResumeRefused:
    """What to raise for `refused`."""
    detail = f": {refused.detail}" if refused.detail else ""
    match refused.refusal:
        case Refusal.NOT_FOUND:
            return OperationNotFound(id_, f"there is no operation {id_}{detail}")
        case Refusal.RUNNING:
            return OperationRunning(id_, f"operation {id_} is active{detail}; wait for its end, or cancel it first")
        case Refusal.COMPLETED:
            return OperationCompleted(id_, f"operation {id_} has completed; there is nothing left to do")
        case Refusal.NO_CHECKPOINT:
            return NoCheckpoint(id_, f"operation {id_} has no checkpoint to go on from; send its request again")
        case Refusal.OTHER_ACTIVE:
            problem = f"its agent runs one operation at a time, and {refused.detail} is active"
            return OperationConflict(id_, f"operation {id_} is not resumed: {problem}")
