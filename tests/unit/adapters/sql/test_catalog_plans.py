"""On SQLite, a listing finds its tasks by an index, with each filter."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql import catalog_statements as sql
from meshpoint.adapters.sql.dialect import Dialect

BY_AGENT = {"agent": "test/travel", "status": "waiting"}
BY_NAMESPACE = {"prefix": "test/"}


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    async def create_tables() -> None:
        store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
        await store.open()
        await store.close()

    asyncio.run(create_tables())
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection:
        yield connection


def explain(connection: sqlite3.Connection, statement: str, **values: Any) -> list[str]:
    prepared, _ = Dialect("sqlite").prepare(statement, {})
    bound = {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in values.items()
    }
    rows = connection.execute(f"EXPLAIN QUERY PLAN {prepared.text}", bound).fetchall()
    return [row[3] for row in rows]


@pytest.mark.parametrize(
    ("values", "index"),
    [
        (BY_AGENT | {"status": "ready"}, "due (agent_name=? AND status=?)"),
        (BY_AGENT, "due (agent_name=? AND status=?)"),
        (BY_AGENT | {"since": 1.0}, "due (agent_name=? AND status=?)"),
        (BY_AGENT | {"until": 1.0}, "due (agent_name=? AND status=?)"),
        (BY_AGENT | {"after_at": 1.0, "after_id": "x"}, "due (agent_name=? AND status=?)"),
        (BY_AGENT | {"requester": "shop"}, "due (agent_name=? AND status=?)"),
        (BY_NAMESPACE | {"user": "ada"}, "user (user_id=?)"),
        (BY_NAMESPACE | {"subject": "ACME"}, "subject (subject=?)"),
        (
            {"agent": "test/travel", "subject": "ACME", "states": ["failed"]},
            "subject (subject=? AND agent_name=?)",
        ),
        (BY_AGENT | {"waiting_for": "flights"}, "due (agent_name=? AND status=?)"),
    ],
    ids=str,
)
def test_each_filter_has_an_index(
    connection: sqlite3.Connection, values: dict[str, Any], index: str
) -> None:
    plan = explain(connection, sql.list_tasks(values), **values, limit=10)
    assert any(step.endswith(index) for step in plan), plan
    # A list of values, such as the states, is no table.
    assert not [step for step in plan if step.startswith("SCAN") and "json_each" not in step], plan


def test_the_states_of_a_listing_are_read_by_an_index(connection: sqlite3.Connection) -> None:
    values = {"agent": "test/travel", "after_at": 1.0, "after_id": "x"}
    states = {"status_0": "parked", "status_1": "ready"}
    statement = sql.list_tasks_of_states(values, len(states))
    plan = explain(connection, statement, **values, **states, limit=10)
    assert sum("due (agent_name=? AND status=?" in step for step in plan) == 2, plan
    assert not [step for step in plan if step.startswith("SCAN t")], plan


@pytest.mark.parametrize("name", ["SHOW_TASK", "SHOW_CALLS", "READ_REQUEST"])
def test_one_task_is_found_by_its_id(connection: sqlite3.Connection, name: str) -> None:
    plan = explain(connection, getattr(sql, name), task_id="x")
    assert not [step for step in plan if step.startswith("SCAN")], plan


@pytest.mark.parametrize(
    "name",
    [
        "COUNT_TASKS",
        "COUNT_WAITS",
        "COUNT_DEAD",
        "COUNT_PARKED",
        "COUNT_OPERATIONS",
        "READ_OWNERS",
    ],
)
def test_the_tasks_of_an_agent_are_counted_by_an_index(
    connection: sqlite3.Connection, name: str
) -> None:
    values = {"agent": "test/travel", "states": ["waiting"], "limit": 10}
    plan = explain(connection, getattr(sql, name), **values)
    assert any("due (agent_name=? AND status=?" in step for step in plan), plan
    assert not [step for step in plan if step.startswith("SCAN") and "json_each" not in step], plan


def test_the_names_of_agents_are_read_from_the_index(connection: sqlite3.Connection) -> None:
    plan = explain(connection, sql.READ_AGENTS)
    assert all("agent_paused_tasks" not in step or "INDEX" in step for step in plan), plan
