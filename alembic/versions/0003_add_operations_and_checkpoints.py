"""Add operations and their subtask checkpoints.

Replicas of the previous release that still run leave the new columns of a task unchanged, so they
never begin an operation. They treat an operation that they end or rescue like any other task: its
request is not kept, and its checkpoints stay until they are deleted by hand. A later operation
with the same id replaces them one by one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TASKS, OPERATIONS = "agent_paused_tasks", "agent_operations"
CHECKPOINTS, ARCHIVE = "agent_checkpoints", "agent_checkpoints_archive"
NEWEST = "ix_agent_operations_newest"
# Rows that `meshpoint db downgrade` must not delete: a query that counts them, by description.
NEEDED_BY_TASKS = {
    "operations that have not completed": """
    SELECT count(*) FROM agent_operations AS o JOIN agent_paused_tasks AS t
        ON t.logical_task_id = o.operation_id
     WHERE t.status <> 'completed'""",
    "preserved operations": "SELECT count(*) FROM agent_operations WHERE preserve",
    "archived checkpoints": "SELECT count(*) FROM agent_checkpoints_archive",
}


def upgrade() -> None:
    if on_postgres():
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
    for column in task_columns():
        op.add_column(TASKS, column)
    op.create_table(
        OPERATIONS,
        sa.Column("operation_id", identity(), nullable=False),
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("subject", sa.String()),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("children", sa.Text(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("exclusive", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("preserve", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("operation_id", name=op.f(f"pk_{OPERATIONS}")),
    )
    op.create_index(NEWEST, OPERATIONS, ["agent_name", "created_at"])
    create_checkpoints(CHECKPOINTS)
    create_checkpoints(ARCHIVE, sa.Column("archived_at", sa.Float(), nullable=False))
    if on_postgres():
        for name in ("working_memory", "interim_results"):
            op.execute(f"ALTER TABLE {CHECKPOINTS} ALTER COLUMN {name} SET STORAGE EXTERNAL")
        for table in (OPERATIONS, CHECKPOINTS):
            op.execute(f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02)")
        op.execute(f"ALTER TABLE {OPERATIONS} SET (fillfactor = 70)")


def downgrade() -> None:
    if on_postgres():
        op.execute("SET LOCAL lock_timeout = '5s'")
    for column in task_columns():
        op.drop_column(TASKS, column.name)
    for table in (ARCHIVE, CHECKPOINTS, OPERATIONS):
        op.drop_table(table)


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")


def task_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("checkpoint_seq", sa.Integer()),
        sa.Column("resume_token", sa.String()),
        sa.Column("retry_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
    ]


def identity() -> sa.types.TypeEngine[str]:
    """The type of ids, compared byte by byte as in Python."""
    return sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


def json() -> sa.types.TypeEngine[str]:
    """The type of columns with JSON lists and objects."""
    return sa.Text().with_variant(postgresql.JSONB(), "postgresql")


def create_checkpoints(table: str, *more: sa.Column[object]) -> None:
    op.create_table(
        table,
        sa.Column("analysis_id", identity(), nullable=False),
        sa.Column("agent_type", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("subject", sa.String()),
        sa.Column("checkpoint_time", sa.Float(), nullable=False),
        sa.Column("progress_pct", sa.Float(), nullable=False),
        sa.Column("current_subtask", sa.String()),
        sa.Column("completed_subtasks", json(), nullable=False),
        sa.Column("pending_subtasks", json(), nullable=False),
        sa.Column("planned_subtasks", json(), nullable=False),
        sa.Column("working_memory", json(), nullable=False),
        sa.Column("interim_results", json(), nullable=False),
        sa.Column("subtasks", json(), nullable=False),
        sa.Column("agent_config", json(), nullable=False),
        sa.Column("failure_reason", sa.Text()),
        sa.Column("error_details", json()),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("agent_version", sa.String()),
        sa.Column("created_at", sa.Float(), nullable=False),
        *more,
        sa.PrimaryKeyConstraint("analysis_id", "agent_type", "seq", name=op.f(f"pk_{table}")),
    )
