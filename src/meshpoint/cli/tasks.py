"""`meshpoint tasks`: list, show, answer, signal, export, cancel, suspend and resume tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import (
    format_age,
    print_either,
    print_json,
    print_note,
    print_table,
    print_text,
)
from meshpoint.cli.task_facts import (
    CALL_COLUMNS,
    TaskDetails,
    describe_call,
    describe_due,
    describe_peers,
    describe_state,
    describe_task,
    summary_to_json,
    to_json,
)
from meshpoint.errors import MeshpointError, OperationNotFound, OperationRunning, PoisonMessage

if TYPE_CHECKING:
    from pydantic import JsonValue

    from meshpoint.model.operations import Revived
    from meshpoint.model.outcomes import Outcome
    from meshpoint.model.tasks import ListPosition, TaskFilter, TaskSummary
    from meshpoint.model.timeline import TimelineEntry
    from meshpoint.model.transitions import ExistingTask
    from meshpoint.operations import Operations
    from meshpoint.ports.agent import ResumeFrom
    from meshpoint.ports.task_store import CheckpointStore

app = typer.Typer(
    help="List, show, answer, signal, export, cancel, suspend and resume tasks.",
    no_args_is_help=True,
)

_TaskId = Annotated[str, typer.Argument(metavar="TASK_ID", help="Id of the task.")]
_Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Agent of the task.")]

_LIST = """\b
Examples:
  meshpoint tasks list --config travel.yaml
  meshpoint tasks list --db postgresql://mesh@db/mesh --state waiting --state parked --json
  meshpoint tasks list --config travel.yaml --waiting-for flights --until 15min
"""
_SHOW = """\b
Examples:
  meshpoint tasks show 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks show order-17 --config travel.yaml --timeline
"""
_EXPORT_SPANS = """\b
Examples:
  opentelemetry-instrument meshpoint tasks export-spans order-17 --config travel.yaml
"""
_RESULT = """\b
Examples:
  meshpoint tasks result order-17 --config travel.yaml
  meshpoint tasks result order-17 --config travel.yaml --wait --json
"""
_EXPORT = """\b
Examples:
  meshpoint tasks export order-17 --config travel.yaml -o order-17.json
  meshpoint tasks export -c travel.yaml --agent travel --state waiting --limit 20 -o histories/
"""
_CANCEL = """\b
Examples:
  meshpoint tasks cancel 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks cancel 01941f29-7c00-7000-8000-000000000000 --agent travel --broker amqp://127.0.0.1/
"""
_COMPLETE = """\b
Examples:
  meshpoint tasks complete 01941f29-7c00-7000-8000-000000000000 approval true --config travel.yaml
  meshpoint tasks complete order-17 approval '{"approved": true}' --db postgresql://mesh@db/mesh
  meshpoint tasks complete order-17 approval --reject "too expensive" --config travel.yaml
"""
_SIGNAL = """\b
Examples:
  meshpoint tasks signal 01941f29-7c00-7000-8000-000000000000 stop true --config travel.yaml
  meshpoint tasks signal order-17 chat '{"text": "make it two"}' --id 17-2 --config travel.yaml
"""
_SUSPEND = """\b
Examples:
  meshpoint tasks suspend 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks suspend -c travel.yaml --agent travel --state waiting --dry-run
"""
_RESUME = """\b
Examples:
  meshpoint tasks resume 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint tasks resume 01941f29-7c00-7000-8000-000000000000 --config travel.yaml --wait --json
  meshpoint tasks resume -c travel.yaml --state parked --agent travel --reason "call 3" --dry-run
  meshpoint tasks resume -c travel.yaml --state suspended --agent travel
"""


@app.command("list", epilog=_LIST)
def list_tasks(
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    agent: _Agent = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only tasks in this state, or suspended ones; repeatable.",
        ),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option("--subject", metavar="TEXT", help="Only operations with this subject."),
    ] = None,
    requester: Annotated[
        str | None, typer.Option("--requester", metavar="NAME", help="Only tasks of this sender.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="ID", help="Only tasks of this user that have not ended."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="WHEN", help="Only tasks that began or paused at WHEN or later."
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="WHEN", help="Only tasks that last began or paused before WHEN."
        ),
    ] = None,
    waiting_for: Annotated[
        str | None,
        typer.Option(
            "--waiting-for",
            metavar="NAME",
            help="Only tasks that wait for this peer or the answer to this question.",
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="TASK_ID", help="Only tasks after this one in the list."),
    ] = None,
    limit: sources.Limit = 100,
    as_json: sources.AsJson = False,
) -> None:
    """List tasks by the time when they last paused, or began, newest first.

    WHEN is an age such as 90s, 15min, 2h or 7d, or a time such as 2026-01-31T12:00+01:00.
    """
    from meshpoint.model.tasks import TaskFilter

    states, suspended = _split_states(state)
    where = TaskFilter(
        subject=subject,
        requester=requester,
        user=user,
        since=sources.parse_instant("--since", since),
        until=sources.parse_instant("--until", until),
        waiting_for=waiting_for,
        suspended=suspended,
    )
    listing = _Listing(agent, states, where, limit, after)
    tasks = asyncio.run(_find_tasks(config, database, namespace, listing))
    if as_json:
        print_json([summary_to_json(task) for task in tasks])
    elif tasks:
        columns = ("task", "agent", "state", "waiting for", "in this state", "due", "subject")
        print_table(columns, [_task_row(task) for task in tasks])
    else:
        mesh = sources.load_mesh(config, namespace=namespace)
        such = "such " if listing.is_filtered else ""
        print_text(f"no {such}tasks in namespace {mesh.namespace}")
    if len(tasks) == limit:
        print_note(f"there may be more: add --after {tasks[-1].task_id}")


@app.command("show", epilog=_SHOW)
def show_task(
    task_id: _TaskId,
    *,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Show the changes of its state instead; needs the agent's setting timeline.",
        ),
    ] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Show a task: its failure or result, or what it waits for, and its calls."""
    if timeline:
        from meshpoint.cli import timelines

        entries = asyncio.run(_find_timeline(config, database, namespace, task_id))
        timelines.print_timeline(task_id, entries, as_json=as_json)
        return
    details = asyncio.run(_find_task(config, database, namespace, task_id))
    if as_json:
        print_json(to_json(details))
        return
    print_table(("task", details.task.task_id), describe_task(details))
    if details.calls:
        print_table(
            CALL_COLUMNS, [describe_call(call, details.secret_keys) for call in details.calls]
        )


@app.command("result", epilog=_RESULT)
def print_result(
    task_id: _TaskId,
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the task to end, if it has a row.")
    ] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Print the result of a task, as `meshpoint send` does.

    The database keeps it for 7 days if `mesh.send` started the task. Otherwise it keeps it for
    tombstone_ttl_seconds, and only if the task has paused or begun a step or subtask.

    Exit codes: 4 failed, 5 cancelled, 10 not found, 11 not ended yet.
    """
    from meshpoint.cli.send import print_outcome

    outcome = asyncio.run(_find_outcome(config, database, namespace, task_id, wait=wait))
    if outcome is None:
        raise OperationRunning(task_id, f"task {task_id} has not ended; --wait waits for it")
    raise typer.Exit(print_outcome(task_id, outcome, as_json=as_json))


@app.command("export", epilog=_EXPORT)
def export_history(
    task_id: Annotated[
        str | None, typer.Argument(metavar="[TASK_ID]", help="Id of the task.")
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File to write, instead of standard output; without TASK_ID, a folder.",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="NAME", help="Export tasks of this agent."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only tasks in this state: waiting, ready, parked or running; repeatable.",
        ),
    ] = None,
    limit: sources.Limit = 100,
    unencrypted: sources.Unencrypted = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
) -> None:
    """Export the history of a task, to replay it with other code.

    `meshpoint.testing.replay_history` reads the file. The file has the inputs, answers and results
    of the task, but not its security context. Only tasks that have not ended have a history. With
    encryption_keys, the file is encrypted; what is printed is not.

    Exit code: 10 not found.
    """
    from meshpoint.cli import histories

    if task_id is not None:
        if agent or state:
            raise typer.BadParameter("--agent and --state exclude TASK_ID")
        export = histories.Export(output, config, database, namespace, unencrypted)
        histories.export_one(task_id, export)
    elif agent is None or output is None:
        raise typer.BadParameter("name a TASK_ID, or use --agent and --output")
    else:
        export = histories.Export(output, config, database, namespace, unencrypted)
        histories.export_all(agent, state or (), limit, export)


@app.command("export-spans", epilog=_EXPORT_SPANS)
def export_spans(
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK_ID...", help="Ids of tasks.")],
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Export the timelines of tasks as OpenTelemetry spans: one trace for each task.

    It has a span for each segment and each wait, with the times in the database. The process needs
    an OpenTelemetry SDK, which opentelemetry-instrument sets up. Each export makes new traces.
    """
    from meshpoint.cli import timelines

    timelines.check_tracing()
    for task_id in task_ids:
        entries = asyncio.run(_find_timeline(config, database, namespace, task_id))
        timelines.export(task_id, entries, as_json=as_json)


@app.command("cancel", epilog=_CANCEL)
def cancel_task(
    task_id: _TaskId,
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    agent: _Agent = None,
    as_json: sources.AsJson = False,
) -> None:
    """Cancel a task in its agent's database and notify the agent.

    With --agent, only send a message to the agent. It accepts such messages from the task's
    requester and from the logins in its operator_logins.
    """
    from meshpoint.client.transport import Transport
    from meshpoint.model.ids import TaskId
    from meshpoint.wiring import make_broker

    mesh = sources.require_mesh(config, broker, namespace)

    async def cancel() -> str:
        owner = agent
        if owner is None:
            owner = await _cancel_in_database(config, database, namespace, task_id)
        async with Transport(make_broker(mesh)) as transport:
            await transport.cancel(owner, TaskId(task_id))
        return owner

    owner = asyncio.run(cancel())
    result = {"task_id": task_id, "agent": owner, "status": "cancel_sent"}
    print_either(result, f"asked {owner} to cancel {task_id}", as_json=as_json)


@app.command("complete", epilog=_COMPLETE)
def complete_question(
    task_id: _TaskId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the question, or its id.")],
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="The answer: JSON, or else plain text."),
    ] = None,
    *,
    reject: Annotated[
        str | None,
        typer.Option(
            "--reject",
            metavar="REASON",
            help="Reject the question, in place of VALUE: the wait fails in the agent.",
        ),
    ] = None,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Answer or reject a question that a task waits for, in the database.

    A replica of its agent resumes the task within seconds.
    """
    from meshpoint.cli.send import parse_input
    from meshpoint.interventions import answer
    from meshpoint.model.ids import TaskId

    if (value is None) == (reject is None):
        raise typer.BadParameter("give either VALUE or --reject REASON")
    parsed = None if value is None else parse_input(value, "VALUE")

    async def complete() -> str:
        async with _open_stores(config, database, namespace) as stores:
            async for store in stores:
                if found := await store.task(TaskId(task_id)):
                    key = await answer(store, *found, name, parsed, rejection=reject)
                    return key.to_id()
        raise _no_such_task(task_id)

    question_id = asyncio.run(complete())
    status = "answered" if reject is None else "rejected"
    result = {"task_id": task_id, "question_id": question_id, "status": status}
    print_either(result, f"{status} {name} of {task_id}", as_json=as_json)


@app.command("signal", epilog=_SIGNAL)
def signal_task(
    task_id: _TaskId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the signal.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="The value: JSON, or else plain text.")
    ],
    *,
    signal_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the signal; received once per id."),
    ] = None,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Send a signal to a task, in the database. The task keeps it until it receives it.

    A task can receive signals once it has a row in the database, usually from its first pause,
    step or subtask on.
    """
    from meshpoint.cli.send import parse_input
    from meshpoint.interventions import signal
    from meshpoint.model.ids import TaskId, new_id
    from meshpoint.model.messages import is_agent_name, is_valid_name

    parsed = parse_input(value, "VALUE")
    id_ = new_id() if signal_id is None else signal_id
    if not is_agent_name(name):
        raise typer.BadParameter(f"{name!r} is not a valid signal name")
    if not (id_ and is_valid_name(id_)):
        raise typer.BadParameter("--id is not printable, or longer than 248 bytes")

    async def send() -> None:
        async with _open_stores(config, database, namespace) as stores:
            async for store in stores:
                if found := await store.task(TaskId(task_id)):
                    return await signal(store, found[0], name, parsed, id_)
        raise _no_such_task(task_id)

    asyncio.run(send())
    result = {"task_id": task_id, "signal_id": id_, "status": "signalled"}
    print_either(result, f"sent signal {name} to {task_id}", as_json=as_json)


@app.command("suspend", epilog=_SUSPEND)
def suspend_task(
    task_id: Annotated[
        str | None, typer.Argument(metavar="[TASK_ID]", help="Id of the task.")
    ] = None,
    *,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="All tasks in this state instead of one: running, waiting or ready; repeatable.",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="NAME", help="All tasks of this agent instead of one."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the tasks without suspending them.")
    ] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Keep replicas from running a task until `tasks resume`.

    A running task continues to its next pause. Meanwhile, responses of peers are recorded and
    deadlines apply. A task can be suspended once it has a row in the database, usually from its
    first pause, step or subtask on.

    Exit codes: 10 not found, 12 completed, 1 parked, failed or cancelled.
    """
    from meshpoint.cli import suspended

    if task_id is None:
        suspended.suspend_all(
            config, database, namespace, state or (), agent, dry_run=dry_run, as_json=as_json
        )
    elif state or agent or dry_run:
        raise typer.BadParameter("--state, --agent and --dry-run exclude TASK_ID")
    else:
        suspended.suspend_one(task_id, config, database, namespace, as_json=as_json)


@app.command("resume", epilog=_RESUME)
def resume_task(
    task_id: Annotated[
        str | None, typer.Argument(metavar="[TASK_ID]", help="Id of the task.")
    ] = None,
    *,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="All tasks in this state instead of one: parked or suspended.",
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Only tasks of this agent.")
    ] = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", metavar="TEXT", help="Only parked tasks whose reason contains TEXT."
        ),
    ] = "",
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="start, or last-pause; without it, the agent chooses.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the tasks without resuming them.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the task to end and print its result.")
    ] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Resume a failed or cancelled task, continue suspended ones, or offer parked ones again.

    A failed or cancelled task resumes from its last checkpoint.

    From its start, it skips recorded subtasks. From its last pause, it reuses steps and results
    too, and makes calls that failed again, under new ids.

    Any replica of its agent can resume it. Versions of the code that could not continue a parked
    task try it again.

    Exit codes of a task that cannot be resumed, checked in this order: 10 not found, 11 active, 12
    completed, 13 no checkpoint, 14 another operation of its exclusive agent is active. Of two
    concurrent callers, one gets 11.
    """
    from meshpoint.cli import parked, suspended

    if from_ not in {None, "start", "last-pause"}:
        raise typer.BadParameter(f"{from_!r} is neither start nor last-pause")
    place = cast("ResumeFrom | None", from_)
    if task_id is None:
        if place is not None:
            raise typer.BadParameter("--from needs a TASK_ID")
        if state == "suspended":
            if reason:
                raise typer.BadParameter("--reason needs --state parked")
            suspended.resume_all(
                config, database, namespace, agent, dry_run=dry_run, as_json=as_json
            )
        else:
            parked.resume_all(
                config, database, namespace, state, agent, reason, dry_run=dry_run, as_json=as_json
            )
    elif state or agent or reason or dry_run:
        raise typer.BadParameter("--state, --agent, --reason and --dry-run exclude TASK_ID")
    else:
        _resume_one(task_id, config, database, namespace, place, wait=wait, as_json=as_json)


def _resume_one(
    task_id: str,
    config: Path | None,
    database: str | None,
    namespace: str | None,
    place: ResumeFrom | None,
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Resume a task, offer it again or continue it, and print what happened."""
    from meshpoint import interventions
    from meshpoint.cli import parked, suspended
    from meshpoint.cli.send import print_outcome

    async def resume(operations: Operations) -> tuple[str, Revived | None, Outcome | None]:
        status, revived = await interventions.resume(operations, task_id, place)
        if wait and not as_json:
            attempt = "" if revived is None else f" for attempt {revived.retry_count + 1}"
            verb = "continues" if status == "continued" else f"is ready{attempt}"
            print_note(f"{task_id} {verb}; waiting for it to end")
        return status, revived, await operations.wait(task_id) if wait else None

    status, revived, outcome = asyncio.run(
        sources.query_operation(config, database, namespace, resume)
    )
    if outcome is not None:
        raise typer.Exit(print_outcome(task_id, outcome, as_json=as_json))
    if revived is not None:
        _print_revived(task_id, revived, as_json=as_json)
    elif status == "offered":
        parked.print_offered([task_id], as_json=as_json)
    else:
        suspended.print_continued(task_id, as_json=as_json)


def _print_revived(task_id: str, revived: Revived, *, as_json: bool) -> None:
    result = {
        "task_id": task_id,
        "agent": revived.agent,
        "status": "resumed",
        "retry_count": revived.retry_count,
    }
    attempt = f"attempt {revived.retry_count + 1}"
    text = f"{task_id} is ready for {attempt}: any replica of {revived.agent} can resume it"
    print_either(result, text, as_json=as_json)


_SUSPENDED = "suspended"
_POLL_SECONDS = 0.2


def _split_states(names: list[str] | None) -> tuple[list[str] | None, bool | None]:
    """Separate "suspended" from the states of rows, since tasks are suspended in several."""
    if not names or _SUSPENDED not in names:
        return names, None
    if set(names) != {_SUSPENDED}:
        raise typer.BadParameter("--state suspended excludes other states")
    return None, True


@dataclass(frozen=True, slots=True)
class _Listing:
    """The options of `tasks list`."""

    agent: str | None
    states: list[str] | None
    where: TaskFilter
    limit: int
    after: str | None

    @property
    def is_filtered(self) -> bool:
        values = (self.agent, self.states, self.after, *astuple(self.where))
        return any(value is not None for value in values)


def _task_row(task: TaskSummary) -> tuple[str, ...]:
    return (
        task.task_id,
        task.agent,
        describe_state(task),
        describe_peers(task),
        format_age(task.checkpointed_at),
        describe_due(task),
        task.subject or "-",
    )


def _open_stores(
    config: Path | None, database: str | None, namespace: str | None
) -> aclosing[AsyncGenerator[CheckpointStore, None]]:
    from meshpoint.model.timeline import TimelineOptions
    from meshpoint.wiring import open_store

    # Only the configuration of the replicas says whether a task has a timeline.
    open_database = partial(open_store, timeline=TimelineOptions(known_only=True))
    return aclosing(sources.open_each(config, database, namespace, open_database))


async def _find_tasks(
    config: Path | None, database: str | None, namespace: str | None, listing: _Listing
) -> list[TaskSummary]:
    """Return the tasks of all databases, newest first."""
    from meshpoint.model.ids import TaskId
    from meshpoint.model.messages import validate_agent_name
    from meshpoint.model.tasks import TaskState

    name = None if listing.agent is None else validate_agent_name(listing.agent)
    states = sources.parse_choices("--state", listing.states, TaskState)
    after = None if listing.after is None else TaskId(listing.after)
    where = elsewhere = listing.where
    position: ListPosition | None = None
    if after is not None:
        # The other databases do not have the task: there, the page begins at its time.
        last = (await _find_task(config, database, namespace, after)).task
        position = last.position
        until = min(filter(None, (where.until, last.checkpointed_at)))
        elsewhere = replace(where, until=until)
    found: list[TaskSummary] = []
    async with _open_stores(config, database, namespace) as stores:
        async for store in stores:
            has_last = after is not None and await store.task(after) is not None
            found += await store.tasks(
                agent=name,
                states=states,
                where=where if has_last else elsewhere,
                limit=listing.limit,
                after=position if has_last else None,
            )
    found.sort(key=lambda task: (task.checkpointed_at, task.task_id), reverse=True)
    return found[: listing.limit]


async def _find_task(
    config: Path | None, database: str | None, namespace: str | None, task_id: str
) -> TaskDetails:
    """Return a task with its calls, its outcome, its input and its open questions."""
    from meshpoint.engine.open_questions import read_open_questions
    from meshpoint.model.ids import TaskId

    id_ = TaskId(task_id)
    async with _open_stores(config, database, namespace) as stores:
        async for store in stores:
            if found := await store.task(id_):
                outcome = _read_outcome((await store.lookup([id_])).get(id_))
                input_ = _read_input(await store.stored_request(id_))
                return TaskDetails(
                    *found,
                    outcome,
                    input_,
                    await read_open_questions(store, *found),
                    sources.load_secret_keys(config),
                    await store.mailbox(id_),
                    sources.database_options(config, namespace),
                )
    raise _no_such_task(task_id)


async def _find_timeline(
    config: Path | None, database: str | None, namespace: str | None, task_id: str
) -> list[TimelineEntry]:
    from meshpoint.cli import timelines
    from meshpoint.model.ids import TaskId

    id_ = TaskId(task_id)
    async with _open_stores(config, database, namespace) as stores:
        async for store in stores:
            if entries := await timelines.read(store, id_):
                return entries
    hint = "its agent needs history: true, and keeps entries for history_retention_seconds"
    raise OperationNotFound(task_id, f"the database has no timeline of task {task_id}; {hint}")


async def _find_outcome(
    config: Path | None, database: str | None, namespace: str | None, task_id: str, *, wait: bool
) -> Outcome | None:
    """Return the outcome of a task; `None` if it has not ended. `wait` waits for the end."""
    from meshpoint.model.ids import TaskId

    id_ = TaskId(task_id)
    async with _open_stores(config, database, namespace) as stores:
        async for store in stores:
            while await store.task(id_) is not None:
                outcome = _read_outcome((await store.lookup([id_])).get(id_))
                if outcome is not None or not wait:
                    return outcome
                await asyncio.sleep(_POLL_SECONDS)
    raise OperationNotFound(task_id, str(_no_such_task(task_id)))


def _read_outcome(existing: ExistingTask | None) -> Outcome | None:
    """Return the outcome in a task's reply; `None` if it has not ended."""
    from meshpoint.model.bodies import ResponseBody, parse_body

    if existing is None or existing.reply is None:
        return None
    return parse_body(ResponseBody, existing.reply.body).outcome()


def _read_input(request: bytes | None) -> JsonValue:
    """Return the input in a stored request; `None` if it is missing or unreadable."""
    from meshpoint.model.bodies import RequestBody, parse_body
    from meshpoint.model.envelopes import decode_request

    if request is None:
        return None
    try:
        return parse_body(RequestBody, decode_request(request).body).input()
    except (ValueError, PoisonMessage):
        return None


async def _cancel_in_database(
    config: Path | None, database: str | None, namespace: str | None, task_id: str
) -> str:
    """Cancel a task in the first database that has it, and return its agent."""
    from meshpoint import interventions
    from meshpoint.model.ids import TaskId

    async with _open_stores(config, database, namespace) as stores:
        async for store in stores:
            if agent := await interventions.cancel(store, TaskId(task_id)):
                return agent
    raise _no_such_task(task_id)


def _no_such_task(task_id: str) -> MeshpointError:
    hint = "a task has no row until it pauses or begins a step or subtask"
    return MeshpointError(f"there is no task {task_id} in the database; {hint}")
