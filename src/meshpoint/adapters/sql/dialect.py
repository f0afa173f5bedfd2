"""What differs between PostgreSQL and SQLite, as fragments that statements name in braces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import TextClause, text

_FAKE_CLOCK = "CAST(:clock_now AS double precision)"


class _ParameterFragment:
    """A fragment around a parameter.

    `{one_of:ids}`: a comparison with any element of the list bound as `ids`. `{jsonb:name}`: the JSON text bound as
    `name`, as it rests.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    def __format__(self, parameter: str) -> str:
        return self._template.format(parameter)


@dataclass(frozen=True)
class Dialect:
    """One database's dialect. With `fake_clock`, instants come from the bound `clock_now`."""

    name: str
    fake_clock: bool = False

    @property
    def is_sqlite(self) -> bool:
        return self.name == "sqlite"

    def bind(self, value: Any) -> Any:
        """`value` as its driver takes it: a list is an array, or JSON where there are no arrays."""
        return json.dumps(value) if self.is_sqlite and isinstance(value, list) else value

    def statement(self, template: str) -> TextClause:
        """The statement that `template` stands for here."""
        return _statement(template, self.name, self.fake_clock)


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
    # after a lock was waited for, time has passed
    "clock": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)",
    # the same throughout a statement, so that an index can be searched for it
    "instant": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS double precision)",
    "for_update": "FOR NO KEY UPDATE",
    "skip_locked": "FOR NO KEY UPDATE SKIP LOCKED",
    "for_delete_skip_locked": "FOR UPDATE SKIP LOCKED",
}

# A writing transaction holds SQLite's one write lock from its BEGIN IMMEDIATE on; rows need none.
_SQLITE = {
    "one_of": _ParameterFragment("IN (SELECT value FROM json_each(:{}))"),
    "jsonb": _ParameterFragment(":{}"),
    "pairs": (
        "(SELECT json_extract(value, '$[0]') AS task_id, json_extract(value, '$[1]') AS sub_task_id"
        " FROM json_each(:pairs)) AS pair"
    ),
    "clock": "((julianday('now') - 2440587.5) * 86400.0)",
    "instant": "((julianday('now') - 2440587.5) * 86400.0)",
    "for_update": "",
    "skip_locked": "",
    "for_delete_skip_locked": "",
}
