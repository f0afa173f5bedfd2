"""Add a table of replicas, and the indexes by which metrics are read.

Replicas of the previous release neither use the table nor appear in it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import VARCHAR

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

REPLICAS = "agent_replicas"
TASKS = "agent_paused_tasks"
CALLS = "agent_peer_sub_tasks"

# (name, table, columns, condition)
INDEXES = (
    ("waiting", TASKS, ["agent_name", "checkpointed_at"], "status = 'waiting'"),
    ("suspended", TASKS, ["agent_name"], "suspended_at IS NOT NULL"),
    ("dead", TASKS, ["agent_name"], "dead_reason IS NOT NULL"),
    ("questions", CALLS, ["agent_name"], "substr(peer_agent, 1, 2) = '~?'"),
)


def upgrade() -> None:
    give_way()
    op.create_table(
        REPLICAS,
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("replica_id", text_id(), nullable=False),
        sa.Column("release", sa.String(), nullable=False),
        sa.Column("app_version", sa.String(), nullable=False),
        sa.Column("state_formats", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("agent_name", "replica_id", name=op.f(f"pk_{REPLICAS}")),
    )
    for name, table, columns, condition in INDEXES:
        op.create_index(
            f"ix_{table}_{name}",
            table,
            columns,
            postgresql_where=sa.text(condition),
            sqlite_where=sa.text(condition),
        )


def downgrade() -> None:
    give_way()
    for name, table, _, _ in reversed(INDEXES):
        op.drop_index(f"ix_{table}_{name}", table_name=table)
    op.drop_table(REPLICAS)


def text_id() -> sa.String:
    return sa.String().with_variant(VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
