"""`meshpoint tasks export`: write the histories of tasks to files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
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
    from meshpoint.ports.sealer import Sealer
    from meshpoint.ports.task_store import CheckpointStore

_STATES = ("waiting", "ready", "parked", "running")
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, slots=True)
class Export:
    """Where histories come from, and the file or folder that gets them; `None` prints them."""

    output: Path | None
    config: Path | None
    database: str | None
    namespace: str | None
    unencrypted: bool

    def sealer(self) -> Sealer | None:
        """The sealer with the keys of the databases."""
        return sources.database_sealer(self.config, self.database)


def export_one(task_id: str, export: Export) -> None:
    """Write the history of a task to a file, or print it.

    Raises:
        OperationNotFound: No task that has not ended has this id.
        MeshpointError: The task cannot be read, or the file cannot be written.
    """
    history = asyncio.run(_find(task_id, export))
    if export.output is None:
        print(history.to_json(), end="")
        return
    with sources.exported(export.output, export.sealer(), export.unencrypted) as sealer:
        _write(history, export.output, sealer)
        print_text(f"wrote {export.output}")


def export_all(agent: str, states: Sequence[str], limit: int, export: Export) -> None:
    """Write the histories of an agent's tasks to a folder, one file for each task.

    Leaves out tasks that end meanwhile, and prints a line for each task that cannot be read.

    Raises:
        ConfigurationError: `states` has a state of ended tasks, which have no history.
        MeshpointError: A file cannot be written.
    """
    folder = export.output
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeshpointError(f"{folder}: {error.strerror}") from error
    with sources.exported(folder, export.sealer(), export.unencrypted) as sealer:
        count = asyncio.run(_export_all(agent, states, limit, folder, export, sealer))
    print_text(f"wrote {quantity(count, 'file')} to {folder}")
    if not count:
        print_note(f"no task of agent {agent!r} is {' or '.join(states or _STATES)}")


async def _export_all(
    agent: str,
    states: Sequence[str],
    limit: int,
    folder: Path,
    export: Export,
    sealer: Sealer | None,
) -> int:
    from meshpoint.model.messages import validate_agent_name
    from meshpoint.model.tasks import TaskState
    from meshpoint.wiring import open_store

    name, count = validate_agent_name(agent), 0
    chosen = sources.parse_choices("--state", list(states or _STATES), TaskState)
    if ended := [state.value for state in chosen if state.is_final]:
        reason = f"{', '.join(ended)} tasks have no history"
        raise ConfigurationError("--state", reason, f"use one of {', '.join(_STATES)}")
    each_database = sources.open_each(export.config, export.database, export.namespace, open_store)
    async with aclosing(each_database) as stores:
        async for store in stores:
            tasks = await store.tasks(agent=name, states=chosen, limit=limit - count)
            for task in tasks:
                try:
                    history = await _collect(store, task.task_id)
                except MeshpointError as error:
                    print_note(str(error))
                    continue
                if history is not None:
                    _write(history, folder / _file_name(task.task_id), sealer)
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


async def _find(task_id: str, export: Export) -> TaskHistory:
    from meshpoint.wiring import open_store

    id_ = TaskId(task_id)
    each_database = sources.open_each(export.config, export.database, export.namespace, open_store)
    async with aclosing(each_database) as stores:
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


def _write(history: TaskHistory, path: Path, sealer: Sealer | None) -> None:
    from meshpoint.wiring import seal_file

    content = history.to_json().encode()
    try:
        write_atomically(path, seal_file(sealer, content, ("export.history", history.agent)))
    except OSError as error:
        raise MeshpointError(f"{path}: {error.strerror}") from error
