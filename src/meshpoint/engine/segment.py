"""One live segment: what is known about its task, and what its agent code works with."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from typing import Any, NoReturn, Protocol, TypeAlias

from pydantic import JsonValue

from meshpoint.engine.backend import Backend
from meshpoint.engine.containment import is_user_interrupt
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.senders import Sender
from meshpoint.engine.step_log import SegmentStepLog
from meshpoint.engine.task_log import Notes, TaskLog
from meshpoint.errors import AgentMisbehaved, IncompatibleState
from meshpoint.model.calls import Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.error_text import describe_exception
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.mailbox import MAX_VALUES, SetValue, TooManyValues
from meshpoint.model.memory import Owner, make_agent_id
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Failed, Outcome
from meshpoint.model.status_metadata import UpdateKind
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import (
    MAX_REPLY_ADDRESSES,
    L1Snapshot,
    Requester,
    Resumable,
    Run,
)
from meshpoint.model.transitions import (
    BeginCommitted,
    BeginResult,
    CancelFound,
    Fenced,
    Save,
    SaveResult,
)
from meshpoint.model.usage import TokenUsage
from meshpoint.ports.agent import DurableAgent, get_plan
from meshpoint.ports.broker import Delivery
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.subtasks.records import recorded_instant
from meshpoint.subtasks.runner import AWAIT_HINT, ClosedTools, OperationAttempt, Subtasks
from meshpoint.subtasks.step_records import StepRecord
from meshpoint.subtasks.step_runner import StepRunner
from meshpoint.working_memory.snapshots import MemoryRef
from meshpoint.working_memory.task_memory import TaskMemory

log = logging.getLogger("meshpoint.run")

Agent: TypeAlias = DurableAgent[Any, Any]


class StopReason(Enum):
    """Why running code was stopped from outside."""

    CANCELLED = auto()  # the task was cancelled
    DRAINING = auto()  # the replica ends, and another one resumes the task
    OVERDUE = auto()  # the task's deadline has passed
    LOST = auto()  # another replica owns the task


class UpdateSender(Protocol):
    """Sends the updates of one run to the requester of its task."""

    async def send(self, kind: UpdateKind, content: JsonValue) -> None:
        """Send an update, or keep it until it can be sent."""

    async def close(self) -> None:
        """Send all kept updates, and none after that but questions."""

    async def send_question(self, content: JsonValue) -> None:
        """Send a question of the segment's pause, after `close` and the pause's commit."""

    async def repeat_latest(self, address: Address) -> None:
        """Send the latest status again, to one address."""


@dataclass(eq=False, slots=True)
class Segment:
    """A task between its trigger and its next pause or end.

    Attributes:
        run: The task and the run that this segment belongs to.
        requester: Who requested the task, and where to reply.
        digest: The digest of the requested input, or `None` if unknown.
        backend: Where the task is stored, or `None` until the first checkpoint chooses a backend.
        deliveries: The unacked requests of the task, more than one if a request was sent again.
        workspace: What the agent code works with, or `None` before it starts.
        updates: Sends the updates of the agent code, or `None` if it has sent none yet.
        code: Runs the agent code.
        begin_task: Writes the task's row while its first subtask waits.
        settling: Set when the code has ended.
        decided: Set when it is known whether the task runs here.
        removed: Set when the replica has forgotten the segment.
        stop_reason: Why the code was stopped from outside, or `None`.
        cancel_reason: What the sender of a cancel gave as its reason, for people.
        log: The task's log as the run found it.
        answers: The outcomes that it resumes with, in call order, as in `Resumable`.
        attempt: The attempt number of an isolated segment.
        dead_reason: Set when the task ends because its runs keep killing their process.
        known_usage: The tokens that the row has of a task that ends without running its code.
        attached: Further addresses that get the status updates of this segment.
        unrecorded: The attached addresses that no row has. At a pause they are written to the
            row; at the end they get the reply.
        keep_alive_at: When the next keep-alive of a task without a row is due, in seconds of the
            monotonic clock.
    """

    run: Run
    requester: Requester
    digest: str | None = None
    backend: Backend | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    workspace: Workspace | None = None
    updates: UpdateSender | None = None
    code: asyncio.Task[object] | None = None
    begin_task: asyncio.Task[tuple[Backend, BeginResult]] | None = None
    settling: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    removed: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: StopReason | None = None
    cancel_reason: str = ""
    log: TaskLog = field(default_factory=TaskLog)
    answers: Sequence[tuple[str, AgentName, Outcome]] = ()
    attempt: int = 1
    dead_reason: str | None = None
    known_usage: TokenUsage | None = None
    attached: list[Address] = field(default_factory=list)
    unrecorded: list[Address] = field(default_factory=list)
    keep_alive_at: float | None = None

    @property
    def shared_backend(self) -> Backend | None:
        """The backend, if other replicas can resume the task from it."""
        return self.backend if self.backend is not None and self.backend.is_shared else None

    def with_usage(self, failure: Failed) -> Failed:
        """Add the tokens that the task has used to `failure`, unless it has some already."""
        workspace = self.workspace
        used = self.known_usage if workspace is None else workspace.context.token_usage
        if used is None or not failure.usage.is_empty:
            return failure
        return replace(failure, usage=used.snapshot())

    def attach(self, address: Address, *, recorded: bool) -> Address | None:
        """Also send status updates to `address`, and the reply if no row has it.

        Returns the address that gets no reply because this one took its place, or `None`.
        """
        if address == self.requester.reply_to:
            return None
        if address not in self.attached:
            self.attached.append(address)
            del self.attached[:-MAX_REPLY_ADDRESSES]  # the first in the row may be another one
        if recorded or address in self.unrecorded:
            return None
        self.unrecorded.append(address)
        if len(self.unrecorded) < MAX_REPLY_ADDRESSES:  # with the requester's own
            return None
        dropped = self.unrecorded.pop(0)
        if dropped in self.attached:
            self.attached.remove(dropped)  # so that it counts as new if it attaches again
        return dropped

    def stop(self, reason: StopReason) -> None:
        """Cancel the code at its next await.

        The first reason counts, but a lost lease overrides it.

        Errors are logged, not raised: they come from objects that the agent's code awaits, and
        other segments must be stopped too.
        """
        if self.stop_reason is None or reason is StopReason.LOST:
            self.stop_reason = reason
        if self.code is not asyncio.current_task():
            self.cancel_code()
        if self.workspace is not None:  # fails if a waiter's loop is closed
            self._call_safely(self.workspace.context.cancelled.set)

    def stop_from_inside(self, reason: StopReason) -> NoReturn:
        """Cancel the code from inside. Any of its asyncio tasks may call this."""
        self.stop(reason)
        raise asyncio.CancelledError(reason.name.lower())

    def cancel_code(self) -> None:
        """Cancel the code if it runs. Errors from the future it awaits are logged."""
        if self.code is not None:
            self._call_safely(self.code.cancel)

    def _call_safely(self, function: Callable[[], object]) -> None:
        """Call `function`, which agent code may have replaced. Errors are logged."""
        try:
            function()
        except BaseException as error:
            if is_user_interrupt(error):
                raise
            log.warning(
                "task %s: its code cannot be stopped: %s",
                self.run.task_id,
                describe_exception(error),
            )


@dataclass(eq=False, slots=True, kw_only=True)
class RequestedSegment(Segment):
    """A segment that a request began. `sender` sent the `message`."""

    message: Message
    sender: Sender


@dataclass(frozen=True, slots=True)
class FinalCheckpoint:
    """The last checkpoint of an operation in this segment, with its memory reference.

    The operation is waiting, or did not complete. `notes` go to the log instead of the checkpoint.
    """

    checkpoint: AgentCheckpoint
    memory_ref: MemoryRef
    notes: Notes | None = None


@dataclass(frozen=True, slots=True)
class AgentPaused:
    """The agent paused its task. `workspace` is what its code worked with until then."""

    paused: Paused
    workspace: Workspace


OpenOperation: TypeAlias = Callable[[Operation | None], Awaitable[BeginResult]]
"""Makes a task an operation, if one is given. A task without a row gets one, as running."""


_STOP_TIMEOUT = 5.0
"""Seconds to wait for cancelled subtasks and steps that the agent did not await."""

_UNRECORDED = -1
"""In place of a number of pauses."""
_BUILDING = threading.RLock()  # agent code may read its context in several threads


class Workspace:
    """What the agent code of one segment works with.

    Subtasks, steps and working memory are built when the code first uses them. An operation that
    resumes has its subtasks from the start.

    A write stops the code at once if the task was cancelled or another replica owns it. So even if
    the cancel broadcast was lost, an operation ends at its next subtask.

    Attributes:
        context: The context passed to the code.
        context_runtime: What this replica attaches to the context.
        agent: The version of the agent whose code runs.
        subtasks: Runs and records subtasks, or `None` if the code has not used any yet.
        steps: Runs and records steps, or `None` likewise.
        failure: Details of how the code failed.
    """

    def __init__(
        self,
        segment: Segment,
        context: TaskExecutionContext,
        runtime: ReplicaRuntime,
        open_operation: OpenOperation,
        agent: Agent,
        parameters: JsonValue = None,
    ) -> None:
        self.context, self.agent = context, agent
        self.subtasks: Subtasks | None = None
        self.steps: StepRunner | None = None
        self._step_log: SegmentStepLog | None = None
        self._unreadable_steps: IncompatibleState | None = None
        self.failure: dict[str, JsonValue] | None = None
        self._segment, self._runtime, self._open_operation = segment, runtime, open_operation
        self._retry_count, self._parameters = 0, parameters
        self._memory: TaskMemory | None = None
        self._memory_ref, self._finished_subtasks = MemoryRef(), tuple[str, ...]()
        self._is_closed = False
        self._instants: dict[int, datetime] | None = None
        # Kept, because agent code may replace the attribute of its context.
        self.context_runtime = context._runtime
        self.context_runtime.tools = self
        self.context_runtime.agent = segment.run.agent
        self.context_runtime.generation = segment.run.generation
        self.context_runtime.directory = runtime.directory
        self.context_runtime.max_fan_out = runtime.options.max_fan_out
        self.context_runtime.resources = runtime.resources.get(agent.state_format)

    @property
    def operation(self) -> Subtasks | None:
        """The subtasks, if the task is an operation."""
        subtasks = self.subtasks
        return subtasks if subtasks is not None and subtasks.is_operation else None

    async def restore_operation(self, backend: Backend, task: Resumable) -> None:
        """Restore the subtasks and the memory as of the last checkpoint, if it is an operation.

        Raises:
            IncompatibleState: The checkpoint is from another version of the agent, and no
                migration leads to this one.
        """
        self._retry_count = task.retry_count
        if (seq := task.checkpoint) is None:
            return
        checkpoint = await self._load_checkpoint(backend, task.run, seq) if seq else None
        migrated = None
        if checkpoint is not None:
            plan = get_plan(self.agent)
            migrated = migrate_checkpoint(checkpoint, plan.version, plan.migrations)
            self._memory_ref = MemoryRef.from_checkpoint(checkpoint)
            self._finished_subtasks = checkpoint.progress.completed
        self.subtasks = self._build_subtasks(migrated, seq, is_operation=True)

    async def _load_checkpoint(
        self, backend: Backend, run: Run, seq: int
    ) -> AgentCheckpoint | None:
        result = await self._runtime.retry.until_available(
            lambda: backend.checkpointer.restore(run.task_id, run.agent, seq=seq)
        )
        if result is None:
            return None
        fallback = {"fallback": result.fallback.value} if result.fallback is not None else {}
        self._runtime.steps.emit(
            Step.CHECKPOINT_RESTORED, run.task_id, source=result.source.value, seq=seq, **fallback
        )
        return result.checkpoint

    def use_subtasks(self) -> Subtasks:
        """Return the subtasks, building them at first use. Any thread may call this.

        Raises:
            AgentMisbehaved: The segment has ended.
        """
        with _BUILDING:
            self._require_open()
            if self.subtasks is None:
                self.subtasks = self._build_subtasks(None, 0, is_operation=False)
            return self.subtasks

    def _build_subtasks(
        self, restored: AgentCheckpoint | None, seq: int, *, is_operation: bool
    ) -> Subtasks:
        runtime = self._runtime
        return Subtasks(
            self.context,
            self.context_runtime,
            get_plan(self.agent),
            OperationAttempt(self._segment.run, self._retry_count, seq, self._parameters),
            restored,
            self,
            runtime.steps,
            runtime.clock.now,
            is_operation=is_operation,
            secret_keys=runtime.options.secret_keys,
        )

    @property
    def place(self) -> tuple[int, int]:
        """The number of pauses before this segment, and the attempt of the operation."""
        return self._segment.run.generation, self._retry_count

    def now(self, pauses: int) -> datetime:
        """The time at which code after `pauses` pauses runs; see `SegmentTools`."""
        with _BUILDING:
            if self._instants is None:
                self._instants = self._load_instants()
                self._instants[_UNRECORDED] = self._runtime.clock.now()
            return self._instants.get(pauses) or self._instants[_UNRECORDED]

    def _load_instants(self) -> dict[int, datetime]:
        """The times that steps and subtasks of this attempt have recorded, by pauses before."""
        found = dict[int, datetime]()
        for step in self._segment.log.steps:
            record = StepRecord.from_bytes(step.record)
            instant = recorded_instant(record.context)
            if instant is not None and step.attempt == self._retry_count:
                found[record.place.generation] = instant
        for subtask in () if self.subtasks is None else self.subtasks.records:
            instant = recorded_instant(subtask.context)
            if instant is not None and subtask.retry == self._retry_count:
                found.setdefault(subtask.generation, instant)
        return found

    def use_steps(self) -> StepRunner:
        """Return the steps, building them at first use. Any thread may call this.

        Raises:
            AgentMisbehaved: The segment has ended.
            IncompatibleState: The code does not fit the task, or a later version of Meshpoint has
                recorded a step of it.
        """
        with _BUILDING:
            self._require_recordable()
            if self.steps is None:
                segment, runtime = self._segment, self._runtime
                self._step_log = SegmentStepLog(
                    segment,
                    runtime,
                    self._retry_count,
                    self._ensure_row,
                    self._stop_unless_owned,
                )
                try:
                    self.steps = StepRunner(
                        self.context,
                        self.context_runtime,
                        (segment.run.generation, self._retry_count),
                        [(each.attempt, each.record) for each in segment.log.steps],
                        self._step_log,
                        runtime.steps,
                        self._runs_again,
                        runtime.options.secret_keys,
                    )
                except IncompatibleState as error:
                    self._unreadable_steps = error
                    raise
            return self.steps

    def _runs_again(self, subtask: str) -> bool:
        return self.subtasks is not None and self.subtasks.runs_again(subtask)

    async def _ensure_row(self) -> None:
        self._require_open()
        if self._segment.backend is None:
            self._stop_unless_owned(await self._open_operation(None))

    async def set_value(self, key: str, value: bytes) -> None:
        """Store a value of the task; see `SegmentTools`."""
        await self._ensure_row()
        run, store = self._segment.run, self._backend.store
        with self._runtime.steps.step(Step.SET_VALUE, [run.task_id], key=key):
            command = SetValue(run, key, value)
            result = await self._runtime.retry.until_available(lambda: store.set_value(command))
        if isinstance(result, TooManyValues):
            raise AgentMisbehaved(f"set_value: {key!r} exceeds the limit of {MAX_VALUES} keys")
        self._stop_unless_owned(result)

    async def cancel_unawaited(self) -> None:
        """Cancel subtasks and steps that the agent's code did not await.

        Nothing would record them.
        """
        if self._step_log is not None:
            self._step_log.has_ended = True
        for runner in (self.subtasks, self.steps):
            if runner is not None and (unawaited := runner.running):
                for task in unawaited:
                    task.cancel()
                await asyncio.wait(unawaited, timeout=_STOP_TIMEOUT)

    async def flush_steps(self) -> None:
        """Wait until all step records are durable."""
        if self._step_log is not None:
            await self._step_log.flush()

    async def drop_steps(self) -> None:
        """Take back the step records of this segment, before its task is parked."""
        if self._step_log is not None:
            await self._step_log.drop()

    def find_mismatch(self) -> IncompatibleState | None:
        """Why this version of the agent cannot continue the task, or `None` if it can.

        Agent code may have caught the error.
        """
        if self._unreadable_steps is not None:
            return self._unreadable_steps
        for runner in (self.subtasks, self.steps):
            if runner is not None and runner.mismatch is not None:
                return runner.mismatch
        return None

    def use_memory(self) -> TaskMemory:
        """Return the working memory, building it at first use. Any thread may call this.

        Raises:
            AgentMisbehaved: The segment has ended.
        """
        if self._memory is not None:
            self._require_open()
            return self._memory
        with _BUILDING:
            subtasks = self.use_subtasks()
            if self._memory is None:
                self._memory = TaskMemory(
                    lambda: self._backend.memory_services,
                    self._memory_ref,
                    self._segment.log.notes,
                    self._finished_subtasks,
                    owner=self._get_owner,
                    position=lambda: subtasks.position,
                    ensure_operation=subtasks.ensure_operation,
                    fetch_sql=self._fetch_snapshot,
                    is_owner=self._is_owner,
                    on_lost=lambda: self._segment.stop_from_inside(StopReason.LOST),
                )
            return self._memory

    def _require_open(self) -> None:
        if self._is_closed:
            raise AgentMisbehaved(
                f"an asyncio task that outlived its segment used subtasks or memory: {AWAIT_HINT}"
            )

    def _require_recordable(self) -> None:
        """Refuse to record anything once the segment has ended, or does not fit its task.

        The code may have caught the error that said so.
        """
        self._require_open()
        if (mismatch := self.find_mismatch()) is not None:
            raise mismatch

    @property
    def _backend(self) -> Backend:
        """Where the task is stored. Until it has a row, that is this process."""
        return self._segment.backend or self._runtime.in_process

    def _get_owner(self) -> Owner:
        run = self._segment.run
        return Owner(make_agent_id(run.agent, run.task_id), run.id, run.fence)

    async def _fetch_snapshot(self) -> L1Snapshot | None:
        run, store = self._segment.run, self._backend.store
        return await self._runtime.retry.until_available(
            lambda: store.l1_snapshot(run.task_id, run.agent)
        )

    async def _is_owner(self) -> bool:
        run, store = self._segment.run, self._backend.store
        return not await self._runtime.retry.until_available(
            lambda: store.renew([run], self._runtime.replica)
        )

    @property
    def is_stopping(self) -> bool:
        """Whether the segment is being stopped; see `SubtaskLog`."""
        return self._segment.stop_reason is not None

    async def open_operation(self, operation: Operation) -> None:
        """Turn the task into an operation; see `SubtaskLog`."""
        self._require_recordable()
        self._stop_unless_owned(await self._open_operation(operation))

    async def save_checkpoint(
        self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool
    ) -> None:
        """Store a checkpoint with a reference to the working memory; see `SubtaskLog`."""
        run, memory, checkpointer = (
            self._segment.run,
            self.use_memory(),
            self._backend.checkpointer,
        )
        # A subtask that saves its progress does not restart from the beginning.
        finished_subtasks = {*checkpoint.progress.completed, subtask}
        memory_ref = await memory.prepare_ref(
            checkpoint.seq, durable=False, finished_subtasks=finished_subtasks
        )
        self._require_recordable()  # the checkpoint would lack what the memory held
        with self._runtime.steps.step(
            Step.SAVE, [run.task_id], subtask=subtask, seq=checkpoint.seq
        ):
            command = Save(run, memory_ref.apply_to(checkpoint), progressed=progressed)
            result = await self._runtime.retry.until_available(lambda: checkpointer.save(command))
        self._stop_unless_owned(result)
        await memory.on_stored(memory_ref)

    def _stop_unless_owned(self, result: BeginResult | SaveResult) -> None:
        match result:
            case BeginCommitted() | SaveCommitted():
                pass
            case CancelFound():
                self._segment.stop_from_inside(StopReason.CANCELLED)
            case Fenced():
                run = self._segment.run
                self._runtime.steps.emit(Step.FENCED, run.task_id, what="save", fence=run.fence)
                self._segment.stop_from_inside(StopReason.LOST)

    async def open_postponed(self) -> None:
        """Make the task an operation if the code asked for it while recorded calls were left.

        If the task was cancelled or lost, it stays as it is, and the next write says so.
        """
        subtasks = self.subtasks
        if subtasks is not None and (operation := subtasks.unopened) is not None:
            result = await self._open_operation(operation)
            subtasks.on_opened(is_opened=isinstance(result, BeginCommitted))

    async def prepare_pause(self) -> FinalCheckpoint | None:
        """Prepare the checkpoint that a pause writes for an operation.

        Returns `None` if the stored checkpoint is up to date.

        Raises:
            MemoryLost: The working memory does not match what the code wrote.
            MemoryRefused: The working memory is too large to store.
        """
        operation = self.operation
        if operation is None or not (operation.has_unsaved or self.use_memory().changed):
            return None
        checkpoint = operation.next_checkpoint()
        memory_ref = await self.use_memory().prepare_ref(
            checkpoint.seq, durable=True, finished_subtasks=checkpoint.progress.completed
        )
        stored_ref, encoded = memory_ref.split_log()
        notes = None if encoded is None else Notes(encoded, memory_ref.writes_replace_log)
        return FinalCheckpoint(stored_ref.apply_to(checkpoint), stored_ref, notes)

    async def prepare_failure(self, reason: str) -> FinalCheckpoint | None:
        """Prepare the last checkpoint of an operation that ends without completing."""
        operation = self.operation
        if operation is None:
            return None
        checkpoint = operation.final_checkpoint(reason, self.failure)
        memory_ref = await self.use_memory().final_ref(
            checkpoint.seq, checkpoint.progress.completed
        )
        return FinalCheckpoint(memory_ref.apply_to(checkpoint), memory_ref)

    async def update_caches(
        self, backend: Backend, final_checkpoint: FinalCheckpoint | None
    ) -> None:
        """Cache the checkpoint and the working memory of a task that may resume."""
        if self.operation is None:
            return
        memory = self.use_memory()
        if final_checkpoint is not None:
            await backend.checkpointer.write_to_cache(final_checkpoint.checkpoint)
            await memory.on_stored(final_checkpoint.memory_ref)
        await memory.on_paused()

    async def clear_caches(self, backend: Backend) -> None:
        """Drop what a completed task no longer needs."""
        if self.operation is not None:
            await backend.checkpointer.forget(self._segment.run.task_id, self._segment.run.agent)
            await self.use_memory().on_completed()

    async def close(self) -> None:
        """Leave the memory, and break reference cycles. Errors of the memory are logged.

        Code that outlives the segment can use neither subtasks nor memory.
        """
        self._is_closed = True
        subtasks, self.subtasks = self.subtasks, None
        progress = None if subtasks is None else subtasks.progress
        self.context_runtime.tools = ClosedTools(self.agent, progress)
        self.steps = None
        step_log, self._step_log = self._step_log, None
        if step_log is not None:
            await step_log.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                await memory.close()
            except Exception:
                task_id = self._segment.run.task_id
                log.exception("task %s: its working memory could not be left", task_id)
