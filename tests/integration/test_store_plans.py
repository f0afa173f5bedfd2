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
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from bulk_tasks import TABLES as CROWDED
from bulk_tasks import copy_task, write_waiting_task
from concurrent_answer import concurrent_answer
from meshpoint.adapters import sql
from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.sql import SqlStore, fast_path, gauges, operator_statements, owning
from meshpoint.adapters.sql.dialect import Dialect
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.adapters.sql.tables import (
    archive,
    checkpoints,
    operations,
    operator_actions,
    subtask_records,
    task_log,
    timelines,
)
from meshpoint.errors import RowLocked
from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    dead_letter_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.operations import Adopted, Revived
from meshpoint.model.operator_views import DuePosition
from meshpoint.model.questions import QuestionKey
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.subtasks import Child, SaveCommitted
from meshpoint.model.tasks import (
    OutboxItem,
    Replica,
    Resumable,
    Run,
    TaskFilter,
    TaskState,
)
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import (
    Attach,
    Attached,
    AttachEnded,
    BeginCommitted,
    CallRetried,
    EndCommitted,
    JoinCompleted,
    Pause,
    PauseCommitted,
    Save,
    StillWaiting,
    TaskSuspended,
    UnroutableCall,
)
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.subtasks.resuming import at_last_pause
from meshpoint.testing.conformance.broker import Inbox, a_message, send
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    NEWER,
    REQUESTER,
    STRANGER,
    a_begin,
    a_call,
    a_cancel,
    a_checkpoint,
    a_claim,
    a_pause,
    a_progress,
    a_record,
    a_release,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_operation,
    an_undelivered_reply,
    begun,
    error,
    ok,
    operating,
    remembering,
    remembering_pause,
    resumed,
    saved,
    sub,
)
from meshpoint.testing.conformance.hand_over import a_handed_over, prepared
from meshpoint.testing.conformance.store_logs import (
    READER,
    an_append,
    continued,
    logged_pause,
)
from meshpoint.testing.conformance.store_mailbox import a_signal
from meshpoint.testing.conformance.store_retries import a_retried_call, answer
from servers import NamedServer, PostgresServer, own_database

pytestmark = pytest.mark.servers

_NOW = timedelta()
_STANDING = 50_000
_EXPIRED = Replica(HERE.id, HERE.agent, HERE.formats, _NOW)
"""A replica whose leases expire at once."""

TABLES = (
    *(*CROWDED, operations, checkpoints, archive, subtask_records, task_log, timelines),
    operator_actions,
)
_SCANNED = {*(table.name for table in TABLES), "meshpoint_queue_message"}
"""Tables that no statement may read sequentially."""

_FOR_PEOPLE = {
    *("LIST_OPERATIONS", "LIST_AGENT_OPERATIONS", "READ_WAITS"),
    *("READ_AGENTS", "READ_REQUEST", "LIST_VALUES"),
    *("COUNT_TASKS", "COUNT_WAITS", "COUNT_DEAD", "COUNT_PARKED", "COUNT_SUSPENDED"),
    *("COUNT_OPERATIONS", "READ_OWNERS"),
    *("READ_TASK_GAUGES", "COUNT_UNACQUIRED"),
    *(name for name in vars(operator_statements) if name.isupper()),
}
"""Statements for people, some of which read and sort many rows."""
_FOR_DAMAGE = {"POSTPONE_TASK", "POSTPONE_KEEP_ALIVE", "UPDATE_UNANSWERABLE"}
"""Statements on one task with a damaged row: see `test_damaged_rows`."""


@dataclass
class RecordedPlans:
    """Statements and their plans, as reported by PostgreSQL."""

    plans: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def record_notice(self, connection: object, message: Any) -> None:
        _, _, plan = str(message.message).partition("plan:\n")
        read: dict[str, Any] = json.loads(plan) if plan else {"Query Text": ""}
        # skips the driver's queries about types
        if any(table.name in read["Query Text"] for table in TABLES):
            self.plans.append((read["Query Text"], read["Plan"]))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect plans from every connection opened in this block."""

        def listen(connection: Any, record: object) -> None:
            connection.driver_connection.add_log_listener(self.record_notice)
            # reading the plans takes time within transactions
            connection.cursor().execute("SET idle_in_transaction_session_timeout = 0")

        event.listen(Pool, "connect", listen)
        try:
            yield
        finally:
            event.remove(Pool, "connect", listen)

    def scans(self) -> list[tuple[str, str]]:
        """Statements that scan a whole table or index, with their plans."""
        return [
            (_without_alias(text), f"{text}\n{json.dumps(plan, indent=1)}")
            for text, plan in self.plans
            if any(map(_scans, _nodes(plan)))
        ]

    def texts(self) -> set[str]:
        return {_without_alias(text) for text in {text for text, _ in self.plans}}


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)


def _scans(node: dict[str, Any]) -> bool:
    read = node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    if read > _STANDING / 10:
        return True
    if node["Node Type"] == "Seq Scan":
        return node["Relation Name"] in _SCANNED
    return (
        node["Node Type"] in {"Index Scan", "Index Only Scan", "Bitmap Index Scan"}
        and "Index Cond" not in node
    )


def _without_alias(statement: str) -> str:
    """`statement` without parameter names and differences in white space."""
    return " ".join(re.sub(r"(?<!:):\w+|\$\d+(::[\w ]+)?", "?", statement).split())


def _statements() -> dict[str, str]:
    """Every statement of the store, by name."""
    modules = [
        importlib.import_module(f"{sql.__name__}.{module_info.name}")
        for module_info in pkgutil.iter_modules(sql.__path__)
    ]
    return {
        name: _without_alias(Dialect("postgresql").prepare(value, {})[0].text)
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("_")
        if any(table.name in value for table in TABLES)
    }


@pytest.fixture(scope="module")
def large_database(module_postgres_url: str) -> str:
    """Name of a database with many paused tasks, filled once and cloned for each test."""
    with ThreadPoolExecutor(1) as thread:  # this one has the loop of the tests
        thread.submit(asyncio.run, _fill(module_postgres_url)).result()
    return urlsplit(module_postgres_url).path.removeprefix("/")


@pytest.fixture
async def large_database_url(
    postgres_server: NamedServer | PostgresServer, large_database: str
) -> AsyncIterator[str]:
    """A database with many paused tasks that reports its plans."""
    async with own_database(postgres_server.url, large_database) as url:
        await _report_plans(url)
        yield url


async def _fill(url: str) -> None:
    store = _create_store(url)
    await store.open()
    long_pause = a_pause(
        a_call("a", timeout=100 * HOUR), requester=a_requester(idle_timeout=90 * HOUR)
    )
    task_id = await write_waiting_task(store, long_pause)
    await copy_task(url, task_id, _STANDING, period=24 * HOUR)
    await _insert_many_operations(url)
    await store.close()
    async with _open_broker(url) as broker:
        await send(broker, _FULL, a_message())
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_FILL_QUEUE, _STANDING)
        await connection.execute("VACUUM ANALYZE meshpoint_queue_message")
    finally:
        await connection.close()


async def _report_plans(url: str) -> None:
    settings = {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_analyze": "on",  # reports the number of rows read
        "auto_explain.log_timing": "off",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_format": "json",
        "auto_explain.log_level": "notice",
    }
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("LOAD 'auto_explain'")  # makes its settings known
        for name, value in settings.items():
            database = await connection.fetchval("SELECT current_database()")
            await connection.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")
    finally:
        await connection.close()


async def _insert_many_operations(url: str) -> None:
    """Fill the tables of operations, checkpoints and subtask records."""
    row_values = {
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
        for table in (operations, checkpoints, archive, subtask_records):
            columns = [
                column
                for column in table.columns
                if not column.nullable and column.server_default is None
            ]
            names = ", ".join(column.name for column in columns)
            values = ", ".join(
                row_values.get(column.name, "1" if column.type.python_type is not str else "'[]'")
                for column in columns
            )
            await connection.execute(
                f"INSERT INTO {table.name} ({names}) SELECT {values} "
                f"FROM generate_series(1, {_STANDING}) AS g"
            )
        for statement in (*_FILL_MAILBOXES, _FILL_TIMELINES):
            await connection.execute(statement)
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()


_FILL_MAILBOXES = (
    """INSERT INTO agent_task_signals (
         logical_task_id, seq, signal_id, name, sender, size, digest, value, sent_at)
       SELECT logical_task_id, 1, 'first', 'other', 'client', 1, '', '1', 0
         FROM agent_paused_tasks""",
    """INSERT INTO agent_task_questions (logical_task_id, sub_task_id, request)
       SELECT logical_task_id, 'other', '1' FROM agent_paused_tasks""",
    """INSERT INTO agent_task_values (logical_task_id, key, value, set_at)
       SELECT logical_task_id, 'other', '1', 0 FROM agent_paused_tasks""",
)


_FILL_TIMELINES = """
INSERT INTO agent_task_timelines (logical_task_id, agent_name, at, change, generation)
SELECT logical_task_id, agent_name, checkpointed_at - 1e6, 'paused', 1 FROM agent_paused_tasks"""


_FULL, _REQUESTS, _RESPONSES = (
    dead_letter_queue(AGENT),
    request_queue(AGENT),
    response_queue(AGENT),
)
_FILL_QUEUE = """
INSERT INTO meshpoint_queue_message (queue, properties, body)
SELECT queue, properties, body FROM meshpoint_queue_message, generate_series(1, $1::integer)"""


_LOCK_TASK = "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR UPDATE"


@asynccontextmanager
async def _open_broker(url: str) -> AsyncIterator[PostgresBroker]:
    """A broker on the same database, with the queues of `AGENT`."""
    broker = PostgresBroker(url, namespace="test", dead_letters_max_length=None)
    await broker.open()
    await broker.declare(AGENT)
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def _listening_store(
    url: str,
    plans: RecordedPlans,
    *,
    fast_path: bool = True,
    timeline: TimelineOptions | None = None,
) -> AsyncIterator[SqlStore]:
    """A store whose statements are collected in `plans`."""
    with plans.listening():
        store = _create_store(url, fast_path=fast_path, timeline=timeline)
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def _create_store(
    url: str, *, fast_path: bool = True, timeline: TimelineOptions | None = None
) -> SqlStore:
    """A store whose unsent messages and tombstones are due at once."""
    return SqlStore(
        url,
        namespace="test",
        dispatch_lease=_NOW,
        tombstone_ttl=_NOW,
        parked_limit=HOUR,
        checkpoint_history=1,
        checkpoint_archive=True,
        pool_size=1,
        fast_path=fast_path,
        timeline=timeline,
    )


class StatementRun:
    """Every transition of a task, for `batch` tasks at a time."""

    def __init__(
        self, store: SqlStore, batch: int, url: str, *, with_locked_row: bool = False
    ) -> None:
        self._with_locked_row = with_locked_row
        self._store = store
        self._batch = batch
        self._url = url

    async def run(self) -> None:
        await self._answer()
        if self._with_locked_row:
            await self._skip_locked_row()
        else:
            await self._answer_with_locked_row()
        await self._answer_in_parts()
        await self._append()
        if self._store._fast_path is not None:
            await self._hand_over()
        await self._expire()
        await self._retry()
        await self._store_replies()
        await self._rescue()
        await self._park()
        await self._suspend()
        await self._attach()
        await self._cancel()
        await self._send()
        await self._operate()
        await self._revive()
        await self._resume_at_pause()
        while await self._store.purge(AGENT, 100):
            pass

    async def _pause(self, *calls: Any, **values: Any) -> list[Pause]:
        pauses = [
            a_pause(*(a_call(**call) for call in calls), **values) for _ in range(self._batch)
        ]
        await self._store.pause(pauses)
        return pauses

    async def _claim(self, pauses: list[Pause]) -> list[Resumable]:
        claims = [a_claim(pause) for pause in pauses]
        first = await self._store.claim(claims, HERE, self._batch)
        # as if the response to the COMMIT was lost
        repeated = await self._store.claim(
            claims, HERE, self._batch
        )  # repeated after a lost answer to COMMIT
        assert first == repeated
        return [outcome.task for outcome in repeated if isinstance(outcome, JoinCompleted)]

    async def _answer(self) -> None:
        """Pause, receive one response, continue without the other, pause again, end."""
        idle = {"call_id": "a", "idle_timeout": timedelta(milliseconds=1)}
        pauses = await self._pause(idle, {"call_id": "b"}, join=Join(needed=1))
        await self._store.pause(pauses)
        assert (
            len(await self._store.lookup([pause.run.task_id for pause in pauses])) == self._batch
        )
        assert await self._store.task(pauses[0].run.task_id)
        assert None not in await self._store.record_progress(
            [a_progress(pause) for pause in pauses]
        )
        calls = [(pause.run.task_id, call.sub_task_id) for pause in pauses for call in pause.calls]
        assert None not in await self._store.find_dispatches(calls)
        keys = [QuestionKey(HERE.agent, task_id, sub_task_id) for task_id, sub_task_id in calls]
        assert await self._store.find_questions(keys) == [None] * len(keys)  # they have peers
        for pause in pauses:
            await self._store.signal([a_signal(pause.run.task_id)])
            assert await self._store.value(pause.run.task_id, AGENT, "none") is not None
        resumed = await self._claim(pauses)
        assert await self._store.renew([task.run for task in resumed], HERE) == []
        pauses = [a_pause("a", run=task.run) for task in resumed]
        await self._store.pause(pauses)
        await self._store.end([an_end(task.run) for task in await self._claim(pauses)])

    async def _skip_locked_row(self) -> None:
        """Another transaction holds the row of a task that ends."""
        run = await begun(self._store)
        connection = await asyncpg.connect(self._url)
        try:
            async with connection.transaction():
                await connection.execute(_LOCK_TASK, run.task_id)
                with pytest.raises(RowLocked):
                    await self._store.end([an_end(run)])
        finally:
            await connection.close()
        await self._store.end([an_end(run)])

    async def _answer_with_locked_row(self) -> None:
        """Another transaction records an outcome that a claim waiting for its lock must read."""
        (pause, *_) = await self._pause({"call_id": "a"}, {"call_id": "b"})
        async with concurrent_answer(self._url, pause, "a"):
            claiming = asyncio.create_task(self._store.claim([a_claim(pause, "b")], HERE, 1))
        (arrival,) = await claiming
        assert isinstance(arrival, JoinCompleted)
        await self._store.end([an_end(arrival.task.run)])

    async def _answer_in_parts(self) -> None:
        """The outcomes of a join have too many bytes to be read at once."""
        (pause, *_) = await self._pause({"call_id": "a"}, {"call_id": "b"})
        with patch.object(fast_path, "PART_BYTES", 0), patch.object(owning, "PART_BYTES", 0):
            await self._store.claim([a_claim(pause, "a")], HERE, 1)
            (arrival,) = await self._store.claim([a_claim(pause, "b")], HERE, 1)
        assert isinstance(arrival, JoinCompleted)
        assert [call_id for call_id, _, _ in arrival.task.outcomes] == ["a", "b"]
        await self._store.end([an_end(arrival.task.run)])

    async def _append(self) -> None:
        """Append to logs, replace one, read large ones, and end the tasks."""
        pauses = [logged_pause(b"a", b"b") for _ in range(self._batch)]
        await self._store.pause(pauses)
        tasks = [await resumed(self._store, pause, replica=READER) for pause in pauses]
        pauses = [
            logged_pause(b"c", run=task.run, after=2, replaces=number % 2 == 0)
            for number, task in enumerate(tasks)
        ]
        await self._store.pause(pauses)
        await self._store.pause(pauses)  # finds itself
        await self._store.end(
            [an_end((await resumed(self._store, pause, replica=READER)).run) for pause in pauses]
        )
        await self._read_large_logs()
        await self._append_between_pauses()

    async def _read_large_logs(self) -> None:
        """Read logs that are too large for a claim's result, and for one statement."""
        for part_bytes in (1000, 0):
            (pause, *_) = await self._pause({"call_id": "a"})
            with (
                patch.object(fast_path, "INLINE_LOG_BYTES", 0),
                patch.object(fast_path, "PART_BYTES", part_bytes),
                patch.object(owning, "PART_BYTES", part_bytes),
            ):
                task = await resumed(self._store, pause)
                task = await continued(self._store, logged_pause(b"a", run=task.run))
            assert task.log == (b"a",)
            await self._store.end([an_end(task.run)])
        await self._read_a_cached_log()

    async def _read_a_cached_log(self) -> None:
        """Read the end of a log that this store has read before."""
        with (
            patch.object(self._store._database.logs, "_min_bytes", 0),
            patch.object(fast_path, "INLINE_LOG_BYTES", 0),
        ):
            task = await continued(self._store, logged_pause(b"a"))
            task = await continued(self._store, logged_pause(b"b", run=task.run, after=1))
        assert task.log == (b"a", b"b")
        await self._store.end([an_end(task.run)])

    async def _append_between_pauses(self) -> None:
        """Append to the logs of running tasks, repeatedly, replace the logs, end the tasks."""
        runs = [await operating(self._store) for _ in range(self._batch)]
        for after, replaces in ((0, False), (1, True)):
            appends = [an_append(run, b"a", after=after, replaces=replaces) for run in runs]
            for _ in range(2):
                results = await self._store.append(appends)
                assert results == [SaveCommitted()] * self._batch
        await self._store.end([an_end(run) for run in runs])

    async def _hand_over(self) -> None:
        """Publish and ack in the commits of pauses, also of operations, claims and ends."""
        async with _open_broker(self._url) as broker:
            for logged in (False, True):
                pauses = [
                    a_handed_over(
                        logged_pause(b"a") if logged else a_pause(),
                        await prepared(broker, [(_REQUESTS, a_message())]),
                    )
                    for _ in range(self._batch)
                ]
                await self._store.pause(pauses)
                tasks = await self._claim_acking(broker, pauses)
                pauses = [
                    a_handed_over(
                        logged_pause(b"b", run=task.run, after=1)
                        if logged
                        else a_pause(run=task.run),
                        await prepared(broker, [(_REQUESTS, a_message())]),
                    )
                    for task in tasks
                ]
                await self._store.pause(pauses)
                ends = [
                    replace(
                        an_end(task.run),
                        hand_over=await prepared(broker, [(_RESPONSES, a_message())]),
                    )
                    for task in await self._claim_acking(broker, pauses)
                ]
                assert len(await self._store.end(ends)) == self._batch
            child = Child(id=TaskId(new_id()), peer=AGENT, digest="d")
            pauses = [
                a_handed_over(
                    replace(a_pause(run=await operating(self._store)), children=(child,)),
                    await prepared(broker, [(_REQUESTS, a_message())]),
                )
                for _ in range(self._batch)
            ]
            await self._store.pause(pauses)
            tasks = await self._claim_acking(broker, pauses)
            await self._store.end([an_end(task.run) for task in tasks])
            assert await self._store.finds_lease(broker.lease_id or 0)

    async def _claim_acking(self, broker: PostgresBroker, pauses: list[Pause]) -> list[Resumable]:
        inbox = Inbox()
        await send(broker, _RESPONSES, *(a_message() for _ in pauses))
        subscription = await broker.consume(_RESPONSES, len(pauses), inbox)
        claims = [
            replace(a_claim(pause), hand_over=await prepared(broker, [], [delivery]))
            for pause, delivery in zip(pauses, await inbox.take(len(pauses)), strict=True)
        ]
        await subscription.cancel()
        results = await self._store.claim(claims, READER, self._batch)
        return [result.task for result in results if isinstance(result, JoinCompleted)]

    async def _expire(self) -> None:
        """Time out one call of two, and an only call, whose task is then acquired."""
        requester = a_requester(idle_timeout=_NOW)
        expired = {"call_id": "a", "timeout": _NOW}
        await self._pause(expired, {"call_id": "b"}, requester=requester)
        await self._pause(expired, requester=requester)
        assert (await self._store.due(HERE, 1)).expired == 1
        assert (
            len(await self._store.expire(HERE, 2 * self._batch, self._batch // 2))
            == 2 * self._batch
        )
        assert await self._store.keep_alives(HERE, 100)
        assert await self._store.acquire(HERE, 100)

    async def _retry(self) -> None:
        """Retry failed calls of operations; an earlier attempt has the result."""
        at_once = RetryPolicy(initial_interval=0)
        pauses = [
            a_pause(a_retried_call(retry=at_once), run=await operating(self._store))
            for _ in range(self._batch)
        ]
        await self._store.pause(pauses)
        failures = [answer(pause, sub(pause, "a"), error()) for pause in pauses]
        for result in await self._store.claim(failures, HERE, self._batch):
            assert isinstance(result, CallRetried)
        await self._store.confirm_sent(await self._store.unsent(AGENT, 100))
        results = [answer(pause, sub(pause, "a"), ok()) for pause in pauses]
        arrivals = await self._store.claim(results, HERE, self._batch)
        tasks = [each.task for each in arrivals if isinstance(each, JoinCompleted)]
        assert len(tasks) == self._batch
        await self._store.end([an_end(task.run) for task in tasks])

    async def _store_replies(self) -> None:
        requests = [an_undelivered_reply() for _ in range(self._batch)]
        for is_repeat in (False, True):
            stored = await self._store.store_replies(
                [replace(reply, is_redelivery=is_repeat) for reply in requests]
            )
            assert stored == [True] * self._batch

    async def _rescue(self) -> None:
        await self._store.begin([a_begin(replica=_EXPIRED) for _ in range(self._batch)])
        rescued = await self._store.rescue(HERE, 100)
        lost = [replace(task.run, fence=1) for task in rescued]
        assert await self._store.renew(lost, HERE) == lost
        assert all(await self._store.release([a_release(task.run) for task in rescued]))

    async def _park(self) -> None:
        tasks = await self._claim(await self._pause({"call_id": "a"}))
        await self._store.release([a_release(task.run, parked="call 1") for task in tasks])
        tried = await self._store.acquire_parked(NEWER, 100)
        assert len(tried) == self._batch
        await self._store.release([a_release(task.run, parked="call 1") for task in tried])
        assert await self._store.unread(STRANGER, HOUR) is not None
        assert await self._store.acquire_overdue(HERE, 100) == []
        expired = await self._store.acquire_parked(replace(_EXPIRED, version="1.6"), 100)
        unread = replace(_EXPIRED, formats=STRANGER.formats)
        # On a busy machine, leases of earlier steps have expired too.
        released = await self._store.release_unread(unread, 1_000)
        assert {task.run.task_id for task in expired} <= set(released)
        assert all(await self._store.unpark([task.run.task_id for task in tried]))

    async def _suspend(self) -> None:
        """Suspend waiting tasks, whose responses then arrive, and resume them."""
        pauses = await self._pause({"call_id": "a"})
        task_ids = [pause.run.task_id for pause in pauses]
        for is_repeat in (False, True):
            results = await self._store.suspend(task_ids)
            assert results == [TaskSuspended(TaskState.WAITING, repeated=is_repeat)] * self._batch
        assert await self._claim(pauses) == []
        assert await self._store.unsuspend(task_ids) == [True] * self._batch
        await self._resume_by_earlier_release()

    async def _resume_by_earlier_release(self) -> None:
        """Acquire new attempts whose suspension an earlier release has left in the row."""
        pauses = await self._pause({"call_id": "a"})
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute(
                "UPDATE agent_paused_tasks SET status = 'ready', generation = 0, attempt = 0,"
                " retry_count = 1, suspended_at = 1, wake_at = 0 WHERE logical_task_id = ANY($1)",
                [pause.run.task_id for pause in pauses],
            )
        finally:
            await connection.close()
        acquired = {task.run.task_id for task in await self._store.acquire(HERE, 1_000)}
        assert {pause.run.task_id for pause in pauses} <= acquired

    async def _attach(self) -> None:
        """Attach to waiting tasks, end them, and attach again."""
        pauses = await self._pause({"call_id": "a"})
        attaches = [
            Attach(pause.run.task_id, AGENT, REQUESTER, Address("client.private.1"))
            for pause in pauses
        ]
        for _ in range(2):
            assert (
                await self._store.attach(attaches) == [Attached(TaskState.WAITING)] * self._batch
            )
        tasks = await self._claim(pauses)
        ended = await self._store.end([an_end(task.run) for task in tasks])
        sent = [result.reply for result in ended if isinstance(result, EndCommitted)]
        await self._store.confirm_sent(sent)
        results = await self._store.attach(attaches)
        assert all(isinstance(result, AttachEnded) for result in results)

    async def _cancel(self) -> None:
        """Cancel waiting, running and unknown tasks, and all of them again after they ended."""
        waiting = [pause.run.task_id for pause in await self._pause({"call_id": "a"})]
        results = await self._store.begin([a_begin() for _ in range(self._batch)])
        running = [result.run.task_id for result in results if isinstance(result, BeginCommitted)]
        unknown = [TaskId(new_id()) for _ in range(self._batch)]
        for _ in range(2):
            await self._store.cancel(
                [a_cancel(task_id) for task_id in (*waiting, *running, *unknown)]
            )
        early = [TaskId(new_id()) for _ in range(self._batch)]
        for sender in ("one", "another"):
            await self._store.cancel([a_cancel(task_id, sender=sender) for task_id in early])

    async def _send(self) -> None:
        """Send requests, cancels and replies, which are due at once because the lease is zero.

        Of a pause's two requests, one is sent first, and the broker returns the other.
        """
        pauses = await self._pause(
            {"call_id": "a", "timeout": HOUR}, {"call_id": "b", "timeout": HOUR}
        )
        committed = [
            result
            for result in await self._store.pause(pauses)
            if isinstance(result, PauseCommitted)
        ]
        await self._store.confirm_sent([result.dispatches[0] for result in committed])
        returned = [result.dispatches[1] for result in committed]
        await self._store.record_unroutable(
            [
                UnroutableCall(call.task_id, call.generation, call.sub_task_id, True, _NOW)
                for call in returned
            ]
        )
        kinds = set[type[OutboxItem]]()
        # A slow machine has let deadlines of earlier steps pass: a batch of such pauses has
        # nothing to send.
        for _ in range(20):
            sends = await self._store.unsent(AGENT, 100)
            kinds |= {type(send) for send in sends}
            await self._store.confirm_sent(sends)
            if not sends and len(kinds) == 3:
                break
        assert len(kinds) == 3

    async def _operate(self) -> None:
        """Operations that pause and complete, fail or are cancelled, in an archiving store."""
        results = await self._store.begin(
            [a_begin(operation=an_operation()) for _ in range(self._batch)]
        )
        runs = [result.run for result in results if isinstance(result, BeginCommitted)]
        for run in runs[:3]:
            await saved(self._store, run)
            # finds itself
            assert await self._store.save(Save(run, a_checkpoint(run, 1))) == SaveCommitted()
            await saved(self._store, run)  # replaces the first
            assert len(await self._store.history(run.task_id)) == 1
        for run in runs[:3]:
            assert (
                await self._store.save(Save(run, remembering(run, 3, "memory"))) == SaveCommitted()
            )
            assert await self._store.l1_snapshot(run.task_id)
        child = Child(id=TaskId(new_id()), peer=AGENT, digest="d")
        pauses = [a_pause(run=run) for run in runs]
        await self._store.pause([replace(pause, children=(child,)) for pause in pauses])
        resumed = await self._claim(pauses)
        await self._store.end([an_end(task.run) for task in resumed])
        assert len(await self._store.history(runs[0].task_id)) == 1  # in the archive
        ended, waiting = await operating(self._store), await operating(self._store)
        counted = a_record("fetch", '"x"').model_copy(update={"context": '{"token_usage": {}}'})
        assert (
            await self._store.save(Save(waiting, a_checkpoint(waiting, 1, counted)))
            == SaveCommitted()
        )
        await self._store.pause(
            [remembering_pause(run, 2, "memory") for run in [await operating(self._store)]]
        )
        last = a_checkpoint(ended, 1, failure_reason="broken")
        await self._store.end([an_end(ended, TaskState.FAILED, checkpoint=last)])
        assert await self._store.preserve(ended.task_id)
        pause = a_pause(run=waiting)
        await self._store.pause([pause])
        await self._store.cancel([a_cancel(waiting.task_id)])
        late = replace(ok(), usage=TokenUsage(total=Tokens(input=1)))
        await self._store.claim([a_claim(pause, "a", late)], HERE, 1)

    async def _revive(self) -> None:
        """Revive the only operation of an exclusive agent."""
        agent_name = AgentName(new_id())
        (result,) = await self._store.begin([a_begin(replace(a_run(), agent=agent_name))])
        assert isinstance(result, BeginCommitted)
        run: Run = result.run
        await self._store.track(run, an_operation(exclusive=True))
        await saved(self._store, run)
        assert await self._store.latest(run.task_id, agent_name)
        await self._store.end([an_end(run, TaskState.FAILED, reason="broken")])
        assert await self._store.operation(run.task_id)
        assert isinstance(await self._store.revive(a_revive(run.task_id)), Revived)
        assert isinstance(
            await self._store.revive(
                a_revive(run.task_id, order="1", adopt=True, requester=a_requester())
            ),
            Adopted,
        )

    async def _resume_at_pause(self) -> None:
        """Resume an operation at its last pause."""
        run = await operating(self._store)
        await saved(self._store, run)
        pause = a_pause("a", "b", run=run)
        await self._store.pause([pause])
        arrivals = await self._store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 1)
        (task,) = [each.task for each in arrivals if isinstance(each, JoinCompleted)]
        await self._store.end([an_end(task.run, TaskState.FAILED, reason="broken")])
        command = await at_last_pause(self._store, a_revive(run.task_id), "last-pause")
        assert command.pause is not None
        assert isinstance(await self._store.revive(command), Revived)


@pytest.mark.parametrize("batch", [1, 60])
async def test_no_statement_of_a_replica_scans_a_table(
    large_database_url: str, batch: int
) -> None:
    plans = RecordedPlans()
    for uses_fast_path, with_locked_row in ((True, False), (False, False), (True, True)):
        async with _listening_store(large_database_url, plans, fast_path=uses_fast_path) as store:
            if with_locked_row:
                store._locked_rows._clock = lambda: 0.0  # the lock never expires
                store._locked_rows.record_timeout()
            await StatementRun(
                store, batch, large_database_url, with_locked_row=with_locked_row
            ).run()
    await _record_timelines(large_database_url, plans, batch)
    statements = _statements()
    scans = [scan for _, scan in plans.scans()]
    assert not scans, "\n\n".join(scans)
    sent = plans.texts()
    missing = {name for name, text in statements.items() if text not in sent}
    assert missing - _FOR_PEOPLE - _FOR_DAMAGE == set(), "`Life` does not send these statements"


async def _record_timelines(url: str, plans: RecordedPlans, batch: int) -> None:
    """Record, read and delete what every statement of the fast path and a command change."""
    async with _listening_store(url, plans, timeline=TimelineOptions(HERE.id)) as store:
        for skips_locked in (False, True):
            if skips_locked:
                store._locked_rows.record_timeout()
            for first, second in (
                (a_pause, a_pause),
                (partial(logged_pause, b"a"), partial(logged_pause, b"b", after=1)),
            ):
                pauses = [first() for _ in range(batch)]
                await store.pause(pauses)
                runs = [(await resumed(store, pause, replica=READER)).run for pause in pauses]
                pauses = [second(run=run) for run in runs]
                await store.pause(pauses)
                runs = [(await resumed(store, pause, replica=READER)).run for pause in pauses]
                await store.end([an_end(run) for run in runs])
                for run in runs[:2]:
                    assert len(await store.timeline(run.task_id)) == 7
        assert await store.prune_timelines(AGENT, 10) == 10
        waiting = a_pause()
        await store.pause([waiting])
        await store.suspend([waiting.run.task_id])
    known = TimelineOptions(known_only=True)
    async with _listening_store(url, plans, timeline=known) as store:
        await store.unsuspend([waiting.run.task_id])
        assert len(await store.timeline(waiting.run.task_id)) == 3


async def test_only_the_last_claim_reads_the_other_responses(large_database_url: str) -> None:
    most = 6000
    lock = _create_store(large_database_url)
    await lock.open()
    pause = a_pause(*(a_call(f"call-{number}", timeout=HOUR) for number in range(most)))
    await lock.pause([pause])
    await lock.claim([a_claim(pause, f"call-{number}") for number in range(most - 2)], HERE, 1)
    await lock.close()
    plans = RecordedPlans()
    async with _listening_store(large_database_url, plans) as store:
        (arrival,) = await store.claim([a_claim(pause, f"call-{most - 2}")], HERE, 1)
    assert isinstance(arrival, StillWaiting)
    assert not plans.scans()


async def test_metrics_read_indexes_up_to_a_limit(
    large_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, limit = RecordedPlans(), 1000
    for name in ("MAX_COUNT", "MAX_ENDED_COUNT", "_SAMPLE"):
        monkeypatch.setattr(gauges, name, limit)
    reader = gauges.SqlGauges(large_database_url, namespace="test", timeout=HOUR)
    with plans.listening():
        found = (await reader.read()).agents[AGENT]
        await reader.close()
    assert (found.tasks[TaskState.WAITING], found.open_questions) == (limit, 0)
    assert found.waiting_age > 23 * HOUR.total_seconds()
    assert plans.plans
    scans = [scan for _, scan in plans.scans()]
    assert not scans, "\n\n".join(scans)


async def test_a_table_scan_is_detected(large_database_url: str) -> None:
    plans = RecordedPlans()
    async with _listening_store(large_database_url, plans) as store:
        await store.operations()
    assert len(plans.scans()) == 1


@pytest.mark.parametrize(
    "filters",
    [
        {"where": TaskFilter(subject="ACME")},
        {"where": TaskFilter(user="ada")},
    ],
    ids=str,
)
async def test_a_listing_by_subject_or_user_reads_an_index(
    large_database_url: str, filters: dict[str, Any]
) -> None:
    plans = RecordedPlans()
    async with _listening_store(large_database_url, plans) as store:
        first = await store.tasks(limit=20, **filters)
        if first:
            assert len(await store.tasks(limit=20, after=first[-1].position, **filters)) == 20
    scans = [scan for _, scan in plans.scans()]
    assert not scans, "\n\n".join(scans)


async def test_no_page_of_operators_scans_a_table(large_database_url: str) -> None:
    plans = RecordedPlans()
    with plans.listening():
        store = SqlOperatorStore(large_database_url, namespace="test")
        await store.open()
        roots = await store.waiting_roots(limit=25)
        assert len(roots.items) == 25
        assert roots.next is not None
        after = DuePosition(float(roots.next[0]), roots.next[1])
        await store.waiting_roots(after=after, limit=25)
        assert len(await store.trees(roots.items, limit=500)) == 50
        assert (await store.open_questions(limit=25)).items == []  # they have peers
        for state in (TaskState.WAITING, TaskState.FAILED):
            for position in (None, after):
                await store.due_tasks(state, after=position, limit=25)
        (agent,) = await store.agents()
        await store.sample(agent)
        action = await store.record_action("ada", "cancel", "t", None)
        await store.complete_action(action, succeeded=True, result="done")
        await store.actions(limit=25)
        await store.actions(target="t", limit=25)
        await store.action(action)
        await store.close()
    by_people = {
        _without_alias(Dialect("postgresql").prepare(text, {})[0].text): name
        for name, text in vars(operator_statements).items()
        if name.isupper() and not name.startswith("_")
        if any(table.name in text for table in TABLES)
    }
    scans = [scan for text, scan in plans.scans() if text in by_people]
    assert not scans, "\n\n".join(scans)
    assert by_people.keys() <= plans.texts(), "the test does not read every page"
