"""Drop an index of waiting tasks, and replace the index of questions by a cheaper one.

Each pause paid for the first, although only listings and a metric read it. The second one's
condition is evaluated for each call. Replicas of the previous release work unchanged. Writes to a
table wait while its index is built.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

TASKS, CALLS = "agent_paused_tasks", "agent_peer_sub_tasks"


def upgrade() -> None:
    give_way()
    op.drop_index(f"ix_{TASKS}_waiting", TASKS)
    op.drop_index(f"ix_{CALLS}_questions", CALLS)
    create_partial_index(f"ix_{CALLS}_questions", CALLS, ["agent_name"], "peer_agent LIKE '~?%'")


def downgrade() -> None:
    give_way()
    op.drop_index(f"ix_{CALLS}_questions", CALLS)
    create_partial_index(
        f"ix_{CALLS}_questions", CALLS, ["agent_name"], "substr(peer_agent, 1, 2) = '~?'"
    )
    create_partial_index(
        f"ix_{TASKS}_waiting", TASKS, ["agent_name", "checkpointed_at"], "status = 'waiting'"
    )


def create_partial_index(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, postgresql_where=where, sqlite_where=where)


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
