"""Keep what is to be sent of a pause on its join, and let calls and joins go without foreign keys.

While replicas of the release before still run:

- They write calls with a lease each, and joins that are due for nothing (`agent_name` is NULL there). Both releases
  send such calls, so those that are there when this runs stay as they are.
- They do not see that a join is due: requests that a replica of this release committed and did not send are sent by
  replicas of this release only. `downgrade` gives each of them a lease of its own.
- They delete tombstones without a look at calls and joins; a tombstone that may be deleted ordinarily has none.
"""

from __future__ import annotations

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
        for table, percent in FILLFACTOR.items():  # of pages that are filled from now on
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
         WHERE j.logical_task_id = {CALLS}.logical_task_id AND j.invocation_id = {CALLS}.invocation_id
           AND j.send_due_at IS NOT NULL AND {CALLS}.status = 'pending' AND {CALLS}.dispatched_at IS NULL
           AND {CALLS}.send_due_at IS NULL""")
    for table in (CALLS, JOINS):
        op.execute(f"DELETE FROM {table} WHERE logical_task_id NOT IN (SELECT logical_task_id FROM {TASKS})")
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
    """Take the locks that all of this needs, each for moments, in the order in which transactions take them."""
    op.execute("SET LOCAL lock_timeout = '5s'")  # whoever waits here makes all others wait: rather fail
    op.execute(f"LOCK TABLE {TASKS}, {CALLS}, {JOINS} IN ACCESS EXCLUSIVE MODE")


def rebuild(table: str, columns: list[sa.schema.SchemaItem], kept: list[sa.Column[object]]) -> None:
    """Make a table anew, since SQLite neither drops nor adds a foreign key."""
    names = ", ".join(column.name for column in kept)
    op.execute(f"ALTER TABLE {table} RENAME TO {table}_before")
    keys = [column.name for column in kept if column.info.get("key")]
    op.create_table(table, *columns, sa.PrimaryKeyConstraint(*keys, name=op.f(f"pk_{table}")))
    op.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before")
    op.drop_table(f"{table}_before")


def create_index(table: str) -> None:
    due = sa.text("send_due_at IS NOT NULL")
    op.create_index(index_of(table), table, ["agent_name", "send_due_at"], postgresql_where=due, sqlite_where=due)


def index_of(table: str) -> str:
    return f"ix_{table}_unsent"


def key_of(table: str) -> str:
    return op.f(f"fk_{table}_logical_task_id")


def foreign_key(table: str) -> sa.ForeignKeyConstraint:
    referred = [f"{TASKS}.logical_task_id"]
    return sa.ForeignKeyConstraint(["logical_task_id"], referred, name=key_of(table), ondelete="CASCADE")


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
        sa.Column("invocation_id", sa.Integer(), autoincrement=False, nullable=False, info={"key": True}),
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
