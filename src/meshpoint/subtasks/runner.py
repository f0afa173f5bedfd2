"""Runs the subtasks of one segment, and records them.

A deliverable is recorded before it is returned to the agent. `validity` decides which recorded
deliverables are reused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol, assert_never

from pydantic import JsonValue

from meshpoint.errors import (
    AgentMisbehaved,
    IncompatibleState,
    ReplayMismatch,
    SubtaskRefused,
)
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.events import Step
from meshpoint.model.json_values import check_json
from meshpoint.model.recorded_work import current_subtask, subtask_scope
from meshpoint.model.secrets import remove_secrets
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Child,
    Operation,
    SubtaskProgress,
    SubtaskRecord,
    SubtaskStatus,
    compute_progress,
    with_token_usage,
)
from meshpoint.model.tasks import Run
from meshpoint.ports.agent import RESUME_FROM, DurableAgent, Plan, get_plan
from meshpoint.ports.observer import Steps
from meshpoint.subtasks import validity
from meshpoint.subtasks.deliverable import DeliverableCodec
from meshpoint.subtasks.dependencies import version_with_uses
from meshpoint.subtasks.failures import rebuild_error, serialize_error
from meshpoint.subtasks.inputs import input_digests
from meshpoint.subtasks.records import ContextChanges, RunRecords


class SubtaskLog(Protocol):
    """Stores the subtask records of one task."""

    @property
    def is_stopping(self) -> bool:
        """Whether the segment is being stopped."""

    async def open_operation(self, operation: Operation) -> None:
        """Make the task an operation, if it is not one yet.

        Raises:
            CancelledError: The task was cancelled, or this run no longer owns it.
        """

    async def save_checkpoint(
        self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool
    ) -> None:
        """Write a checkpoint, waiting while the database is unavailable.

        Args:
            checkpoint: What to write.
            subtask: The subtask that caused it.
            progressed: Whether the task has made progress with it.

        Raises:
            CancelledError: As for `open_operation`.
        """


@dataclass(frozen=True, slots=True)
class OperationAttempt:
    """The run and the attempt of an operation. `parameters` is the input of its request."""

    run: Run
    retry_count: int
    seq: int
    parameters: JsonValue


@dataclass(frozen=True, slots=True)
class ClosedTools:
    """What is left of a segment that has ended: the progress of its task.

    Asyncio tasks that outlive the segment get errors. `last_progress` is `None` if no code has
    used subtasks.
    """

    agent: DurableAgent[Any, Any]
    last_progress: SubtaskProgress | None

    @property
    def place(self) -> tuple[int, int]:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment drew a random value: {AWAIT_HINT}"
        )

    def now(self, pauses: int) -> datetime:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment asked for the time: {AWAIT_HINT}"
        )

    def use_subtasks(self) -> ClosedTools:
        """Return this runner, which refuses everything."""
        return self

    def use_steps(self) -> ClosedTools:
        """Return this runner, which refuses everything."""
        return self

    def use_memory(self) -> None:
        """Return `None`: the memory has been left."""

    async def set_value(self, key: str, value: bytes) -> None:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment set value {key!r}: {AWAIT_HINT}"
        )

    @property
    def progress(self) -> SubtaskProgress:
        """Progress at the end of the segment."""
        return self.last_progress or compute_progress(get_plan(self.agent).subtasks, ())

    async def ensure_operation(self) -> None:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(f"an asyncio task that outlived its segment runs on: {AWAIT_HINT}")

    async def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment began subtask {name!r}: {AWAIT_HINT}"
        )

    async def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment began step {name!r}: {AWAIT_HINT}"
        )

    async def save_progress(self, subtask: str, state: object) -> None:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment saved progress of {subtask!r}: "
            f"{AWAIT_HINT}"
        )

    def saved_progress(self, subtask: str) -> JsonValue:
        """Return `None`."""
        return None


AWAIT_HINT = "an agent must await the tasks that it starts before it ends or pauses"


class _Phase(Enum):
    """How far the task is as an operation."""

    PLAIN_TASK = auto()
    """Not an operation yet."""

    UNSAVED = auto()
    """An operation with something that no checkpoint has."""

    SAVED = auto()
    """An operation whose last checkpoint has all that a pause needs."""


class Subtasks:
    """The `SubtaskRunner` of one segment.

    Attributes:
        retry_count: How many times the operation was resumed.
        paused_subtask: The subtask whose code ended with a pause.
        mismatch: Why this version of the agent cannot continue the task. Kept because agent code
            may catch the error.
    """

    def __init__(
        self,
        ctx: TaskExecutionContext,
        runtime: ContextRuntime,
        plan: Plan,
        attempt: OperationAttempt,
        restored: AgentCheckpoint | None,
        log: SubtaskLog,
        steps: Steps,
        now: Callable[[], datetime],
        *,
        is_operation: bool,
        secret_keys: Sequence[str] = (),
    ) -> None:
        self._ctx, self._ctx_runtime, self._plan, self._log = ctx, runtime, plan, log
        self._attempt, self.retry_count = attempt, attempt.retry_count
        self._steps, self._now, self._secret_keys = steps, now, secret_keys
        self._records = RunRecords(restored)
        self._extra = {} if restored is None else restored.extra
        self._context_changes = ContextChanges(ctx, runtime)
        self._write_lock = asyncio.Lock()  # keeps checkpoints in order
        self._seq = max(attempt.seq, restored.seq if restored else 0)
        self._restored_retry = attempt.retry_count if restored is None else restored.retry_count
        self._phase = self._operation_phase() if is_operation else _Phase.PLAIN_TASK
        self._is_opened = is_operation
        self._running: dict[str, asyncio.Task[Any]] = {}
        self.paused_subtask: str | None = None
        self.mismatch: IncompatibleState | None = None

    @property
    def records(self) -> Iterable[SubtaskRecord]:
        """The records of this run and of earlier ones."""
        return self._records.by_name.values()

    @property
    def is_operation(self) -> bool:
        """Whether the task is an operation, or becomes one at its next pause or end."""
        return self._phase is not _Phase.PLAIN_TASK

    @property
    def unopened(self) -> Operation | None:
        """The operation that the store does not have yet, because of a replay."""
        return self._operation() if self.is_operation and not self._is_opened else None

    def reusable_children(self, children: Iterable[Child]) -> list[Child]:
        """Return the peer tasks of earlier attempts whose outcomes still count, latest first."""
        records = self._records.by_name.values()
        return validity.find_reusable_children(children, records, self.retry_count)

    def runs_again(self, name: str) -> bool:
        """Whether a subtask that an earlier attempt had completed runs again in this one."""
        record = self._records.by_name.get(name)
        return (
            record is not None and validity.reason_in_attempt(record, self.retry_count) is not None
        )

    @property
    def progress(self) -> SubtaskProgress:
        """Progress of the task through its subtasks."""
        begun_last = next(reversed(self._running), None)
        return compute_progress(self._plan.subtasks, self._records.by_name.values(), begun_last)

    @property
    def position(self) -> tuple[int, int]:
        """Number of pauses of the task, and of subtasks of this run, before the current code."""
        pause_count = self._ctx_runtime.prior_pause_count(self._attempt.run.generation)
        return pause_count, len(self._records.requested)

    async def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the recorded deliverable of a subtask if valid; otherwise, run and record it."""
        self._request(name)
        requested = self._describe(name, function, args, kwargs)
        codec = DeliverableCodec.for_function(function)
        try:
            await self.ensure_operation()
        except asyncio.CancelledError:
            self._note_stopped(requested)
            raise
        verdict = validity.judge(self._records.by_name, requested, self._current_run(), codec.read)
        match verdict:
            case validity.Reuse(record, deliverable, difference):
                self._warn_of_difference(name, difference)
                self._reuse(record)
                return deliverable
            case validity.FailAgain(record, error, difference):
                self._warn_of_difference(name, difference)
                self._context_changes.restore(record)
                raise rebuild_error(name, error)
            case validity.Park(reason):
                raise self._mismatch(IncompatibleState(reason))
            case validity.Run(again, invalidated):
                self._refuse_other_path(name)
                self._records.invalidate(invalidated, self.retry_count)
                started = self._start(requested, again)
                return await self._run(started, codec, partial(function, *args, **kwargs))
            case _:
                assert_never(verdict)

    def _note_stopped(self, requested: SubtaskRecord) -> None:
        """Note that a new subtask was stopped before its code ran, for example by a time limit.

        The code around it continues, and its next replay must know that the subtask is not new.
        """
        if requested.name not in self._records.by_name and not self._log.is_stopping:
            self._records.begin(requested)
            self._phase = _Phase.UNSAVED

    def _mismatch(self, error: IncompatibleState) -> IncompatibleState:
        self.mismatch = error
        return error

    def _refuse_other_path(self, name: str) -> None:
        """Refuse a subtask that the function itself awaits before a recorded call, if it is new.

        The run that made the call would have recorded it. In another asyncio task it may begin
        earlier than in that run. So it runs there, but nothing is saved before the last call.
        """
        recorder = self._ctx_runtime.recorder
        if recorder is None or not recorder.replaying or name in self._records.by_name:
            return
        if recorder.is_own_task:
            call = recorder.passed + 1
            reason = f"subtask {name!r} before call {call} is not recorded"
            raise self._mismatch(ReplayMismatch(reason))

    def _warn_of_difference(self, name: str, difference: str | None) -> None:
        if difference is not None:
            self._steps.emit(Step.SUBTASK_DIFFERS, self._ctx.task_id, subtask=name, why=difference)

    def _request(self, name: str) -> None:
        if self.mismatch is not None:
            raise self.mismatch
        problem = validity.find_name_problem(
            name, current_subtask(), self._records.by_name, self._current_run()
        )
        if problem is not None:
            raise SubtaskRefused(problem)
        self._records.requested.add(name)

    def _describe(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> SubtaskRecord:
        """Return the record that the subtask would begin with now."""
        recorded = self._records.by_name.get(name)
        held = recorded if recorded and validity.holds(recorded, self.retry_count) else None
        version = (
            held.function
            if held is not None and held.result is not None  # reused even if the code has changed
            else version_with_uses(function)
        )
        return SubtaskRecord(
            name=name,
            status=SubtaskStatus.STARTED,
            function=version,
            inputs=input_digests(name, function, args, kwargs, strict=held is None),
            retry=self.retry_count,
            generation=self._attempt.run.generation,
        )

    def _current_run(self) -> validity.CurrentRun:
        return validity.CurrentRun(
            retry=self.retry_count,
            generation=self._attempt.run.generation,
            replays=self._ctx_runtime.recorder is not None,
            requested=self._records.requested,
            used=self._records.used,
        )

    async def ensure_operation(self) -> None:
        """Make the task an operation, if it is not one yet.

        While recorded calls are left, the store keeps it as it is: see `_save_checkpoint`.
        """
        async with self._write_lock:
            if not self._is_opened and not self._is_replaying:
                await self._log.open_operation(self._operation())
                self._is_opened = True
            if self._phase is _Phase.PLAIN_TASK:
                self._phase = self._operation_phase()

    def on_opened(self, *, is_opened: bool) -> None:
        """Note that the store has the operation; if it refused, the task remains as it is."""
        self._is_opened = is_opened
        if not is_opened:
            self._phase = _Phase.PLAIN_TASK

    def _operation(self) -> Operation:
        plan = self._plan
        return Operation(
            type=plan.type,
            parameters=self._attempt.parameters,
            subject=self._ctx.subject,
            exclusive=plan.exclusive,
            preserve=plan.preserve,
        )

    @property
    def _is_replaying(self) -> bool:
        recorder = self._ctx_runtime.recorder
        return recorder is not None and recorder.replaying

    def _operation_phase(self) -> _Phase:
        """Return the phase of an operation that this run has not changed yet.

        The first checkpoint of an attempt records its configuration.
        """
        is_saved = self._seq > 0 and self._restored_retry == self.retry_count
        return _Phase.SAVED if is_saved else _Phase.UNSAVED

    def _reuse(self, record: SubtaskRecord) -> None:
        if not record.belongs_to(self.retry_count):
            self._records.keep(record, self.retry_count)
            self._phase = _Phase.UNSAVED
        self._records.used.add(record.name)
        self._context_changes.restore(record)
        self._steps.emit(
            Step.SUBTASK_REUSED,
            self._ctx.task_id,
            subtask=record.name,
            seconds=round(record.seconds, 3),
            retry=record.retry,
        )

    def _start(self, requested: SubtaskRecord, again: str | None) -> SubtaskRecord:
        """Add the record of a subtask that is about to run."""
        if not self._running:
            self._context_changes.start()
        if again is not None:
            self._steps.emit(
                Step.SUBTASK_RERUN, self._ctx.task_id, subtask=requested.name, why=again
            )
            requested = requested.model_copy(update={"again": again})
        self._records.begin(requested)
        self._phase = _Phase.UNSAVED  # a replay must know that it began before the next call
        return requested

    async def _run(
        self, started: SubtaskRecord, codec: DeliverableCodec, code: Callable[[], Any]
    ) -> Any:
        name, started_at = started.name, self._now()
        self._running[name] = _this_task()
        try:
            text, pointers = codec.write(name, await self._call(name, code))
        except Exception as error:
            serialized = serialize_error(error, self._secret_keys)
            self._end(started, SubtaskStatus.FAILED, started_at, error=serialized)
            self._phase = _Phase.UNSAVED
            raise
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.paused_subtask = name
            raise
        finally:
            del self._running[name]
        self._end(started, SubtaskStatus.COMPLETED, started_at, result=text, secrets=pointers)
        self._records.saved_progress.pop(name, None)
        await self._save_checkpoint(name, progressed=True)
        return codec.read(text)

    async def _call(self, name: str, code: Callable[[], Any]) -> Any:
        with (
            subtask_scope(name),
            self._steps.step(Step.SUBTASK, [self._ctx.task_id], subtask=name),
        ):
            try:
                value = code()
                return await value if isawaitable(value) else value
            except Exception:
                raise
            except BaseException as signal:  # a pause or the end of the run is no failure
                interruption = signal
        raise interruption

    def _end(
        self, started: SubtaskRecord, status: SubtaskStatus, started_at: datetime, **fields: object
    ) -> None:
        context = self._context_changes.take()
        seconds = (self._now() - started_at).total_seconds()
        ended = {"status": status, "seconds": seconds, "context": context, **fields}
        self._records.by_name[started.name] = started.model_copy(update=ended)

    @property
    def running(self) -> set[asyncio.Task[Any]]:
        """The asyncio tasks in which subtasks run."""
        return set(self._running.values())

    async def save_progress(self, subtask: str, state: object) -> None:
        """Store intermediate state of a running subtask."""
        if subtask not in self._running:
            raise AgentMisbehaved(f"subtask {subtask!r} has ended: it can no longer save progress")
        text = json.dumps(check_json(state, f"saved_progress of subtask {subtask!r}"))
        progressed = self._records.save_progress(subtask, text)
        await self._save_checkpoint(subtask, progressed=progressed)

    def saved_progress(self, subtask: str) -> JsonValue:
        """Return the stored state of a subtask; `None` if nothing is stored."""
        text = self._records.saved_progress.get(subtask)
        state: JsonValue = None if text is None else json.loads(text)
        return state

    async def _save_checkpoint(self, subtask: str, *, progressed: bool) -> None:
        """Save what is recorded so far.

        While recorded calls are left, nothing is saved: the code may turn out not to fit them,
        and an earlier version must then find its own records. A later subtask, the next pause or
        the end saves it too.
        """
        if self._is_replaying:
            self._phase = _Phase.UNSAVED
            return
        await self.ensure_operation()
        async with self._write_lock:
            checkpoint = self.next_checkpoint()
            try:
                await self._log.save_checkpoint(checkpoint, subtask, progressed=progressed)
            except BaseException:  # perhaps not stored: the next checkpoint has it again
                self._phase = _Phase.UNSAVED
                raise
            self._records.on_stored(checkpoint)

    @property
    def has_unsaved(self) -> bool:
        """Whether a pause needs a checkpoint to record that a subtask began, failed or exists."""
        return self._phase is _Phase.UNSAVED or (
            self._phase is _Phase.SAVED and self.paused_subtask is not None
        )

    def final_checkpoint(
        self, reason: str, details: dict[str, JsonValue] | None
    ) -> AgentCheckpoint:
        """Build the checkpoint of an operation that ends without completing.

        `details` describes the error, if code raised one.
        """
        checkpoint = self._build_checkpoint()
        # The task's own count includes their tokens, and the next attempt starts with it.
        records = tuple(record.without_usage() for record in checkpoint.subtasks)
        final = {
            "subtasks": records,
            "failure_reason": reason,
            "error_details": with_token_usage(details, self._ctx.token_usage),
        }
        return self._with_changes(checkpoint.model_copy(update=final))

    def next_checkpoint(self) -> AgentCheckpoint:
        """Build the next checkpoint, with everything recorded so far."""
        return self._with_changes(self._build_checkpoint())

    def _with_changes(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """Let the store write only the changed records.

        An earlier release would not find the others. It refuses the checkpoint because of its
        version, so the records of an agent without a version are always written.
        """
        if self._plan.version is None:
            return checkpoint
        return self._records.with_changes(checkpoint)

    def _build_checkpoint(self) -> AgentCheckpoint:
        # Counted before the write: if it is abandoned, the next must have another number.
        self._seq += 1
        if self._phase is _Phase.UNSAVED:
            self._phase = _Phase.SAVED
        plan, run = self._plan, self._attempt.run
        return AgentCheckpoint(
            operation_id=run.task_id,
            agent=run.agent,
            seq=self._seq,
            subject=self._ctx.subject,
            planned=plan.subtasks,
            subtasks=tuple(self._records.by_name.values()),
            saved_progress=dict(self._records.saved_progress),
            current_subtask=self.progress.current,
            agent_config=self._agent_config(),
            agent_version=plan.version,
            retry_count=self.retry_count,
            extra=self._extra,
        )

    def _agent_config(self) -> dict[str, JsonValue]:
        """Return the description of the agent for a checkpoint, without secrets."""
        plan = self._plan
        config, _ = remove_secrets(dict(plan.config), (), self._secret_keys)
        own: dict[str, JsonValue] = {
            "type": plan.type,
            "exclusive": plan.exclusive,
            "preserve": plan.preserve,
        }
        if plan.resume_from != "start":
            own[RESUME_FROM] = plan.resume_from
        return (config if isinstance(config, dict) else {}) | own


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a subtask runs only inside an asyncio task")
    return task
