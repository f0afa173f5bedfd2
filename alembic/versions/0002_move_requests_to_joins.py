"""Move the outbox of a pause's requests to its join, and drop the foreign keys of calls and joins.

While replicas of the previous release still run:

- They write a lease on each call, and joins that are never due (with `agent_name` NULL). Both
  releases send such calls, so existing ones are left unchanged.
- They do not see that a join is due. If a replica of this release commits requests and does not
  send them, only replicas of this release can. `downgrade` gives each of these calls a lease.
- They delete tombstones without checking for calls and joins. Normally, a tombstone that may be
  deleted has no calls or joins.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TASKS, CALLS, JOINS = "agent_paused_tasks", "agent_peer_sub_tasks", "agent_parallel_invocations"
FILLFACTOR = {TASKS: 70, CALLS: 50, JOINS: 70}


def upgrade() -> None:
    if on_postgres():
        lock()
        for column in outbox_columns():
            op.add_column(JOINS, column)
        for table in (CALLS, JOINS):
            op.drop_constraint(key_of(table), table, type_="foreignkey")
        for table, percent in FILLFACTOR.items():  # applies only to pages filled from now on
            op.execute(f"ALTER TABLE {table} SET (fillfactor = {percent})")
    else:
        rebuild(JOINS, [*joins_columns(), *outbox_columns()], kept=joins_columns())
        rebuild(CALLS, calls_columns(), kept=calls_columns())
        create_index(CALLS)
    create_index(JOINS)


def downgrade() -> None:
    if on_postgres():
        lock()
    op.execute(f"""
        UPDATE {CALLS} SET send_due_at = j.send_due_at, send_attempts = j.send_attempts
          FROM {JOINS} AS j
         WHERE j.logical_task_id = {CALLS}.logical_task_id
           AND j.invocation_id = {CALLS}.invocation_id
           AND j.send_due_at IS NOT NULL AND {CALLS}.status = 'pending'
           AND {CALLS}.dispatched_at IS NULL
           AND {CALLS}.send_due_at IS NULL""")
    for table in (CALLS, JOINS):
        op.execute(
            f"DELETE FROM {table} "
            f"WHERE logical_task_id NOT IN (SELECT logical_task_id FROM {TASKS})"
        )
    if on_postgres():
        for table in FILLFACTOR:
            op.execute(f"ALTER TABLE {table} RESET (fillfactor)")
        op.drop_index(index_of(JOINS), JOINS)
        for column in outbox_columns():
            op.drop_column(JOINS, column.name)
        for table in (CALLS, JOINS):
            id_ = ["logical_task_id"]
            op.create_foreign_key(key_of(table), table, TASKS, id_, id_, ondelete="CASCADE")
    else:
        rebuild(JOINS, [*joins_columns(), foreign_key(JOINS)], kept=joins_columns())
        rebuild(CALLS, [*calls_columns(), foreign_key(CALLS)], kept=calls_columns())
        create_index(CALLS)


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")


def lock() -> None:
    """Lock all tables that the migration needs, in the order in which transactions lock them.

    Each lock is needed only for a moment.
    """
    op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
    op.execute(f"LOCK TABLE {TASKS}, {CALLS}, {JOINS} IN ACCESS EXCLUSIVE MODE")


def rebuild(
    table: str, columns: Sequence[sa.schema.SchemaItem], kept: Sequence[sa.Column[object]]
) -> None:
    """Recreate a table, since SQLite can neither drop nor add a foreign key."""
    names = ", ".join(column.name for column in kept)
    op.execute(f"ALTER TABLE {table} RENAME TO {table}_before")
    keys = [column.name for column in kept if column.info.get("key")]
    op.create_table(table, *columns, sa.PrimaryKeyConstraint(*keys, name=op.f(f"pk_{table}")))
    op.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before")
    op.drop_table(f"{table}_before")


def create_index(table: str) -> None:
    due = sa.text("send_due_at IS NOT NULL")
    op.create_index(
        index_of(table),
        table,
        ["agent_name", "send_due_at"],
        postgresql_where=due,
        sqlite_where=due,
    )


def index_of(table: str) -> str:
    return f"ix_{table}_unsent"


def key_of(table: str) -> str:
    return op.f(f"fk_{table}_logical_task_id")


def foreign_key(table: str) -> sa.ForeignKeyConstraint:
    referred = [f"{TASKS}.logical_task_id"]
    return sa.ForeignKeyConstraint(
        ["logical_task_id"], referred, name=key_of(table), ondelete="CASCADE"
    )


def outbox_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("agent_name", sa.String()),
        sa.Column("send_due_at", sa.Float()),
        sa.Column("send_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("dispatched_at", sa.Float()),
    ]


def joins_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("logical_task_id", sa.String(), nullable=False, info={"key": True}),
        sa.Column(
            "invocation_id", sa.Integer(), autoincrement=False, nullable=False, info={"key": True}
        ),
        sa.Column("total_expected", sa.Integer(), nullable=False),
        sa.Column("completed_count", sa.Integer(), nullable=False),
        sa.Column("succeeded_count", sa.Integer(), nullable=False),
        sa.Column("needed", sa.Integer()),
        sa.Column("join_deadline", sa.Float()),
    ]


def calls_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("logical_task_id", sa.String(), nullable=False, info={"key": True}),
        sa.Column("sub_task_id", sa.String(), nullable=False, info={"key": True}),
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("invocation_id", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("call_id", sa.String(), nullable=False),
        sa.Column("peer_agent", sa.String(), nullable=False),
        sa.Column("correlation_data", sa.Text(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("outcome", sa.LargeBinary()),
        sa.Column("claim_id", sa.String()),
        sa.Column("dispatched_at", sa.Float()),
        sa.Column("send_due_at", sa.Float()),
        sa.Column("send_attempts", sa.Integer(), nullable=False),
        sa.Column("idle_timeout", sa.Float()),
        sa.Column("timeout_deadline", sa.Float(), nullable=False),
        sa.Column("absolute_deadline", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    ]
