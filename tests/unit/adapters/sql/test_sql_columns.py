"""The lists of columns that the statements of the SQL store share."""

from __future__ import annotations

import pytest
from sqlalchemy import Table

from meshpoint.adapters.sql import columns, tables


@pytest.mark.parametrize(
    ("names", "table", "missing"),
    [
        (
            columns.NEW_CALL,
            tables.calls,
            # pauses with retried calls have a statement of their own
            {"claim_id", "dispatched_at", "send_due_at", "unroutable_since", "retry"},
        ),
        (columns.NEW_JOIN, tables.joins, {"dispatched_at"}),
        (columns.NEW_OPERATION, tables.operations, set()),
        (columns.CHECKPOINT, tables.checkpoints, set()),
        (columns.CHECKPOINT, tables.archive, {"archived_at"}),
    ],
)
def test_an_insert_has_all_columns_but_those_that_later_steps_set(
    names: tuple[str, ...], table: Table, missing: set[str]
) -> None:
    assert len(set(names)) == len(names)
    assert set(names) == {column.name for column in table.columns} - missing


def test_the_parts_of_a_checkpoint_do_not_overlap() -> None:
    assert len(set(columns.CHECKPOINT)) == len(columns.CHECKPOINT)
    assert columns.CHECKPOINT_JSON[0] == "completed_subtasks"
    assert set(columns.CHECKPOINT_READ) == set(columns.CHECKPOINT) - {"l1_snapshot"}


def test_what_is_wiped_and_restored_is_part_of_what_a_pause_writes() -> None:
    assert set(columns.WIPED_AT_END) < set(columns.CONTEXT)
    assert set(columns.RESTORED) < set(columns.CONTEXT)
