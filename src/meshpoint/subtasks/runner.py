"""Runs the subtasks of one segment, and reuses recorded deliverables that are still valid.

A deliverable is recorded before it is returned to the agent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from inspect import isawaitable
from typing import Any, Protocol

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved, SubtaskRefused
from meshpoint.model.checkpoint import Checkpoint, Run
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.json_values import check_json
from meshpoint.model.snapshot import change, changes, rewind, snapshot
from meshpoint.model.subtasking import current_subtask, inside
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SubtaskProgress,
    SubtaskRecord,
    SubtaskStatus,
    progress_of,
)
from meshpoint.model.typed import DoesNotFit
from meshpoint.ports.agent import Plan
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.deliverable import DeliverableCodec
from meshpoint.subtasks.failures import rebuild_error, serialize_error
from meshpoint.subtasks.inputs import describe_difference, input_digests
from meshpoint.subtasks.names import MAX_NAME_LENGTH, is_valid_name
from meshpoint.subtasks.versions import version_of

_STOP_TIMEOUT = 5.0
"""Seconds to wait for cancelled subtasks that the agent did not await."""


class SubtaskLog(Protocol):
    """Stores the subtask records of one task."""

    async def open(self, operation: Operation) -> None:
        """Make the task an operation, if it is not one yet.

        Raises:
            CancelledError: The task was cancelled, or this run no longer owns it.
        """

    async def save(self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool) -> None:
        """Write a checkpoint, waiting while the database is unavailable.

        Args:
            checkpoint: What to write.
            subtask: The subtask that caused it.
            progressed: Whether the task has made progress with it.

        Raises:
            CancelledError: As for `open`.
        """


@dataclass(frozen=True, slots=True)
class OperationAttempt:
    """The run and the attempt of an operation. `parameters` is the input of its request."""

    run: Run
    retry_count: int
    seq: int
    parameters: JsonValue


class ClosedSubtasks:
    """The `SubtaskRunner` after the end of a segment. Asyncio tasks that outlive it get errors."""

    def __init__(self, progress: SubtaskProgress) -> None:
        self.progress = progress

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(f"an asyncio task that outlived its segment began subtask {name!r}: {_AWAIT_HINT}")

    async def save_progress(self, subtask: str, state: object) -> None:
        """Raise `AgentMisbehaved`."""
        raise AgentMisbehaved(
            f"an asyncio task that outlived its segment saved progress of {subtask!r}: {_AWAIT_HINT}"
        )

    def saved_progress(self, subtask: str) -> JsonValue:
        """Return `None`."""
        return None


_AWAIT_HINT = "an agent must await the tasks that it starts before it ends or pauses"


class Subtasks:
    """The `SubtaskRunner` of one segment.

    A record is valid if it was made by the same function with the same inputs. In a new attempt,
    the first completed subtask that differs runs again, and so does everything that began after
    it. Within one attempt nothing should change, so inputs that differ must depend on time or
    chance, and are refused.
    """

    def __init__(
        self,
        ctx: TaskExecutionContext,
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
        self._ctx, self._plan, self._attempt, self._log = ctx, plan, attempt, log
        self._steps, self._now, self._is_operation = steps, now, is_operation
        self._secret_keys = secret_keys
        self._records = {record.name: record for record in restored.subtasks} if restored else {}
        self._saved_states = dict(restored.saved_progress) if restored else {}
        self._restored_states = dict(self._saved_states)  # the previous run's
        self._seq = max(attempt.seq, restored.seq if restored else 0)
        self._requested: list[str] = []
        self._running: list[str] = []
        self._current_names: set[str] = set()  # subtasks whose record this run has used or created
        self._executing: set[asyncio.Task[Any]] = set()  # asyncio tasks that run a subtask
        # The context when a subtask last ended, or began while no other was running.
        self._context_baseline: Checkpoint = {}
        self._all_saved = True
        self._write_lock = asyncio.Lock()
        self.paused_subtask: str | None = None

    @property
    def is_operation(self) -> bool:
        """Whether the task is an operation."""
        return self._is_operation

    @property
    def retry_count(self) -> int:
        """How many times the operation was resumed."""
        return self._attempt.retry_count

    @property
    def outdated(self) -> frozenset[str]:
        """Names of the subtasks whose records were invalidated.

        The outcomes of their peer calls do not count either.
        """
        return frozenset(name for name, record in self._records.items() if self._is_rerun(record))

    @property
    def progress(self) -> SubtaskProgress:
        """Progress of the task through its subtasks."""
        current = self._running[-1] if self._running else None
        return progress_of(self._plan.subtasks, self._records.values(), current)

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the recorded deliverable of a subtask if valid; otherwise, run and record it."""
        self._check_name(name)
        self._requested.append(name)
        requested = SubtaskRecord(
            name=name,
            status=SubtaskStatus.STARTED,
            function=version_of(function),
            inputs=input_digests(name, function, args, kwargs),
            retry=self._attempt.retry_count,
            generation=self._attempt.run.generation,
        )
        codec = DeliverableCodec.for_function(function)
        await self.ensure_operation()
        record = self._find_valid(requested)
        if record is not None and record.error is not None and self._failed_before_pause(record):
            self._restore_context(record)
            raise rebuild_error(name, record.error)
        if record is not None and record.completed:
            try:
                return self._reuse(record, codec)
            except DoesNotFit as error:
                self._invalidate_from(record, f"its deliverable no longer fits: {error}")
        return await self._run(requested, codec, function, args, kwargs)

    def _check_name(self, name: str) -> None:
        if not is_valid_name(name):
            raise SubtaskRefused(
                f"{name!r} is not a valid subtask name: use printable text of 1 to {MAX_NAME_LENGTH} characters"
            )
        if (outer := current_subtask()) is not None:
            raise SubtaskRefused(
                f"subtask {name!r} begins inside subtask {outer!r}: record only one of them, "
                "and call plain functions inside it"
            )
        earlier = self._records.get(name)
        in_an_earlier_handler = (
            earlier is not None
            and self._ctx.calls_are_not_recorded
            and earlier.completed
            and earlier.retry == self._attempt.retry_count
            and earlier.generation < self._attempt.run.generation
        )
        if name in self._requested or in_an_earlier_handler:
            raise SubtaskRefused(
                f"two subtasks of this run are called {name!r}: use unique names, such as '{name}-2'"
            )

    @property
    def position(self) -> tuple[int, int]:
        """Number of pauses of the task, and of subtasks of this run, before the current code."""
        return self._ctx.pauses_passed(self._attempt.run.generation), len(self._requested)

    async def ensure_operation(self) -> None:
        """Make the task an operation, if it is not one yet."""
        async with self._write_lock:
            if not self._is_operation:
                plan = self._plan
                await self._log.open(
                    Operation(
                        type=plan.type,
                        parameters=self._attempt.parameters,
                        subject=self._ctx.subject,
                        exclusive=plan.exclusive,
                        preserve=plan.preserve,
                    )
                )
                self._is_operation = True

    def _find_valid(self, requested: SubtaskRecord) -> SubtaskRecord | None:
        """Return the record of a subtask if it is valid.

        Otherwise, invalidate it and all records that began after it.
        """
        record = self._records.get(requested.name)
        if record is None:
            for skipped in self._unvisited():
                self._invalidate(skipped, f"after {requested.name!r}, which is new")
            return None
        if record.status is SubtaskStatus.OUTDATED:
            return None
        difference_found = self._find_difference(record, requested)
        if difference_found is None:
            return record
        self._invalidate_from(record, difference_found)
        return None

    def _unvisited(self) -> list[SubtaskRecord]:
        """Return records of earlier attempts that this one has not reached yet.

        Empty unless this attempt runs from the top.
        """
        if self._attempt.run.generation > 0 and self._ctx.calls_are_not_recorded:
            return []  # an earlier handler may have reached them
        retry = self._attempt.retry_count
        return [each for each in self._records.values() if each.retry < retry and each.name not in self._requested]

    def _invalidate_from(self, record: SubtaskRecord, reason: str) -> None:
        self._invalidate(record, reason)
        if record.completed:
            records = list(self._records.values())
            for later in records[[each.name for each in records].index(record.name) + 1 :]:
                self._invalidate(later, f"after {record.name!r}, which runs again")

    def _invalidate(self, record: SubtaskRecord, reason: str) -> None:
        if record.name in self._current_names:
            return
        self._saved_states.pop(record.name, None)
        if record.completed:
            cleared = {"result": None, "context": None, "secrets": (), "seconds": 0.0}
            changed = {"status": SubtaskStatus.OUTDATED, "again": reason, "retry": self._attempt.retry_count}
            self._records[record.name] = record.model_copy(update={**cleared, **changed})

    def _is_rerun(self, record: SubtaskRecord) -> bool:
        since = record.retry == self._attempt.retry_count or record.status is SubtaskStatus.OUTDATED
        return record.again is not None and since

    def _find_difference(self, record: SubtaskRecord, requested: SubtaskRecord) -> str | None:
        if record.function is None and not record.inputs:
            return None  # a migration has accepted it
        if record.function is not None and record.function != requested.function:
            return "its function has changed"
        difference_found = describe_difference(record.inputs, requested.inputs)
        if difference_found is not None and record.completed and record.retry == requested.retry:
            raise SubtaskRefused(
                f"subtask {requested.name!r}: {difference_found} compared to its earlier run in this attempt; "
                "it depends on time, chance or anything else besides the request and recorded results: "
                "pass a value that does not change, or compute it in its own subtask"
            )
        return difference_found

    def _reuse(self, record: SubtaskRecord, codec: DeliverableCodec) -> Any:
        assert record.result is not None
        deliverable = codec.read(record.result)
        self._current_names.add(record.name)
        self._restore_context(record)
        seconds = round(record.seconds, 3)
        self._steps.note(
            Step.SUBTASK_REUSED, self._ctx.task_id, subtask=record.name, seconds=seconds, retry=record.retry
        )
        return deliverable

    def _restore_context(self, record: SubtaskRecord) -> None:
        """Set the context and the recorded calls to their state after the subtask."""
        if record.context is not None:
            change(self._ctx, json.loads(record.context))
        changed = snapshot(self._ctx)
        self._ctx.skip_calls_of(record.name)  # the last one may restore an older context
        rewind(self._ctx, changed)

    def _failed_before_pause(self, record: SubtaskRecord) -> bool:
        """Whether a replayed function had already seen this failure when it paused."""
        run, retry = self._attempt.run, self._attempt.retry_count
        runs_again = record.retry == retry and record.generation < run.generation
        return runs_again and not self._ctx.calls_are_not_recorded

    async def _run(
        self,
        requested: SubtaskRecord,
        codec: DeliverableCodec,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        name, started_at = requested.name, self._now()
        if not self._running:
            self._context_baseline = snapshot(self._ctx)
        if (earlier := self._records.get(name)) is not None and self._is_rerun(earlier):
            self._steps.note(Step.SUBTASK_AGAIN, self._ctx.task_id, subtask=name, why=earlier.again)
            requested = requested.model_copy(update={"again": earlier.again})
        self._records[name] = requested
        self._current_names.add(name)
        self._running.append(name)
        task = asyncio.current_task()
        assert task is not None
        self._executing.add(task)
        try:
            text, pointers = codec.write(name, await self._call(name, function, args, kwargs))
        except Exception as error:
            self._record_end(
                requested, SubtaskStatus.FAILED, started_at, error=serialize_error(error, self._secret_keys)
            )
            self._all_saved = False
            raise
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.paused_subtask = name
            raise
        finally:
            self._running.remove(name)
            self._executing.discard(task)
        self._record_end(requested, SubtaskStatus.COMPLETED, started_at, result=text, secrets=pointers)
        self._saved_states.pop(name, None)
        await self._save_checkpoint(name, progressed=True)
        return codec.read(text)

    def _record_end(
        self, requested: SubtaskRecord, status: SubtaskStatus, started_at: datetime, **fields: object
    ) -> None:
        # With concurrent subtasks, each is credited with the changes since another one ended.
        now = snapshot(self._ctx)
        changed, self._context_baseline = changes(self._context_baseline, now), now
        context = json.dumps(changed) if changed else None
        seconds = (self._now() - started_at).total_seconds()
        ended = {"status": status, "seconds": seconds, "context": context, **fields}
        self._records[requested.name] = requested.model_copy(update=ended)

    async def cancel_running(self) -> None:
        """Cancel subtasks that the agent's code did not await, since nothing would record them."""
        if self._executing:
            for task in self._executing:
                task.cancel()
            await asyncio.wait(self._executing, timeout=_STOP_TIMEOUT)

    async def _call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        interruption: BaseException | None = None
        with inside(name), self._steps.step(Step.SUBTASK, [self._ctx.task_id], subtask=name):
            try:
                value = function(*args, **kwargs)
                return await value if isawaitable(value) else value
            except Exception:
                raise
            except BaseException as signal:  # a pause or the end of the run is not a failure
                interruption = signal
        assert interruption is not None
        raise interruption

    async def save_progress(self, subtask: str, state: object) -> None:
        """Store intermediate state of a running subtask."""
        if subtask not in self._running:
            raise AgentMisbehaved(f"subtask {subtask!r} has ended: it can no longer save progress")
        text = json.dumps(check_json(state, f"saved_progress of subtask {subtask!r}"))
        progressed = text != self._restored_states.get(subtask)
        self._saved_states[subtask] = text
        await self._save_checkpoint(subtask, progressed=progressed)

    def saved_progress(self, subtask: str) -> JsonValue:
        """Return the stored state of a subtask; `None` if nothing is stored."""
        text = self._saved_states.get(subtask)
        state: JsonValue = None if text is None else json.loads(text)
        return state

    async def _save_checkpoint(self, subtask: str, *, progressed: bool) -> None:
        async with self._write_lock:
            await self._log.save(self.next_checkpoint(), subtask, progressed=progressed)

    @property
    def has_unsaved(self) -> bool:
        """Whether a pause needs a checkpoint to record that a subtask began, failed or exists."""
        return self._is_operation and (self.paused_subtask is not None or self._seq == 0 or not self._all_saved)

    def final_checkpoint(self, reason: str, details: dict[str, JsonValue] | None) -> AgentCheckpoint:
        """Build the checkpoint of an operation that ends without completing."""
        return self.next_checkpoint().model_copy(update={"failure_reason": reason, "error_details": details})

    def next_checkpoint(self) -> AgentCheckpoint:
        """Build the next checkpoint, with everything recorded so far."""
        # Counted before the write: if it is abandoned, the next must have another number.
        self._seq += 1
        self._all_saved = True
        plan, run = self._plan, self._attempt.run
        return AgentCheckpoint(
            operation_id=run.task_id,
            agent=run.agent,
            seq=self._seq,
            subject=self._ctx.subject,
            planned=plan.subtasks,
            subtasks=tuple(self._records.values()),
            saved_progress=dict(self._saved_states),
            current_subtask=self.progress.current,
            agent_config={"type": plan.type, "exclusive": plan.exclusive, "preserve": plan.preserve},
            agent_version=plan.version,
            retry_count=self._attempt.retry_count,
        )
