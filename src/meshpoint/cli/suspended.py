"""`tasks suspend`, and `tasks resume` for suspended tasks, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshpoint.cli import sources
from meshpoint.cli.audit import Action
from meshpoint.cli.output import format_age, print_either, print_json, print_table, print_text
from meshpoint.cli.task_facts import describe_peers, describe_state
from meshpoint.errors import MeshpointError, OperationCompleted, OperationNotFound
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import SuspendRefused, TaskSuspended

if TYPE_CHECKING:
    from meshpoint.model.tasks import TaskSummary
    from meshpoint.operations import Operations

_NONE_SUSPENDED = "no such task is suspended"
_NONE_LEFT = "no such task can be suspended"
_CONTINUED = "is no longer suspended"


def suspend_one(
    task_id: str,
    config: Path | None,
    database: str | None,
    namespace: str | None,
    *,
    as_json: bool,
) -> None:
    """Suspend a task, and print when it stops.

    Raises:
        OperationNotFound, OperationCompleted, MeshpointError: It cannot be suspended.
    """

    async def suspend(operations: Operations) -> TaskSuspended:
        (result,) = await operations.suspend([task_id])
        if isinstance(result, SuspendRefused):
            raise _refusal(task_id, result, sources.database_options(config, namespace))
        return result

    result = asyncio.run(sources.query_operation(config, database, namespace, suspend))
    status = _status(result)
    verb = f"is already {status}" if result.repeated else _describe_suspension(result.state)
    text = f"{task_id} {verb}"
    print_either({"task_id": task_id, "status": status}, text, as_json=as_json)


def suspend_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    states: Sequence[str],
    agent: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Suspend all tasks of an agent or in some states, or only list them."""
    if not states and agent is None:
        raise typer.BadParameter("name a TASK_ID, or use --agent or --state")

    async def suspend(operations: Operations, ids: Sequence[str]) -> list[str]:
        return [
            task_id
            for task_id, result in zip(ids, await operations.suspend(ids), strict=True)
            if isinstance(result, TaskSuspended)
        ]

    def find(operations: Operations) -> AsyncGenerator[list[TaskSummary], None]:
        return operations.suspendable(agent=agent, states=states)

    change = None if dry_run else suspend
    action = Action("suspend", agent or "all agents", {"states": [*states]}, "suspended {}")
    found = asyncio.run(sources.change_all(config, database, namespace, find, change, action))
    _print_changed(found, "suspended", _NONE_LEFT, dry_run=dry_run, as_json=as_json)


def resume_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    agent: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Let replicas run all suspended tasks of an agent again, or only list them."""

    async def unsuspend(operations: Operations, ids: Sequence[str]) -> list[str]:
        return await operations.unsuspend(ids)

    def find(operations: Operations) -> AsyncGenerator[list[TaskSummary], None]:
        return operations.suspended(agent=agent)

    change = None if dry_run else unsuspend
    action = Action("resume-suspended", agent or "all agents", {}, "continued {}")
    found = asyncio.run(sources.change_all(config, database, namespace, find, change, action))
    _print_changed(found, "continued", _NONE_SUSPENDED, dry_run=dry_run, as_json=as_json)


def print_continued(task_id: str, *, as_json: bool) -> None:
    """Print that a task is no longer suspended."""
    result = {"task_id": task_id, "status": "continued"}
    print_either(result, f"{task_id} {_CONTINUED}", as_json=as_json)


def _print_changed(
    tasks: Sequence[TaskSummary], status: str, nothing: str, *, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        shown = "unchanged" if dry_run else status
        print_json({"task_ids": [task.task_id for task in tasks], "status": shown})
    elif not tasks:
        print_text(nothing)
    elif dry_run:
        columns = ("task", "agent", "state", "waiting for", "in this state")
        print_table(columns, [_row(task) for task in tasks])
    else:
        print_text("\n".join(f"{task.task_id} {_verb(task, status)}" for task in tasks))


def _verb(task: TaskSummary, status: str) -> str:
    return _CONTINUED if status == "continued" else _describe_suspension(task.state)


def _describe_suspension(state: TaskState) -> str:
    if state is TaskState.RUNNING:
        return "runs to its next pause and is suspended there"
    return "is suspended"


def _row(task: TaskSummary) -> tuple[str, ...]:
    age = format_age(task.checkpointed_at)
    return task.task_id, task.agent, describe_state(task), describe_peers(task), age


def _status(result: TaskSuspended) -> str:
    return "suspending" if result.state is TaskState.RUNNING else "suspended"


def _refusal(task_id: str, refused: SuspendRefused, database_options: str) -> MeshpointError:
    """The error for a task that cannot be suspended, with cause and fix."""
    resume = f"meshpoint tasks resume {task_id} {database_options}"
    if refused.is_cancelled:
        return MeshpointError(f"task {task_id} is being cancelled; there is nothing to suspend")
    match refused.state:
        case None:
            why = "a task has no row until it pauses or begins a step or subtask"
            problem = f"there is no task {task_id} in the database"
            return OperationNotFound(task_id, f"{problem}; {why}, and cannot be suspended before")
        case TaskState.COMPLETED:
            return OperationCompleted(
                task_id, f"task {task_id} has completed; there is nothing to suspend"
            )
        case TaskState.PARKED:
            fix = f"offer it again with: {resume}; or cancel it"
            return MeshpointError(f"task {task_id} is parked, so no replica runs it; {fix}")
        case state:
            fix = f"a new attempt begins with: {resume}"
            verb = "failed" if state is TaskState.FAILED else "been cancelled"
            return MeshpointError(
                f"task {task_id} has already {verb}; there is nothing to suspend; {fix}"
            )
