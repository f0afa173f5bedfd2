"""Runs the steps of one segment, and records them.

A result is recorded before it is returned to the agent, and a recorded step never runs again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

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

    def ensure_row(self) -> Awaitable[None]:
        """Write the task as running, if it has no row yet.

        Raises:
            CancelledError: The task was cancelled, or this run no longer owns it.
        """

    def add(self, step: str, record: bytes) -> asyncio.Future[Any]:
        """Append the record of `step`, with others. The future is done when it is durable."""

    async def append(self, step: str, record: bytes) -> None:
        """Append the record of `step`, waiting while the database is unavailable.

        Raises:
            CancelledError: As for `ensure_row`.
            AgentMisbehaved: The log would become larger than a task can be.
        """


class StepRunner:
    """The `meshpoint.model.context_runtime.StepRunner` of one segment.

    `run` is the generation and the attempt (`retry_count`) of the segment. `recorded` are the
    records of earlier runs, oldest first, with their attempts.

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
        secret_keys: Sequence[str] = (),
    ) -> None:
        self._ctx, self._ctx_runtime = ctx, runtime
        self._generation, self._attempt = run
        self._log, self._steps, self._secret_keys = log, steps, secret_keys
        self._records: dict[StepPlace, tuple[int, StepRecord]] = {}
        for attempt, encoded in recorded:
            record = StepRecord.from_bytes(encoded)
            self._records[record.place] = attempt, record
        self._context_changes = ContextChanges(ctx, runtime)
        self._uses: dict[tuple[int, str | None, str], int] = {}
        self._open: dict[tuple[str | None, str], str] = {}
        self._running: dict[StepPlace, asyncio.Task[Any]] = {}
        self.mismatch: IncompatibleState | None = None

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
        self._open[subtask, name] = name
        self._ctx_runtime.open_steps = self._open.values()
        place = StepPlace(generation, subtask, name, use)
        return self._run(place, function, partial(run_step, name, function, args, kwargs))

    def _find_problem(self, name: str, subtask: str | None) -> str | None:
        if not is_valid_name(name, MAX_STEP_NAME_LENGTH):
            return (
                f"{name!r} is not a valid step name: "
                f"use printable text of 1 to {MAX_STEP_NAME_LENGTH} characters"
            )
        if (problem := nesting_problem(f"step {name!r}")) is not None:
            return problem
        if (subtask, name) in self._open:
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
            await self._log.ensure_row()
            return await self._execute(place, codec, code)
        finally:
            del self._open[place.subtask, place.name]

    def _find_record(self, place: StepPlace, *, is_replaying: bool) -> StepRecord | None:
        """The record of a step; `None` if it must run.

        An attempt that was resumed at a pause runs the steps again that have failed since then,
        and starts with the tokens of the earlier one.
        """
        attempt, record = self._records.get(place, (0, None))
        if record is None or is_replaying or attempt == self._attempt:
            return record
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
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self._context_changes.start()
        self._running[place] = task
        try:
            text = _write(place.name, await self._call_code(place.name, code), codec)
        except StepFailed as failure:
            masked = self._masked(failure)
            record = StepRecord.of_failure(place, masked, self._context_changes.take())
            await self._log.append(place.name, record.to_bytes())
            raise masked from failure.__cause__
        except asyncio.CancelledError:
            if not self._log.is_stopping:
                record = StepRecord(place, StepEnd.CANCELLED, context=self._context_changes.take())
                self._log.add(place.name, record.to_bytes())
            raise
        finally:
            del self._running[place]
        record = StepRecord(place, StepEnd.OK, text, self._context_changes.take())
        await self._log.append(place.name, record.to_bytes())
        return codec.read(text)

    async def _call_code(self, name: str, code: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        with step_scope(name), self._steps.step(Step.STEP, [self._ctx.task_id], name=name):
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


def _write(name: str, value: object, codec: DeliverableCodec) -> str:
    try:
        return codec.write(name, value)[0]
    except SubtaskRefused as error:
        kind, problem = type(value).__name__, exception_message(error.__cause__ or error)
        message = f"it returned a {kind} that cannot be recorded: {problem}"
        raise StepFailed(name, "NotJson", message) from error
