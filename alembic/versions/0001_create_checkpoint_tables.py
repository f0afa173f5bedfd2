"""Create the tables of paused tasks, their calls and their joins."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

EXTERNAL = {
    "agent_paused_tasks": ("state", "security_context", "request", "reply"),
    "agent_peer_sub_tasks": ("request", "outcome"),
}
"""Columns whose values are compressed before they are stored."""

SHORT_LIVED = ("agent_paused_tasks", "agent_peer_sub_tasks", "agent_parallel_invocations")
"""Tables whose rows live for minutes: vacuumed after 2 % has changed, instead of 20 %."""


def identity() -> sa.types.TypeEngine[str]:
    """The type of ids, compared byte by byte as in Python, so that both compute one lock order."""
    return sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


def where(condition: str) -> dict[str, Any]:
    """The condition of a partial index, as options for both databases."""
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


# Rows that `meshpoint db downgrade` must not delete: a query that counts them, by description.
NEEDED_BY_TASKS = {
    "tasks that have not ended": """
    SELECT count(*) FROM agent_paused_tasks
     WHERE status NOT IN ('completed', 'failed', 'cancelled')""",
    "replies that are not sent": """
    SELECT count(*) FROM agent_paused_tasks
     WHERE status IN ('completed', 'failed', 'cancelled') AND NOT reply_sent""",
}


def upgrade() -> None:
    op.create_table(
        "agent_paused_tasks",
        sa.Column("logical_task_id", identity(), nullable=False),
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("wake_at", sa.Float(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("a2a_context", sa.Text()),
        sa.Column("effective_session_id", sa.String()),
        sa.Column("user_id", sa.String()),
        sa.Column("current_invocation_id", sa.String()),
        sa.Column("produced_artifacts", sa.Text()),
        sa.Column("artifact_signals_to_return", sa.Text()),
        sa.Column("response_buffer", sa.Text()),
        sa.Column("flags", sa.Text()),
        sa.Column("security_context", sa.LargeBinary()),
        sa.Column("token_usage", sa.Text()),
        sa.Column("context_rest", sa.Text()),
        sa.Column("state", sa.LargeBinary()),
        sa.Column("state_format", sa.String()),
        sa.Column("app_version", sa.String()),
        sa.Column("framework", sa.String()),
        sa.Column("request", sa.LargeBinary()),
        sa.Column("reply", sa.LargeBinary()),
        sa.Column("reply_to", sa.String()),
        sa.Column("requester_app_id", sa.String()),
        sa.Column("parent_task_id", sa.String()),
        sa.Column("task_deadline", sa.Float()),
        sa.Column("idle_timeout", sa.Float()),
        sa.Column("keep_alive_at", sa.Float()),
        sa.Column("reply_sent", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("reply_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("incompatible_since", sa.Float()),
        sa.Column("dead_reason", sa.Text()),
        sa.Column("checkpointed_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("expires_at", sa.Float()),
        sa.PrimaryKeyConstraint("logical_task_id", name=op.f("pk_agent_paused_tasks")),
    )
    op.create_index(
        "ix_agent_paused_tasks_due", "agent_paused_tasks", ["agent_name", "status", "wake_at"]
    )
    op.create_index(
        "ix_agent_paused_tasks_keep_alive",
        "agent_paused_tasks",
        ["agent_name", "keep_alive_at"],
        **where("keep_alive_at IS NOT NULL"),
    )

    op.create_table(
        "agent_parallel_invocations",
        sa.Column("logical_task_id", identity(), nullable=False),
        sa.Column("invocation_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("total_expected", sa.Integer(), nullable=False),
        sa.Column("completed_count", sa.Integer(), nullable=False),
        sa.Column("succeeded_count", sa.Integer(), nullable=False),
        sa.Column("needed", sa.Integer()),
        sa.Column("join_deadline", sa.Float()),
        sa.ForeignKeyConstraint(
            ["logical_task_id"],
            ["agent_paused_tasks.logical_task_id"],
            name=op.f("fk_agent_parallel_invocations_logical_task_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "logical_task_id", "invocation_id", name=op.f("pk_agent_parallel_invocations")
        ),
    )
    op.create_table(
        "agent_peer_sub_tasks",
        sa.Column("logical_task_id", identity(), nullable=False),
        sa.Column("sub_task_id", identity(), nullable=False),
        sa.Column("agent_name", sa.String(), nullable=False),
        sa.Column("invocation_id", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("call_id", sa.String(), nullable=False),
        sa.Column("peer_agent", sa.String(), nullable=False),
        sa.Column("correlation_data", sa.Text(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("outcome", sa.LargeBinary()),
        sa.Column("claim_id", sa.String()),
        sa.Column("dispatched_at", sa.Float()),
        sa.Column("send_due_at", sa.Float()),
        sa.Column("send_attempts", sa.Integer(), nullable=False),
        sa.Column("idle_timeout", sa.Float()),
        sa.Column("timeout_deadline", sa.Float(), nullable=False),
        sa.Column("absolute_deadline", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["logical_task_id"],
            ["agent_paused_tasks.logical_task_id"],
            name=op.f("fk_agent_peer_sub_tasks_logical_task_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "logical_task_id", "sub_task_id", name=op.f("pk_agent_peer_sub_tasks")
        ),
    )
    op.create_index(
        "ix_agent_peer_sub_tasks_unsent",
        "agent_peer_sub_tasks",
        ["agent_name", "send_due_at"],
        **where("send_due_at IS NOT NULL"),
    )

    if op.get_context().dialect.name == "postgresql":
        for table, columns in EXTERNAL.items():
            for column in columns:
                op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
        for table in SHORT_LIVED:
            op.execute(f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02)")


def downgrade() -> None:
    for table in ("agent_peer_sub_tasks", "agent_parallel_invocations", "agent_paused_tasks"):
        op.drop_table(table)
