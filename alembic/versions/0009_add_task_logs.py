"""Add task logs, to which pauses append instead of writing the whole state again.

Replicas of the previous release do not read a state with a log, because its format has another
name. They leave such tasks to replicas of this release. If they cancel one, its log stays until
the task is deleted.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TASKS, LOG = "agent_paused_tasks", "agent_task_log"

# Rows that `meshpoint db downgrade` must not delete: a query that counts them, by description.
NEEDED_BY_TASKS = {
    "tasks whose state has a log": """
    SELECT count(*) FROM agent_paused_tasks
     WHERE log_seq > 0 AND status NOT IN ('completed', 'failed', 'cancelled')""",
}


def upgrade() -> None:
    give_way()
    op.add_column(
        TASKS, sa.Column("log_seq", sa.Integer(), server_default=sa.text("0"), nullable=False)
    )
    op.create_table(
        LOG,
        sa.Column("logical_task_id", identity(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("entry", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("logical_task_id", "seq", name=op.f(f"pk_{LOG}")),
        sa.ForeignKeyConstraint(
            ["logical_task_id"],
            [f"{TASKS}.logical_task_id"],
            name=op.f(f"fk_{LOG}_logical_task_id"),
            ondelete="CASCADE",
        ),
    )
    if on_postgres():
        op.execute(f"ALTER TABLE {LOG} ALTER COLUMN entry SET STORAGE EXTERNAL")
        op.execute(f"ALTER TABLE {LOG} SET (autovacuum_vacuum_scale_factor = 0.02)")


def downgrade() -> None:
    give_way()
    op.drop_table(LOG)
    op.drop_column(TASKS, "log_seq")


def identity() -> sa.types.TypeEngine[str]:
    return sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if on_postgres():
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")
