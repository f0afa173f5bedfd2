"""Record the queue from which a dead letter came, so that it can be replayed.

Brokers of the previous release use the new table: they leave the column empty.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE meshpoint_queue_message ADD COLUMN IF NOT EXISTS dead_from text")


def downgrade() -> None:
    op.execute("ALTER TABLE meshpoint_queue_message DROP COLUMN dead_from")
