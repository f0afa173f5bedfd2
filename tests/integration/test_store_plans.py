"""On PostgreSQL, what replicas run all the time finds its rows by an index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.rows import pairs

pytestmark = pytest.mark.servers

_DUE = "ix_agent_paused_tasks_due"
_TASK = "pk_agent_paused_tasks"
_CALL = "pk_agent_peer_sub_tasks"
_UNSENT = "ix_agent_peer_sub_tasks_unsent"
_KEEP_ALIVE = "ix_agent_paused_tasks_keep_alive"
_SWEEP = {"agent": "test/travel", "limit": 100}
_IDS = {"ids": ["a", "b"]}
_KEYS = {"pairs": pairs([("a", "b")])}


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url, command_timeout=timedelta(seconds=30), pool_size=1, clock=None)
    yield database
    await database.close()


@pytest.mark.parametrize(
    ("statement", "values", "index"),
    [
        pytest.param(sql.LOOKUP, _IDS, _TASK, id="lookup"),
        pytest.param(sql.LOCK_TASKS, _IDS, _TASK, id="lock"),
        pytest.param(sql.READ_CALLS, _KEYS, _CALL, id="claim"),
        pytest.param(sql.READ_PROGRESS, _KEYS, _CALL, id="progress"),
        pytest.param(sql.READ_OUTCOMES, _IDS, _CALL, id="restore"),
        pytest.param(sql.PICK_EXPIRED, _SWEEP, _DUE, id="expire"),
        pytest.param(sql.PICK_RUNNABLE, {**_SWEEP, "status": "ready", "formats": ["travel/1"]}, _DUE, id="take"),
        pytest.param(sql.PICK_RUNNABLE, {**_SWEEP, "status": "running", "formats": []}, _DUE, id="take over"),
        pytest.param(sql.PICK_UNSENT_CALLS, _SWEEP, _UNSENT, id="unsent calls"),
        pytest.param(sql.PICK_UNSENT_REPLIES, _SWEEP, _DUE, id="unsent replies"),
        pytest.param(sql.PICK_KEEP_ALIVES, _SWEEP, _KEEP_ALIVE, id="keep alives"),
        pytest.param(sql.PICK_PURGEABLE, _SWEEP, _DUE, id="purge"),
    ],
)
async def test_a_hot_statement_uses_its_index(
    database: Database, statement: str, values: dict[str, object], index: str
) -> None:
    async def explain(tx: Transaction) -> list[str]:
        await tx.run("SET LOCAL enable_seqscan = off")  # the tables are empty: anything else would cost more
        await tx.run("SET LOCAL enable_bitmapscan = off")
        return [row[0] for row in await tx.rows("EXPLAIN " + statement, **values)]

    plan = "\n".join(await database.write(explain))
    assert f" using {index} " in plan
    assert "Seq Scan" not in plan
