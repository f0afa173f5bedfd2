"""Add a table of what operators have done.

Replicas of the previous release do not know the table.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import VARCHAR

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

ACTIONS = "agent_operator_actions"


def upgrade() -> None:
    give_way()
    op.create_table(
        ACTIONS,
        sa.Column("namespace", text_id(), nullable=False),
        sa.Column("action_id", text_id(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("target", text_id(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("succeeded", sa.Boolean()),
        sa.Column("result", sa.Text()),
        sa.PrimaryKeyConstraint("namespace", "action_id", name=op.f(f"pk_{ACTIONS}")),
    )
    op.create_index(f"ix_{ACTIONS}_target", ACTIONS, ["namespace", "target", "action_id"])


def downgrade() -> None:
    """Drop the record of what operators have done."""
    give_way()
    op.drop_index(f"ix_{ACTIONS}_target", table_name=ACTIONS)
    op.drop_table(ACTIONS)


def text_id() -> sa.String:
    return sa.String().with_variant(VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
