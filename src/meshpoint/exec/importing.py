"""From an exported checkpoint to a session that can be resumed: its records, and the rows that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from meshpoint.exec.checkpoint_file import Document, ExportedSubtask
from meshpoint.exec.embedded import Exec, begin, embedded_store
from meshpoint.exec.session import Wanted
from meshpoint.exec.sessions import HeldSession, Sessions
from meshpoint.model.checkpoint import End, Save, TaskState
from meshpoint.model.envelopes import reply_bytes
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import NOBODY
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import AgentCheckpoint, Operation, Saved, SubtaskRecord, SubtaskStatus
from meshpoint.ports.agent import Plan
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.deliverable import json_text
from meshpoint.subtasks.migrating import migrated
from meshpoint.working_memory.recovery import NOWHERE

NOT_IN_FILE = "its output is not in the file"
WITHOUT_SECRETS = "its output was exported without its secrets"
_IMPORTED = Failed(FailureKind.ERROR, "imported from a file, to be resumed")


@dataclass(slots=True)
class Recovered:
    """What a file's checkpoint gives. `again`: by subtask, why it runs again although it was completed."""

    records: list[SubtaskRecord] = field(default_factory=list)
    again: dict[str, str] = field(default_factory=dict)


def recovered(document: Document, kept: AgentCheckpoint | None) -> Recovered:
    """The records of `document`, with results from it, or from what the store has `kept` of the same operation.

    What was begun after a subtask without a result runs again too.
    """
    known = {record.name: record for record in kept.subtasks} if kept is not None else {}
    found, lost = Recovered(), ""
    for index, subtask in enumerate(document.subtasks):
        completed = subtask.status is SubtaskStatus.COMPLETED
        record = _record(subtask, known, stripped=document.stripped(index)) if completed else _begun(subtask)
        if record is not None and not lost:
            found.records.append(record)
        elif completed:
            why = WITHOUT_SECRETS if document.stripped(index) else NOT_IN_FILE
            found.again[subtask.name] = f"after {lost!r}, which runs again" if lost else why
            lost = lost or subtask.name
    return found


def _record(subtask: ExportedSubtask, known: Mapping[str, SubtaskRecord], *, stripped: bool) -> SubtaskRecord | None:
    """The record of a completed subtask; None: its result is nowhere."""
    if subtask.has_output and not stripped:
        context = None if subtask.context is None else json.dumps(subtask.context)
        return _begun(subtask).model_copy(update={"result": json_text(subtask.output), "context": context})
    kept = known.get(subtask.name)
    if kept is None or not kept.completed or (kept.function, kept.inputs) != (subtask.function, subtask.inputs):
        return None
    return kept.model_copy(update={"retry": 0, "generation": 0})


def _begun(subtask: ExportedSubtask) -> SubtaskRecord:
    return SubtaskRecord(
        name=subtask.name,
        status=subtask.status,
        function=subtask.function,
        inputs=subtask.inputs,
        seconds=subtask.seconds,
    )


def checkpoint_of(document: Document, records: list[SubtaskRecord], operation_id: TaskId) -> AgentCheckpoint:
    """The checkpoint of the new operation that goes on from `document`."""
    return AgentCheckpoint(
        operation_id=operation_id,
        agent=document.agent,
        seq=1,
        planned=tuple(subtask.name for subtask in document.subtasks),
        subtasks=tuple(records),
        agent_version=document.agent_version,
        l1_snapshot_hash=NOWHERE,  # what they may have put into a working memory is not in the file
    )


async def imported(run: Exec, sessions: Sessions, wanted: Wanted, document: Document) -> HeldSession:
    """A new session whose operation has failed after the checkpoint in `document`, as if it had run here.

    Raises:
        IncompatibleState: no migration leads from it to this version of the agent.
        Unavailable: the embedded store does not answer.
    """
    found = recovered(document, await _kept(run, sessions, document))
    migrated(checkpoint_of(document, found.records, document.operation_id), run.plan.version, run.plan.migrations)
    held = sessions.new(wanted)
    try:
        held.session.again = found.again
        checkpoint = checkpoint_of(document, found.records, held.session.operation_id)
        async with embedded_store(run, held.session.namespace) as store:
            await _write(store, checkpoint, run.plan, held.session.input)
    except BaseException:
        held.release()
        raise
    return held


async def _kept(run: Exec, sessions: Sessions, document: Document) -> AgentCheckpoint | None:
    """What the embedded store has of the exported operation: of the very checkpoint, or else of the last one."""
    session = next((each for each in sessions.all() if each.operation_id == document.operation_id), None)
    if session is None:
        return None
    async with embedded_store(run, session.namespace) as store:
        history = await store.history(document.operation_id)
    return next((each for each in history if each.seq == document.seq), history[-1] if history else None)


async def _write(store: CheckpointStore, checkpoint: AgentCheckpoint, plan: Plan, input_: JsonValue) -> None:
    """The rows of an operation that began, saved `checkpoint` and failed. Whoever resumes it brings the request."""
    task_id, agent = checkpoint.operation_id, checkpoint.agent
    operation = Operation(type=plan.type, parameters=input_, exclusive=plan.exclusive, preserve=plan.preserve)
    run = await begin(store, task_id, agent, NOBODY, b"{}\n", operation)
    assert run is not None, "its id is new"
    saved = await store.save(Save(run, checkpoint))
    assert isinstance(saved, Saved), "nobody else knows it"
    reply = reply_bytes(task_id, None, _IMPORTED)
    await store.end([End(run, TaskState.FAILED, reply, reason=_IMPORTED.message)])
