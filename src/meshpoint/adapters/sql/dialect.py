"""Differences between PostgreSQL and SQLite, as fragments that statements name in braces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from sqlalchemy import TextClause, text

from meshpoint.ports.clock import Clock

_FAKE_CLOCK = "CAST(:clock_now AS double precision)"


class _ParameterFragment:
    """A fragment around a parameter or an expression.

    `{one_of:ids}` compares with any element of the list bound as `ids`. `{jsonb:name}` converts
    the JSON text bound as `name` to the type of a JSON column, and `{as_jsonb:text}` converts an
    expression. `{first_line:text}` and `{other_lines:text}` split a text, and are NULL if it has
    no such line.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    def __format__(self, parameter: str) -> str:
        return self._template.format(parameter)


@dataclass(frozen=True)
class Dialect:
    """The SQL dialect of one database. `clock` replaces the database's clock in tests."""

    name: str
    clock: Clock | None = None

    @cached_property
    def is_sqlite(self) -> bool:
        return self.name == "sqlite"

    def prepare(
        self, template: str, values: Mapping[str, Any]
    ) -> tuple[TextClause, dict[str, Any]]:
        """Fill in the fragments of `template`, and convert `values` for the driver."""
        bound = dict(values)
        if self.is_sqlite:  # it has no arrays, so it takes lists as JSON
            for name, value in values.items():
                if isinstance(value, list):
                    bound[name] = json.dumps(value)
        if self.clock is not None and ("{clock}" in template or "{instant}" in template):
            bound["clock_now"] = self.clock.now().timestamp()
        return _statement(template, self.name, self.clock is not None), bound


@cache
def _statement(template: str, name: str, fake_clock: bool) -> TextClause:
    fragments: dict[str, Any] = dict(_SQLITE if name == "sqlite" else _POSTGRES)
    if fake_clock:
        fragments |= {"clock": _FAKE_CLOCK, "instant": _FAKE_CLOCK}
    return text(template.format(**fragments))


_POSTGRES = {
    "one_of": _ParameterFragment("= ANY(:{})"),
    "jsonb": _ParameterFragment("CAST(CAST(:{} AS text) AS jsonb)"),
    "pairs": (
        "(SELECT value ->> 0 AS task_id, value ->> 1 AS sub_task_id"
        " FROM json_array_elements(CAST(CAST(:pairs AS text) AS json))) AS pair"
    ),
    "timeline_entries": (
        "json_to_recordset(CAST(CAST(:entries AS text) AS json))"
        " AS e(place int, task_id text, change text, calls int, ref text)"
    ),
    # Read anew at each use, since a statement may have waited for a lock.
    "clock": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)",
    # Constant within a statement, so that it can be a condition of an index scan.
    "instant": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS double precision)",
    "for_update": "FOR NO KEY UPDATE",
    "skip_locked": "FOR NO KEY UPDATE SKIP LOCKED",
    "for_delete_skip_locked": "FOR UPDATE SKIP LOCKED",
    # Of the checkpoint `c`. The texts of lists and objects, from ordered rows.
    "records_from": "CAST(c.working_memory ->> 'records_from' AS integer)",
    "record_list": "CAST(json_agg(CAST(record AS json)) AS text)",
    "result_object": "CAST(json_object_agg(name, result) AS text)",
    "as_jsonb": _ParameterFragment("CAST({} AS jsonb)"),
    "bytewise": '"C"',
    "first_line": _ParameterFragment("split_part({0}, chr(10), 1)"),
    "other_lines": _ParameterFragment(
        "nullif(substr({0}, length(split_part({0}, chr(10), 1)) + 2), '')"
    ),
}

# On SQLite, rows need no locks: a write transaction holds the file's only write lock from its
# BEGIN IMMEDIATE on.
_SQLITE = {
    "one_of": _ParameterFragment("IN (SELECT value FROM json_each(:{}))"),
    "jsonb": _ParameterFragment(":{}"),
    "pairs": (
        "(SELECT json_extract(value, '$[0]') AS task_id,"
        " json_extract(value, '$[1]') AS sub_task_id"
        " FROM json_each(:pairs)) AS pair"
    ),
    "timeline_entries": (
        "(SELECT key AS place, json_extract(value, '$.task_id') AS task_id,"
        " json_extract(value, '$.change') AS change, json_extract(value, '$.calls') AS calls,"
        " json_extract(value, '$.ref') AS ref FROM json_each(:entries)) AS e"
    ),
    "clock": "((julianday('now') - 2440587.5) * 86400.0)",
    "instant": "((julianday('now') - 2440587.5) * 86400.0)",
    "for_update": "",
    "skip_locked": "",
    "for_delete_skip_locked": "",
    "records_from": "json_extract(c.working_memory, '$.records_from')",
    "record_list": "json_group_array(json(record))",
    "result_object": "json_group_object(name, result)",
    "as_jsonb": _ParameterFragment("{}"),
    "bytewise": "BINARY",
    "first_line": _ParameterFragment("substr({0}, 1, instr({0} || char(10), char(10)) - 1)"),
    "other_lines": _ParameterFragment(
        "nullif(substr({0}, instr({0} || char(10), char(10)) + 1), '')"
    ),
}
