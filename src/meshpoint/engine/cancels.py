"""End a task as cancelled, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.transitions import Cancel, CancelCommitted, CancelResult

CANCELLED = Failed(FailureKind.CANCELLED, "cancelled on request")


class CancelCommand(NamedTuple):
    """A task to cancel, the sender's parent task, the sender, and its reason for people.

    By now the task may belong to a later attempt of the parent. A `sender` of `None` may cancel
    any task.
    """

    task_id: TaskId
    parent: str | None
    sender: str | None
    reason: str = ""


def cancelled_outcome(reason: str) -> Failed:
    """The outcome of a task cancelled for `reason`, which may be empty."""
    return replace(CANCELLED, message=f"{CANCELLED.message}: {reason}") if reason else CANCELLED


async def cancel_tasks(
    backend: Backend, commands: Sequence[CancelCommand], runtime: ReplicaRuntime
) -> list[CancelResult]:
    """Cancel tasks in `backend`.

    Raises:
        StoreUnavailable: As for `ReplicaRuntime.ask_store`.
    """
    cancels = [
        Cancel(
            command.task_id,
            runtime.agent,
            RunId(new_id()),
            encode_reply(command.task_id, None, cancelled_outcome(command.reason)),
            parent=command.parent,
            sender=command.sender,
        )
        for command in commands
    ]
    with runtime.steps.step(Step.CANCEL, [command.task_id for command in commands]):
        results = await runtime.ask_store(backend, lambda: backend.store.cancel(cancels))
    for command, result in zip(commands, results, strict=True):
        if isinstance(result, CancelCommitted):
            runtime.report_failure(command.task_id, cancelled_outcome(command.reason))
    return results
