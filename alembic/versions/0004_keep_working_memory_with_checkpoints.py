"""Store an agent's working memory with its checkpoints.

Replicas of the previous release that still run leave the new columns empty, as for a task without
working memory. If they rescue an operation, they may prune the checkpoint that has its memory.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = ("agent_checkpoints", "agent_checkpoints_archive")
# The large column is last, because SQLite reads through it to reach the columns after it.
COLUMNS = {"l1_snapshot_hash": sa.Text, "l1_snapshot": sa.LargeBinary}
# Rows that `meshpoint db downgrade` must not delete: a query that counts them, by description.
NEEDED_BY_TASKS = {
    "working memories": "SELECT count(*) FROM agent_checkpoints WHERE l1_snapshot IS NOT NULL",
}


def upgrade() -> None:
    give_way()
    for table in TABLES:
        for name, kind in COLUMNS.items():
            op.add_column(table, sa.Column(name, kind()))
        if on_postgres():
            op.execute(f"ALTER TABLE {table} ALTER COLUMN l1_snapshot SET STORAGE EXTERNAL")


def downgrade() -> None:
    give_way()
    for table in TABLES:
        for name in reversed(COLUMNS):
            op.drop_column(table, name)


def give_way() -> None:
    if on_postgres():
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")
