"""Signals, kept answers and values of tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Row

from meshpoint.adapters.sql import inventory, statements
from meshpoint.adapters.sql import mailbox_statements as sql
from meshpoint.adapters.sql.claiming import claim
from meshpoint.adapters.sql.codec import Codec, Packed
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.locking import LockedTasks, lock_task, run_in_rounds
from meshpoint.adapters.sql.rows import (
    instant,
    is_early_cancel,
    outcome_columns,
    read_outcome,
    unpack_outcome,
    unpack_request,
)
from meshpoint.errors import KeyMissing
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.mailbox import (
    MAX_SIGNAL_IDS,
    MAX_VALUES,
    KeptSignal,
    MailAccepted,
    Mailbox,
    MailForbidden,
    MailRefused,
    MailResult,
    MailUnknown,
    RecordAnswer,
    SendSignal,
    SetValue,
    StoredValue,
    TooManyValues,
    asks_same,
    match_mail,
    uses_mailbox,
    with_outcomes,
)
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.questions import (
    AskedQuestion,
    QuestionKey,
    describe_answer,
    was_answered,
)
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import CallState, Replica, TaskState
from meshpoint.model.transitions import (
    CancelFound,
    Claim,
    ClaimResult,
    Fenced,
    Pause,
    SaveResult,
    StillWaiting,
    TaskLocked,
    TaskReady,
)
from meshpoint.model.waits import QUESTION_PREFIX, is_question


async def signal(
    tx: Transaction, commands: Sequence[tuple[SendSignal, Packed]]
) -> list[MailResult]:
    """Keep signals, each given with its packed value, and deliver them to tasks that wait."""

    async def process_round(
        batch: list[tuple[SendSignal, Packed]], locked: LockedTasks
    ) -> list[MailResult]:
        return [
            await _signal(tx, command, value, locked.rows.get(command.task_id), locked.now)
            for command, value in batch
        ]

    return [*await run_in_rounds(tx, commands, lambda pair: pair[0].task_id, process_round)]


async def _signal(
    tx: Transaction, command: SendSignal, value: Packed, row: Row[Any] | None, now: float
) -> MailResult:
    if row is None or row.agent_name != tx.options.names.qualified(command.agent):
        return MailUnknown()
    if is_early_cancel(row):
        return MailUnknown()
    if not command.may_signal(row.requester_app_id):
        return MailForbidden(row.requester_app_id)
    state, key = TaskState(row.status), {"task_id": command.task_id}
    for known in await tx.fetch(sql.FIND_SIGNAL, **key, signal_id=command.id):
        is_received = known.received_at is not None
        digest = _known_digest(known, command, tx.options.codec, row.agent_name)
        return command.repeated_result(digest, is_received=is_received, state=state)
    if state.is_final:
        return MailRefused(f"task {command.task_id} has already ended ({state.value})")
    counts = await tx.fetch(sql.COUNT_SIGNALS, **key)
    excess = command.find_excess({each.sender: (each.number, each.bytes) for each in counts})
    if excess is not None:
        return MailRefused(excess)
    await tx.execute(
        sql.INSERT_SIGNAL,
        **key,
        signal_id=command.id,
        name=command.name,
        sender=command.sender,
        size=len(command.value),
        digest=tx.options.codec.text(
            command.digest, inventory.SIGNAL_DIGEST, row.agent_name, command.task_id, command.id
        ),
        value=value,
        now=now,
    )
    await tx.execute(sql.DELETE_OLD_SIGNALS, **key, kept=MAX_SIGNAL_IDS)
    return (
        await _deliver_to_wait(tx, command, row, now)
        if state is TaskState.WAITING
        else MailAccepted()
    )


def _known_digest(known: Row[Any], command: SendSignal, codec: Codec, agent: str) -> str:
    """The digest of the signal that has the command's id; the command's own without its key."""
    key = (inventory.SIGNAL_DIGEST, agent, command.task_id, command.id)
    try:
        return codec.read_text(known.digest, *key) or command.digest
    except KeyMissing:
        return command.digest


async def _deliver_to_wait(
    tx: Transaction, command: SendSignal, row: Row[Any], now: float
) -> MailResult:
    """Give the oldest signal with this name to the first call that waits for it, if any."""
    key = {"task_id": command.task_id}
    waits = await tx.fetch(sql.FIND_WAIT, **key, generation=row.generation, peer=command.peer)
    if not waits:
        return MailAccepted()
    kept = await tx.fetch(sql.READ_KEPT_SIGNALS, ids=[command.task_id])
    seq = next(each.seq for each in kept if each.name == command.name)
    outcome = await _receive(tx, row.agent_name, command.task_id, seq, now)
    id_, sub_task_id = RunId(new_id()), TaskId(waits[0].sub_task_id)
    return _delivered(
        await _claim(tx, Claim(id_, command.task_id, sub_task_id, outcome, command.peer), row)
    )


async def _receive(tx: Transaction, agent: str, task_id: str, seq: int, now: float) -> Ok[Any]:
    """Take a signal out of the mailbox."""
    key = {"task_id": task_id, "seq": seq}
    (stored,) = await tx.fetch(sql.READ_SIGNAL_VALUE, **key)
    value = await tx.options.codec.unpack(
        stored.value, inventory.SIGNAL_VALUE, agent, task_id, stored.signal_id
    )
    await tx.execute(sql.SET_RECEIVED, **key, now=now)
    return Ok(from_json(value or b"null"))


async def _claim(tx: Transaction, command: Claim, row: Row[Any]) -> ClaimResult:
    """Record the outcome of a wait of a locked task. The task is acquired by a sweep."""
    (outcome,) = await outcome_columns(
        [(command.task_id, command.sub_task_id, command.outcome)],
        tx.options.codec,
        row.agent_name,
    )
    onlooker = Replica.onlooker(tx.options.names.plain(row.agent_name))
    (result,), _ = await claim(tx, [(command, outcome)], onlooker, 0)
    return result


def _delivered(result: ClaimResult) -> MailResult:
    match result:
        case TaskReady(cancels=cancels):
            return MailAccepted(is_ready=True, cancels=cancels)
        case StillWaiting():
            return MailAccepted()
        case TaskLocked():
            return result
        case _:
            return MailUnknown()


async def answer(
    tx: Transaction, commands: Sequence[tuple[RecordAnswer, Packed]]
) -> list[MailResult]:
    """Record answers, each given with its packed outcome, or keep them for the next wait."""

    async def process_round(
        batch: list[tuple[RecordAnswer, Packed]], locked: LockedTasks
    ) -> list[MailResult]:
        return [
            await _answer(tx, command, outcome, locked.rows.get(command.key.task_id))
            for command, outcome in batch
        ]

    return [*await run_in_rounds(tx, commands, lambda pair: pair[0].key.task_id, process_round)]


async def _answer(
    tx: Transaction, command: RecordAnswer, outcome: Packed, row: Row[Any] | None
) -> MailResult:
    if row is None or row.agent_name != tx.options.names.qualified(command.key.agent):
        return MailUnknown()
    state, name = TaskState(row.status), command.key.name
    key = {"task_id": command.key.task_id, "sub_task_id": command.key.sub_task_id}
    pair = json.dumps([[*key.values()]])
    known = next(iter(await tx.fetch(sql.READ_QUESTION, **key)), None)
    call = next(iter(await tx.fetch(statements.READ_CALLS, pairs=pair)), None)
    wait = call if _is_open_wait(row, call) else None
    codec, place = tx.options.codec, (row.agent_name, *key.values())
    if known is not None and known.answer is not None:
        stored = await _stored_answer(known, codec, *place)
        if stored == command.outcome:  # repeated, because the result of its commit was lost
            return MailAccepted()
        if wait is None:
            return MailRefused(describe_answer(name, stored))
        # A replica of an earlier release has asked the question again.
        if known.is_kept and await _asks_again(tx, known, pair, *place):
            await tx.execute(sql.SET_ANSWER, **key, answer=known.answer, is_kept=False)
            await _claim(tx, _as_claim(command, stored, wait.peer_agent), row)
            return MailRefused(describe_answer(name, stored))
    if state.is_final and known is not None:
        return MailRefused(f"{name!r} is no longer open: its task has ended")
    if wait is not None:
        result = await _claim(tx, _as_claim(command, command.outcome, wait.peer_agent), row)
        if isinstance(result, StillWaiting | TaskReady):
            await tx.execute(sql.SET_ANSWER, **key, answer=outcome, is_kept=False)
        return _delivered(result)
    if known is None:
        return MailUnknown()
    for each in await tx.fetch(statements.READ_CALL_OUTCOMES, pairs=pair):
        if was_answered(stored := await read_outcome(each, codec)):  # by an earlier release
            return MailRefused(describe_answer(name, stored))
    await tx.execute(sql.SET_ANSWER, **key, answer=outcome, is_kept=True)
    return MailAccepted()


async def _asks_again(tx: Transaction, known: Row[Any], pair: str, *place: str) -> bool:
    """Whether the open wait asks the same as the question whose answer was kept."""
    (call,) = await tx.fetch(statements.READ_QUESTIONS, pairs=pair)
    again = await unpack_request(call, tx.options.codec) or b"{}"
    return asks_same(await _stored_question(known, tx.options.codec, *place), again)


async def _stored_question(row: Row[Any], codec: Codec, *place: str) -> bytes:
    return await codec.unpack(row.request, inventory.QUESTION, *place) or b"{}"


async def _stored_answer(row: Row[Any], codec: Codec, *place: str) -> Outcome:
    return await unpack_outcome(codec.open(row.answer, inventory.ANSWER, *place))


def _is_open_wait(task: Row[Any], call: Row[Any] | None) -> bool:
    return (
        call is not None
        and task.status == TaskState.WAITING
        and call.status == CallState.PENDING
        and call.invocation_id == task.generation
    )


def _as_claim(command: RecordAnswer, outcome: Outcome, peer: str) -> Claim:
    task_id, sub_task_id = command.key.task_id, command.key.sub_task_id
    return Claim(command.id, task_id, sub_task_id, outcome, sender=peer)


async def deliver(
    tx: Transaction, pauses: Sequence[Pause], known: Mapping[str, Row[Any]], now: float
) -> dict[TaskId, Pause]:
    """Add the outcomes in the mailboxes to pauses that are about to be written.

    Their tasks are locked. Returns the changed pauses by task.
    """
    waiting = [each for each in pauses if each.run.task_id in known and uses_mailbox(each)]
    ids = [each.run.task_id for each in waiting]
    if not ids:
        return {}
    signals: dict[str, list[tuple[int, str]]] = {}
    for row in await tx.fetch(sql.READ_KEPT_SIGNALS, ids=ids):
        signals.setdefault(row.logical_task_id, []).append((row.seq, row.name))
    answers = {
        (row.logical_task_id, row.sub_task_id): row
        for row in await tx.fetch(sql.READ_KEPT_ANSWERS, ids=ids)
    }
    changed: dict[TaskId, Pause] = {}
    codec = tx.options.codec
    for each in waiting:
        task_id, agent = each.run.task_id, tx.options.names.qualified(each.run.agent)
        fitting: dict[TaskId, Outcome] = {}
        for call in each.calls:
            id_ = call.sub_task_id
            if (stored := answers.get((task_id, id_))) is None:
                continue
            place = (agent, task_id, id_)
            if asks_same(await _stored_question(stored, codec, *place), call.body):
                fitting[id_] = await _stored_answer(stored, codec, *place)
            else:
                key = {"task_id": task_id, "sub_task_id": id_}
                await tx.execute(sql.SET_ANSWER, **key, answer=None, is_kept=False)
        matched = match_mail(each, signals.get(task_id, ()), fitting)
        outcomes: dict[TaskId, Outcome] = {
            id_: fitting[id_] if seq is None else await _receive(tx, agent, task_id, seq, now)
            for id_, seq in matched.items()
        }
        if outcomes:
            changed[task_id] = with_outcomes(each, outcomes)
    return changed


async def record_questions(tx: Transaction, pauses: Sequence[Pause]) -> None:
    """Record the questions of pauses that were just written."""
    codec, columns = tx.options.codec, list[dict[str, Any]]()
    for pause in pauses:
        task_id, agent = pause.run.task_id, tx.options.names.qualified(pause.run.agent)
        asked = [
            call
            for call in pause.calls
            if is_question(call.peer) and (call.outcome is None or was_answered(call.outcome))
        ]
        answers = [(task_id, call.sub_task_id, call.outcome) for call in asked]
        packed = await outcome_columns(answers, codec, agent, inventory.ANSWER)
        for call, answer_ in zip(asked, packed, strict=True):
            place = (inventory.QUESTION, agent, task_id, call.sub_task_id)
            columns.append(
                {
                    "task_id": task_id,
                    "sub_task_id": call.sub_task_id,
                    "request": await codec.pack(call.body, *place),
                    "answer": answer_,
                }
            )
    await tx.execute_many(sql.PUT_QUESTION, columns)


async def set_value(
    tx: Transaction, command: SetValue, packed: Packed
) -> SaveResult | TooManyValues:
    """Set a value of a running task."""
    row, now = await lock_task(tx, command.run.task_id)
    if row is None or row.status != TaskState.RUNNING or row.fence != command.run.fence:
        return Fenced()
    key = {"task_id": command.run.task_id, "key": command.key}
    (others,) = await tx.fetch(sql.COUNT_OTHER_VALUES, **key)
    if others.number >= MAX_VALUES:
        return TooManyValues()
    await tx.execute(sql.PUT_VALUE, **key, value=packed, now=now)
    return CancelFound(command.run) if row.cancel_requested else SaveCommitted()


async def find_questions(
    database: Database, keys: Sequence[QuestionKey]
) -> dict[QuestionKey, AskedQuestion]:
    """Read questions that tasks have asked, from their last pause or an earlier one."""
    pairs = json.dumps(sorted({(key.task_id, key.sub_task_id) for key in keys}))
    names, codec = database.options.names, database.options.codec
    found: dict[QuestionKey, AskedQuestion] = {}
    for row in await database.fetch(statements.READ_QUESTIONS, pairs=pairs):
        if row.agent_name.startswith(names.prefix) and is_question(row.peer_agent):
            key = _question_key(names.plain(row.agent_name), row)
            outcome = None if row.outcome is None else await read_outcome(row, codec)
            request = await unpack_request(row, codec) or b"{}"
            found[key] = AskedQuestion(key, row.peer_agent, request, row.requester_app_id, outcome)
    for row in await database.fetch(sql.READ_QUESTIONS, pairs=pairs):
        if row.agent_name.startswith(names.prefix):
            key = _question_key(names.plain(row.agent_name), row)
            asked = found.get(key)
            if asked is not None and asked.outcome is None:
                continue  # an earlier release may have asked it again
            place = (row.agent_name, row.logical_task_id, row.sub_task_id)
            outcome = None if row.answer is None else await _stored_answer(row, codec, *place)
            if outcome is None and asked is not None and was_answered(asked.outcome):
                outcome = asked.outcome
            if outcome is None and TaskState(row.status).is_final:
                outcome = _ENDED
            request = await _stored_question(row, codec, *place)
            peer = f"{QUESTION_PREFIX}{key.name}"
            found[key] = AskedQuestion(key, peer, request, row.requester_app_id, outcome)
    return found


_ENDED = Failed(FailureKind.CANCELLED, "its task has ended")


def _question_key(agent: AgentName, row: Row[Any]) -> QuestionKey:
    return QuestionKey(agent, TaskId(row.logical_task_id), TaskId(row.sub_task_id))


async def read_value(
    database: Database, task_id: TaskId, agent: AgentName, key: str
) -> StoredValue | None:
    """Read a value of a task; `None` if the agent has no such task."""
    for row in await database.fetch(sql.READ_VALUE, task_id=task_id, key=key):
        if row.agent_name == database.options.names.qualified(agent) and not is_early_cancel(row):
            value = await database.options.codec.unpack(
                row.value, inventory.VALUE, row.agent_name, task_id, key
            )
            return StoredValue(row.requester_app_id, value)
    return None


async def read_mailbox(database: Database, task_id: TaskId) -> Mailbox:
    """Read what is kept for a task."""
    signals = await database.fetch(sql.LIST_SIGNALS, task_id=task_id)
    questions = await database.fetch(sql.LIST_QUESTIONS, task_id=task_id)
    values = [
        (row.key, await _shown_value(row, database.options.codec, task_id))
        for row in await database.fetch(sql.LIST_VALUES, task_id=task_id)
    ]
    return Mailbox(
        tuple(
            KeptSignal(row.signal_id, row.name, row.sender, row.size, instant(row.sent_at))
            for row in signals
        ),
        tuple(TaskId(row.sub_task_id) for row in questions if row.answer is None),
        tuple(TaskId(row.sub_task_id) for row in questions if row.is_kept),
        tuple(values),
    )


async def _shown_value(row: Row[Any], codec: Codec, task_id: TaskId) -> bytes:
    place = (inventory.VALUE, row.agent_name, task_id, row.key)
    try:
        return await codec.unpack(row.value, *place) or b"null"
    except KeyMissing as error:
        return json.dumps(f"({error})").encode()
