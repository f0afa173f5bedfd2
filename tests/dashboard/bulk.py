"""Many tasks: trees written by the store, copied in the database."""

from __future__ import annotations

from sqlalchemy import text

from dashboard.scene import ask, call, open_store, respond, wait
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.adapters.sql.tables import calls, joins, questions, tasks
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import TaskState
from meshpoint.testing.conformance.build import a_release, an_end

_IDS = {"logical_task_id", "parent_task_id"}
_KINDS = 6


async def fill(url: str, count: int) -> None:
    """Write `count` tasks: roots with a child each, questions, and failed and parked tasks."""
    if not url.startswith("sqlite"):
        from asyncio import to_thread

        from meshpoint.adapters.sql import migrations

        await to_thread(migrations.upgrade, url)
    store = await open_store(url)
    await _write_kinds(store)
    async with store._database.engine.connect() as connection:
        for table in (tasks, calls, joins, questions):
            names = [column.name for column in table.columns]
            chosen = ", ".join(_copied(name) for name in names)
            if table is calls:
                chosen = chosen.replace("o.sub_task_id", _copy_of_child())
            numbers = (
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)"
            )
            await connection.execute(
                text(
                    f"INSERT INTO {table.name} ({', '.join(names)}) {numbers} "
                    f"SELECT {chosen} FROM {table.name} AS o, n"
                ),
                {"count": count // _KINDS - 1},
            )
        await connection.execute(text("ANALYZE"))
    await store.close()


def _copied(name: str) -> str:
    """A column of the copy number `i`, whose ids and deadlines differ from the original's."""
    if name in _IDS:
        return f"o.{name} || '-' || CAST(i AS varchar)"
    if name == "wake_at":
        return "o.wake_at + i * 0.001"
    return f"o.{name}"


def _copy_of_child() -> str:
    return (
        "CASE WHEN o.peer_agent LIKE '~%' THEN o.sub_task_id "
        "ELSE o.sub_task_id || '-' || CAST(i AS varchar) END"
    )


async def _write_kinds(store: SqlOperatorStore) -> None:
    flights = call("flights")
    root = await wait(store, "travel", flights, call("hotels"), value={"city": "Rome"})
    await wait(store, "flights", call("x"), parent=root.run.task_id, task_id=flights.sub_task_id)
    await wait(store, "travel", ask("approval", "Book it?", {"type": "boolean"}))
    await wait(store, "billing", call("bank"))
    run = await respond(store, await wait(store, "travel", call("flights")))
    reply = encode_reply(run.task_id, None, Failed(FailureKind.ERROR, "no seat on flight 4711"))
    await store.end([an_end(run, TaskState.FAILED, reply=reply)])
    run = await respond(store, await wait(store, "travel", call("flights")))
    await store.release([a_release(run, parked="call 3: expected flights")])
