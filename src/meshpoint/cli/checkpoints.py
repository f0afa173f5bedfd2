"""`meshpoint checkpoints`: inspect operations, and preserve and export their checkpoints."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import (
    format_age,
    format_duration,
    print_either,
    print_json,
    print_note,
    print_table,
    print_text,
)
from meshpoint.cli.task_facts import describe_usage
from meshpoint.errors import ConsistencyError, NoCheckpoint
from meshpoint.model.error_text import quantity

if TYPE_CHECKING:
    from meshpoint.model.memory import SnapshotInfo
    from meshpoint.model.operations import OperationSummary
    from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord
    from meshpoint.operations import Operations

app = typer.Typer(
    help="Inspect operations; preserve and export their checkpoints.", no_args_is_help=True
)

_OperationId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the operation, which is the id of its task.")
]

_LIST = """\b
Examples:
  meshpoint checkpoints list --config travel.yaml
  meshpoint checkpoints list --db postgresql://mesh@db/mesh --status failed --status cancelled \
--json
"""
_SHOW = """\b
Examples:
  meshpoint checkpoints show 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
"""
_PRESERVE = """\b
Examples:
  meshpoint checkpoints preserve 01941f29-7c00-7000-8000-000000000000 --config travel.yaml
  meshpoint checkpoints preserve 01941f29-7c00-7000-8000-000000000000 --no --config travel.yaml
"""
_EXPORT = """\b
Examples:
  meshpoint checkpoints export 01941f29-7c00-7000-8000-000000000000 --config travel.yaml \
-o failed.json
  meshpoint exec my_agents.travel:travel --input @trip.json --resume-from failed.json
"""


@app.command("list", epilog=_LIST)
def list_operations(
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Only operations of this agent.")
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status", metavar="STATUS", help="Only operations with this status; repeatable."
        ),
    ] = None,
    limit: sources.Limit = 100,
    as_json: sources.AsJson = False,
) -> None:
    """List operations, newest first."""
    from meshpoint.model.operations import OperationStatus

    statuses = sources.parse_choices("--status", status, OperationStatus)

    async def find() -> list[OperationSummary]:
        each_database = sources.open_each(config, database, namespace, sources.open_operations)
        async with aclosing(each_database) as databases:
            return [
                operation
                async for operations in databases
                for operation in await operations.find(agent=agent, statuses=statuses, limit=limit)
            ]

    found = asyncio.run(find())
    found.sort(key=lambda operation: operation.created_at, reverse=True)
    if as_json:
        print_json([_to_json(operation) for operation in found[:limit]])
    elif not found:
        print_text("no operations")
    else:
        columns = (
            "operation",
            "agent",
            "status",
            "progress",
            "phase",
            "resumed",
            "tokens",
            "age",
            "subject",
        )
        print_table(columns, [_operation_row(operation) for operation in found[:limit]])


@app.command("show", epilog=_SHOW)
def show_operation(
    operation_id: _OperationId,
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Show an operation and the history of its checkpoints."""

    async def show(
        operations: Operations,
    ) -> tuple[OperationSummary, SnapshotInfo | str | None, list[AgentCheckpoint]]:
        operation = await operations.get(operation_id)
        try:
            memory: SnapshotInfo | str | None = await operations.memory(operation_id)
        except ConsistencyError as error:
            memory = str(error)
        return operation, memory, await operations.checkpoints(operation_id)

    operation, memory, history = asyncio.run(
        sources.query_operation(config, database, namespace, show)
    )
    if as_json:
        print_json(
            {
                **_to_json(operation),
                "memory": _memory_json(memory),
                "checkpoints": [each.model_dump(mode="json") for each in history],
            }
        )
        return
    print_table(("operation", operation.id), [*_facts(operation), *_memory_facts(memory)])
    if history:
        print_table(
            ("subtask", "status", "took", "in attempt"),
            [_subtask_row(each) for each in history[-1].subtasks],
        )
        columns = ("checkpoint", "in attempt", "written", "progress", "next", "tokens", "why")
        print_table(columns, [_checkpoint_row(each) for each in reversed(history)])


@app.command("preserve", epilog=_PRESERVE)
def preserve_operation(
    operation_id: _OperationId,
    *,
    no: Annotated[bool, typer.Option("--no", help="End the exemption.")] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Exempt an operation's checkpoints from deletion."""

    async def preserve(operations: Operations) -> None:
        await operations.preserve(operation_id, preserve=not no)

    asyncio.run(sources.query_operation(config, database, namespace, preserve))
    text = f"checkpoints of {operation_id} are {'no longer preserved' if no else 'preserved'}"
    print_either({"operation_id": operation_id, "preserve": not no}, text, as_json=as_json)


@app.command("export", epilog=_EXPORT)
def export_checkpoint(
    operation_id: _OperationId,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write to this file, not to standard output."
        ),
    ] = None,
    include_outputs: Annotated[
        bool,
        typer.Option(
            "--include-outputs", help="Include the outputs of the subtasks, without secrets."
        ),
    ] = False,
    secret_key: sources.SecretKeys = None,
    unencrypted: sources.Unencrypted = False,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
) -> None:
    """Export an operation's last checkpoint, for exec --resume-from."""
    from meshpoint.exec.checkpoint_file import build_document, document_text, write_document

    async def latest_checkpoint(operations: Operations) -> AgentCheckpoint:
        operation = await operations.get(operation_id)
        history = await operations.checkpoints(operation_id)
        if not history:
            suffix = " any more, since it has completed" if operation.status == "completed" else ""
            raise NoCheckpoint(operation_id, f"operation {operation_id} has no checkpoint{suffix}")
        return history[-1]

    checkpoint = asyncio.run(
        sources.query_operation(config, database, namespace, latest_checkpoint)
    )
    document = build_document(
        checkpoint, include_outputs=include_outputs, secret_keys=tuple(secret_key or ())
    )
    if removed := document.removed:
        count, verb = len(removed), "was" if len(removed) == 1 else "were"
        print_note(
            f"{quantity(count, 'secret value')} {verb} removed; "
            "the export may still contain personal data"
        )
    if file is None:
        print(document_text(document))
    else:
        fix = "name a file in an existing folder"
        sealer = sources.database_sealer(config, database)
        with sources.exported(file, sealer, unencrypted) as sealer:
            write_document(document, file, "--output", fix, sealer)
            print_note(f"wrote {file}")


def _to_json(operation: OperationSummary) -> dict[str, object]:
    children = [child.model_dump(mode="json") for child in operation.children]
    usage = None if operation.usage is None else operation.usage.model_dump(mode="json")
    return {**asdict(operation), "children": children, "usage": usage}


def _facts(operation: OperationSummary) -> list[tuple[str, str]]:
    saved = "-" if operation.checkpoint is None else f"{format_age(operation.updated_at)} ago"
    children = ", ".join(f"{child.peer} {child.id}" for child in operation.children)
    facts = [
        ("agent", operation.agent),
        ("type", operation.type),
        ("status", operation.status.value),
        ("progress", f"{operation.progress_pct:g} %"),
        ("phase", operation.phase or "-"),
        ("subject", operation.subject or "-"),
        ("resumed", quantity(operation.retry_count, "time")),
        ("owner", operation.owner or "-"),
        ("age", format_age(operation.created_at)),
        ("last checkpoint", saved),
        ("peers' tasks", children or "-"),
        ("tokens", describe_usage(operation.usage) or "-"),
    ]
    if operation.failure_reason:
        facts.append(("reason", operation.failure_reason))
    if operation.preserve:
        facts.append(("preserved", "yes"))
    return facts


def _memory_json(memory: SnapshotInfo | str | None) -> dict[str, object] | None:
    """Describe the snapshot of the working memory, or why it is unusable."""
    match memory:
        case None:
            return None
        case str(problem):
            return {"problem": problem}
        case info:
            return {
                "timestamp": info.taken_at.isoformat(),
                "hash": info.digest,
                "checkpoint": info.checkpoint,
                "key_count": info.key_count,
            }


def _memory_facts(memory: SnapshotInfo | str | None) -> list[tuple[str, str]]:
    match memory:
        case None:
            return []
        case str(problem):
            return [("memory", problem)]
        case info:
            keys, age = quantity(info.key_count, "key"), format_age(info.taken_at)
            return [("memory", f"{keys}, as of checkpoint {info.checkpoint}, {age} ago")]


def _operation_row(operation: OperationSummary) -> tuple[str, ...]:
    return (
        operation.id,
        operation.agent,
        operation.status.value,
        f"{operation.progress_pct:g} %",
        operation.phase or "-",
        str(operation.retry_count),
        describe_usage(operation.usage) or "-",
        format_age(operation.created_at),
        operation.subject or "-",
    )


def _subtask_row(record: SubtaskRecord) -> tuple[str, ...]:
    return record.name, record.status.value, format_duration(record.seconds), str(record.retry + 1)


def _checkpoint_row(checkpoint: AgentCheckpoint) -> tuple[str, ...]:
    progress, written = checkpoint.progress, checkpoint.checkpoint_time
    return (
        str(checkpoint.seq),
        str(checkpoint.retry_count + 1),
        "-" if written is None else f"{format_age(written)} ago",
        f"{progress.k} of {progress.n}",
        progress.current or "-",
        describe_usage(checkpoint.token_usage) or "-",
        checkpoint.failure_reason or "-",
    )
