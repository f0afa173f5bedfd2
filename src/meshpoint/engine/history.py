"""The history of a task as a file: what its code has recorded, for a replay by other code.

    {"format": "meshpoint-history/1", "agent": "travel", "input": …,
     "pauses": [{"calls": […], "outcomes": […]}, …], "steps": [{"name": "charge", "result": …}, …]}

A file contains the data of its task, but not its security context.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    JsonValue,
    ValidationError,
    model_validator,
)

from meshpoint._version import __version__
from meshpoint.agents.journal import Journal
from meshpoint.engine.parsing import parse_request
from meshpoint.engine.task_log import TaskLog
from meshpoint.errors import ConfigurationError, KeyMissing, PoisonMessage, StoreUnavailable
from meshpoint.files import read_bounded
from meshpoint.model.bodies import RequestBody, parse_body
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.envelopes import decode_request
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Outcome, decode_outcome, encode_outcome
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.model.tasks import (
    CheckpointDict,
    L1Snapshot,
    StoredCall,
    StoredTask,
    TaskState,
    plain_format,
)
from meshpoint.model.waits import is_wait
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.step_records import StepEnd, StepPlace, StepRecord

_FORMAT = "meshpoint-history/1"
_FORMAT_PATTERN = re.compile(r"meshpoint-history/([1-9][0-9]{0,8})")
_KEY = "history"
_MAX_READS = 5
_MAX_BYTES = 512 * 1024 * 1024
_SECRET_FIELD = "security_context"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedCall(_Model):
    """A call of the last pause. `outcome` is `None` while it is open."""

    id: str
    peer: AgentName
    input: JsonValue
    outcome: JsonValue = None

    @model_validator(mode="after")
    def _check_outcome(self) -> Self:
        try:
            self.read_outcome()
        except Exception as error:  # a damaged file can have anything in its place
            raise ValueError("its outcome is not one") from error
        return self

    def read_outcome(self) -> Outcome | None:
        """The outcome, for agent code."""
        return None if self.outcome is None else decode_outcome(json.dumps(self.outcome).encode())


class RecordedStep(_Model):
    """A step that has ended.

    `pauses` is the number of pauses before it. `use` counts the earlier steps of the same name in
    the same generation and subtask. The `result` of a failure has its type, message and kind.
    """

    pauses: int
    subtask: str | None
    name: str
    use: int
    attempt: int
    end: StepEnd
    result: JsonValue = None
    context: JsonValue = None

    @classmethod
    def from_record(cls, attempt: int, record: StepRecord) -> RecordedStep:
        """Convert a record in the task's log."""
        place = record.place
        return cls(
            pauses=place.generation,
            subtask=place.subtask,
            name=place.name,
            use=place.use,
            attempt=attempt,
            end=record.end,
            result=json.loads(record.text) if record.text else None,
            context=None if record.context is None else json.loads(record.context),
        )

    def to_record(self) -> StepRecord:
        """The record, as a replay reads it."""
        return StepRecord(
            StepPlace(self.pauses, self.subtask, self.name, self.use),
            self.end,
            "" if self.end is StepEnd.CANCELLED else json.dumps(self.result),
            None if self.context is None else json.dumps(self.context),
        )


class StoredBytes(_Model):
    """Bytes, as text if they are valid UTF-8, else as Base64."""

    text: str | None = None
    base64: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        self.to_bytes()  # Raises ValueError, as pydantic expects
        return self

    @classmethod
    def of(cls, content: bytes) -> StoredBytes:
        """Convert `content`."""
        try:
            return cls(text=content.decode())
        except UnicodeDecodeError:
            return cls(base64=b64encode(content).decode())

    def to_bytes(self) -> bytes:
        """The content."""
        return (
            (self.text or "").encode()
            if self.base64 is None
            else b64decode(self.base64, validate=True)
        )


class RecordedMemory(_Model):
    """The packed working memory of an operation and its digest, as of checkpoint `seq`."""

    seq: int
    digest: str
    content: Base64Bytes

    def to_snapshot(self) -> L1Snapshot:
        """The snapshot, as a replay reads it."""
        return L1Snapshot(self.seq, self.digest, self.content)


class TaskHistory(_Model):
    """What the code of one task has recorded.

    Attributes:
        generation: number of its pauses.
        attempt: number of times that it was resumed after a failure.
        stored_format: format of its state, as stored.
        app_version: version of the code that made its last pause; `None` if unknown.
        meshpoint: the release that wrote the file.
        input: the input of its request; `None` if the request is no longer stored.
        context: its context at the last pause.
        first_context, pauses: for function agents, the context at the first start, and the pauses.
            `None` for other agents and before the first pause.
        state, log: for other agents, the state at the last pause and the log entries so far.
        calls: the calls of the last pause, with their inputs.
        operation: number of its last checkpoint, 0 before the first; `None` if the task is not an
            operation.
        memory: its working memory, if the database has it.
        memory_writes: notes of the writes that the memory contains.
    """

    format: Literal["meshpoint-history/1"]
    agent: AgentName
    task_id: TaskId
    task_state: TaskState
    generation: int
    attempt: int
    stored_format: str
    app_version: str | None
    meshpoint: str
    exported_at: AwareDatetime
    input: JsonValue
    context: dict[str, JsonValue]
    first_context: dict[str, JsonValue] | None = None
    pauses: list[dict[str, JsonValue]] | None = None
    state: StoredBytes | None = None
    log: list[StoredBytes] = []
    calls: list[RecordedCall] = []
    steps: list[RecordedStep] = []
    operation: int | None = None
    checkpoint: AgentCheckpoint | None = None
    memory: RecordedMemory | None = None
    memory_writes: list[Base64Bytes] = []

    @property
    def is_complete(self) -> bool:
        """Whether every call of the last pause has its outcome."""
        return all(call.outcome is not None for call in self.calls)

    def journal(self) -> Journal | None:
        """The journal of a function agent; `None` for other agents and before the first pause.

        Raises:
            ConfigurationError: The file is damaged.
        """
        if self.pauses is None:
            return None
        merged = {
            "format": plain_format(self.stored_format),
            "input": self.input,
            "context": self.first_context or {},
            "entries": self.pauses,
        }
        try:
            return Journal.merge(json.dumps(merged).encode(), ())
        except ValidationError as error:
            problem = f"is damaged: {first_problem(error)}"
            raise ConfigurationError(_KEY, problem, _EXPORT_FIX) from loggable_cause(error)

    def to_json(self) -> str:
        """The content of the file."""
        fields = type(self).model_fields
        data = {
            name: value
            for name, value in self.model_dump(mode="json").items()
            if fields[name].is_required() or value not in (None, [])
        }
        text = json.dumps(data, ensure_ascii=False, indent=2)
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            text = json.dumps(data, indent=2)
        return text + "\n"


_EXPORT_FIX = "export it again with `meshpoint tasks export`"


async def collect_history(
    store: CheckpointStore, task_id: TaskId, exported_at: datetime
) -> TaskHistory | None:
    """Read the history of a task that has not ended; `None` if there is no such task.

    Raises:
        IncompatibleState: A later release has written its log.
        StoreUnavailable: The database does not answer, or the task changes faster than it can be
            read.
        ValueError: Its state, its log or its request cannot be read.
    """
    for _ in range(_MAX_READS):
        stored = await store.stored_task(task_id)
        if stored is None or stored.resumable.checkpoint is None:
            return None if stored is None else build_history(stored, None, None, exported_at)
        checkpoint = await store.latest(task_id)
        memory = await store.l1_snapshot(task_id)
        seq = 0 if checkpoint is None else checkpoint.seq
        if seq == stored.resumable.checkpoint and (memory is None or memory.seq <= seq):
            return build_history(stored, checkpoint, memory, exported_at)
    raise StoreUnavailable(f"task {task_id} changes faster than it can be read")


def build_history(
    stored: StoredTask,
    checkpoint: AgentCheckpoint | None,
    memory: L1Snapshot | None,
    exported_at: datetime,
) -> TaskHistory:
    """Collect the history of a task. `checkpoint` is its last one, if it is an operation.

    Raises:
        IncompatibleState: A later release has written its log.
        ValueError: Its state, its log or its request cannot be read.
    """
    task = stored.resumable
    log = TaskLog.of(task)
    run = task.run
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "agent": run.agent,
        "task_id": run.task_id,
        "task_state": stored.state,
        "generation": run.generation,
        "attempt": task.retry_count,
        "stored_format": task.state_format,
        "app_version": stored.app_version,
        "meshpoint": __version__,
        "exported_at": exported_at,
        "context": _without_secrets(task.context),
        "calls": list(map(_read_call, stored.calls)),
        "steps": [
            RecordedStep.from_record(each.attempt, StepRecord.from_bytes(each.record))
            for each in log.steps
        ],
        "operation": task.checkpoint,
        "checkpoint": checkpoint,
        "memory_writes": list(map(b64encode, log.notes)),
    }
    if memory is not None:
        fields["memory"] = {
            "seq": memory.seq,
            "digest": memory.digest,
            "content": b64encode(memory.content),
        }
    return TaskHistory.model_validate(fields | _describe_work(stored, log))


def _describe_work(stored: StoredTask, log: TaskLog) -> dict[str, Any]:
    """The input, and what the agent itself has stored."""
    task = stored.resumable
    if task.run.generation == 0:
        if task.request is None:
            raise ValueError("its request is missing")
        try:
            request = parse_request(decode_request(task.request), Options())
        except PoisonMessage as error:
            raise ValueError(f"its request cannot be read: {error}") from error
        context = request.create_context(_report_nothing).to_checkpoint_dict()
        return {"input": request.input, "context": _without_secrets(context)}
    if plain_format(task.state_format).startswith(f"{task.run.agent}/function/"):
        journal = Journal.merge(task.state, log.agent)
        data: dict[str, Any] = json.loads(journal.to_bytes())
        return {
            "input": journal.input,
            "first_context": journal.context,
            "pauses": data["entries"],
        }
    return {
        "input": None if task.request is None else _read_input(task.request),
        "state": StoredBytes.of(task.state),
        "log": list(map(StoredBytes.of, log.agent)),
    }


async def _report_nothing(*_: object) -> None:
    pass


def _without_secrets(context: Mapping[str, JsonValue]) -> CheckpointDict:
    return {key: value for key, value in context.items() if key != _SECRET_FIELD}


def _read_call(call: StoredCall) -> RecordedCall:
    outcome = None if call.outcome is None else json.loads(encode_outcome(call.outcome))
    # The row of a wait has its prompt and its schema in place of an input.
    input_ = None if is_wait(call.peer) else parse_body(RequestBody, call.body).input()
    return RecordedCall(id=call.call_id, peer=call.peer, input=input_, outcome=outcome)


def _read_input(request: bytes) -> JsonValue:
    try:
        return parse_body(RequestBody, decode_request(request).body).input()
    except (ValueError, PoisonMessage):
        return None


def read_history(path: Path, decrypt: Callable[[bytes], bytes]) -> TaskHistory:
    """Read a file that `meshpoint tasks export` wrote.

    `decrypt` undoes the encryption of a file, if it is encrypted.

    Raises:
        ConfigurationError: The file cannot be read, is not a history, is damaged, or was written
            by a later release.
    """
    try:
        stored = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        fix = "name a file written by `meshpoint tasks export`"
        raise ConfigurationError(_KEY, f"{path}: {error.strerror or error}", fix) from error
    try:
        content = decrypt(stored)
    except KeyMissing as error:
        fix = "set MESHPOINT_AGENT__ENCRYPTION_KEYS"
        raise ConfigurationError(_KEY, f"{path} is {error}", fix) from error
    except ValueError as error:
        problem = f"{path} is encrypted, and was changed or belongs to another agent"
        raise ConfigurationError(_KEY, problem, _EXPORT_FIX) from error
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(_KEY, f"{path} is not JSON: {error}", _EXPORT_FIX) from error
    written = str(data.get("format")) if isinstance(data, dict) else ""
    match = _FORMAT_PATTERN.fullmatch(written)
    if match is None:
        raise ConfigurationError(_KEY, f"{path} is not the history of a task", _EXPORT_FIX)
    if int(match[1]) > 1:
        problem = f"{path} has the format {written}; this release reads {_FORMAT}"
        raise ConfigurationError(
            _KEY, problem, "install the release that wrote it, or a later one"
        )
    try:
        history = TaskHistory.model_validate(data)
        history.journal()
    except ValidationError as error:
        problem = f"{path} is damaged: {first_problem(error)}"
        raise ConfigurationError(_KEY, problem, _EXPORT_FIX) from loggable_cause(error)
    return history
