"""Add the keys that have sealed values of each agent.

Replicas of the previous release do not know the table. Switch encryption on once all replicas run
this release: earlier ones cannot read sealed values, and park the tasks that have any.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import VARCHAR

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

KEYS = "agent_mesh_keys"

# For each kind of row that `meshpoint db downgrade` must not delete, a query that counts them.
NEEDED_BY_TASKS = {
    "keys whose values the earlier release cannot read; run meshpoint db reseal --clear": """
    SELECT count(*) FROM agent_mesh_keys""",
}


def upgrade() -> None:
    give_way()
    op.create_table(
        KEYS,
        sa.Column("agent_name", text_id(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("agent_name", "key_id", name=op.f(f"pk_{KEYS}")),
    )


def downgrade() -> None:
    """Drop the list of keys."""
    give_way()
    op.drop_table(KEYS)


def text_id() -> sa.String:
    return sa.String().with_variant(VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
