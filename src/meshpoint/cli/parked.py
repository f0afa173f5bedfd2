"""`tasks resume` for parked tasks, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshpoint.cli import sources
from meshpoint.cli.audit import Action
from meshpoint.cli.output import format_age, print_json, print_table, print_text

if TYPE_CHECKING:
    from pydantic import JsonValue

    from meshpoint.model.tasks import TaskSummary
    from meshpoint.operations import Operations


def resume_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    state: str | None,
    agent: str | None,
    reason: str,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Offer all parked tasks of an agent to every version again, or only list them."""
    if state != "parked":
        raise typer.BadParameter("name a TASK_ID, or use --state parked or suspended")

    async def unpark(operations: Operations, ids: Sequence[str]) -> list[str]:
        return await operations.unpark(ids)

    def find(operations: Operations) -> AsyncGenerator[list[TaskSummary], None]:
        return operations.parked(agent=agent, reason=reason)

    change = None if dry_run else unpark
    details: dict[str, JsonValue] = {"reason": reason} if reason else {}
    action = Action("resume-parked", agent or "all agents", details, "offered {} again")
    found = asyncio.run(sources.change_all(config, database, namespace, find, change, action))
    if not dry_run:
        print_offered([task.task_id for task in found], as_json=as_json)
    elif as_json:
        print_json({"task_ids": [task.task_id for task in found], "status": "parked"})
    elif found:
        rows = [_row(task) for task in found]
        print_table(("task", "agent", "age", "parked", "tried by"), rows)
    else:
        print_text("no such task is parked")


def print_offered(task_ids: Sequence[str], *, as_json: bool) -> None:
    """Print which tasks are offered again."""
    if as_json:
        print_json({"task_ids": list(task_ids), "status": "offered"})
    elif task_ids:
        print_text(
            "\n".join(f"{task_id} is offered to every version again" for task_id in task_ids)
        )
    else:
        print_text("no such task is parked")


def _row(task: TaskSummary) -> tuple[str, ...]:
    tried = ", ".join(task.tried_versions) or "-"
    return (
        task.task_id,
        task.agent,
        format_age(task.checkpointed_at),
        task.parked_reason or "-",
        tried,
    )
