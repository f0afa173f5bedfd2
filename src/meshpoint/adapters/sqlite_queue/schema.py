"""The tables of the queues, and connections to them.

They may share a file with the task tables; all names begin with `meshpoint_queue`. A message's
state and content are separate rows, so that a claim rewrites a few bytes and never the body.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpoint.adapters.sqlite_queue.content import COLUMNS
from meshpoint.errors import ConfigurationError
from meshpoint.files import create_private
from meshpoint.model.error_text import quantity

_log = logging.getLogger(__name__)

VERSION = 1

_TABLES = (
    "CREATE TABLE meshpoint_queue_schema (version INTEGER NOT NULL)",
    # One row per open broker. Its beat increases while the process lives; ids are never reused.
    "CREATE TABLE meshpoint_queue_holder"
    " (id INTEGER PRIMARY KEY AUTOINCREMENT, beat INTEGER NOT NULL DEFAULT 0)",
    # For a private queue, `holder` declared it, and `left_at` is when that holder was removed.
    """CREATE TABLE meshpoint_queue (
        name TEXT PRIMARY KEY, agent TEXT NOT NULL, dead_letters TEXT NOT NULL,
        private INTEGER NOT NULL, holder INTEGER, left_at REAL) WITHOUT ROWID""",
    # `holder` is the broker that holds the message unacked; `deliveries` counts its deliveries.
    """CREATE TABLE meshpoint_queue_message (
        id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, holder INTEGER,
        deliveries INTEGER NOT NULL DEFAULT 0, dead_reason TEXT)""",
    "CREATE INDEX meshpoint_queue_ready ON meshpoint_queue_message (queue, id)"
    " WHERE holder IS NULL",
    "CREATE INDEX meshpoint_queue_held ON meshpoint_queue_message (holder)"
    " WHERE holder IS NOT NULL",
    """CREATE TABLE meshpoint_queue_content (
        id INTEGER PRIMARY KEY, type TEXT NOT NULL, message_id TEXT NOT NULL,
        correlation_id TEXT NOT NULL, app_id TEXT NOT NULL, reply_to TEXT, user_id TEXT,
        headers TEXT NOT NULL, timestamp TEXT, body BLOB NOT NULL)""",
)
MARKER_TABLE = "meshpoint_queue_marker"
"""Agents whose replicas store tasks in a database. Files of earlier releases lack this table."""
_CREATE_MARKERS = (
    f"CREATE TABLE IF NOT EXISTS {MARKER_TABLE} (name TEXT PRIMARY KEY) WITHOUT ROWID"
)
TOPIC_TABLE = "meshpoint_queue_topic"
"""Private queues that are subscribed to topics. Files of earlier releases lack this table."""
_CREATE_TOPICS = (
    f"CREATE TABLE IF NOT EXISTS {TOPIC_TABLE}"
    " (topic TEXT NOT NULL, queue TEXT NOT NULL, PRIMARY KEY (topic, queue)) WITHOUT ROWID"
)
_CREATE_REQUESTS = (
    "CREATE INDEX IF NOT EXISTS meshpoint_queue_request"
    " ON meshpoint_queue_content (correlation_id) WHERE type = 'request'"
)
"""Finds the request of a task. Files of earlier releases lack this index."""
_ADD_DEAD_FROM = "ALTER TABLE meshpoint_queue_message ADD COLUMN dead_from TEXT"
"""The queue from which a dead letter came. Files of earlier releases lack this column."""
_COLUMNS = {
    "marker": "name",
    "topic": "topic, queue",
    "holder": "id, beat",
    "": "name, agent, dead_letters, private, holder, left_at",
    "message": "id, queue, holder, deliveries, dead_reason, dead_from",
    "content": f"id, {COLUMNS}",
}
_MAX_ID = 2**62
_ID_GAP = 2**20
"""Ids skipped after a repair, because some above the last valid one may have been used."""
_UNUSABLE_FILE_ERRORS = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}


def connect(path: Path, busy_timeout: float) -> sqlite3.Connection:
    """Open an autocommit connection to the queues in `path`, and create them if missing.

    Several processes may do this concurrently. A new file, including its WAL and shared-memory
    files, is accessible only to its owner.

    Raises:
        ConfigurationError: The file can never be used: its folder does not exist, it is not a
            database, it is not on a local disk, or its queues have another version.
        sqlite3.Error: The file cannot be opened, or stayed locked for `busy_timeout` seconds.
    """
    try:
        if not path.parent.is_dir():
            raise ConfigurationError(
                "mesh.broker_url", f"there is no folder {path.parent}", "create it"
            )
        create_private(path)
        db = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None)
    except OSError as error:
        raise ConfigurationError(
            "mesh.broker_url", f"cannot create {path}: {error}", "name another file"
        ) from error
    try:
        _use_wal(db, path, busy_timeout)
        if not has_schema(db):
            _create(db)
        if not has_table(db, MARKER_TABLE):
            db.execute(_CREATE_MARKERS)
        if not has_table(db, TOPIC_TABLE):
            db.execute(_CREATE_TOPICS)
        add_dead_from(db)
        _check(db, path)
        if not has_table(db, "meshpoint_queue_request"):
            db.execute(_CREATE_REQUESTS)
    except sqlite3.DatabaseError as error:
        db.close()
        if error.sqlite_errorcode & 0xFF in _UNUSABLE_FILE_ERRORS:
            raise ConfigurationError(
                "mesh.broker_url", f"{path}: {error}", "name another file"
            ) from error
        raise
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a write transaction. It is rolled back if the block raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def remove_out_of_range_ids(db: sqlite3.Connection) -> bool:
    """Delete messages and holders whose ids are too high to be genuine. `True` if there were any.

    Once the highest possible id is used, SQLite fails every insert with "database or disk is
    full". Runs inside the caller's transaction.
    """
    messages, holders = (
        _remove_out_of_range_ids(db, "message"),
        _remove_out_of_range_ids(db, "holder"),
    )
    if messages:
        db.execute("DELETE FROM meshpoint_queue_content WHERE id > ?", (_MAX_ID,))
    return messages or holders


def _remove_out_of_range_ids(db: sqlite3.Connection, name: str) -> bool:
    table = f"meshpoint_queue_{name}"
    used = (
        f"SELECT max(id) FROM {table}"
        " UNION ALL SELECT CAST(seq AS INTEGER) FROM sqlite_sequence WHERE name = ?"
    )
    if all(id_ is None or id_ <= _MAX_ID for (id_,) in db.execute(used, (table,))):
        return False
    removed = db.execute(f"DELETE FROM {table} WHERE id > ?", (_MAX_ID,)).rowcount
    db.execute(
        f"UPDATE sqlite_sequence SET seq = ? + (SELECT coalesce(max(id), 0) FROM {table})"
        " WHERE name = ?",
        (_ID_GAP, table),
    )
    _log.warning("%s had ids out of range: removed %s", table, quantity(removed, "row"))
    return True


def _use_wal(db: sqlite3.Connection, path: Path, busy_timeout: float) -> None:
    # SQLite's busy timeout does not apply to a change of the journal mode.
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise ConfigurationError(
            "mesh.broker_url", f"{path} cannot be shared by processes", "put it on a local disk"
        )


def has_schema(db: sqlite3.Connection) -> bool:
    """Whether the file has the tables of the queues."""
    return has_table(db, "meshpoint_queue_schema")


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether the file has the table or index `name`."""
    query = "SELECT 1 FROM sqlite_master WHERE name = ?"
    return db.execute(query, (name,)).fetchone() is not None


def add_dead_from(db: sqlite3.Connection) -> None:
    """Add the column for the queue of a dead letter to a file of an earlier release."""
    if _lacks_dead_from(db):
        with transaction(db):
            if _lacks_dead_from(db):  # no other process was faster
                db.execute(_ADD_DEAD_FROM)


def _lacks_dead_from(db: sqlite3.Connection) -> bool:
    """Whether messages have no such column. A missing table is reported elsewhere."""
    query = "SELECT name FROM pragma_table_info('meshpoint_queue_message')"
    names = {name for (name,) in db.execute(query)}
    return bool(names) and "dead_from" not in names


def _create(db: sqlite3.Connection) -> None:
    with transaction(db):
        if has_schema(db):  # another process was faster
            return
        for statement in _TABLES:
            db.execute(statement)
        db.execute("INSERT INTO meshpoint_queue_schema VALUES (?)", (VERSION,))


def _check(db: sqlite3.Connection, path: Path) -> None:
    row = db.execute("SELECT version FROM meshpoint_queue_schema").fetchone()
    version = row[0] if row else None
    if version != VERSION:
        raise ConfigurationError(
            "mesh.broker_url",
            f"the queues in {path} have version {version}; this release reads version {VERSION}",
            "use the Meshpoint release that created them, or another file",
        )
    for name, columns in _COLUMNS.items():
        table = f"meshpoint_queue_{name}".rstrip("_")
        try:
            db.execute(f"SELECT {columns} FROM {table} LIMIT 0")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            problem = f"{path} has no usable table {table}: {error}"
            raise ConfigurationError("mesh.broker_url", problem, "name another file") from error
