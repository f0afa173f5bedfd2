"""Create a session from an exported checkpoint, so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import JsonValue

from meshpoint.exec.checkpoint_file import CheckpointDocument, ExportedSubtask
from meshpoint.exec.embedded import ExecConfig, begin_operation
from meshpoint.exec.session import SessionSpec
from meshpoint.exec.sessions import LockedSession, SessionStore
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import NO_REQUESTER
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SaveCommitted,
    SubtaskRecord,
    SubtaskStatus,
)
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import End, Save
from meshpoint.ports.agent import Plan
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.deliverable import json_text
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.working_memory.recovery import UNRECOVERABLE

NOT_IN_FILE = "its output is not in the file"
SECRETS_REMOVED = "its output was exported without its secrets"
_IMPORTED_FAILURE = Failed(FailureKind.ERROR, "imported from a file, to be resumed")


def recover_records(
    document: CheckpointDocument, stored: AgentCheckpoint | None
) -> tuple[list[SubtaskRecord], dict[str, str]]:
    """Build the records of `document`, with results from the file or from `stored`.

    `stored` is a checkpoint of the same operation. Completed subtasks without a result, and those
    that began after one, run again: the second value has the reason for each name.
    """
    stored_records = {record.name: record for record in stored.subtasks} if stored else {}
    records: list[SubtaskRecord] = []
    rerun_reasons: dict[str, str] = {}
    first_missing = ""
    for index, subtask in enumerate(document.subtasks):
        completed = subtask.status is SubtaskStatus.COMPLETED
        secrets_removed = document.has_removed_secrets(index)
        record = (
            _completed_record(subtask, stored_records, secrets_removed=secrets_removed)
            if completed
            else _to_record(subtask)
        )
        if record is not None and not first_missing:
            records.append(record)
        elif completed:
            reason = SECRETS_REMOVED if secrets_removed else NOT_IN_FILE
            rerun_reasons[subtask.name] = (
                f"after {first_missing!r}, which runs again" if first_missing else reason
            )
            first_missing = first_missing or subtask.name
    return records, rerun_reasons


def _completed_record(
    subtask: ExportedSubtask, stored_records: Mapping[str, SubtaskRecord], *, secrets_removed: bool
) -> SubtaskRecord | None:
    """Return the record of a completed subtask; `None` if its result is not available."""
    if subtask.has_output and not secrets_removed:
        context = None if subtask.context is None else json.dumps(subtask.context)
        return _to_record(subtask).model_copy(
            update={"result": json_text(subtask.output), "context": context}
        )
    stored = stored_records.get(subtask.name)
    if (
        stored is None
        or not stored.completed
        or (stored.function, stored.inputs) != (subtask.function, subtask.inputs)
    ):
        return None
    return stored.model_copy(update={"retry": 0, "generation": 0})


def _to_record(subtask: ExportedSubtask) -> SubtaskRecord:
    return SubtaskRecord(
        name=subtask.name,
        status=subtask.status,
        function=subtask.function,
        inputs=subtask.inputs,
        seconds=subtask.seconds,
    )


def _build_checkpoint(
    document: CheckpointDocument, records: list[SubtaskRecord], operation_id: TaskId
) -> AgentCheckpoint:
    """Build the first checkpoint of the new operation that continues `document`."""
    return AgentCheckpoint(
        operation_id=operation_id,
        agent=document.agent,
        seq=1,
        planned=tuple(subtask.name for subtask in document.subtasks),
        subtasks=tuple(records),
        agent_version=document.agent_version,
        l1_snapshot_hash=UNRECOVERABLE,  # the file has no working memory
    )


async def import_checkpoint(
    config: ExecConfig, sessions: SessionStore, spec: SessionSpec, document: CheckpointDocument
) -> LockedSession:
    """Create a session whose operation has failed after the checkpoint in `document`.

    It can be resumed as if it had run here.

    Raises:
        IncompatibleState: No migration leads from the checkpoint to this version of the agent.
        Unavailable: The embedded store does not answer.
    """
    unmigrated, rerun_reasons = await _recover_checkpoint(config, sessions, document)
    migrate_checkpoint(unmigrated, config.plan.version, config.plan.migrations)
    locked = sessions.create(spec)
    try:
        locked.session.again = rerun_reasons
        checkpoint = unmigrated.model_copy(update={"operation_id": locked.session.operation_id})
        async with config.open_store(locked.session.namespace) as store:
            await _write_operation(store, checkpoint, config.plan, locked.session.input)
    except BaseException:
        locked.release()
        raise
    return locked


async def restore_records(
    config: ExecConfig, sessions: SessionStore, document: CheckpointDocument
) -> tuple[AgentCheckpoint, dict[str, str]]:
    """Return the checkpoint that an import would resume from, migrated.

    The second value has the reasons why steps run again, by name.

    Raises:
        IncompatibleState: No migration leads from the checkpoint to this version of the agent.
        Unavailable: The embedded store does not answer.
    """
    checkpoint, rerun_reasons = await _recover_checkpoint(config, sessions, document)
    plan = config.plan
    return migrate_checkpoint(checkpoint, plan.version, plan.migrations), rerun_reasons


async def _recover_checkpoint(
    config: ExecConfig, sessions: SessionStore, document: CheckpointDocument
) -> tuple[AgentCheckpoint, dict[str, str]]:
    stored = await _stored_checkpoint(config, sessions, document)
    records, rerun_reasons = recover_records(document, stored)
    return _build_checkpoint(document, records, document.operation_id), rerun_reasons


async def _stored_checkpoint(
    config: ExecConfig, sessions: SessionStore, document: CheckpointDocument
) -> AgentCheckpoint | None:
    """Return the exported checkpoint from the embedded store, or else the operation's last one."""
    session = next(
        (each for each in sessions.list_all() if each.operation_id == document.operation_id), None
    )
    if session is None:
        return None
    async with config.open_store(session.namespace) as store:
        history = await store.history(document.operation_id)
    return next(
        (each for each in history if each.seq == document.seq), history[-1] if history else None
    )


async def _write_operation(
    store: CheckpointStore, checkpoint: AgentCheckpoint, plan: Plan, input_: JsonValue
) -> None:
    """Write the rows of an operation that began, saved `checkpoint` and failed.

    The client that resumes it sends the request.
    """
    task_id, agent = checkpoint.operation_id, checkpoint.agent
    operation = Operation(
        type=plan.type, parameters=input_, exclusive=plan.exclusive, preserve=plan.preserve
    )
    run = await begin_operation(store, task_id, agent, NO_REQUESTER, b"{}\n", operation)
    saved = await store.save(Save(run, checkpoint))
    assert isinstance(saved, SaveCommitted), "no other process knows its id"
    reply = encode_reply(task_id, None, _IMPORTED_FAILURE)
    await store.end([End(run, TaskState.FAILED, reply, reason=_IMPORTED_FAILURE.message)])
