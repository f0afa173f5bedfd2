"""The tables as the migrations create them, and the revision that a database has of them.

Instants are seconds since the epoch by the database's clock. `agent_name` is the namespace and the
agent's name, so that several meshes can share a database. `invocation_id` is the generation, that
is, the number of the pause. It is -1 for calls of a revived task that only wait for their cancel
to be sent, and -2 - g for earlier attempts at the calls of pause g (`model.call_attempts`).

A call's key begins with its task, so that the calls of a task are adjacent and the tables can be
partitioned by `logical_task_id`. Calls and joins have no foreign key to their task: a transaction
that deletes a task deletes them too, and checking the key would cost as much as writing the row.
The same holds for operations and checkpoints. Log entries, subtask records and mailboxes do have a
foreign key, because only few tasks have any.

A deliverable is stored as JSON text in a JSON string, since PostgreSQL would reorder its keys,
round its numbers and reject NUL.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TextClause,
    event,
    false,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, VARCHAR

from meshpoint.errors import ConfigurationError

REVISION = "0019"
"""The newest migration of this release, which it requires. It also works with a later one."""

VERSION_TABLE = "meshpoint_alembic_version"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id() -> String:
    # Compared byte by byte, as in Python, so that both compute the same lock order.
    return String().with_variant(VARCHAR(collation="C"), "postgresql")


JSON = Text().with_variant(JSONB(), "postgresql")


tasks = Table(
    "agent_paused_tasks",
    metadata,
    Column("logical_task_id", _id(), primary_key=True),
    Column("agent_name", String, nullable=False),
    Column("status", String, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    # The run, claim or cancel that wrote the row last; a repeated write finds its own id here.
    Column("run_id", String, nullable=False),
    Column("owner", String),
    Column("attempt", Integer, nullable=False),
    # When the sweeper must look at the task. For a running task, the end of its lease; for a
    # waiting one, at or before its earliest deadline; for a ready one, the earliest time to
    # acquire it; for a parked one, when it must be ended; for an ended one, when its reply is due,
    # and after that, when its row may be deleted.
    Column("wake_at", Float, nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    # The context. The session, user and invocation ids are copies for people who query the table.
    Column("a2a_context", Text),
    Column("effective_session_id", String),
    Column("user_id", String),
    Column("current_invocation_id", String),
    Column("produced_artifacts", Text),
    Column("artifact_signals_to_return", Text),
    Column("response_buffer", Text),
    Column("flags", Text),
    Column("security_context", LargeBinary),
    Column("token_usage", Text),
    Column("context_rest", Text),  # context values without a column of their own
    # The agent's state, opaque to Meshpoint.
    Column("state", LargeBinary),
    Column("state_format", String),
    Column("app_version", String),
    Column("framework", String),
    # The request and its reply.
    Column("request", LargeBinary),
    Column("reply", LargeBinary),
    Column("reply_to", String),
    Column("requester_app_id", String),
    Column("parent_task_id", String),
    Column("task_deadline", Float),
    Column("idle_timeout", Float),
    Column("keep_alive_at", Float),
    Column("reply_sent", Boolean, nullable=False, server_default=false()),
    Column("reply_attempts", Integer, nullable=False, server_default=text("0")),
    # Parking, failure and end. `incompatible_since` is when the task was first parked since its
    # last pause.
    Column("incompatible_since", Float),
    Column("dead_reason", Text),
    Column("checkpointed_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("expires_at", Float),
    # The operation. `checkpoint_seq` is the number of its last checkpoint, 0 before the first, and
    # NULL if the task is not an operation.
    Column("checkpoint_seq", Integer),
    Column("resume_token", String),  # order of the requester's latest request for the task
    Column("retry_count", Integer, nullable=False, server_default=text("0")),
    # The number of owners lost since the last pause.
    Column("rescues", Integer, nullable=False, server_default=text("0")),
    Column("request_digest", String),  # of the input; another request with this id must match it
    # Why the task was parked, and the versions of the agent's code that cannot continue it, as a
    # JSON list; NULL since the last pause.
    Column("parked_reason", Text),
    Column("tried_versions", Text),
    # The number of the last entry of the task's log. It never decreases. Readers read up to it, if
    # `state_format` says that the task has a log.
    Column("log_seq", Integer, nullable=False, server_default=text("0")),
    # Since when a person has suspended the task. While it is `ready`, `wake_at` is then the far
    # future, so that no replica of any release acquires it.
    Column("suspended_at", Float),
    # Addresses that also get the reply, one per line. Once the reply has been sent to `reply_to`,
    # the first of them takes its place.
    Column("further_reply_to", Text),
    # Seconds to keep the row of an ended task at least; NULL: as long as any other.
    Column("result_ttl", Float),
)

# What the pauses of a task appended to its state, in the order of `seq`. The run that owns the
# task inserts and deletes entries, in the transaction of its pause or its end, and updates none.
task_log = Table(
    "agent_task_log",
    metadata,
    Column(
        "logical_task_id",
        _id(),
        ForeignKey(tasks.c.logical_task_id, ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("run_id", String, nullable=False),
    Column("entry", LargeBinary, nullable=False),
)


def _task_key() -> Column[Any]:
    return Column(
        "logical_task_id",
        _id(),
        ForeignKey(tasks.c.logical_task_id, ondelete="CASCADE"),
        primary_key=True,
    )


# Signals in the order in which they were accepted. `value` is NULL once the task has received it:
# the row then only recognizes a repeated signal. Every writer has locked the task.
signals = Table(
    "agent_task_signals",
    metadata,
    _task_key(),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("signal_id", _id(), nullable=False),
    Column("name", String, nullable=False),
    Column("sender", String, nullable=False),
    Column("size", Integer, nullable=False),  # of the value, as JSON
    Column("digest", String, nullable=False),  # of the name and the value
    Column("value", LargeBinary),
    Column("sent_at", Float, nullable=False),
    Column("received_at", Float),
)

# The questions that a task has asked, as the latest pause with each asked it. Every writer has
# locked the task.
questions = Table(
    "agent_task_questions",
    metadata,
    _task_key(),
    Column("sub_task_id", _id(), primary_key=True),
    Column("request", LargeBinary, nullable=False),
    Column("answer", LargeBinary),  # the outcome; NULL while the question is open
    # Whether the answer arrived while the task was not waiting for it. The next pause with the
    # question takes it.
    Column("is_kept", Boolean, nullable=False, server_default=false()),
)

# The latest values that `ctx.set_value` has set. The run that owns the task writes them.
values = Table(
    "agent_task_values",
    metadata,
    _task_key(),
    Column("key", _id(), primary_key=True),
    Column("value", LargeBinary, nullable=False),
    Column("set_at", Float, nullable=False),
)

calls = Table(
    "agent_peer_sub_tasks",
    metadata,
    Column("logical_task_id", _id(), primary_key=True),
    Column("sub_task_id", _id(), primary_key=True),
    Column("agent_name", String, nullable=False),
    Column("invocation_id", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("call_id", String, nullable=False),
    Column("peer_agent", String, nullable=False),
    Column("correlation_data", Text, nullable=False),  # the message's headers
    Column("request", LargeBinary, nullable=False),
    Column("status", String, nullable=False),
    Column("outcome", LargeBinary),
    Column("claim_id", String),
    # When the request was sent; NULL if the join has that time for all requests of the pause.
    Column("dispatched_at", Float),
    # When the cancel is due; NULL if none is. A join says when its requests are due, except for
    # later attempts, which are due here.
    Column("send_due_at", Float),
    Column("send_attempts", Integer, nullable=False),  # 0 if the request was never due
    Column("idle_timeout", Float),
    Column("timeout_deadline", Float, nullable=False),  # the earlier of idle and absolute deadline
    Column("absolute_deadline", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    # When the broker first returned the request because the peer has no queue.
    Column("unroutable_since", Float),
    # The policy by which the call is retried, and the number of this attempt, as JSON
    # (`model.call_attempts`); NULL without a policy.
    Column("retry", Text),
)

joins = Table(
    "agent_parallel_invocations",
    metadata,
    Column("logical_task_id", _id(), primary_key=True),
    Column("invocation_id", Integer, primary_key=True, autoincrement=False),
    Column("total_expected", Integer, nullable=False),
    Column("completed_count", Integer, nullable=False),
    Column("succeeded_count", Integer, nullable=False),
    Column("needed", Integer),  # results that meet the join; NULL: it needs every call's outcome
    Column("join_deadline", Float),
    # The outbox of the pause: one lease for the requests of all its calls.
    Column("agent_name", String),  # NULL in rows of the previous release
    Column("send_due_at", Float),  # when the requests are due; NULL if sent or no longer needed
    Column("send_attempts", Integer, nullable=False, server_default=text("0")),
    Column("dispatched_at", Float),
)

operations = Table(
    "agent_operations",
    metadata,
    Column("operation_id", _id(), primary_key=True),  # the task id; its row has status and owner
    Column("agent_name", String, nullable=False),
    Column("type", String, nullable=False),
    Column("subject", String),
    Column("parameters", Text, nullable=False),
    Column("children", Text, nullable=False, server_default=text("'[]'")),
    Column("exclusive", Boolean, nullable=False, server_default=false()),
    Column("preserve", Boolean, nullable=False, server_default=false()),
    Column("created_at", Float, nullable=False),
)

# The replicas that serve each agent. Each refreshes its row from time to time, and deletes it when
# it stops. A replica that has not refreshed its row by `expires_at` is lost.
replicas = Table(
    "agent_replicas",
    metadata,
    Column("agent_name", String, primary_key=True),
    Column("replica_id", _id(), primary_key=True),
    Column("release", String, nullable=False),  # of Meshpoint
    Column("app_version", String, nullable=False),
    Column("state_formats", Text, nullable=False),  # that it reads, as a JSON list
    Column("slots", Integer, nullable=False),
    Column("host", String, nullable=False),  # may end with its process
    Column("is_draining", Boolean, nullable=False, server_default=false()),
    Column("started_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)

# The timelines of tasks: an entry for each change of a task's state, written in the transaction
# that makes the change. They outlive their tasks, until they are pruned by time.
timelines = Table(
    "agent_task_timelines",
    metadata,
    # Grows from entry to entry of a task, since its entries are written under the task's lock.
    # An identity needs no right to a sequence.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("logical_task_id", _id(), nullable=False),
    Column("agent_name", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("change", String, nullable=False),  # see `meshpoint.model.timeline.Change`
    Column("replica", String),  # that wrote the entry; NULL for an operator's command
    Column("generation", Integer, nullable=False),
    # Of the run that owns the task; NULL if the entry is about calls.
    Column("fence", Integer),
    Column("attempt", Integer),
    # Of an entry about calls: their number, and the counters of their join.
    Column("calls", Integer),
    Column("completed", Integer),
    Column("total", Integer),
    # Of an entry about one call: its peer and its `sub_task_id`. For a signal, its id.
    Column("peer", String),
    Column("ref", String),
)


# The key that authenticates copies that replicas keep in Redis. One row per mesh.
secrets = Table(
    "agent_mesh_secrets",
    metadata,
    Column("namespace", _id(), primary_key=True),
    Column("copy_key", LargeBinary, nullable=False),
)

# What operators have done, in the order of `action_id`. A row is written before its action and
# completed after it. `ended_at` stays NULL if the process died in between.
operator_actions = Table(
    "agent_operator_actions",
    metadata,
    Column("namespace", _id(), primary_key=True),
    Column("action_id", _id(), primary_key=True),
    Column("actor", String, nullable=False),
    Column("action", String, nullable=False),
    Column("target", _id(), nullable=False),  # a task's id, or what a bulk action selects
    Column("details", Text, nullable=False),  # JSON, without secrets
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("succeeded", Boolean),
    Column("result", Text),
)


# The keys that may have sealed values of an agent. A replica without all of them refuses to
# start, and `meshpoint db reseal` deletes unused ones.
keys = Table(
    "agent_mesh_keys",
    metadata,
    Column("agent_name", _id(), primary_key=True),
    Column("key_id", String, primary_key=True),
    Column("used_at", Float, nullable=False),
)


def _checkpoint_columns() -> list[Column[Any]]:
    return [
        Column("analysis_id", _id(), primary_key=True),  # the id of the operation
        Column("agent_type", String, primary_key=True),  # the same as `agent_name` in other tables
        Column("seq", Integer, primary_key=True, autoincrement=False),
        Column("subject", String),
        Column("checkpoint_time", Float, nullable=False),
        Column("progress_pct", Float, nullable=False),
        Column("current_subtask", String),
        Column("completed_subtasks", JSON, nullable=False),
        Column("pending_subtasks", JSON, nullable=False),
        Column("planned_subtasks", JSON, nullable=False),
        Column("working_memory", JSON, nullable=False),
        Column("interim_results", JSON, nullable=False),  # deliverables by subtask
        Column("subtasks", JSON, nullable=False),  # subtask records without their deliverables
        Column("agent_config", JSON, nullable=False),
        Column("failure_reason", Text),
        Column("error_details", JSON),
        Column("retry_count", Integer, nullable=False),
        Column("agent_version", String),
        Column("created_at", Float, nullable=False),
        Column("l1_snapshot_hash", Text),  # NULL if the task had no working memory
        # The working memory, packed; NULL if another row has it. It is the last column, because
        # SQLite reads through large values to reach the columns after them.
        Column("l1_snapshot", LargeBinary),
    ]


checkpoints = Table("agent_checkpoints", metadata, *_checkpoint_columns())

# The records of subtasks, in versions. A checkpoint with `records_from` in its `working_memory`
# has, for each name, the newest version that was written between that checkpoint and itself, in
# the order of `place`. A checkpoint without it has its records in its own row. Versions are never
# updated, and are deleted together with the checkpoints or the operation.
subtask_records = Table(
    "agent_subtask_records",
    metadata,
    Column(
        "analysis_id",
        _id(),
        ForeignKey("agent_operations.operation_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("agent_type", String, primary_key=True),
    Column("name", String, primary_key=True),  # of the subtask
    # The checkpoint that wrote this version.
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("place", Integer, nullable=False),
    Column("record", Text, nullable=False),  # JSON, without the deliverable
    Column("result", Text),  # the deliverable, as JSON text
)

archive = Table(
    "agent_checkpoints_archive",
    metadata,
    Column("archived_at", Float, nullable=False),
    *_checkpoint_columns(),
)


def _partial_index(
    name: str, *columns: Column[Any], where: ColumnElement[bool] | TextClause
) -> Index:
    """An index of the rows that match `where` only: other rows pay nothing for it."""
    return Index(name, *columns, postgresql_where=where, sqlite_where=where)


Index("ix_agent_task_signals_id", signals.c.logical_task_id, signals.c.signal_id, unique=True)
Index(
    "ix_agent_operator_actions_target",
    operator_actions.c.namespace,
    operator_actions.c.target,
    operator_actions.c.action_id,
)
Index("ix_agent_operations_newest", operations.c.agent_name, operations.c.created_at)
_partial_index(
    "ix_agent_operations_subject",
    operations.c.subject,
    operations.c.agent_name,
    where=operations.c.subject.is_not(None),
)
_partial_index(
    "ix_agent_paused_tasks_user",
    tasks.c.user_id,
    tasks.c.checkpointed_at,
    where=tasks.c.user_id.is_not(None),
)
Index("ix_agent_paused_tasks_due", tasks.c.agent_name, tasks.c.status, tasks.c.wake_at)
_partial_index(
    "ix_agent_paused_tasks_deadline",
    tasks.c.agent_name,
    tasks.c.task_deadline,
    where=text("status = 'ready' AND task_deadline IS NOT NULL"),
)
_partial_index(
    "ix_agent_paused_tasks_keep_alive",
    tasks.c.agent_name,
    tasks.c.keep_alive_at,
    where=tasks.c.keep_alive_at.is_not(None),
)
_partial_index(
    "ix_agent_paused_tasks_suspended",
    tasks.c.agent_name,
    where=tasks.c.suspended_at.is_not(None),
)
_partial_index(
    "ix_agent_paused_tasks_dead",
    tasks.c.agent_name,
    where=tasks.c.dead_reason.is_not(None),
)
# The condition must not name a column that a response changes, or no update would be HOT.
_partial_index(
    "ix_agent_peer_sub_tasks_questions",
    calls.c.agent_name,
    where=text("peer_agent LIKE '~?%'"),
)
_partial_index(
    "ix_agent_peer_sub_tasks_unsent",
    calls.c.agent_name,
    calls.c.send_due_at,
    where=calls.c.send_due_at.is_not(None),
)
_partial_index(
    "ix_agent_parallel_invocations_unsent",
    joins.c.agent_name,
    joins.c.send_due_at,
    where=joins.c.send_due_at.is_not(None),
)

Index("ix_agent_task_timelines_task", timelines.c.logical_task_id, timelines.c.id)
Index("ix_agent_task_timelines_age", timelines.c.agent_name, timelines.c.at)

FILLFACTOR = {tasks.name: 70, calls.name: 50, joins.name: 70, operations.name: 70}
"""Percentage of a page that inserts fill, by table.

Rows are updated soon after they are inserted; a call, for example, gets its outcome. The free
space keeps the new version on the same page. If no indexed column changes, no index gets a new
entry.
"""

POSTGRES_STORAGE = (
    # The codec has already compressed these columns.
    *(
        f"ALTER TABLE agent_paused_tasks ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("state", "security_context", "request", "reply")
    ),
    *(
        f"ALTER TABLE agent_peer_sub_tasks ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("request", "outcome")
    ),
    "ALTER TABLE agent_task_log ALTER COLUMN entry SET STORAGE EXTERNAL",
    "ALTER TABLE agent_task_signals ALTER COLUMN value SET STORAGE EXTERNAL",
    "ALTER TABLE agent_task_questions ALTER COLUMN request SET STORAGE EXTERNAL",
    "ALTER TABLE agent_task_values ALTER COLUMN value SET STORAGE EXTERNAL",
    # Each checkpoint writes these columns anew, and most rows live for seconds: compression does
    # not pay.
    *(
        f"ALTER TABLE agent_checkpoints ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("working_memory", "interim_results")
    ),
    "ALTER TABLE agent_subtask_records ALTER COLUMN result SET STORAGE EXTERNAL",
    # Snapshots are compressed before they are stored.
    *(
        f"ALTER TABLE {table} ALTER COLUMN l1_snapshot SET STORAGE EXTERNAL"
        for table in ("agent_checkpoints", "agent_checkpoints_archive")
    ),
    # Rows live for minutes: vacuum after 2 % of the table has changed, instead of 20 %.
    *(
        f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02)"
        for table in (
            "agent_paused_tasks",
            "agent_peer_sub_tasks",
            "agent_parallel_invocations",
            "agent_operations",
            "agent_checkpoints",
            "agent_subtask_records",
            "agent_task_log",
        )
    ),
    *(
        f"ALTER TABLE {table} SET (fillfactor = {percent})"
        for table, percent in FILLFACTOR.items()
    ),
)


@event.listens_for(metadata, "after_create")
def _set_storage(target: object, connection: Connection, **options: object) -> None:
    if connection.dialect.name == "postgresql":
        for statement in POSTGRES_STORAGE:
            connection.exec_driver_sql(statement)


def recorded_revision(connection: Connection, version_table: str = VERSION_TABLE) -> str | None:
    """The latest migration applied to the database, or `None`.

    Raises:
        ConfigurationError: The version table was not written by Alembic.
    """
    inspector = inspect(connection)
    if not inspector.has_table(version_table):
        return None
    columns = {column["name"]: column["type"] for column in inspector.get_columns(version_table)}
    if not isinstance(columns.get("version_num"), String):
        raise _version_table_error(version_table, "it has no text column version_num")
    found = (
        connection.execute(text(f"SELECT version_num FROM {version_table} LIMIT 2"))
        .scalars()
        .all()
    )
    if len(found) > 1:
        raise _version_table_error(version_table, "it has more than one row")
    if not all(isinstance(each, str) for each in found):
        raise _version_table_error(version_table, "its version_num is not text")
    return found[0] if found else None


def _version_table_error(table: str, problem: str) -> ConfigurationError:
    """The error for a version table that Alembic did not write, or that was changed since."""
    fix = "use another database, or repair or drop that table"
    return ConfigurationError("database", f"cannot use table {table}: {problem}", fix)


def create_if_empty(connection: Connection) -> None:
    """Create the tables in a database without a version table, and record their revision."""
    if inspect(connection).has_table(VERSION_TABLE):
        return
    metadata.create_all(connection)
    connection.execute(
        text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    )
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{REVISION}')"))


def is_outdated(revision: str | None) -> bool:
    """Whether a database at `revision` must be upgraded for this release.

    A revision later than this release's own is accepted: migrations keep the previous release
    working, so that replicas can be replaced one by one.
    """
    return revision is None or revision < REVISION
