"""`meshpoint tasks`: list, show, cancel and resume tasks in a database."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.databases import query_first
from meshpoint.cli.output import format_age, format_due, print_json, print_note, print_table, print_text
from meshpoint.errors import ConfigurationError, MeshpointError

if TYPE_CHECKING:
    from meshpoint.model.checkpoint import CallSummary, Known, TaskState, TaskSummary
    from meshpoint.model.operations import Revived
    from meshpoint.model.outcomes import Outcome
    from meshpoint.operations import Operations
    from meshpoint.settings import AgentSettings

    FoundTask = tuple[TaskSummary, list[CallSummary], str | None]
    """A task, its calls, and the reason if it failed or was cancelled."""

app = typer.Typer(help="List, show, cancel and resume tasks.", no_args_is_help=True)

TaskIdArgument = Annotated[str, typer.Argument(metavar="TASK_ID", help="Id of the task.")]
AgentOption = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Agent of the task.")]

_LIST = """\b
Examples:
  meshpoint tasks list --config travel.yaml
  meshpoint tasks list --db postgresql://mesh@db/mesh --state waiting --state parked --json
"""
_SHOW = """\b
Examples:
  meshpoint tasks show 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
"""
_CANCEL = """\b
Examples:
  meshpoint tasks cancel 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks cancel 01941f29-7c00-7000-8000-000000000000 --agent travel --broker amqp://127.0.0.1/
"""
_RESUME = """\b
Examples:
  meshpoint tasks resume 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks resume 01941f29-7c00-7000-8000-000000000000 --config travel.yaml --wait --json
"""


@app.command("list", epilog=_LIST)
def list_tasks(
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    agent: AgentOption = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only tasks in this state; repeatable.")
    ] = None,
    limit: sources.Limit = 100,
    as_json: sources.AsJson = False,
) -> None:
    """List tasks, newest first."""
    states = _parse_states(state or [])
    databases = sources.load_databases(config, database)
    mesh = _resolve_namespace(config, namespace)
    tasks = asyncio.run(_load_tasks(databases, mesh, agent, states, limit))
    if as_json:
        print_json([asdict(task) for task in tasks])
        return
    if not tasks:
        print_text(f"no {'such ' if agent or states else ''}tasks in namespace {mesh}")
        return
    columns = ("task", "agent", "state", "generation", "age", "due", "owner")
    print_table(
        columns,
        [(t.task_id, t.agent, describe_state(t), str(t.generation), *_age_and_due(t), t.owner or "-") for t in tasks],
    )


@app.command("show", epilog=_SHOW)
def show_task(
    task_id: TaskIdArgument,
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Show a task and its calls."""
    databases = sources.load_databases(config, database)
    task, calls, reason = _require_task(
        asyncio.run(_find_task(databases, _resolve_namespace(config, namespace), task_id)), task_id
    )
    if as_json:
        print_json({**asdict(task), "reason": reason, "calls": [asdict(call) for call in calls]})
        return
    age, due = _age_and_due(task)
    facts = [("agent", task.agent), ("state", describe_state(task)), ("generation", str(task.generation))]
    facts += [("attempt", str(task.attempt)), ("age", age), ("due", due), ("owner", task.owner or "-")]
    facts += [("rescues", str(task.rescues))] if task.rescues else []
    facts += [("dead", task.dead_reason)] if task.dead_reason else []
    facts += [("reason", reason)] if reason and reason != task.dead_reason else []
    print_table(("task", task.task_id), facts)
    if calls:
        columns = ("call", "peer", "state", "outcome", "sent", "deadline", "peer's task")
        print_table(columns, [_call_row(call) for call in calls])


@app.command("cancel", epilog=_CANCEL)
def cancel_task(
    task_id: TaskIdArgument,
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    agent: AgentOption = None,
    as_json: sources.AsJson = False,
) -> None:
    """Cancel a task in its agent's database and notify the agent.

    With --agent, only send a message to the agent. It accepts such messages from the task's
    requester and from the logins in its operator_logins.
    """
    from meshpoint.model.ids import TaskId

    mesh = sources.require_mesh(config, broker, namespace)
    if agent is None:
        databases = sources.load_databases(config, database)
        task, _, _ = _require_task(asyncio.run(_find_task(databases, mesh.namespace, task_id)), task_id)
        if task.state.ended:
            raise MeshpointError(f"task {task_id} has already {_PAST_TENSE[task.state]}")
        agent = task.agent
        asyncio.run(_cancel_in_databases(databases, mesh.namespace, task))

    async def cancel() -> None:
        from meshpoint.client import Client
        from meshpoint.wiring import make_broker

        async with Client(make_broker(mesh)) as client:
            await client.cancel(agent, TaskId(task_id))

    asyncio.run(cancel())
    result = {"task_id": task_id, "agent": agent, "status": "cancel_sent"}
    print_json(result) if as_json else print_text(f"asked {agent} to cancel {task_id}")


@app.command("resume", epilog=_RESUME)
def resume_task(
    task_id: TaskIdArgument,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the task to end and print its result.")] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Resume a failed or cancelled task from its last subtask checkpoint, in any replica.

    Exit codes of a task that cannot be resumed, checked in this order: 10 not found, 11 active, 12
    completed, 13 no checkpoint, 14 another operation of its exclusive agent is active. Of two
    concurrent callers, one gets 11.
    """
    from meshpoint.cli.send import print_outcome

    async def resume(operations: Operations) -> tuple[Revived, Outcome | None]:
        revived = await operations.resume(task_id)
        if wait and not as_json:
            print_note(f"{task_id} is ready for attempt {revived.retry_count + 1}; waiting for it to end")
        return revived, await operations.wait(task_id) if wait else None

    revived, outcome = asyncio.run(query_first(config, database, namespace, resume))
    if outcome is not None:
        raise typer.Exit(print_outcome(task_id, outcome, as_json=as_json))
    if as_json:
        result = {"task_id": task_id, "agent": revived.agent, "status": "resumed", "retry_count": revived.retry_count}
        print_json(result)
    else:
        attempt = f"attempt {revived.retry_count + 1}"
        print_text(f"{task_id} is ready for {attempt}: any replica of {revived.agent} can resume it")


_PAST_TENSE = {"completed": "completed", "failed": "failed", "cancelled": "been cancelled"}


def describe_state(task: TaskSummary) -> str:
    """Return the state of a task for people, such as "waiting 2 of 3"."""
    return f"waiting {task.completed} of {task.expected}" if task.state == "waiting" else task.state.value


def _age_and_due(task: TaskSummary) -> tuple[str, str]:
    return format_age(task.checkpointed_at), "-" if task.state.ended else format_due(task.wake_at)


def _call_row(call: CallSummary) -> tuple[str, ...]:
    sent = "-" if call.dispatched_at is None else f"{format_age(call.dispatched_at)} ago"
    return (
        call.call_id,
        call.peer,
        call.state.value,
        call.outcome or "-",
        sent,
        format_due(call.deadline),
        call.sub_task_id,
    )


def _parse_states(names: list[str]) -> list[TaskState]:
    from meshpoint.model.checkpoint import TaskState

    try:
        return [TaskState(name) for name in names]
    except ValueError as error:
        raise ConfigurationError("--state", str(error), f"use one of {', '.join(TaskState)}") from error


def _resolve_namespace(config: Path | None, namespace: str | None) -> str:
    return sources.load_mesh(config, namespace=namespace).namespace


async def _load_tasks(
    databases: list[AgentSettings], namespace: str, agent: str | None, states: list[TaskState], limit: int
) -> list[TaskSummary]:
    from meshpoint.model.ids import agent_name
    from meshpoint.wiring import make_store

    name = None if agent is None else agent_name(agent)
    tasks: list[TaskSummary] = []
    for database in databases:
        sources.check_file_exists(database.session_db_url)
        store = make_store(database, namespace)
        await store.open()
        try:
            tasks += await store.tasks(agent=name, states=states, limit=limit)
        finally:
            await store.close()
    return sorted(tasks, key=lambda task: task.checkpointed_at, reverse=True)[:limit]


async def _find_task(databases: list[AgentSettings], namespace: str, task_id: str) -> FoundTask | None:
    from meshpoint.model.ids import TaskId
    from meshpoint.wiring import make_store

    for database in databases:
        sources.check_file_exists(database.session_db_url)
        store = make_store(database, namespace)
        await store.open()
        try:
            found = await store.task(TaskId(task_id))
            existing = (await store.lookup([TaskId(task_id)])).get(TaskId(task_id))
        finally:
            await store.close()
        if found is not None:
            return *found, _failure_reason(existing)
    return None


def _failure_reason(existing: Known | None) -> str | None:
    """Return why a task failed or was cancelled, from its reply; `None` for any other task."""
    from meshpoint.model.bodies import ResponseBody, parse
    from meshpoint.model.outcomes import Failed

    if existing is None or existing.reply is None:
        return None
    outcome = parse(ResponseBody, existing.reply.body).outcome()
    return outcome.message if isinstance(outcome, Failed) else None


async def _cancel_in_databases(databases: list[AgentSettings], namespace: str, task: TaskSummary) -> None:
    """End a task as cancelled, or mark it for the replica that runs it.

    Replicas send its reply.
    """
    from meshpoint.engine.cancels import CANCELLED
    from meshpoint.model.checkpoint import Cancel
    from meshpoint.model.envelopes import reply_bytes
    from meshpoint.model.ids import RunId, new_id
    from meshpoint.wiring import make_store

    command = Cancel(task.task_id, task.agent, RunId(new_id()), reply_bytes(task.task_id, None, CANCELLED))
    for database in databases:
        store = make_store(database, namespace)
        await store.open()
        try:
            if await store.task(task.task_id) is not None:
                await store.cancel([command])
        finally:
            await store.close()


def _require_task(found: FoundTask | None, task_id: str) -> FoundTask:
    if found is None:
        hint = "a task has no row until it pauses or begins a subtask"
        raise MeshpointError(f"there is no task {task_id} in the database; {hint}")
    return found
