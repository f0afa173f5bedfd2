"""Run agent code for one segment, until its deadline at most, and turn the result into a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.engine.containment import Origin, current_origin, is_user_interrupt
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import AgentPaused, Segment, StopReason, Workspace
from meshpoint.errors import (
    AgentFailed,
    IncompatibleState,
    InvalidInput,
    MemoryLost,
    MemoryUnavailable,
    PeerFailed,
    WaitTimeout,
)
from meshpoint.model.call_attempts import failure_of
from meshpoint.model.calls import Done, Paused
from meshpoint.model.current_context import running_context
from meshpoint.model.error_text import describe_exception, exception_message, type_name
from meshpoint.model.events import Step
from meshpoint.model.json_values import copy_containers
from meshpoint.model.log_context import LogContext, current_log_context
from meshpoint.model.outcomes import OVERDUE, Failed, FailureKind, Ok, Outcome, outcome_name
from meshpoint.model.secrets import format_traceback, mask_secrets
from meshpoint.model.tasks import Resumable
from meshpoint.model.waits import display_name

log = logging.getLogger("meshpoint.run")

_CLEANUP_TIME = timedelta(seconds=3)
"""How long code may still run after its cancellation before its task ends without it."""
_MAX_SLEEP = timedelta(minutes=1)
"""Maximum time until the clock is read again: it follows the clock of the database."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The code was stopped from outside before it finished."""

    reason: StopReason


@dataclass(frozen=True, slots=True)
class Incompatible:
    """This version of the agent cannot continue the task.

    Attributes:
        reason: why, for operators.
        message: why, with a hint for the agent's author.
        from_checkpoint: whether a record of an operation does not fit, rather than the state.
    """

    reason: str
    message: str
    from_checkpoint: bool = False

    @classmethod
    def from_error(
        cls, error: IncompatibleState, *, from_checkpoint: bool = False
    ) -> Incompatible:
        """Create the result of agent code that raised `error`, or of a failed restore."""
        message = exception_message(error)
        return cls(getattr(error, "reason", message), message, from_checkpoint)


@dataclass(frozen=True, slots=True)
class MemoryMissing:
    """The task's working memory is unavailable. `lost`: it existed, but its contents changed."""

    reason: str
    lost: bool


@dataclass(frozen=True, slots=True)
class SettledElsewhere:
    """The segment ran in its own process, which committed and sent the resulting messages."""


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The segment's own process died before settling. `counted` unless no agent code ran there."""

    reason: str
    counted: bool


SegmentResult: TypeAlias = (
    AgentPaused | Outcome | Stopped | Incompatible | MemoryMissing | SettledElsewhere | ProcessDied
)


@dataclass(frozen=True, slots=True)
class _Raised:
    """Agent code raised. `result` is its outcome, unless the code had been stopped."""

    result: SegmentResult


_AgentCall: TypeAlias = Callable[[], Awaitable[Paused | Done[Any]]]
"""Calls agent code. Not a coroutine yet, since an exception in the call must fail the task too."""


@dataclass(frozen=True, slots=True)
class AgentCode:
    """One call of agent code. Every exception that it raises becomes a result."""

    call_agent: _AgentCall
    segment: Segment
    workspace: Workspace
    runtime: ReplicaRuntime

    async def run(self) -> SegmentResult:
        """Run it in its own asyncio task, so that it can be stopped without its caller."""
        segment, run, exits = self.segment, self.segment.run, list[str]()

        def on_exit(description: str) -> None:  # of a background task
            exits.append(description)
            segment.cancel_code()

        if segment.stop_reason is not None:
            return Stopped(segment.stop_reason)
        with self.runtime.steps.step(
            Step.SEGMENT, [run.task_id], self._describe, generation=run.generation
        ) as detail:
            origin, context = Origin(on_exit), copy_context()
            context.run(current_origin.set, origin)
            code_runtime = self.workspace.context_runtime
            log_context = LogContext(run.task_id, run.agent, run.generation, code_runtime)
            context.run(current_log_context.set, log_context)
            context.run(running_context.set, self.workspace.context)
            code_task = asyncio.create_task(
                self._run_guarded(), name=f"segment {run.task_id}", context=context
            )
            segment.code = code_task
            try:
                await asyncio.wait({code_task})
            except asyncio.CancelledError:  # the replica ends, so the result is discarded
                segment.stop_reason = segment.stop_reason or StopReason.DRAINING
                segment.cancel_code()
                raise
            finally:
                origin.on_exit = None
                if code_task.done():
                    segment.code = None
            result = self._resolve_result(code_task, exits)
            detail["result"] = _result_name(result)
            if isinstance(result, Failed):  # requesters, logs and checkpoints see the same text
                return replace(result, message=mask_secrets(result.message, self._secret_keys))
            return result

    def _describe(self) -> dict[str, JsonValue]:
        """More details of the segment's events.

        `trace` is the task's own trace context: an observer may update it, and the next pause
        stores it. `answers` are the outcomes that the segment resumes with.
        """
        segment, context = self.segment, self.workspace.context
        return {
            "attempt": segment.attempt,
            "version": self.runtime.options.app_version,
            "call_depth": context.a2a_context.call_depth,
            "conversation": context.a2a_context.context_id,
            "trace": context.trace_context,
            "answers": [
                {"peer": peer, "outcome": outcome_name(outcome), "trace": outcome.traceparent}
                for _, peer, outcome in segment.answers
            ],
        }

    @property
    def _secret_keys(self) -> Sequence[str]:
        return self.runtime.options.secret_keys

    def _resolve_result(
        self, code_task: asyncio.Task[SegmentResult | _Raised], exits: Sequence[str]
    ) -> SegmentResult:
        stop_reason = self.segment.stop_reason
        result = None if code_task.cancelled() else code_task.result()
        if stop_reason is StopReason.OVERDUE:
            return Stopped(stop_reason)  # a result after the deadline does not count
        if result is not None and not isinstance(result, _Raised) and not exits:
            return result
        if stop_reason is not None and (result is None or isinstance(result, _Raised)):
            return Stopped(stop_reason)  # a failed cleanup does not change the result
        if exits:
            return self._new_failure(exits[0])
        if isinstance(result, _Raised):
            return result.result
        return self._new_failure("the agent's code cancelled itself")

    async def _run_guarded(self) -> SegmentResult | _Raised:
        # The consumer edge: every exception in agent code becomes an answer, including SystemExit
        # and KeyboardInterrupt, which would otherwise end the replica and all its tasks.
        try:
            result = self._result_from_return(await self.call_agent())
            mismatch = self.workspace.find_mismatch()
            return result if mismatch is None else _raised_mismatch(mismatch)
        except asyncio.CancelledError as error:
            self._record_failure(error)
            raise
        except BaseException as error:
            if is_user_interrupt(error) or (
                isinstance(error, GeneratorExit) and not _is_current_task(self.segment)
            ):
                raise  # Ctrl-C, or the event loop was closed
            try:
                if (mismatch := self.workspace.find_mismatch()) is not None:
                    return _raised_mismatch(mismatch)
                return _Raised(self._result_from_error(error))
            except Exception as description_error:  # for example, circular causes
                log.warning(
                    "task %s: its error cannot be described: %s",
                    self.segment.run.task_id,
                    describe_exception(description_error),
                )
                return _Raised(self._new_failure(describe_exception(error)))

    def _result_from_error(self, error: BaseException) -> SegmentResult:
        match error:
            case IncompatibleState():
                self._record_failure(error)
                return Incompatible.from_error(error)
            case InvalidInput():
                self._record_failure(error)
                return self._new_failure(exception_message(error), FailureKind.INVALID)
        if (missing_memory := _find_missing_memory(error)) is not None:
            return missing_memory
        self._record_failure(error)
        match error:
            case WaitTimeout():
                return self._new_failure(exception_message(error), FailureKind.TIMEOUT)
            case PeerFailed():
                return self._new_failure(exception_message(error), _inherited_kind(error))
            case AgentFailed():
                usage = self.workspace.context.token_usage.snapshot()
                return failure_of(error, exception_message(error), FailureKind.ERROR, usage)
            case _:
                return self._new_failure(describe_exception(error))

    def _record_failure(self, error: BaseException) -> None:
        """Record the error for the log, and for the last checkpoint of an operation.

        Stored as text, because a traceback keeps every frame and its variables alive.
        """
        self.workspace.failure = {
            "type": type_name(error),
            "message": mask_secrets(exception_message(error), self._secret_keys),
            "traceback": format_traceback(error, self._secret_keys),
        }

    def _result_from_return(self, returned: object) -> SegmentResult:
        if isinstance(returned, Paused):
            return AgentPaused(returned, self.workspace)
        if not isinstance(returned, Done):
            type_name = type(returned).__name__
            return self._new_failure(
                f"the agent returned {type_name}; it must return Paused or Done"
            )
        try:
            value = _round_trip_json(returned.output)
        except ValueError as error:
            return self._new_failure(f"the agent's output is not JSON: {exception_message(error)}")
        try:
            artifacts = self._collect_artifacts(returned.artifacts)
        except (ValueError, TypeError) as error:
            return self._new_failure(
                f"the agent's artifacts are not JSON objects: {exception_message(error)}"
            )
        return Ok(value, artifacts, self.workspace.context.token_usage.snapshot())

    def _collect_artifacts(self, returned: object) -> tuple[Any, ...]:
        """Return the artifacts in the context, followed by the `returned` artifacts."""
        produced = self.workspace.context.produced_artifacts.to_plain()
        for index, artifact in enumerate(produced):
            if not isinstance(artifact, dict):
                raise TypeError(f"ctx.produced_artifacts[{index}] is a {type(artifact).__name__}")
        if not isinstance(returned, (list, tuple)):  # an iterator may be endless
            raise TypeError(f"they are a {type(returned).__name__}, not a list or a tuple")
        return (*produced, *map(dict, _round_trip_json(list(returned)) if returned else ()))

    def _new_failure(self, message: str, kind: FailureKind = FailureKind.ERROR) -> Failed:
        return Failed(kind, message, self.workspace.context.token_usage.snapshot())


def _result_name(result: SegmentResult) -> str:
    """The result of a segment in its events."""
    match result:
        case AgentPaused():
            return "paused"
        case Ok() | Failed():
            return outcome_name(result)
        case Stopped(reason=reason):
            return reason.name.lower()
        case _:
            return "released"


def _raised_mismatch(mismatch: IncompatibleState) -> _Raised:
    """The result if a record did not fit this code, even if the code caught that error."""
    return _Raised(Incompatible.from_error(mismatch, from_checkpoint=True))


_INHERITED_KINDS = frozenset({FailureKind.TIMEOUT, FailureKind.UNDELIVERABLE})
"""Kinds that a task inherits from an unhandled failure of a peer.

The others describe the call only: this task was not cancelled, and its own request was valid.
"""


def _inherited_kind(error: PeerFailed) -> FailureKind:
    """The kind of a task that `error` ends. Agent code may have created the error itself."""
    kind = getattr(error.outcome, "kind", None)
    return FailureKind(kind) if kind in _INHERITED_KINDS else FailureKind.ERROR


def _is_current_task(segment: Segment) -> bool:
    try:
        return asyncio.current_task() is segment.code
    except RuntimeError:
        return False


def _find_missing_memory(error: BaseException | None) -> MemoryMissing | None:
    """The result if missing working memory ended the code, else `None`.

    Also searches exception groups and the causes of a framework's own error.
    """
    match error:
        case MemoryUnavailable():
            return MemoryMissing(exception_message(error), isinstance(error, MemoryLost))
        case BaseExceptionGroup(exceptions=exceptions):
            return next(filter(None, map(_find_missing_memory, exceptions)), None)
        case None:
            return None
        case _:
            return _find_missing_memory(error.__cause__)


def _round_trip_json(value: object) -> Any:
    """`value` after a JSON round trip. Refuses NaN and infinity, which would turn into null."""
    return from_json(
        to_json(copy_containers(value), inf_nan_mode="constants"), allow_inf_nan=False
    )


def overdue_outcome(task: Resumable) -> Failed:
    """The outcome of a task whose code does not run because its deadline has passed."""
    silent = sorted(
        {
            display_name(peer)
            for _, peer, outcome in task.outcomes
            if isinstance(outcome, Failed) and outcome.kind is FailureKind.TIMEOUT
        }
    )
    if not silent:
        return OVERDUE
    peers = ", ".join(map(repr, silent))
    return Failed(OVERDUE.kind, f"{OVERDUE.message} while it waited for {peers}")


async def run_until_deadline(
    segment: Segment, code: Callable[[], Awaitable[SegmentResult]], runtime: ReplicaRuntime
) -> SegmentResult:
    """Run `code`, and cancel it at the deadline of the segment's task.

    If code ignores its cancellation, it keeps running, but its task ends and its result is
    discarded.
    """
    caller, is_given_up = asyncio.current_task(), False

    async def enforce() -> None:
        nonlocal is_given_up
        await _wait_until_overdue(segment, runtime)
        segment.stop(StopReason.OVERDUE)
        await runtime.clock.sleep(_CLEANUP_TIME)
        is_given_up = True
        if caller is not None:
            caller.cancel()

    watcher = runtime.background.spawn(enforce)
    try:
        return await code()
    except asyncio.CancelledError:
        if not is_given_up or caller is None or caller.uncancel():
            raise  # the replica ends
        log.warning(
            "task %s: its code ignores that the task's deadline has passed; the task ends "
            "without it",
            segment.run.task_id,
        )
        return Stopped(segment.stop_reason or StopReason.OVERDUE)
    finally:
        watcher.cancel()


async def _wait_until_overdue(segment: Segment, runtime: ReplicaRuntime) -> None:
    deadline = segment.requester.deadline
    while deadline is not None:
        remaining = deadline - runtime.clock.now()
        if remaining > timedelta():
            await runtime.clock.sleep(min(remaining, _MAX_SLEEP))
            continue
        current = await _read_deadline(segment, runtime)
        if current == deadline:
            return
        deadline = current
        segment.requester = replace(segment.requester, deadline=deadline)
    await asyncio.Event().wait()  # it has no deadline any more


async def _read_deadline(segment: Segment, runtime: ReplicaRuntime) -> datetime | None:
    """The current deadline: a requester that was resumed may have asked again with a later one."""
    backend = segment.backend
    if backend is None:
        return segment.requester.deadline
    read = partial(backend.store.task, segment.run.task_id)
    found = await runtime.retry.until_available(read)
    return segment.requester.deadline if found is None else found[0].deadline
