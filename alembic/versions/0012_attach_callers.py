"""Store further reply addresses of a task, and how long its result is kept.

Replicas of the previous release do not know the columns. They send the reply to `reply_to` only;
callers that attached to other addresses ask again and get the stored reply. They delete the row
of an ended task after the ordinary time.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TASKS = "agent_paused_tasks"


def upgrade() -> None:
    give_way()
    op.add_column(TASKS, sa.Column("further_reply_to", sa.Text()))
    op.add_column(TASKS, sa.Column("result_ttl", sa.Float()))


def downgrade() -> None:
    """Forget further addresses: callers ask again."""
    give_way()
    op.drop_column(TASKS, "result_ttl")
    op.drop_column(TASKS, "further_reply_to")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
