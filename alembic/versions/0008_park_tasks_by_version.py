"""Store why a task is parked, which versions have tried it, and when it must end.

The previous release parks tasks without setting the new columns. Replicas of this release try such
a task once, and set the columns if they park it again. The previous release does not acquire tasks
that this release has parked.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TASKS, DEADLINES = "agent_paused_tasks", "ix_agent_paused_tasks_deadline"
IS_DUE = "status = 'ready' AND task_deadline IS NOT NULL"
LIMIT = 30 * 86_400  # seconds
FAR_FUTURE = 253_370_764_800


def upgrade() -> None:
    give_way()
    op.add_column(TASKS, sa.Column("parked_reason", sa.Text()))
    op.add_column(TASKS, sa.Column("tried_versions", sa.Text()))
    op.create_index(
        DEADLINES,
        TASKS,
        ["agent_name", "task_deadline"],
        postgresql_where=sa.text(IS_DUE),
        sqlite_where=sa.text(IS_DUE),
    )
    limit = f"coalesce(incompatible_since, checkpointed_at) + {LIMIT}"
    op.execute(
        f"UPDATE {TASKS} SET parked_reason = dead_reason, dead_reason = NULL,"
        f" wake_at = CASE WHEN task_deadline < {limit} THEN task_deadline ELSE {limit} END"
        " WHERE status = 'parked'"
    )


def downgrade() -> None:
    give_way()
    op.execute(
        f"UPDATE {TASKS} SET dead_reason = parked_reason, wake_at = {FAR_FUTURE}"
        " WHERE status = 'parked'"
    )
    op.drop_index(DEADLINES, TASKS)
    op.drop_column(TASKS, "tried_versions")
    op.drop_column(TASKS, "parked_reason")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
