"""Add a table for the timelines of tasks.

Replicas of the previous release do not know the table: the changes that they make are missing from
the timelines.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import VARCHAR

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

TIMELINES = "agent_task_timelines"


def upgrade() -> None:
    give_way()
    op.create_table(
        TIMELINES,
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(),
            nullable=False,
        ),
        sa.Column("logical_task_id", text_id(), nullable=False),
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("change", sa.String(), nullable=False),
        sa.Column("replica", sa.String()),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer()),
        sa.Column("attempt", sa.Integer()),
        sa.Column("calls", sa.Integer()),
        sa.Column("completed", sa.Integer()),
        sa.Column("total", sa.Integer()),
        sa.Column("peer", sa.String()),
        sa.Column("ref", sa.String()),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{TIMELINES}")),
    )
    op.create_index(f"ix_{TIMELINES}_task", TIMELINES, ["logical_task_id", "id"])
    op.create_index(f"ix_{TIMELINES}_age", TIMELINES, ["agent_name", "at"])


def downgrade() -> None:
    """Drop all timelines."""
    give_way()
    op.drop_index(f"ix_{TIMELINES}_age", table_name=TIMELINES)
    op.drop_index(f"ix_{TIMELINES}_task", table_name=TIMELINES)
    op.drop_table(TIMELINES)


def text_id() -> sa.String:
    return sa.String().with_variant(VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
