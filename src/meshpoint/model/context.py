"""The execution context of a task: what an agent sees, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
)

from meshpoint.errors import IncompatibleState, NotJson
from meshpoint.model.agent_memory import MemoryMixin
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.declared_type import first_problem
from meshpoint.model.error_text import make_storable
from meshpoint.model.fixed_values import FixedValuesMixin
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import JsonDict, JsonList, check_json
from meshpoint.model.messages import TRACEPARENT, Address, readable_traceparent
from meshpoint.model.peer_calls_mixin import PeerCallsMixin
from meshpoint.model.recorded_work import RecordedWorkMixin
from meshpoint.model.status_metadata import UpdateKind
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage
from meshpoint.model.waits_mixin import WaitsMixin

_Value = TypeVar("_Value")
_Assigned = TypeVar("_Assigned")
_Value_co = TypeVar("_Value_co", covariant=True)
_Assigned_contra = TypeVar("_Assigned_contra", contravariant=True)

StatusReporter = Callable[[UpdateKind, JsonValue], Awaitable[None]]
"""Sends an update to the requester."""


_UtcDatetime = Annotated[AwareDatetime, AfterValidator(lambda instant: instant.astimezone(UTC))]


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
    deadline: _UtcDatetime | None = None
    idle_timeout: timedelta | None = None
    # With names, because pydantic 2.12.0 passes none to a validator of a default.
    user_config: Annotated[
        dict[str, JsonValue], AfterValidator(partial(JsonDict, name="a2a_context.user_config"))
    ] = Field(default_factory=dict)
    metadata: Annotated[
        dict[str, JsonValue], AfterValidator(partial(JsonDict, name="a2a_context.metadata"))
    ] = Field(default_factory=dict)


class _Converter(Protocol[_Value_co, _Assigned_contra]):
    def __call__(self, value: _Assigned_contra, /, *, name: str) -> _Value_co: ...


class _Checked(Generic[_Value, _Assigned]):
    """An attribute that checks and converts each value assigned to it.

    Reading it is a plain attribute access, because the descriptor has no `__get__`.
    """

    def __init__(self, convert: _Converter[_Value, _Assigned]) -> None:
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, context: TaskExecutionContext, value: _Assigned) -> None:
        context.__dict__[self._name] = self._convert(value, name=self._name)

    if TYPE_CHECKING:

        def __get__(self, context: TaskExecutionContext, owner: type) -> _Value: ...


def _check_text(text: str, *, name: str) -> str:
    if not isinstance(text, str):
        raise NotJson(f"{name}: {type(text).__name__} is not a string")
    return str(check_json(text, name))


def _check_usage(usage: TokenUsage, *, name: str) -> TokenUsage:
    if not isinstance(usage, TokenUsage):
        raise NotJson(f"{name}: {type(usage).__name__} is not TokenUsage")
    return usage


def _to_storable(text: str | None, *, name: str) -> str | None:
    if text is not None and not isinstance(text, str):
        raise NotJson(f"{name}: {type(text).__name__} is not a string")
    return None if text is None else make_storable(text)


class _CancelEvent(asyncio.Event):
    """An event that is falsy until it is set, so that `if ctx.cancelled:` works."""

    def __bool__(self) -> bool:
        return self.is_set()


class TaskExecutionContext(
    PeerCallsMixin, WaitsMixin, RecordedWorkMixin, FixedValuesMixin, MemoryMixin
):
    """One task's execution context.

    A pause keeps what `to_checkpoint_dict` returns. `cancelled` and the status reporter are
    recreated in the replica that resumes the task. Assigning a value that is not JSON raises
    `NotJson` immediately.
    """

    response_buffer = _Checked(_check_text)
    """Text of the response collected so far."""

    produced_artifacts = _Checked(JsonList)
    artifact_signals_to_return = _Checked(JsonList)
    flags = _Checked(JsonDict)
    security_context = _Checked(JsonDict)

    token_usage = _Checked(_check_usage)
    """Tokens used so far by the task and its peers."""

    trace_context = _Checked(JsonDict)

    subject = _Checked(_to_storable)
    """A short description of the task, shown with operations and checkpoints."""

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
        report: StatusReporter | None = None,
    ) -> None:
        self._task_id = task_id
        self._a2a_context = a2a_context if a2a_context is not None else A2AContext()
        # Unchecked, because each message creates a context and few pass these values.
        self.__dict__ |= {"response_buffer": "", "token_usage": TokenUsage(), "subject": None}
        if response_buffer != "":
            self.response_buffer = response_buffer
        if token_usage is not None:
            self.token_usage = token_usage
        if subject is not None:
            self.subject = subject
        self.produced_artifacts = produced_artifacts
        self.artifact_signals_to_return = artifact_signals_to_return
        self.flags = flags
        self.security_context = security_context
        self.trace_context = trace_context
        self._cancelled = _CancelEvent()
        self._report = report
        self._runtime = ContextRuntime()

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
    def resources(self) -> Any:
        """What the agent's lifespan has yielded in this replica, such as its clients.

        `None` without a lifespan, and outside replicas.
        """
        return self._runtime.resources

    @property
    def cancelled(self) -> asyncio.Event:
        """Set when the task should stop. Falsy until it is set."""
        return self._cancelled

    @property
    def is_cancelled(self) -> bool:
        """Whether the task should stop."""
        return self._cancelled.is_set()

    async def wait_cancelled(self) -> None:
        """Wait until the task should stop."""
        await self._cancelled.wait()

    async def update_status(self, message: JsonValue) -> None:
        """Send a progress update to the requester.

        Advisory: it may be lost, or have no receiver. A function that runs again is silent until
        it has passed its recorded calls; code that runs again after a crash sends its updates
        again. At most 20 updates a second are sent; of the others, only the latest. Updates of
        more than 64 KiB are dropped and logged.

        Raises:
            NotJson: `message` is not JSON.
        """
        await self._report_update(UpdateKind.STATUS, check_json(message, "status"))

    async def add_text(self, delta: str) -> None:
        """Send the next piece of the response to the requester, as it is written.

        Advisory, like `update_status`. Pieces are joined and sent up to 20 times a second, the
        last ones when the task pauses or ends. The task's output must repeat the whole text.

        Raises:
            NotJson: `delta` is not a string, or not valid Unicode.
        """
        await self._report_update(UpdateKind.TEXT, _check_text(delta, name="text"))

    async def add_artifact(self, artifact: Mapping[str, Any]) -> None:
        """Add an artifact in A2A form to the task's outcome, and send it to the requester now.

        It replaces an earlier artifact with the same `artifactId`. The outcome has all artifacts,
        `produced_artifacts`; sending them earlier is advisory.

        Raises:
            NotJson: `artifact` is not a JSON object.
        """
        if not isinstance(artifact, Mapping):
            raise NotJson(f"artifact: {type(artifact).__name__} is not a mapping")
        checked = JsonDict(artifact, name="artifact").to_plain()
        artifact_id, artifacts = checked.get("artifactId"), self.produced_artifacts
        places = [
            index
            for index, known in enumerate(artifacts)
            if artifact_id is not None
            and isinstance(known, Mapping)
            and known.get("artifactId") == artifact_id
        ]
        if places:
            artifacts[places[-1]] = checked
        else:
            artifacts.append(checked)
        await self._report_update(UpdateKind.ARTIFACT, checked)

    async def _report_update(self, kind: UpdateKind, content: JsonValue) -> None:
        if self._report is not None and not self.replaying:
            await self._report(kind, content)

    def to_checkpoint_dict(self) -> CheckpointDict:
        """A copy of everything that survives a pause, independent of later changes."""
        data: CheckpointDict = {
            "task_id": self._task_id,
            "a2a_context": self._a2a_context.model_dump(mode="json"),
            "response_buffer": self.response_buffer,
            "produced_artifacts": self.produced_artifacts.to_plain(),
            "artifact_signals_to_return": self.artifact_signals_to_return.to_plain(),
            "flags": self.flags.to_plain(),
            "security_context": self.security_context.to_plain(),
            "token_usage": self.token_usage.model_dump(mode="json"),
            "trace_context": self.trace_context.to_plain(),
        }
        # Omitted if unset, because the previous release rejects the key.
        return data if self.subject is None else {**data, "subject": self.subject}

    @classmethod
    def from_checkpoint_dict(
        cls, data: CheckpointDict, *, report: StatusReporter | None = None
    ) -> TaskExecutionContext:
        """Rebuild a context from `to_checkpoint_dict`.

        Keys that older checkpoints lack get their defaults.

        Raises:
            IncompatibleState: a later version wrote it, and continuing here would lose data.
        """
        # The constructor's parameters define the known keys; an unknown key raises TypeError.
        values: dict[str, Any] = dict(data)
        try:
            values["a2a_context"] = A2AContext.model_validate(values.get("a2a_context", {}))
            values["token_usage"] = TokenUsage.model_validate(values.get("token_usage", {}))
            return cls(**values, report=report)
        except (ValueError, NotJson, TypeError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            raise IncompatibleState(
                f"the checkpoint's context cannot be read here: {problem}"
            ) from error


def traceparent_of(context: TaskExecutionContext) -> str | None:
    """W3C's `traceparent` of the running segment, or of its request without telemetry."""
    return readable_traceparent(context.trace_context.get(TRACEPARENT))


Context: TypeAlias = TaskExecutionContext
"""Short for `TaskExecutionContext`, for annotations."""
