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

# Rows that `meshpoint db downgrade` must not delete: a query that counts them, by description. A
# log may have ended with the state that it continued. Until the first pause, it has step records,
# or the writes of an operation that runs again from its request.
NEEDED_BY_TASKS = {
    "tasks that need their log": """
    SELECT count(*) FROM agent_paused_tasks AS t
     WHERE EXISTS (SELECT 1 FROM agent_task_log AS l
                    WHERE l.logical_task_id = t.logical_task_id)
       AND CASE WHEN status = 'completed' THEN false
                WHEN status IN ('failed', 'cancelled') THEN checkpoint_seq IS NOT NULL
                WHEN generation = 0 THEN true
                ELSE substr(state_format, length(state_format) - 3) = '+log' END""",
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
