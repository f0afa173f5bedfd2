"""Store the records of subtasks in versions, instead of all of them with each checkpoint.

Replicas of the previous release do not find these records. The version of such a checkpoint ends
in `+records`, so they treat it as another version of the agent and release the task.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

RECORDS, CHECKPOINTS, OPERATIONS = (
    "agent_subtask_records",
    "agent_checkpoints",
    "agent_operations",
)
MARK = "+records"


def upgrade() -> None:
    give_way()
    op.create_table(
        RECORDS,
        sa.Column("analysis_id", identity(), nullable=False),
        sa.Column("agent_type", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("result", sa.Text()),
        sa.PrimaryKeyConstraint(
            "analysis_id", "agent_type", "name", "seq", name=op.f(f"pk_{RECORDS}")
        ),
        sa.ForeignKeyConstraint(
            ["analysis_id"],
            [f"{OPERATIONS}.operation_id"],
            name=op.f(f"fk_{RECORDS}_analysis_id"),
            ondelete="CASCADE",
        ),
    )
    if on_postgres():
        op.execute(f"ALTER TABLE {RECORDS} ALTER COLUMN result SET STORAGE EXTERNAL")
        op.execute(f"ALTER TABLE {RECORDS} SET (autovacuum_vacuum_scale_factor = 0.02)")


def downgrade() -> None:
    """Move the records back into the rows of their checkpoints, as earlier releases read them.

    These know neither `reused_in` nor the digests of what a function uses.
    """
    give_way()
    if on_postgres():
        records_from = "CAST(c.working_memory ->> 'records_from' AS integer)"
        memory = "c.working_memory - 'records_from'"
        function = own_version("CAST(record AS jsonb) ->> 'function'", "strpos")
        in_row = (
            f"CAST(record AS jsonb) - 'reused_in' || jsonb_build_object('function', {function})"
        )
        as_list, as_object = f"jsonb_agg({in_row})", "jsonb_object_agg(name, result)"
        as_column = "CAST({} AS jsonb)"
    else:
        records_from = "json_extract(c.working_memory, '$.records_from')"
        memory = "json_remove(c.working_memory, '$.records_from')"
        function = own_version("json_extract(record, '$.function')", "instr")
        in_row = f"json_set(json_remove(record, '$.reused_in'), '$.function', {function})"
        as_list, as_object = f"json_group_array(json({in_row}))", "json_group_object(name, result)"
        as_column = "{}"
    newest = f"""(
      SELECT r.name, r.record, r.result FROM {RECORDS} AS r
       WHERE r.analysis_id = c.analysis_id AND r.agent_type = c.agent_type
         AND r.seq >= {records_from} AND r.seq <= c.seq
         AND NOT EXISTS (SELECT 1 FROM {RECORDS} AS newer
                          WHERE newer.analysis_id = r.analysis_id
                            AND newer.agent_type = r.agent_type AND newer.name = r.name
                            AND newer.seq > r.seq AND newer.seq <= c.seq)
       ORDER BY r.place) AS newest"""
    op.execute(f"""
    UPDATE {CHECKPOINTS} AS c SET
      subtasks = (SELECT coalesce({as_list}, {as_column.format("'[]'")}) FROM {newest}),
      interim_results = (SELECT coalesce({as_object}, {as_column.format("'{}'")})
                           FROM {newest} WHERE result IS NOT NULL),
      agent_version = substr(c.agent_version, 1, length(c.agent_version) - {len(MARK)}),
      working_memory = {memory}
     WHERE {records_from} IS NOT NULL""")
    op.drop_table(RECORDS)


def own_version(function: str, position: str) -> str:
    """The version of a function without what it uses, if it was computed."""
    return f"""CASE
      WHEN (substr({function}, 1, 4) = 'src:' OR substr({function}, 1, 5) = 'code:')
           AND {position}({function}, ' uses ') > 0
      THEN substr({function}, 1, {position}({function}, ' uses ') - 1) ELSE {function} END"""


def identity() -> sa.types.TypeEngine[str]:
    return sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


def give_way() -> None:
    if on_postgres():
        op.execute("SET LOCAL lock_timeout = '5s'")  # fail instead of blocking all replicas


def on_postgres() -> bool:
    return bool(op.get_context().dialect.name == "postgresql")
