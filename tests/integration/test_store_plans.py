"""On PostgreSQL, every statement of a replica finds its rows by an index, without a scan.

PostgreSQL reports the plan of every statement that it executes (auto_explain), so no list of
statements is needed here. A statement of the store that no step below sends is reported as
missing.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from beside import answered_beside
from loading import TABLES as CROWDED
from loading import multiply, standing_task
from meshpoint.adapters import sql
from meshpoint.adapters.sql import SqlStore, fast_path, owning
from meshpoint.adapters.sql.dialect import Dialect
from meshpoint.adapters.sql.locked_rows import LockedRows
from meshpoint.adapters.sql.tables import archive, checkpoints, operations
from meshpoint.model.calls import Join
from meshpoint.model.checkpoint import (
    AllArrived,
    Begun,
    Committed,
    Pause,
    Replica,
    Resumable,
    Run,
    Save,
    Send,
    StillWaiting,
    TaskState,
    Track,
)
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.operations import Adopted, Revived
from meshpoint.model.subtasks import Child, Saved
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    a_begin,
    a_call,
    a_cancel,
    a_checkpoint,
    a_claim,
    a_kept_reply,
    a_pause,
    a_progress,
    a_release,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_operation,
    operating,
    saved,
)
from meshpoint.testing.conformance.build_memory import remembering, remembering_pause

pytestmark = pytest.mark.servers

_NOW = timedelta()
_STANDING = 50_000
_IMPATIENT = Replica(HERE.id, HERE.agent, HERE.formats, _NOW)
"""A replica whose leases expire at once."""

TABLES = (*CROWDED, operations, checkpoints, archive)

_FOR_PEOPLE = {"LIST_TASKS", "LIST_AGENT_TASKS", "LIST_OPERATIONS", "LIST_AGENT_OPERATIONS"}
"""Statements for people, which may read and sort many rows."""
_FOR_DAMAGE = {"POSTPONE_TASK", "POSTPONE_KEEP_ALIVE", "POSTPONE_REPLY", "POSTPONE_CALLS", "POSTPONE_JOINS"}
"""Statements on one task with a damaged row: see `test_damaged_rows`."""


@dataclass
class Plans:
    """Statements and their plans, as reported by PostgreSQL."""

    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def hear(self, connection: object, message: Any) -> None:
        _, _, plan = str(message.message).partition("plan:\n")
        read = json.loads(plan) if plan else {"Query Text": ""}
        # skips the driver's queries about types
        if any(table.name in read["Query Text"] for table in TABLES):
            self.told.append((read["Query Text"], read["Plan"]))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect plans from every connection opened in this block."""

        def listen(connection: Any, record: object) -> None:
            connection.driver_connection.add_log_listener(self.hear)

        event.listen(Pool, "connect", listen)
        try:
            yield
        finally:
            event.remove(Pool, "connect", listen)

    def scans(self) -> list[tuple[str, str]]:
        """Statements that scan a whole table or index, with their plans."""
        return [
            (_bare(text), f"{text}\n{json.dumps(plan, indent=1)}")
            for text, plan in self.told
            if any(map(_scans, _nodes(plan)))
        ]

    def texts(self) -> set[str]:
        return {_bare(text) for text, _ in self.told}


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)


def _scans(node: dict[str, Any]) -> bool:
    read = node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    if read > _STANDING / 10:
        return True
    if node["Node Type"] == "Seq Scan":
        return node["Relation Name"] in {table.name for table in TABLES}
    return node["Node Type"] in {"Index Scan", "Index Only Scan", "Bitmap Index Scan"} and "Index Cond" not in node


def _bare(statement: str) -> str:
    """`statement` without parameter names and differences in white space."""
    return " ".join(re.sub(r"(?<!:):\w+|\$\d+(::[\w ]+)?", "?", statement).split())


def _statements() -> dict[str, str]:
    """Every statement of the store, by name."""
    modules = [importlib.import_module(f"{sql.__name__}.{each.name}") for each in pkgutil.iter_modules(sql.__path__)]
    return {
        name: _bare(Dialect("postgresql").statement(value).text)
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("_")
        if any(table.name in value for table in TABLES)
    }


@pytest.fixture
async def crowded_url(postgres_url: str) -> str:
    """A database with many paused tasks that reports its plans."""
    store = _store(postgres_url)
    await store.open()
    patient = a_pause(a_call("a", timeout=100 * HOUR), requester=a_requester(idle_timeout=90 * HOUR))
    task_id = await standing_task(store, patient)
    await multiply(postgres_url, task_id, _STANDING, over=24 * HOUR)
    await _many_operations(postgres_url)
    await store.close()
    settings = {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_analyze": "on",  # reports the number of rows read
        "auto_explain.log_timing": "off",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_format": "json",
        "auto_explain.log_level": "notice",
    }
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute("LOAD 'auto_explain'")  # makes its settings known
        for name, value in settings.items():
            database = await connection.fetchval("SELECT current_database()")
            await connection.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")
    finally:
        await connection.close()
    return postgres_url


async def _many_operations(url: str) -> None:
    """Fill the tables of operations and checkpoints."""
    given = {
        "analysis_id": "'gone-' || g",
        "agent_type": f"'test/{AGENT}'",
        "operation_id": "'gone-' || g",
        "agent_name": f"'test/{AGENT}'",
        "type": "'analysis'",
        "parameters": "'{}'",
        "working_memory": """'{"saved_progress": {}}'""",
    }
    connection = await asyncpg.connect(url)
    try:
        for table in (operations, checkpoints, archive):
            columns = [column for column in table.columns if not column.nullable and column.server_default is None]
            names = ", ".join(column.name for column in columns)
            values = ", ".join(
                given.get(column.name, "1" if column.type.python_type is not str else "'[]'") for column in columns
            )
            await connection.execute(
                f"INSERT INTO {table.name} ({names}) SELECT {values} FROM generate_series(1, {_STANDING}) AS g"
            )
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()


@asynccontextmanager
async def _listened(url: str, plans: Plans, *, hot_path: bool = True) -> AsyncIterator[SqlStore]:
    """A store whose statements are collected in `plans`."""
    with plans.listening():
        store = _store(url, hot_path=hot_path)
        await store.open()
        yield store
        await store.close()


def _store(url: str, *, hot_path: bool = True) -> SqlStore:
    """A store whose unsent messages and tombstones are due at once."""
    return SqlStore(
        url,
        namespace="test",
        dispatch_lease=_NOW,
        tombstone_ttl=_NOW,
        incompatible_limit=HOUR,
        checkpoint_history=1,
        checkpoint_archive=True,
        pool_size=1,
        fast_path=hot_path,
    )


class Life:
    """Every transition of a task, for `batch` tasks at a time."""

    def __init__(self, store: SqlStore, batch: int, url: str, *, beside_a_lock: bool = False) -> None:
        self._beside_a_lock = beside_a_lock
        self._store = store
        self._batch = batch
        self._url = url

    async def run(self) -> None:
        await self._answer()
        if not self._beside_a_lock:
            await self._answer_beside_another()
        await self._answer_in_parts()
        await self._expire()
        await self._keep_replies()
        await self._take_over()
        await self._cancel()
        await self._send()
        await self._operate()
        await self._revive()
        while await self._store.purge(AGENT, 100):
            pass

    async def _pause(self, *calls: Any, **values: Any) -> list[Pause]:
        pauses = [a_pause(*(a_call(**call) for call in calls), **values) for _ in range(self._batch)]
        await self._store.pause(pauses)
        return pauses

    async def _claim(self, pauses: list[Pause]) -> list[Resumable]:
        claims = [a_claim(pause) for pause in pauses]
        first = await self._store.claim(claims, HERE, self._batch)
        # as if the response to the COMMIT was lost
        again = await self._store.claim(claims, HERE, self._batch)  # repeated after a lost answer to COMMIT
        assert first == again
        return [each.task for each in again if isinstance(each, AllArrived)]

    async def _answer(self) -> None:
        """Pause, receive one response, continue without the other, pause again, end."""
        idle = {"call_id": "a", "idle_timeout": timedelta(milliseconds=1)}
        pauses = await self._pause(idle, {"call_id": "b"}, join=Join(needed=1))
        await self._store.pause(pauses)
        assert len(await self._store.lookup([pause.run.task_id for pause in pauses])) == self._batch
        assert await self._store.task(pauses[0].run.task_id)
        assert None not in await self._store.progress([a_progress(pause) for pause in pauses])
        calls = [(pause.run.task_id, call.sub_task_id) for pause in pauses for call in pause.calls]
        assert None not in await self._store.requested(calls)
        resumed = await self._claim(pauses)
        assert await self._store.renew([task.run for task in resumed], HERE) == []
        pauses = [a_pause("a", run=task.run) for task in resumed]
        await self._store.pause(pauses)
        await self._store.end([an_end(task.run) for task in await self._claim(pauses)])

    async def _answer_beside_another(self) -> None:
        """Another transaction records an outcome; a claim that waited for its lock must read it."""
        (pause, *_) = await self._pause({"call_id": "a"}, {"call_id": "b"})
        async with answered_beside(self._url, pause, "a"):
            claiming = asyncio.create_task(self._store.claim([a_claim(pause, "b")], HERE, 1))
        (arrival,) = await claiming
        assert isinstance(arrival, AllArrived)
        await self._store.end([an_end(arrival.task.run)])

    async def _answer_in_parts(self) -> None:
        """The outcomes of a join have too many bytes to be read at once."""
        (pause, *_) = await self._pause({"call_id": "a"}, {"call_id": "b"})
        with patch.object(fast_path, "PART_BYTES", 0), patch.object(owning, "PART_BYTES", 0):
            await self._store.claim([a_claim(pause, "a")], HERE, 1)
            (arrival,) = await self._store.claim([a_claim(pause, "b")], HERE, 1)
        assert isinstance(arrival, AllArrived)
        assert [call_id for call_id, _, _ in arrival.task.outcomes] == ["a", "b"]
        await self._store.end([an_end(arrival.task.run)])

    async def _expire(self) -> None:
        """Deadlines pass: of one call among two, and of an only call, whose task is then acquired."""
        requester = a_requester(idle_timeout=_NOW)
        over = {"call_id": "a", "timeout": _NOW}
        await self._pause(over, {"call_id": "b"}, requester=requester)
        await self._pause(over, requester=requester)
        assert (await self._store.due(HERE, 1)).expired == 1
        assert len(await self._store.expire(HERE, 2 * self._batch, self._batch // 2)) == 2 * self._batch
        assert await self._store.keep_alives(HERE, 100)
        assert await self._store.take(HERE, 100)

    async def _keep_replies(self) -> None:
        wishes = [a_kept_reply() for _ in range(self._batch)]
        for again in (False, True):
            kept = await self._store.keep_replies([replace(wish, again=again) for wish in wishes])
            assert kept == [True] * self._batch

    async def _take_over(self) -> None:
        await self._store.begin([a_begin(replica=_IMPATIENT) for _ in range(self._batch)])
        taken = await self._store.take_over(HERE, 100)
        lost = [replace(task.run, fence=1) for task in taken]
        assert await self._store.renew(lost, HERE) == lost
        assert all(await self._store.release([a_release(task.run) for task in taken]))

    async def _cancel(self) -> None:
        """Cancel waiting, running and unknown tasks; then all of them again once they have ended."""
        waiting = [pause.run.task_id for pause in await self._pause({"call_id": "a"})]
        begun = await self._store.begin([a_begin() for _ in range(self._batch)])
        running = [each.run.task_id for each in begun if isinstance(each, Begun)]
        unknown = [TaskId(new_id()) for _ in range(self._batch)]
        for _ in range(2):
            await self._store.cancel([a_cancel(task_id) for task_id in (*waiting, *running, *unknown)])
        early = [TaskId(new_id()) for _ in range(self._batch)]
        for sender in ("one", "another"):
            await self._store.cancel([a_cancel(task_id, sender=sender) for task_id in early])

    async def _send(self) -> None:
        """Send requests, cancels and replies, which are due at once because the lease is zero.

        Of a pause's two requests, one is sent first.
        """
        pauses = await self._pause({"call_id": "a", "timeout": HOUR}, {"call_id": "b", "timeout": HOUR})
        committed = [result for result in await self._store.pause(pauses) if isinstance(result, Committed)]
        await self._store.mark_sent([result.dispatches[0] for result in committed])
        kinds = set[type[Send]]()
        # A slow machine has let deadlines of earlier steps pass: a batch of such pauses has nothing to send.
        for _ in range(20):
            sends = await self._store.unsent(AGENT, 100)
            kinds |= {type(send) for send in sends}
            await self._store.mark_sent(sends)
            if not sends and len(kinds) == 3:
                break
        assert len(kinds) == 3

    async def _operate(self) -> None:
        """Operations that pause and complete, fail, or are cancelled, in a store with an archive."""
        begun = await self._store.begin([a_begin(operation=an_operation()) for _ in range(self._batch)])
        runs = [each.run for each in begun if isinstance(each, Begun)]
        for run in runs[:3]:
            await saved(self._store, run)
            # finds itself
            assert await self._store.save(Save(run, a_checkpoint(run, 1))) == Saved()
            await saved(self._store, run)  # replaces the first
            assert len(await self._store.history(run.task_id)) == 1
        for run in runs[:3]:
            assert await self._store.save(Save(run, remembering(run, 3, "memory"))) == Saved()
            assert await self._store.l1_snapshot(run.task_id)
        child = Child(id=TaskId(new_id()), peer=AGENT, digest="d")
        pauses = [a_pause(run=run) for run in runs]
        await self._store.pause([replace(pause, children=(child,)) for pause in pauses])
        resumed = await self._claim(pauses)
        await self._store.end([an_end(task.run) for task in resumed])
        assert len(await self._store.history(runs[0].task_id)) == 1  # in the archive
        over, waiting = await operating(self._store), await operating(self._store)
        await self._store.pause([remembering_pause(run, 2, "memory") for run in [await operating(self._store)]])
        last = a_checkpoint(over, 1, failure_reason="broken")
        await self._store.end([an_end(over, TaskState.FAILED, checkpoint=last)])
        assert await self._store.preserve(over.task_id)
        await self._store.pause([a_pause(run=waiting)])
        await self._store.cancel([a_cancel(waiting.task_id)])

    async def _revive(self) -> None:
        """Revive the only operation of an exclusive agent."""
        alone = AgentName(new_id())
        (begun,) = await self._store.begin([a_begin(replace(a_run(), agent=alone))])
        assert isinstance(begun, Begun)
        run: Run = begun.run
        await self._store.track(Track(run, an_operation(exclusive=True)))
        await saved(self._store, run)
        assert await self._store.latest(run.task_id, alone)
        await self._store.end([an_end(run, TaskState.FAILED, reason="broken")])
        assert await self._store.operation(run.task_id)
        assert isinstance(await self._store.revive(a_revive(run.task_id)), Revived)
        assert isinstance(
            await self._store.revive(a_revive(run.task_id, order="1", adopt=True, requester=a_requester())), Adopted
        )


@pytest.mark.parametrize("batch", [1, 60])
async def test_nothing_that_replicas_run_scans_a_table(crowded_url: str, batch: int) -> None:
    plans = Plans()
    for hot_path, beside_a_lock in ((True, False), (False, False), (True, True)):
        async with _listened(crowded_url, plans, hot_path=hot_path) as store:
            if beside_a_lock:
                # the lock is remembered forever
                store._locked_rows = LockedRows(clock=lambda: 0.0)  # the lock never expires
                store._locked_rows.record_timeout()
            await Life(store, batch, crowded_url, beside_a_lock=beside_a_lock).run()
    statements = _statements()
    scans = [scan for _, scan in plans.scans()]
    assert not scans, "\n\n".join(scans)
    missing = {name for name, text in statements.items() if text not in plans.texts()}
    assert missing - _FOR_PEOPLE - _FOR_DAMAGE == set(), "`Life` does not send these statements"


async def test_a_claim_reads_no_other_answers_before_the_last(crowded_url: str) -> None:
    most = 6000
    beside = _store(crowded_url)
    await beside.open()
    pause = a_pause(*(a_call(f"call-{number}", timeout=HOUR) for number in range(most)))
    await beside.pause([pause])
    await beside.claim([a_claim(pause, f"call-{number}") for number in range(most - 2)], HERE, 1)
    await beside.close()
    plans = Plans()
    async with _listened(crowded_url, plans) as store:
        (arrival,) = await store.claim([a_claim(pause, f"call-{most - 2}")], HERE, 1)
    assert isinstance(arrival, StillWaiting)
    assert not plans.scans()


async def test_a_scan_would_be_noticed(crowded_url: str) -> None:
    plans = Plans()
    async with _listened(crowded_url, plans) as store:
        await store.tasks()
    assert len(plans.scans()) == 1
