"""Count rescues apart from attempts, and keep a digest of each request's input.

Replicas of the previous release leave both columns at their defaults: a task they rescue counts an attempt as before,
and a request without a digest is compared with nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TASKS = "agent_paused_tasks"


def upgrade() -> None:
    give_way()
    op.add_column(TASKS, sa.Column("rescues", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column(TASKS, sa.Column("request_digest", sa.String()))


def downgrade() -> None:
    give_way()
    op.drop_column(TASKS, "request_digest")
    op.drop_column(TASKS, "rescues")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # waiting here would make everybody else wait: rather fail
