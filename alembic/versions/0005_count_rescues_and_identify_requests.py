"""Count rescues separately, identify requests by a digest, and store a key for Redis copies.

Replicas of the previous release leave both new columns at their defaults: a rescue counts as an
attempt, as before, and a request without a digest is not compared. Neither release can use the
other's copies in Redis; both fall back to the database.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TASKS, SECRETS = "agent_paused_tasks", "agent_mesh_secrets"


def upgrade() -> None:
    give_way()
    op.add_column(
        TASKS, sa.Column("rescues", sa.Integer(), server_default=sa.text("0"), nullable=False)
    )
    op.add_column(TASKS, sa.Column("request_digest", sa.String()))
    op.create_table(
        SECRETS,
        sa.Column("namespace", identity(), nullable=False),
        sa.Column("copy_key", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", name=op.f(f"pk_{SECRETS}")),
    )


def downgrade() -> None:
    give_way()
    op.drop_table(SECRETS)
    op.drop_column(TASKS, "request_digest")
    op.drop_column(TASKS, "rescues")


def identity() -> sa.types.TypeEngine[str]:
    return sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
