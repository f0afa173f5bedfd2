"""Keep when the broker first returned a call because its peer has no queue.

Replicas of the previous release leave the column NULL: they end such a call at once.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

CALLS = "agent_peer_sub_tasks"


def upgrade() -> None:
    give_way()
    op.add_column(CALLS, sa.Column("unroutable_since", sa.Float()))


def downgrade() -> None:
    give_way()
    op.drop_column(CALLS, "unroutable_since")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
