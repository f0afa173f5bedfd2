"""Deletion of tasks that nothing will continue: of a demonstration, and of `exec` sessions.

A store deletes only tombstones and keeps all other rows, because a replica may still need them.
The callers of these functions know that no replica does.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from sqlalchemy import delete

from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.rows import AgentNames
from meshpoint.adapters.sql.tables import tasks
from meshpoint.errors import StoreUnavailable
from meshpoint.model.ids import AgentName

_BUSY_TIMEOUT = 10.0
"""Seconds to wait for other writers."""

# Each table with the column that starts with the namespace.
_AGENT_TABLES = {
    "agent_replicas": "agent_name",
    "agent_operations": "agent_name",
    "agent_subtask_records": "agent_type",
    "agent_checkpoints": "agent_type",
    "agent_checkpoints_archive": "agent_type",
    "agent_task_timelines": "agent_name",
    "agent_paused_tasks": "agent_name",
    "agent_mesh_keys": "agent_name",
}
_TASK_TABLES = ("agent_peer_sub_tasks", "agent_parallel_invocations", "agent_task_log")

_HAS_PREFIX = "substr({column}, 1, length(:prefix)) = :prefix"
_TASK_IDS = (
    "SELECT logical_task_id FROM agent_paused_tasks "
    f"WHERE {_HAS_PREFIX.format(column='agent_name')}"
)


async def delete_tasks(url: str, namespace: str, agent: AgentName, timeout: timedelta) -> None:
    """Delete the tasks of one agent; their calls are deleted with them."""
    engine = engine_for(url, command_timeout=timeout, pool_size=1)
    try:
        async with engine.connect() as connection:
            key = AgentNames(namespace).qualified(agent)
            await connection.execute(delete(tasks).where(tasks.c.agent_name == key))
    finally:
        await engine.dispose()


def delete_namespace(file: Path, namespace: str) -> None:
    """Delete every row of `namespace` from a SQLite file. A missing file or table is ignored.

    Raises:
        StoreUnavailable: Others kept the file locked for 10 seconds, or it is unreadable.
    """
    if not file.exists():
        return
    prefix = {"prefix": f"{namespace}/"}
    try:
        with closing(sqlite3.connect(file, timeout=_BUSY_TIMEOUT, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")  # closing rolls back an open transaction
            existing = {
                name
                for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            for table in existing.intersection(_TASK_TABLES):
                db.execute(f"DELETE FROM {table} WHERE logical_task_id IN ({_TASK_IDS})", prefix)
            for table, column in _AGENT_TABLES.items():
                if table in existing:
                    db.execute(
                        f"DELETE FROM {table} WHERE {_HAS_PREFIX.format(column=column)}", prefix
                    )
            if "agent_operator_actions" in existing:
                db.execute("DELETE FROM agent_operator_actions WHERE namespace = ?", (namespace,))
            db.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        raise StoreUnavailable(f"{file}: {error}") from error
