"""The execution context of a task: what an agent sees, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, timedelta
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from meshpoint.errors import IncompatibleState, NotJson
from meshpoint.model.checkpoint import Checkpoint
from meshpoint.model.error_text import storable
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import JsonDict, JsonList, check_json
from meshpoint.model.messages import Address
from meshpoint.model.recording import Recorder, Recording
from meshpoint.model.remembering import Remembering
from meshpoint.model.subtasking import Subtasking
from meshpoint.model.usage import TokenUsage

Report = Callable[[JsonValue], Awaitable[None]]
"""Sends a status update to the requester."""


def _guarded(name: str) -> AfterValidator:
    # Takes the name as an argument: pydantic 2.12.0 passes none when it validates defaults.
    return AfterValidator(lambda values: JsonDict(values, name=f"a2a_context.{name}"))


UtcInstant = Annotated[AwareDatetime, AfterValidator(lambda instant: instant.astimezone(UTC))]


class A2AContext(BaseModel):
    """The origin of a task: conversation, user, requester and reply address."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True)

    context_id: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    reply_to: Address | None = None
    requester: str | None = None
    parent_task_id: str | None = None
    call_depth: int = 0
    deadline: UtcInstant | None = None
    idle_timeout: timedelta | None = None
    user_config: Annotated[dict[str, JsonValue], _guarded("user_config")] = Field(default_factory=dict)
    metadata: Annotated[dict[str, JsonValue], _guarded("metadata")] = Field(default_factory=dict)


class _DictField:
    """A descriptor that converts any assigned mapping to a `JsonDict`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: TaskExecutionContext, owner: type) -> JsonDict:
        held: JsonDict = context.__dict__[self._name]
        return held

    def __set__(self, context: TaskExecutionContext, values: Mapping[str, Any]) -> None:
        context.__dict__[self._name] = JsonDict(values, name=self._name)


class _ListField:
    """A descriptor that converts any assigned iterable to a `JsonList`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: TaskExecutionContext, owner: type) -> JsonList:
        held: JsonList = context.__dict__[self._name]
        return held

    def __set__(self, context: TaskExecutionContext, values: Iterable[Any]) -> None:
        context.__dict__[self._name] = JsonList(values, name=self._name)


class TaskExecutionContext(Recording, Subtasking, Remembering):
    """One task's execution context.

    A pause keeps what `to_checkpoint_dict` returns. `cancelled` and the status reporter are
    recreated in the replica that resumes the task. Assigning a value that is not JSON raises
    `NotJson` immediately.
    """

    produced_artifacts = _ListField()
    artifact_signals_to_return = _ListField()
    flags = _DictField()
    security_context = _DictField()
    trace_context = _DictField()

    def __init__(
        self,
        task_id: TaskId,
        a2a_context: A2AContext | None = None,
        *,
        response_buffer: str = "",
        produced_artifacts: Iterable[Any] = (),
        artifact_signals_to_return: Iterable[Any] = (),
        flags: Mapping[str, Any] = MappingProxyType({}),
        security_context: Mapping[str, Any] = MappingProxyType({}),
        token_usage: TokenUsage | None = None,
        trace_context: Mapping[str, Any] = MappingProxyType({}),
        subject: str | None = None,
        report: Report | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._task_id = task_id
        self._a2a_context = a2a_context if a2a_context is not None else A2AContext()
        self.response_buffer = response_buffer
        self.produced_artifacts = produced_artifacts
        self.artifact_signals_to_return = artifact_signals_to_return
        self.flags = flags
        self.security_context = security_context
        self.token_usage = token_usage if token_usage is not None else TokenUsage()
        self.trace_context = trace_context
        self.subject = subject
        self._cancelled = asyncio.Event()
        self._report = report
        self._recorder = recorder
        self._subtasks = None
        self._memory = None

    def __repr__(self) -> str:
        return f"TaskExecutionContext({self._task_id!r})"

    @property
    def task_id(self) -> TaskId:
        """The task's id, unique across the mesh."""
        return self._task_id

    @property
    def a2a_context(self) -> A2AContext:
        """The origin of the task."""
        return self._a2a_context

    @property
    def response_buffer(self) -> str:
        """Text of the response collected so far."""
        return self._response_buffer

    @response_buffer.setter
    def response_buffer(self, text: str) -> None:
        if not isinstance(text, str):
            raise NotJson(f"response_buffer: {type(text).__name__} is not a string")
        self._response_buffer = str(check_json(text, "response_buffer"))

    @property
    def token_usage(self) -> TokenUsage:
        """Tokens used so far by the task and its peers."""
        return self._token_usage

    @token_usage.setter
    def token_usage(self, usage: TokenUsage) -> None:
        if not isinstance(usage, TokenUsage):
            raise NotJson(f"token_usage: {type(usage).__name__} is not TokenUsage")
        self._token_usage = usage

    @property
    def subject(self) -> str | None:
        """A short description of the task, shown with operations and checkpoints."""
        return self._subject

    @subject.setter
    def subject(self, text: str | None) -> None:
        if text is not None and not isinstance(text, str):
            raise NotJson(f"subject: {type(text).__name__} is not a string")
        self._subject = None if text is None else storable(text)

    @property
    def cancelled(self) -> asyncio.Event:
        """Set when the task should stop."""
        return self._cancelled

    async def status(self, data: JsonValue) -> None:
        """Send a progress update to the requester.

        Advisory: it may be lost or duplicated, or have no receiver. Updates of more than 64 KiB
        are dropped and logged.

        Raises:
            NotJson: `data` is not JSON.
        """
        checked = check_json(data, "status")
        if self._report is not None:
            await self._report(checked)

    def to_checkpoint_dict(self) -> Checkpoint:
        """A copy of everything that survives a pause, independent of later changes."""
        kept: Checkpoint = {
            "task_id": self._task_id,
            "a2a_context": self._a2a_context.model_dump(mode="json"),
            "response_buffer": self._response_buffer,
            "produced_artifacts": self.produced_artifacts.to_plain(),
            "artifact_signals_to_return": self.artifact_signals_to_return.to_plain(),
            "flags": self.flags.to_plain(),
            "security_context": self.security_context.to_plain(),
            "token_usage": self.token_usage.model_dump(mode="json"),
            "trace_context": self.trace_context.to_plain(),
        }
        # Omitted if unset, because the previous release rejects the key.
        return kept if self.subject is None else {**kept, "subject": self.subject}

    @classmethod
    def from_checkpoint_dict(
        cls, kept: Checkpoint, *, report: Report | None = None, recorder: Recorder | None = None
    ) -> TaskExecutionContext:
        """Rebuild a context from `to_checkpoint_dict`.

        Keys that older checkpoints lack get their defaults.

        Raises:
            IncompatibleState: a later version wrote it, and continuing here would lose data.
        """
        # The constructor's parameters define the known keys; an unknown key raises TypeError.
        values: dict[str, Any] = dict(kept)
        try:
            values["a2a_context"] = A2AContext.model_validate(values.get("a2a_context", {}))
            values["token_usage"] = TokenUsage.model_validate(values.get("token_usage", {}))
            return cls(**values, report=report, recorder=recorder)
        except (ValidationError, NotJson, TypeError) as error:
            raise IncompatibleState(f"the checkpoint's context cannot be read here: {error}") from error
