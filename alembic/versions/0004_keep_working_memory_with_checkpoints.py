"""Keep an agent's working memory with its checkpoints.

While replicas of the release before still run: they leave the new columns empty, as those of a task that has no
working memory. What they prune of an operation that they have taken over may be the checkpoint that has its memory.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = ("agent_checkpoints", "agent_checkpoints_archive")
# In this order: what may be large comes last, since SQLite reads through it to the columns behind.
COLUMNS = {"l1_snapshot_hash": sa.Text, "l1_snapshot": sa.LargeBinary}


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
        op.execute("SET LOCAL lock_timeout = '5s'")  # whoever waits here makes all others wait: rather fail


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")
