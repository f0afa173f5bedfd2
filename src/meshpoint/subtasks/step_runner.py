"""Runs the steps of one segment, and records them.

A result is recorded before it is returned to the agent, and a recorded step never runs again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any, Protocol
from weakref import ReferenceType, ref

from meshpoint.errors import (
    AgentMisbehaved,
    IncompatibleState,
    ReplayMismatch,
    StepFailed,
    SubtaskRefused,
)
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.error_text import exception_message
from meshpoint.model.events import Step
from meshpoint.model.recorded_work import current_subtask, nesting_problem, run_step, step_scope
from meshpoint.model.secrets import mask_secrets
from meshpoint.model.snapshot import apply_diff
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.deliverable import DeliverableCodec
from meshpoint.subtasks.records import ContextChanges
from meshpoint.subtasks.step_records import StepEnd, StepPlace, StepRecord
from meshpoint.subtasks.validity import is_valid_name

MAX_STEP_NAME_LENGTH = 200


class StepLog(Protocol):
    """Stores the step records of one task."""

    @property
    def is_stopping(self) -> bool:
        """Whether the segment is being stopped from outside, or its code has ended."""

    @property
    def free_bytes(self) -> int:
        """How many more bytes the task's log can have."""

    def ensure_row(self) -> Awaitable[None]:
        """Write the task as running, if it has no row yet.

        Raises:
            CancelledError: The task was cancelled, or this run no longer owns it.
            AgentMisbehaved: The code of the segment has ended.
        """

    def add(self, step: str, record: bytes) -> asyncio.Future[Any]:
        """Append the record of `step`. A task without a row gets one first.

        The future is done when the record is durable.
        """

    async def append(self, step: str, record: bytes) -> None:
        """Append the record of `step`, waiting while the database is unavailable.

        Raises:
            CancelledError: As for `ensure_row`.
            AgentMisbehaved: The log would become larger than a task can be, or the code of the
                segment has ended.
        """


class _OpenSteps:
    """The steps that were called and may still run, by subtask and name.

    A step that was cancelled before it began is closed, but runs none of its own code.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[str | None, str], ReferenceType[Coroutine[Any, Any, Any]]] = {}

    def add(self, key: tuple[str | None, str], step: Coroutine[Any, Any, Any]) -> None:
        """Add a step that was called."""
        self._steps[key] = ref(step)

    def remove(self, key: tuple[str | None, str]) -> None:
        """Remove a step that has ended."""
        self._steps.pop(key, None)

    def has(self, key: tuple[str | None, str]) -> bool:
        """Whether such a step is open."""
        reference = self._steps.get(key)
        step = None if reference is None else reference()
        return step is not None and getcoroutinestate(step) != CORO_CLOSED

    def find_name(self) -> str | None:
        """The name of an open step, or `None`."""
        return next((name for subtask, name in self._steps if self.has((subtask, name))), None)


class StepRunner:
    """The `meshpoint.model.context_runtime.StepRunner` of one segment.

    `run` is the generation and the attempt (`retry_count`) of the segment. `recorded` are the
    records of earlier runs, oldest first, with their attempts. `runs_again` returns whether a
    subtask that an earlier attempt had completed runs again in this one.

    Attributes:
        mismatch: Why this version of the agent cannot continue the task. Kept because agent code
            may catch the error.
    """

    def __init__(
        self,
        ctx: TaskExecutionContext,
        runtime: ContextRuntime,
        run: tuple[int, int],
        recorded: Iterable[tuple[int, bytes]],
        log: StepLog,
        steps: Steps,
        runs_again: Callable[[str], bool],
        secret_keys: Sequence[str] = (),
    ) -> None:
        self._ctx, self._ctx_runtime, self._runs_again = ctx, runtime, runs_again
        self._generation, self._attempt = run
        self._log, self._steps, self._secret_keys = log, steps, secret_keys
        self._records: dict[StepPlace, tuple[int, StepRecord]] = {}
        self._unseen_results: dict[StepPlace, StepRecord] = {}
        for attempt, encoded in recorded:
            self._load(attempt, StepRecord.from_bytes(encoded))
        self._context_changes = ContextChanges(ctx, runtime)
        self._uses: dict[tuple[int, str | None, str], int] = {}
        self._open = _OpenSteps()
        self._running: dict[StepPlace, asyncio.Task[Any]] = {}
        self._executing = 0
        self.mismatch: IncompatibleState | None = None

    def _load(self, attempt: int, record: StepRecord) -> None:
        """Add a record, which replaces the earlier record of its place.

        A result that a cancellation follows is kept: the code around the step did not see it, but
        a new attempt may.
        """
        _, earlier = self._records.get(record.place, (0, None))
        self._records[record.place] = attempt, record
        if record.end is not StepEnd.CANCELLED:
            self._unseen_results.pop(record.place, None)
        elif earlier is not None and earlier.end is StepEnd.OK:
            self._unseen_results[record.place] = earlier.without_usage()

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Give the step its place now, and return what runs or replays it."""
        subtask = current_subtask()
        if (problem := self._find_problem(name, subtask)) is not None:
            return _refuse(problem)
        recorder = self._ctx_runtime.recorder
        generation = self._generation if recorder is None else recorder.passed
        use = self._uses.get((generation, subtask, name), 0)
        self._uses[generation, subtask, name] = use + 1
        place = StepPlace(generation, subtask, name, use)
        step = self._run(place, function, partial(run_step, name, function, args, kwargs))
        self._open.add((subtask, name), step)
        self._ctx_runtime.find_open_step = self._open.find_name
        return step

    def _find_problem(self, name: str, subtask: str | None) -> str | None:
        if not is_valid_name(name, MAX_STEP_NAME_LENGTH):
            return (
                f"{name!r} is not a valid step name: "
                f"use printable text of 1 to {MAX_STEP_NAME_LENGTH} characters"
            )
        if (problem := nesting_problem(f"step {name!r}")) is not None:
            return problem
        if self._open.has((subtask, name)):
            return (
                f"two open steps are called {name!r}: await the first one before the second, "
                f"or give each its own name, such as '{name}-2'"
            )
        return None

    async def _run(
        self,
        place: StepPlace,
        function: Callable[..., Any],
        code: Callable[[], Coroutine[Any, Any, Any]],
    ) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running[place] = task
        try:
            if self.mismatch is not None:
                raise self.mismatch
            codec = DeliverableCodec.for_function(function)
            recorder = self._ctx_runtime.recorder
            is_replaying = recorder is not None and recorder.replaying
            if (record := self._find_record(place, is_replaying=is_replaying)) is not None:
                return await self._replay(record, codec)
            if is_replaying:
                raise self._mismatch(
                    ReplayMismatch(
                        f"step {place.name!r} before call {place.generation + 1} is not recorded"
                    )
                )
            if (unseen := self._unseen_results.pop(place, None)) is not None:
                await self._append(unseen)
                return await self._replay(unseen, codec)
            return await self._execute(place, codec, code)
        finally:
            del self._running[place]
            self._open.remove((place.subtask, place.name))

    def _find_record(self, place: StepPlace, *, is_replaying: bool) -> StepRecord | None:
        """The record of a step; `None` if it must run.

        An attempt that was resumed at a pause runs the steps again that have failed since then,
        and all steps of a subtask that runs again. It starts with the tokens of the earlier one.
        """
        attempt, record = self._records.get(place, (0, None))
        if record is None or is_replaying or attempt == self._attempt:
            return record
        if place.subtask is not None and self._runs_again(place.subtask):
            self._unseen_results.pop(place, None)
            return None
        return record.without_usage() if record.end is StepEnd.OK else None

    async def _replay(self, record: StepRecord, codec: DeliverableCodec) -> Any:
        if record.context is not None:
            apply_diff(self._ctx, json.loads(record.context))
        if record.end is StepEnd.CANCELLED:
            await asyncio.get_running_loop().create_future()  # until it is cancelled again
        if record.end is StepEnd.FAILED:
            raise record.failure()
        try:
            return codec.read(record.text)
        except TypeMismatch as error:
            reason = f"the recorded result of step {record.place.name!r} does not fit: {error}"
            raise self._mismatch(IncompatibleState(reason)) from error

    def _mismatch(self, error: IncompatibleState) -> IncompatibleState:
        self.mismatch = error
        return error

    async def _execute(
        self,
        place: StepPlace,
        codec: DeliverableCodec,
        code: Callable[[], Coroutine[Any, Any, Any]],
    ) -> Any:
        try:
            await self._log.ensure_row()
        except asyncio.CancelledError:
            self._record_cancellation(place)
            raise
        record, cause = await self._run_code(place, codec, code)
        await self._append(record)
        if record.end is StepEnd.FAILED:
            raise record.failure() from cause
        return codec.read(record.text)

    async def _run_code(
        self,
        place: StepPlace,
        codec: DeliverableCodec,
        code: Callable[[], Coroutine[Any, Any, Any]],
    ) -> tuple[StepRecord, BaseException | None]:
        """Run the code of a step, and return its record and the cause of its failure."""
        if not self._executing:
            self._context_changes.start()
        self._executing += 1
        try:
            value = await self._call_code(place, code)
            text = _write(place.name, value, codec, self._log.free_bytes)
        except StepFailed as failure:
            masked = self._masked(failure)
            record = StepRecord.of_failure(place, masked, self._context_changes.take())
            return record, failure.__cause__
        except asyncio.CancelledError:
            self._record_cancellation(place, self._context_changes.take())
            raise
        finally:
            self._executing -= 1
        return StepRecord(place, StepEnd.OK, text, self._context_changes.take()), None

    async def _append(self, record: StepRecord) -> None:
        try:
            await self._log.append(record.place.name, record.to_bytes())
        except asyncio.CancelledError:
            self._record_cancellation(record.place, record.context)
            raise

    def _record_cancellation(self, place: StepPlace, context: str | None = None) -> None:
        """Record that the code around a step has cancelled it, unless the segment is stopped.

        That code sees a cancellation even if the step has ended already. Later runs must see the
        same, and find the last record of a place.
        """
        if not self._log.is_stopping:
            record = StepRecord(place, StepEnd.CANCELLED, context=context)
            self._log.add(place.name, record.to_bytes())

    async def _call_code(
        self, place: StepPlace, code: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        steps, task_id = self._steps, self._ctx.task_id
        with step_scope(place.name, place.use), steps.step(Step.STEP, [task_id], name=place.name):
            return await code()

    def _masked(self, failure: StepFailed) -> StepFailed:
        """The failure as it is recorded, so that every run raises the same text."""
        message = mask_secrets(failure.message, self._secret_keys)
        return StepFailed(failure.step, failure.error_type, message, failure.kind)

    @property
    def running(self) -> set[asyncio.Task[Any]]:
        """The asyncio tasks in which steps run."""
        return set(self._running.values())


async def _refuse(problem: str) -> Any:
    raise AgentMisbehaved(problem)


def _write(name: str, value: object, codec: DeliverableCodec, max_bytes: int) -> str:
    """The result of step `name` as JSON text of at most `max_bytes`.

    Raises:
        StepFailed: It has no such form. The step has run, so this is recorded too.
    """
    try:
        text = codec.write(name, value)[0]
    except Exception as error:  # the types of results have code of their own
        cause = error.__cause__ if isinstance(error, SubtaskRefused) else error
        kind, problem = type(value).__name__, exception_message(cause or error)
        message = f"it returned a {kind} that cannot be recorded: {problem}"
        raise StepFailed(name, "NotJson", message) from error
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        message = f"its result has {size} bytes; the task's log has room for {max(max_bytes, 0)}"
        raise StepFailed(name, "ResultTooLarge", message) from ValueError(message)
    return text
