"""Deletion of the rows that `exec` sessions leave in the embedded store.

They are deleted with the session, or before its next attempt. The store itself deletes only
tombstones and keeps all other rows, because a replica may still need them. The process that holds
the session's lock knows that no replica does, so its rows are deleted here, table by table.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from meshpoint.errors import StoreUnavailable

_BUSY_TIMEOUT = 10.0
"""Seconds to wait for other writers."""

# Each table with the column that starts with the namespace.
_AGENT_TABLES = {
    "agent_operations": "agent_name",
    "agent_checkpoints": "agent_type",
    "agent_checkpoints_archive": "agent_type",
    "agent_paused_tasks": "agent_name",
}
_TASK_TABLES = ("agent_peer_sub_tasks", "agent_parallel_invocations")

_HAS_PREFIX = "substr({column}, 1, length(:prefix)) = :prefix"
_TASK_IDS = f"SELECT logical_task_id FROM agent_paused_tasks WHERE {_HAS_PREFIX.format(column='agent_name')}"


def delete_namespace(file: Path, namespace: str) -> None:
    """Delete every row and queue of `namespace` from `file`.

    Raises:
        StoreUnavailable: others kept the file locked for 10 seconds, or it is unreadable.
    """
    prefix = {"prefix": f"{namespace}/"}
    with _transaction(file) as (db, tables):
        for table in _TASK_TABLES:
            if table in tables:
                db.execute(f"DELETE FROM {table} WHERE logical_task_id IN ({_TASK_IDS})", prefix)
        for table, column in _AGENT_TABLES.items():
            if table in tables:
                db.execute(f"DELETE FROM {table} WHERE {_HAS_PREFIX.format(column=column)}", prefix)
        _drop_queues(db, [name for name, *_ in _queues(db, tables, namespace)])


def delete_unserved_queues(file: Path, namespace: str, served: Collection[str]) -> None:
    """Delete the queues of agents not in `served`, and the private queues of all processes.

    A request for an agent that is no longer served then fails at once instead of waiting for a
    replica that never starts.

    Raises:
        StoreUnavailable: others kept the file locked for 10 seconds, or it is unreadable.
    """
    agents = {f"{namespace}.{agent}" for agent in served}
    with _transaction(file) as (db, tables):
        queues = _queues(db, tables, namespace)
        _drop_queues(db, [name for name, agent, private in queues if private or agent not in agents])


def _queues(db: sqlite3.Connection, tables: set[str], namespace: str) -> list[tuple[str, str, int]]:
    if "meshpoint_queue" not in tables:
        return []
    query = f"SELECT name, agent, private FROM meshpoint_queue WHERE {_HAS_PREFIX.format(column='name')}"
    return db.execute(query, {"prefix": f"{namespace}."}).fetchall()


def _drop_queues(db: sqlite3.Connection, names: Iterable[str]) -> None:
    for name in names:
        messages = "SELECT id FROM meshpoint_queue_message WHERE queue = ?"
        db.execute(f"DELETE FROM meshpoint_queue_content WHERE id IN ({messages})", (name,))
        db.execute("DELETE FROM meshpoint_queue_message WHERE queue = ?", (name,))
        db.execute("DELETE FROM meshpoint_queue WHERE name = ?", (name,))


@contextmanager
def _transaction(file: Path) -> Iterator[tuple[sqlite3.Connection, set[str]]]:
    """Open a write transaction; yields the connection and the names of the existing tables.

    Without a file, it yields an empty in-memory database and no tables.
    """
    if not file.exists():
        with closing(sqlite3.connect(":memory:")) as db:
            yield db, set()
        return
    try:
        with closing(sqlite3.connect(file, timeout=_BUSY_TIMEOUT, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")  # closing rolls back an open transaction
            yield db, {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            db.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        raise StoreUnavailable(f"{file}: {error}") from error
