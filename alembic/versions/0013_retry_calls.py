"""Store the retry policy of a call.

Replicas of the previous release do not know the column. They send later attempts, but any failure
that they record is final.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

CALLS = "agent_peer_sub_tasks"


def upgrade() -> None:
    give_way()
    op.add_column(CALLS, sa.Column("retry", sa.Text()))


def downgrade() -> None:
    """Drop the policies: the next failure of an open call is final."""
    give_way()
    op.drop_column(CALLS, "retry")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
