"""Store since when a person has suspended a task.

Replicas of the previous release do not know the column. They do not acquire a suspended task that
is ready, because it is due in the far future, and end it at its deadline. But they resume a
suspended task that waits, when its calls have their outcomes. The column keeps its value, so this
release suspends such a task again at its next pause.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TASKS = "agent_paused_tasks"

# Tasks that `meshpoint db downgrade` must not resume: a query that counts them, by description.
NEEDED_BY_TASKS = {
    "suspended tasks, which would run again": (
        f"SELECT count(*) FROM {TASKS} WHERE suspended_at IS NOT NULL AND ended_at IS NULL"
    ),
}


def upgrade() -> None:
    give_way()
    op.add_column(TASKS, sa.Column("suspended_at", sa.Float()))


def downgrade() -> None:
    """Resume suspended tasks, which would be due in the far future otherwise."""
    give_way()
    op.execute(
        f"UPDATE {TASKS} SET wake_at = suspended_at"
        " WHERE status = 'ready' AND suspended_at IS NOT NULL"
    )
    op.drop_column(TASKS, "suspended_at")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
