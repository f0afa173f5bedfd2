"""Add tables for signals, open questions and values of tasks.

Replicas of the previous release do not know the tables. A foreign key deletes signals, kept
answers and values with their task, even if such a replica deletes it. Use these features once all
replicas run this release: earlier releases move signals to the dead letters.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import VARCHAR

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

TASKS = "agent_paused_tasks"
SIGNALS = "agent_task_signals"
QUESTIONS = "agent_task_questions"
VALUES = "agent_task_values"

# For each kind of row that `meshpoint db downgrade` must not delete, a query that counts them.
NEEDED_BY_TASKS = {
    "signals that their tasks have not received": """
    SELECT count(*) FROM agent_task_signals AS s
      JOIN agent_paused_tasks AS t ON t.logical_task_id = s.logical_task_id
     WHERE s.received_at IS NULL AND t.ended_at IS NULL""",
    "answers that their tasks have not read": """
    SELECT count(*) FROM agent_task_questions AS q
      JOIN agent_paused_tasks AS t ON t.logical_task_id = q.logical_task_id
     WHERE q.is_kept AND t.ended_at IS NULL""",
}


def upgrade() -> None:
    give_way()
    op.create_table(
        SIGNALS,
        task_id(SIGNALS),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("signal_id", text_id(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("sender", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("value", sa.LargeBinary()),
        sa.Column("sent_at", sa.Float(), nullable=False),
        sa.Column("received_at", sa.Float()),
        sa.PrimaryKeyConstraint("logical_task_id", "seq", name=op.f(f"pk_{SIGNALS}")),
    )
    op.create_index(f"ix_{SIGNALS}_id", SIGNALS, ["logical_task_id", "signal_id"], unique=True)
    op.create_table(
        QUESTIONS,
        task_id(QUESTIONS),
        sa.Column("sub_task_id", text_id(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("answer", sa.LargeBinary()),
        sa.Column("is_kept", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.PrimaryKeyConstraint("logical_task_id", "sub_task_id", name=op.f(f"pk_{QUESTIONS}")),
    )
    op.create_table(
        VALUES,
        task_id(VALUES),
        sa.Column("key", text_id(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("set_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("logical_task_id", "key", name=op.f(f"pk_{VALUES}")),
    )
    if op.get_context().dialect.name == "postgresql":
        for table, column in ((SIGNALS, "value"), (QUESTIONS, "request"), (VALUES, "value")):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Drop signals, kept answers and values."""
    give_way()
    op.drop_table(VALUES)
    op.drop_table(QUESTIONS)
    op.drop_index(f"ix_{SIGNALS}_id", table_name=SIGNALS)
    op.drop_table(SIGNALS)


def task_id(table: str) -> sa.Column[str]:
    return sa.Column(
        "logical_task_id",
        text_id(),
        sa.ForeignKey(
            f"{TASKS}.logical_task_id",
            name=op.f(f"fk_{table}_logical_task_id"),
            ondelete="CASCADE",
        ),
        nullable=False,
    )


def text_id() -> sa.String:
    return sa.String().with_variant(VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas
