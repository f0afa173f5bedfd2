"""`tasks resume` for parked tasks, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import format_age, print_json, print_table, print_text

if TYPE_CHECKING:
    from meshpoint.model.tasks import TaskSummary


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
    found = asyncio.run(_offer_all(config, database, namespace, agent, reason, dry_run=dry_run))
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


async def _offer_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    agent: str | None,
    reason: str,
    *,
    dry_run: bool,
) -> list[TaskSummary]:
    chosen: list[TaskSummary] = []
    databases = sources.open_each(config, database, namespace, sources.open_operations)
    async with aclosing(databases) as opened:
        async for operations in opened:
            async with aclosing(operations.parked(agent=agent, reason=reason)) as pages:
                async for tasks in pages:
                    ids = [task.task_id for task in tasks]
                    offered = set(ids if dry_run else await operations.unpark(ids))
                    chosen += [task for task in tasks if task.task_id in offered]
    return chosen
