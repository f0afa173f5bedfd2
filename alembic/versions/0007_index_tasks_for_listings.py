"""Index tasks by user and operations by subject, for listings.

Most tasks have neither, so their transitions write to no additional index. Replicas of the
previous release work unchanged. Writes to a table wait while its index is built.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TASKS, OPERATIONS = "agent_paused_tasks", "agent_operations"


def upgrade() -> None:
    give_way()
    create_partial_index(f"ix_{TASKS}_user", TASKS, ["user_id", "checkpointed_at"])
    create_partial_index(f"ix_{OPERATIONS}_subject", OPERATIONS, ["subject", "agent_name"])


def downgrade() -> None:
    give_way()
    op.drop_index(f"ix_{OPERATIONS}_subject", OPERATIONS)
    op.drop_index(f"ix_{TASKS}_user", TASKS)


def create_partial_index(name: str, table: str, columns: list[str]) -> None:
    """Create an index without the rows whose first column is NULL, so that they cost nothing."""
    present = sa.text(f"{columns[0]} IS NOT NULL")
    op.create_index(name, table, columns, postgresql_where=present, sqlite_where=present)


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
