"""`meshpoint tasks export`: write the histories of tasks to files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from meshpoint.cli import sources
from meshpoint.cli.output import print_note, print_text
from meshpoint.errors import (
    ConfigurationError,
    IncompatibleState,
    MeshpointError,
    OperationNotFound,
)
from meshpoint.files import write_atomically
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import TaskId

if TYPE_CHECKING:
    from meshpoint.engine.history import TaskHistory
    from meshpoint.ports.task_store import CheckpointStore

_STATES = ("waiting", "ready", "parked", "running")
_MAX_NAME_BYTES = 200


def export_one(
    task_id: str,
    output: Path | None,
    config: Path | None,
    database: str | None,
    namespace: str | None,
) -> None:
    """Write the history of a task to `output`, or print it.

    Raises:
        OperationNotFound: No task that has not ended has this id.
        MeshpointError: The task cannot be read, or the file cannot be written.
    """
    history = asyncio.run(_find(task_id, config, database, namespace))
    if output is None:
        print(history.to_json(), end="")
        return
    _write(history, output)
    print_text(f"wrote {output}")
    _note_clear(config)


def export_all(
    agent: str,
    states: Sequence[str],
    limit: int,
    folder: Path,
    config: Path | None,
    database: str | None,
    namespace: str | None,
) -> None:
    """Write the histories of an agent's tasks to a folder, one file for each task.

    Leaves out tasks that end meanwhile, and prints a line for each task that cannot be read.

    Raises:
        ConfigurationError: `states` has a state of ended tasks, which have no history.
        MeshpointError: A file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeshpointError(f"{folder}: {error.strerror}") from error
    count = asyncio.run(_export_all(agent, states, limit, folder, config, database, namespace))
    print_text(f"wrote {quantity(count, 'file')} to {folder}")
    _note_clear(config)
    if not count:
        print_note(f"no task of agent {agent!r} is {' or '.join(states or _STATES)}")


async def _export_all(
    agent: str,
    states: Sequence[str],
    limit: int,
    folder: Path,
    config: Path | None,
    database: str | None,
    namespace: str | None,
) -> int:
    from meshpoint.model.messages import validate_agent_name
    from meshpoint.model.tasks import TaskState
    from meshpoint.wiring import open_store

    name, count = validate_agent_name(agent), 0
    chosen = sources.parse_choices("--state", list(states or _STATES), TaskState)
    if ended := [state.value for state in chosen if state.is_final]:
        reason = f"{', '.join(ended)} tasks have no history"
        raise ConfigurationError("--state", reason, f"use one of {', '.join(_STATES)}")
    async with aclosing(sources.open_each(config, database, namespace, open_store)) as stores:
        async for store in stores:
            tasks = await store.tasks(agent=name, states=chosen, limit=limit - count)
            for task in tasks:
                try:
                    history = await _collect(store, task.task_id)
                except MeshpointError as error:
                    print_note(str(error))
                    continue
                if history is not None:
                    _write(history, folder / _file_name(task.task_id))
                    count += 1
            if count == limit:
                break
    return count


def _file_name(task_id: str) -> str:
    name = quote(task_id, safe=" ")
    kept = name[:_MAX_NAME_BYTES].lstrip(".")
    if kept != name:  # another id may have the same beginning
        kept = f"{kept}~{hashlib.blake2b(task_id.encode(), digest_size=8).hexdigest()}"
    return f"{kept}.json"


async def _find(
    task_id: str, config: Path | None, database: str | None, namespace: str | None
) -> TaskHistory:
    from meshpoint.wiring import open_store

    id_ = TaskId(task_id)
    async with aclosing(sources.open_each(config, database, namespace, open_store)) as stores:
        async for store in stores:
            if (history := await _collect(store, id_)) is not None:
                return history
            if (found := await store.task(id_)) is not None:
                state = found[0].state.value
                raise OperationNotFound(
                    task_id, f"task {task_id} has ended as {state}: its history is gone"
                )
    raise OperationNotFound(task_id, f"there is no task {task_id} in the database")


async def _collect(store: CheckpointStore, task_id: TaskId) -> TaskHistory | None:
    from meshpoint.engine.history import collect_history

    try:
        return await collect_history(store, task_id, datetime.now(UTC))
    except (ValueError, IncompatibleState) as error:
        raise MeshpointError(f"task {task_id} cannot be exported: {error}") from error


def _note_clear(config: Path | None) -> None:
    """Say that exports are not encrypted, if what they export is."""
    if config is not None and any(each.keys for each in sources.load_databases(config, None)):
        print_note("exports are not encrypted: keep them as safe as the keys")


def _write(history: TaskHistory, path: Path) -> None:
    try:
        write_atomically(path, history.to_json())
    except OSError as error:
        raise MeshpointError(f"{path}: {error.strerror}") from error
