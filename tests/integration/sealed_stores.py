"""A store with a canary in each place that is sealed, and a search for them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Text, cast, inspect, select
from sqlalchemy.ext.asyncio import create_async_engine

from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.engine import async_url
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.adapters.sql.tables import metadata
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.mailbox import RecordAnswer, SendSignal, SetValue
from meshpoint.model.questions import QuestionKey
from meshpoint.model.subtasks import Child, SubtaskRecord
from meshpoint.model.tasks import Run
from meshpoint.model.transitions import Append, BeginCommitted, LogChange, Save
from meshpoint.testing.conformance.build import (
    AGENT,
    FAILED,
    HERE,
    PEER,
    REQUESTER,
    TIMINGS,
    a_begin,
    a_call,
    a_checkpoint,
    a_claim,
    a_pause,
    a_record,
    a_release,
    an_end,
    an_operation,
    begun,
    error,
    ok,
    one,
    resumed,
)
from meshpoint.testing.conformance.store_questions import a_question

CANARY = "canary4711"
WORD = f"{CANARY} " * 200
"""Long enough to be compressed."""

OLD, NEW = b"o" * 32, b"n" * 32


def a_ring(*secrets: bytes) -> KeyRing:
    """A ring of keys; an empty one first only opens."""
    return KeyRing([RingKey(key) for key in secrets], setting="encryption_keys", scope="store")


@asynccontextmanager
async def open_sealed(
    url: str, ring: KeyRing | None, *, archive: bool = False, replica: bool = True
) -> AsyncIterator[SqlOperatorStore]:
    """A store with this ring."""
    store = SqlOperatorStore(
        url,
        namespace="test",
        checkpoint_archive=archive,
        checkpoint_history=TIMINGS.checkpoint_history,
        keep_security_context=True,
        sealer=ring,
        agent=AGENT if replica else None,
    )
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def _context(word: str) -> dict[str, Any]:
    return {
        "a2a_context": {"user_id": CANARY, "session_id": CANARY, "text": word},
        "security_context": {"token": word},
        "produced_artifacts": [{"text": word}],
        "artifact_signals_to_return": [word],
        "response_buffer": [word],
        "flags": {"note": word},
        "token_usage": {"total": {"input": 7}, "by_source": {CANARY: {"input": 7}}},
        "other": word,
    }


async def fill(store: SqlOperatorStore) -> list[TaskId]:
    """Write tasks in many states, and a record of an action. Returns the ids of the tasks."""
    await act(store)
    return [
        await _waiting(store),
        await _failed_operation(store),
        await _archived_operation(store),
        await _ended(store),
        await _parked(store),
        await _mailbox(store),
    ]


async def act(store: SqlOperatorStore) -> str:
    """Record what a person did. Returns the id of the record."""
    action = await store.record_action("ada", "answer", "task", {"answer": CANARY})
    await store.complete_action(action, succeeded=False, result=f"not {CANARY}")
    return action


async def _waiting(store: SqlStore) -> TaskId:
    calls = []
    for name in ("a", "b"):
        call = a_call(name)
        body = f'{{"for": "{WORD}"}}'.encode()
        calls.append(replace(call, body=body, headers={"traceparent": CANARY}))
    pause = a_pause(*calls, context=_context(WORD), state=WORD.encode(), digest=CANARY)
    pause = replace(
        pause, request=WORD.encode(), log=LogChange((WORD.encode(), b"short " + CANARY.encode()))
    )
    assert one(await store.pause([pause])).dispatches  # type: ignore[union-attr]
    await store.claim([a_claim(pause, "a", ok({"answer": WORD}))], HERE, 1)
    return pause.run.task_id


def _record(name: str, result: str) -> SubtaskRecord:
    return a_record(name, result).model_copy(update={"inputs": {"ticker": CANARY}})


async def _operation(store: SqlStore) -> Run:
    begin = a_begin(operation=an_operation(subject=CANARY, parameters={"of": WORD}))
    result = one(await store.begin([begin]))
    assert isinstance(result, BeginCommitted)
    return result.run


async def _failed_operation(store: SqlStore) -> TaskId:
    run = await _operation(store)
    plain = a_checkpoint(
        run,
        1,
        _record("fetch", f'"{WORD}"'),
        subject=CANARY,
        records_from=None,
        l1_snapshot=b"\0" + WORD.encode(),
        l1_snapshot_hash=CANARY,
        agent_config={"prompt": WORD},
        extra={"note": WORD},
    )
    await store.save(Save(run, plain))
    shared = a_checkpoint(run, 2, _record("fetch", f'"{WORD}"'), subject=CANARY)
    pause = replace(
        a_pause(run=run, context=_context(WORD), state=WORD.encode()),
        checkpoint=shared,
        children=(Child(id=TaskId("c"), peer=PEER, digest=CANARY),),
    )
    task = await _answer(store, pause)
    ending = a_checkpoint(task, 3, failure_reason=CANARY, error_details={"text": WORD})
    end = an_end(task, FAILED, reply=WORD.encode(), dead_reason=CANARY, checkpoint=ending)
    await store.end([end])
    return run.task_id


async def _answer(store: SqlStore, pause: Any) -> Run:
    await store.pause([pause])
    result = one(await store.claim([a_claim(pause, outcome=error(WORD))], HERE, 1))
    run: Run = result.task.run  # type: ignore[union-attr]
    return run


async def _archived_operation(store: SqlStore) -> TaskId:
    run = await _operation(store)
    for seq in (1, 2):
        checkpoint = a_checkpoint(
            run,
            seq,
            _record("fetch", f'"{WORD}"'),
            _record("weigh", f'"{CANARY}"'),
            subject=CANARY,
            records_from=1,
            agent_config={"prompt": WORD},
            failure_reason=CANARY,
            error_details={"text": WORD},
            l1_snapshot=b"\0" + WORD.encode(),
            l1_snapshot_hash=CANARY,
            extra={"note": WORD},
        )
        changed = frozenset({"weigh"} if seq == 2 else {"fetch", "weigh"})
        await store.save(Save(run, checkpoint.model_copy(update={"changed": changed})))
    await store.end([an_end(run, reply=WORD.encode())])
    return run.task_id


async def _ended(store: SqlStore) -> TaskId:
    run = (await resumed(store)).run
    await store.end([an_end(run, reply=WORD.encode())])
    return run.task_id


async def _parked(store: SqlStore) -> TaskId:
    run = (await resumed(store)).run
    await store.release([a_release(run, parked=f"call 1: {CANARY}")])
    return run.task_id


async def _mailbox(store: SqlStore) -> TaskId:
    run = await begun(store)
    await store.append([Append(run, LogChange((WORD.encode(),)))])
    await store.set_value(SetValue(run, "progress", f'"{WORD}"'.encode()))
    asked = replace(a_question(), body=f'{{"prompt": "{WORD}"}}'.encode())
    log = LogChange((), after=1)
    await store.pause([replace(a_pause(asked, run=run), log=log)])
    key = QuestionKey(AGENT, run.task_id, asked.sub_task_id)
    signal = SendSignal(
        run.task_id, AGENT, new_id(), "chat", f'"{WORD}"'.encode(), REQUESTER, is_trusted=True
    )
    await store.signal([signal])
    await store.answer([RecordAnswer(RunId(new_id()), key, ok(WORD))])
    return run.task_id


async def columns_with(url: str, *needles: bytes) -> set[str]:
    """The columns in which any of `needles` is found."""
    engine = create_async_engine(async_url(url))
    found: set[str] = set()
    try:
        async with engine.connect() as connection:
            tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
            for table in metadata.sorted_tables:
                assert table.name in tables
                for column in table.columns:
                    shown = column if column.type.python_type is bytes else cast(column, Text)
                    for (value,) in await connection.execute(select(shown)):
                        raw = value.encode() if isinstance(value, str) else bytes(value or b"")
                        if any(needle in raw for needle in needles):
                            found.add(f"{table.name}.{column.name}")
    finally:
        await engine.dispose()
    return found


def encoded_forms(word: str) -> list[bytes]:
    """The word as it is, and in Base64 at each offset."""
    raw = word.encode()
    forms = [base64.b64encode(b"x" * offset + raw)[4:-4] for offset in range(3)]
    return [raw, *forms]
