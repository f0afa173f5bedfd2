"""Every column of the store is in exactly one list: sealed, keyed digest or clear."""

from __future__ import annotations

from collections import Counter

from meshpoint.adapters.sql.inventory import CLEAR, DIGESTED, SEALED
from meshpoint.adapters.sql.tables import metadata


def test_each_column_is_in_one_list() -> None:
    listed = Counter(f"{each.table}.{each.column}" for each in SEALED)
    listed.update(list(DIGESTED))
    listed.update(f"{table}.{name}" for table, names in CLEAR.items() for name in names.split())
    columns = {
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        for column in table.columns
    }
    assert columns - set(listed) == set(), (
        "add them to `inventory`: sealed, or clear with a reason"
    )
    assert set(listed) - columns == set()
    assert [name for name, count in listed.items() if count > 1] == []


def test_values_are_bound_to_columns_that_exist() -> None:
    for each in SEALED:
        assert set(each.keys) <= set(metadata.tables[each.table].c.keys())
