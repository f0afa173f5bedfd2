"""The tables, as the migrations create them: tasks, calls and joins; operations and their checkpoints; secrets.

Instants are seconds since the epoch, by the database's clock. `agent_name` is the namespace and the agent's name,
so that several meshes share one database. `invocation_id` is the generation: the number of the pause, -1 for a call
of which only the cancel is left, since its task was revived.

A call's key begins with its task, so all calls of a task lie together, and the tables can be partitioned by
`logical_task_id`. No foreign key ties calls and joins to their task: whoever deletes a task deletes them with it, and
a look at the task for each of them would cost as much as the row. The same holds for operations and checkpoints.

A deliverable is JSON text within JSON, as a string: PostgreSQL would order its keys, round its numbers and refuse a
zero character.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    event,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, VARCHAR

REVISION = "0005"
"""The newest migration, which this code needs. A later one in the database is one this code can live with."""

VERSION_TABLE = "meshpoint_alembic_version"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id() -> String:
    # Compared byte by byte, as Python does: the order of locks is the same wherever it is computed.
    return String().with_variant(VARCHAR(collation="C"), "postgresql")


def _json() -> Text:
    return Text().with_variant(JSONB(), "postgresql")


tasks = Table(
    "agent_paused_tasks",
    metadata,
    Column("logical_task_id", _id(), primary_key=True),
    Column("agent_name", String, nullable=False),
    Column("status", String, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column(
        "run_id", String, nullable=False
    ),  # of the run, claim or cancel that wrote last: a repetition finds itself
    Column("owner", String),
    Column("attempt", Integer, nullable=False),
    # When time alone makes the task due. running: its lease ends; waiting: no deadline is earlier; ready: not
    # before; ended: its reply is due for sending, later its row is due for deletion.
    Column("wake_at", Float, nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    # the context
    Column("a2a_context", Text),
    Column("effective_session_id", String),  # a copy, for people who look
    Column("user_id", String),  # a copy, for people who look
    Column("current_invocation_id", String),  # a copy, for people who look
    Column("produced_artifacts", Text),
    Column("artifact_signals_to_return", Text),
    Column("response_buffer", Text),
    Column("flags", Text),
    Column("security_context", LargeBinary),
    Column("token_usage", Text),
    Column("context_rest", Text),  # what has no column of its own
    # the state, opaque
    Column("state", LargeBinary),
    Column("state_format", String),
    Column("app_version", String),
    Column("framework", String),
    # the request and its answer
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
    # the end
    Column("incompatible_since", Float),
    Column("dead_reason", Text),
    Column("checkpointed_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("expires_at", Float),
    # the operation
    Column("checkpoint_seq", Integer),  # NULL: the task is none; 0: no checkpoint yet; else: the last checkpoint
    Column("resume_token", String),  # the order in which its requester has asked for it last
    Column("retry_count", Integer, nullable=False, server_default=text("0")),
    # what comes from outside
    Column("rescues", Integer, nullable=False, server_default=text("0")),  # lost owners since the last pause
    Column("request_digest", String),  # of the input; a second request under this id must match it
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
    Column("dispatched_at", Float),  # NULL for what was sent with all requests of its pause: see the join
    # The cancel is to be sent, not before this; NULL: nothing to send but what the join says. The release before
    # wrote here also when the request is due.
    Column("send_due_at", Float),
    Column("send_attempts", Integer, nullable=False),  # 0: was never to be sent
    Column("idle_timeout", Float),
    Column("timeout_deadline", Float, nullable=False),  # the earlier of the idle and the absolute one
    Column("absolute_deadline", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

joins = Table(
    "agent_parallel_invocations",
    metadata,
    Column("logical_task_id", _id(), primary_key=True),
    Column("invocation_id", Integer, primary_key=True, autoincrement=False),
    Column("total_expected", Integer, nullable=False),
    Column("completed_count", Integer, nullable=False),
    Column("succeeded_count", Integer, nullable=False),
    Column("needed", Integer),  # results that meet the join; NULL: an outcome of every call
    Column("join_deadline", Float),
    # The outbox of the pause: one lease for the requests of all its calls.
    Column("agent_name", String),  # NULL: of the release before
    Column("send_due_at", Float),  # requests are to be sent, not before this; NULL: all are sent, or answered
    Column("send_attempts", Integer, nullable=False, server_default=text("0")),
    Column("dispatched_at", Float),
)

operations = Table(
    "agent_operations",
    metadata,
    Column("operation_id", _id(), primary_key=True),  # the task, which has the status and the owner
    Column("agent_name", String, nullable=False),
    Column("type", String, nullable=False),
    Column("subject", String),
    Column("parameters", Text, nullable=False),
    Column("children", Text, nullable=False, server_default=text("'[]'")),
    Column("exclusive", Boolean, nullable=False, server_default=false()),
    Column("preserve", Boolean, nullable=False, server_default=false()),
    Column("created_at", Float, nullable=False),
)


# The key that authenticates data that replicas keep in Redis. One row per mesh.
secrets = Table(
    "agent_mesh_secrets",
    metadata,
    Column("namespace", _id(), primary_key=True),
    Column("copy_key", LargeBinary, nullable=False),
)


def _checkpoint_columns() -> list[Column[Any]]:
    return [
        Column("analysis_id", _id(), primary_key=True),  # the operation
        Column("agent_type", String, primary_key=True),  # as `agent_name` elsewhere
        Column("seq", Integer, primary_key=True, autoincrement=False),
        Column("subject", String),
        Column("checkpoint_time", Float, nullable=False),
        Column("progress_pct", Float, nullable=False),
        Column("current_subtask", String),
        Column("completed_subtasks", _json(), nullable=False),
        Column("pending_subtasks", _json(), nullable=False),
        Column("planned_subtasks", _json(), nullable=False),
        Column("working_memory", _json(), nullable=False),
        Column("interim_results", _json(), nullable=False),  # deliverables by subtask
        Column("subtasks", _json(), nullable=False),  # records without their deliverables
        Column("agent_config", _json(), nullable=False),
        Column("failure_reason", Text),
        Column("error_details", _json()),
        Column("retry_count", Integer, nullable=False),
        Column("agent_version", String),
        Column("created_at", Float, nullable=False),
        Column("l1_snapshot_hash", Text),  # NULL: the task had no working memory
        # That memory, packed; NULL: not in this row. The last column: SQLite reads through it to those behind.
        Column("l1_snapshot", LargeBinary),
    ]


checkpoints = Table("agent_checkpoints", metadata, *_checkpoint_columns())

archive = Table(
    "agent_checkpoints_archive", metadata, Column("archived_at", Float, nullable=False), *_checkpoint_columns()
)

Index("ix_agent_operations_newest", operations.c.agent_name, operations.c.created_at)
Index("ix_agent_paused_tasks_due", tasks.c.agent_name, tasks.c.status, tasks.c.wake_at)
Index(
    "ix_agent_paused_tasks_keep_alive",
    tasks.c.agent_name,
    tasks.c.keep_alive_at,
    postgresql_where=tasks.c.keep_alive_at.is_not(None),
    sqlite_where=tasks.c.keep_alive_at.is_not(None),
)
Index(
    "ix_agent_peer_sub_tasks_unsent",
    calls.c.agent_name,
    calls.c.send_due_at,
    postgresql_where=calls.c.send_due_at.is_not(None),
    sqlite_where=calls.c.send_due_at.is_not(None),
)
Index(
    "ix_agent_parallel_invocations_unsent",
    joins.c.agent_name,
    joins.c.send_due_at,
    postgresql_where=joins.c.send_due_at.is_not(None),
    sqlite_where=joins.c.send_due_at.is_not(None),
)

FILLFACTOR = {tasks.name: 70, calls.name: 50, joins.name: 70, operations.name: 70}
"""How full, in percent, rows make a page when they are new. Each is written again a moment later, a call with its
outcome: in the same page, and where no indexed column changes without a new entry in any index."""

POSTGRES_STORAGE = (
    # The codec has compressed these already.
    *(
        f"ALTER TABLE agent_paused_tasks ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("state", "security_context", "request", "reply")
    ),
    *(
        f"ALTER TABLE agent_peer_sub_tasks ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("request", "outcome")
    ),
    # Each checkpoint writes these once more, and most live for seconds: they are not worth compressing.
    *(
        f"ALTER TABLE agent_checkpoints ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for column in ("working_memory", "interim_results")
    ),
    # These come compressed.
    *(
        f"ALTER TABLE {table} ALTER COLUMN l1_snapshot SET STORAGE EXTERNAL"
        for table in ("agent_checkpoints", "agent_checkpoints_archive")
    ),
    # Rows live for minutes: vacuum after a fiftieth of the table has changed, not after a fifth.
    *(
        f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02)"
        for table in (
            "agent_paused_tasks",
            "agent_peer_sub_tasks",
            "agent_parallel_invocations",
            "agent_operations",
            "agent_checkpoints",
        )
    ),
    *(f"ALTER TABLE {table} SET (fillfactor = {percent})" for table, percent in FILLFACTOR.items()),
)


@event.listens_for(metadata, "after_create")
def _set_storage(target: object, connection: Connection, **options: object) -> None:
    if connection.dialect.name == "postgresql":
        for statement in POSTGRES_STORAGE:
            connection.exec_driver_sql(statement)
