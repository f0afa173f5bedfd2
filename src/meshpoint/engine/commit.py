"""Commit the result of a segment and return the messages to publish.

Every result of agent code leads to one guarded write, or to none if another run owns the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias, assert_never

from meshpoint.engine import end, hand_over
from meshpoint.engine.backend import Backend
from meshpoint.engine.cancels import cancelled_outcome
from meshpoint.engine.pause import commit_pause, find_repeated_question, plan_pause
from meshpoint.engine.running import (
    Incompatible,
    MemoryMissing,
    ProcessDied,
    SegmentResult,
    SettledElsewhere,
    Stopped,
)
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import AgentPaused, FinalCheckpoint, Segment, StopReason, Workspace
from meshpoint.errors import AgentMisbehaved, MemoryLost, MemoryRefused
from meshpoint.model.events import Step
from meshpoint.model.hand_over import HandOver
from meshpoint.model.outcomes import OVERDUE, Failed, FailureKind, Ok, Outcome
from meshpoint.model.questions import QuestionCall
from meshpoint.model.secrets import mask_reason, mask_secrets
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import Dispatch, Reply, TaskState
from meshpoint.model.transitions import (
    BeginResult,
    CancelFound,
    End,
    EndCommitted,
    Fenced,
    PastDeadline,
    PauseCommitted,
    Release,
)
from meshpoint.ports.agent import ReadsLog
from meshpoint.subtasks.runner import Subtasks

_MAX_RERUN_DELAY = timedelta(seconds=30)
"""Maximum delay before a task runs again after its own process died."""


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """The task waits for its calls, or is ready if all of them have an outcome already.

    `questions` are the ones that it asks. `hand_over` has what its commit may have published.
    """

    backend: Backend
    workspace: Workspace
    dispatches: Sequence[Dispatch]
    is_ready: bool
    final_checkpoint: FinalCheckpoint | None
    questions: Sequence[QuestionCall] = ()
    hand_over: HandOver | None = None


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The task has its outcome. An operation without a result has a `final_checkpoint`."""

    backend: Backend
    reply: Reply
    outcome: Outcome
    final_checkpoint: FinalCheckpoint | None
    hand_over: HandOver | None = None


@dataclass(frozen=True, slots=True)
class TaskHasNoRow:
    """The task has its outcome but no row: the reply itself, confirmed or stored, commits it."""

    reply: Reply
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TaskReleased:
    """Any replica may acquire the task.

    With `parked_reason`, only another version of the agent may, unless a person offers it again.
    """

    backend: Backend
    parked_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRescheduled:
    """The task runs again later, or its own process has settled it."""

    may_be_ready: bool = False


@dataclass(frozen=True, slots=True)
class TaskNotStored:
    """Another replica runs the task from its request, which goes back to the broker."""


@dataclass(frozen=True, slots=True)
class TaskLost:
    """Nothing was committed: another run owns the task and answers its request."""


Committed: TypeAlias = (
    TaskPaused
    | TaskEnded
    | TaskHasNoRow
    | TaskReleased
    | TaskRescheduled
    | TaskNotStored
    | TaskLost
)


class Commits:
    """Commits the results of an agent's segments."""

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime

    async def commit(self, segment: Segment, result: SegmentResult) -> Committed:
        """Commit `result` in the backend of the task. Waits while the database is unavailable."""
        match result:
            case AgentPaused() if segment.stop_reason is StopReason.CANCELLED:
                # The cancel came too late to stop the code.
                return await self._commit_stop(segment, StopReason.CANCELLED)
            case AgentPaused():
                return await self._commit_pause(segment, result)
            case Ok() | Failed() if segment.stop_reason is StopReason.LOST:
                # The code ignored its cancellation. A zombie must not answer.
                return TaskLost()
            case Ok() | Failed():
                return await self._commit_end(segment, result)
            case Stopped(reason=stop_reason):
                return await self._commit_stop(segment, stop_reason)
            case Incompatible(message=message, from_checkpoint=False) if (
                segment.run.generation == 0
            ):
                return await self._fail(segment, f"a new task has no state: {message}")
            case Incompatible():
                return await self._park(segment, result)
            case MemoryMissing():
                return await self._release_without_memory(segment, result)
            case SettledElsewhere():
                return TaskRescheduled()
            case ProcessDied():
                return await self._release_after_death(segment, result)
            case _:
                assert_never(result)

    async def _fail(self, segment: Segment, message: str) -> Committed:
        return await self._commit_end(segment, Failed(FailureKind.ERROR, message))

    async def _commit_stop(self, segment: Segment, stop_reason: StopReason) -> Committed:
        match stop_reason:
            case StopReason.CANCELLED:
                self._runtime.steps.emit(Step.CODE_CANCELLED, segment.run.task_id)
                return await self._commit_end(segment, cancelled_outcome(segment.cancel_reason))
            case StopReason.OVERDUE:
                return await self._time_out(segment)
            case StopReason.DRAINING:
                return await self._hand_over(segment)
            case StopReason.LOST:
                return TaskLost()
            case _:
                assert_never(stop_reason)

    async def _commit_pause(self, segment: Segment, returned: AgentPaused) -> Committed:
        call_count, max_fan_out = len(returned.paused.calls), self._runtime.options.max_fan_out
        if call_count > max_fan_out:
            message = f"it makes {call_count} calls at once; max_fan_out is {max_fan_out}"
            return await self._fail(segment, message)
        if (twice := find_repeated_question(returned.paused.calls)) is not None:
            return await self._fail(segment, f"it waits for question {twice!r} twice at once")
        agent = returned.workspace.agent
        if returned.paused.append is not None and not isinstance(agent, ReadsLog):
            return await self._fail(segment, "Paused.append needs an agent with resume_with_log")
        await returned.workspace.flush_steps()
        await returned.workspace.open_postponed()
        try:
            final_checkpoint = await returned.workspace.prepare_pause()
        except MemoryLost as error:
            return await self.commit(segment, MemoryMissing(str(error), lost=True))
        except MemoryRefused as error:
            return await self._fail(segment, str(error))
        pause = plan_pause(
            segment,
            returned,
            returned.workspace.agent.state_format,
            self._runtime.options,
            await self._find_earlier_children(segment, returned.workspace.operation),
            final_checkpoint,
            now=self._runtime.clock.now(),
        )
        runtime = self._runtime
        target = segment.backend or runtime.new_task_backend
        pause = await hand_over.prepare_pause(pause, segment, target, runtime)
        try:
            backend, result = await commit_pause(pause, segment.backend, self._runtime)
        except AgentMisbehaved as error:
            return await self._fail(segment, str(error))
        match result:
            case PauseCommitted(state=state, dispatches=dispatches):
                is_ready = state is TaskState.READY
                asked = [each for each in returned.paused.calls if isinstance(each, QuestionCall)]
                return TaskPaused(
                    backend,
                    returned.workspace,
                    dispatches,
                    is_ready,
                    final_checkpoint,
                    () if is_ready else asked,
                    pause.hand_over,
                )
            case Fenced():
                self._runtime.steps.emit(
                    Step.FENCED, segment.run.task_id, what="pause", fence=segment.run.fence
                )
                return TaskLost()
            case CancelFound(run=owned_run):
                # Without a row of this run there is a tombstone, and only the answer is left to
                # send.
                segment.backend = backend if owned_run else None
                segment.run = owned_run or segment.run
                return await self._commit_end(segment, cancelled_outcome(segment.cancel_reason))
            case PastDeadline():
                return await self._time_out(segment)
            case _:
                assert_never(result)

    async def _find_earlier_children(
        self, segment: Segment, subtasks: Subtasks | None
    ) -> Sequence[Child]:
        """The peer tasks that an operation had before it was resumed."""
        backend = segment.backend
        if backend is None or subtasks is None or not subtasks.retry_count:
            return ()
        operation = await self._runtime.retry.until_available(
            lambda: backend.store.operation(segment.run.task_id)
        )
        return operation.children if operation is not None else ()

    async def _commit_end(self, segment: Segment, outcome: Outcome) -> Committed:
        if isinstance(outcome, Failed):
            outcome = segment.with_usage(outcome)
        reply, sent = end.build_reply(segment, outcome, self._runtime.options)
        backend = segment.backend
        if backend is None:
            return TaskHasNoRow(reply, sent)
        reason, final_checkpoint, workspace = None, None, segment.workspace
        if workspace is not None:
            await workspace.open_postponed()
        if isinstance(sent, Failed):
            reason = mask_secrets(sent.message, self._runtime.options.secret_keys)
            if workspace is not None and workspace.operation is not None:
                await workspace.flush_steps()  # the operation may be resumed at its last pause
                final_checkpoint = await workspace.prepare_failure(reason)
        command = End(
            segment.run,
            reply.state,
            reply.body,
            segment.dead_reason,
            reason,
            None if final_checkpoint is None else final_checkpoint.checkpoint,
            None if workspace is None or workspace.operation is None else sent.usage,
            hand_over=await hand_over.prepare_end(reply, segment, backend, self._runtime),
        )
        match await end.commit_end(backend, command, self._runtime):
            case EndCommitted(reply=committed_reply):
                return TaskEnded(
                    backend, committed_reply, sent, final_checkpoint, command.hand_over
                )
            case Fenced():
                return TaskLost()

    async def _time_out(self, segment: Segment) -> Committed:
        return await self._commit_end(segment, OVERDUE)

    async def _hand_over(self, segment: Segment) -> Committed:
        """Let another replica run the task: from its row, or else from its request."""
        backend = segment.shared_backend
        if backend is None:
            return TaskNotStored()
        if segment.workspace is not None:
            await segment.workspace.flush_steps()
        await release(backend, Release(segment.run), "drain", self._runtime)
        return TaskReleased(backend)

    async def _park(self, segment: Segment, incompatible: Incompatible) -> Committed:
        """Park a task that only another version of the agent can continue.

        The version that wrote the last checkpoint finds its own records: a replay saves nothing,
        and the steps that this run has recorded after it are taken back.
        """
        backend, options = segment.shared_backend, self._runtime.options
        if backend is None or not options.parked_limit:  # no other version will ever have the task
            return await self._fail(segment, incompatible.message)
        if self._is_past_deadline(segment):
            return await self._time_out(segment)
        if segment.workspace is not None:
            await segment.workspace.drop_steps()
        reason = mask_reason(incompatible.reason, options.secret_keys)
        command = Release(segment.run, parked_reason=reason, version=self._runtime.replica.version)
        if not await release(backend, command, reason, self._runtime):
            return TaskLost()
        return TaskReleased(backend, reason)

    def _is_past_deadline(self, segment: Segment) -> bool:
        return segment.requester.is_overdue(self._runtime.clock.now())

    async def _release_without_memory(
        self, segment: Segment, missing_memory: MemoryMissing
    ) -> Committed:
        """Release a task whose working memory could not be loaded.

        It resumes later from its last checkpoint, here or on another replica.
        """
        backend = segment.shared_backend
        if backend is None:  # no other replica has the task
            return await self._fail(segment, missing_memory.reason)
        if self._is_past_deadline(segment):
            return await self._time_out(segment)
        self._runtime.steps.emit(
            Step.MEMORY_PROBLEM, segment.run.task_id, what="unavailable", why=missing_memory.reason
        )
        if segment.workspace is not None:
            await segment.workspace.flush_steps()
        delay = self._runtime.options.incompatible_pause
        command = Release(segment.run, delay, counts_as_attempt=missing_memory.lost)
        await release(backend, command, missing_memory.reason, self._runtime)
        return TaskRescheduled()

    async def _release_after_death(self, segment: Segment, died: ProcessDied) -> Committed:
        """Release a task whose own process died. It reruns later, or its next owner ends it."""
        backend = segment.shared_backend
        if backend is None:
            raise RuntimeError("only a task in the database runs in a process of its own")
        options, attempt = self._runtime.options, segment.attempt
        delay = min(options.sweep_interval * 2 ** min(attempt - 1, 10), _MAX_RERUN_DELAY)
        if not died.counted:
            delay = options.incompatible_pause
        elif attempt >= options.max_attempts:
            delay = timedelta()  # its next owner ends it
        command = Release(
            segment.run,
            delay,
            counts_as_attempt=died.counted,
            crash_reason=died.reason if died.counted else None,
        )
        if await release(backend, command, f"its process {died.reason}", self._runtime):
            self._runtime.steps.emit(
                Step.ISOLATED_PROCESS_DIED,
                segment.run.task_id,
                reason=died.reason,
                attempt=attempt,
                counted=died.counted,
            )
        return TaskRescheduled(may_be_ready=True)


async def release(
    backend: Backend, command: Release, reason: str, runtime: ReplicaRuntime
) -> bool:
    """Release a task for any replica. Returns `True` if its run still owned it."""
    with runtime.steps.step(Step.RELEASE, [command.run.task_id], reason=reason):
        (released,) = await runtime.retry.until_available(lambda: backend.store.release([command]))
    return released


async def checked_result(
    begin_task: asyncio.Task[tuple[Backend, BeginResult]], result: SegmentResult
) -> SegmentResult:
    """Return `result`, unless writing the row found another owner or a cancel.

    The code may have ended without waiting for that write.
    """
    match (await begin_task)[1]:
        case Fenced():
            return Stopped(StopReason.LOST)
        case CancelFound():
            return Stopped(StopReason.CANCELLED)
        case _:
            return result
