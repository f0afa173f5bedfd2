"""Run the live segments of one replica, each from its trigger until it is settled.

`start` and `resume` begin a segment, `_run` drives it, and `settlement.Settlement` commits its
result, publishes and acks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, assert_never

from pydantic import JsonValue

from meshpoint.engine import claim, parsing, running
from meshpoint.engine.backend import Backend
from meshpoint.engine.begin import commit_begin, commit_operation
from meshpoint.engine.commit import Commits, release
from meshpoint.engine.containment import is_defect
from meshpoint.engine.dispatch import Dispatcher
from meshpoint.engine.isolated_segment import (
    IsolationImpossible,
    find_exhausted_reason,
    run_isolated,
)
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.refusals import find_refusal, internal_error_text
from meshpoint.engine.running import AgentCode, overdue_outcome, run_until_deadline
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import (
    Agent,
    OpenOperation,
    RequestedSegment,
    Segment,
    StopReason,
    Workspace,
)
from meshpoint.engine.settlement import Settlement
from meshpoint.engine.status_sender import StatusSender
from meshpoint.engine.task_log import TaskLog
from meshpoint.errors import IncompatibleState
from meshpoint.model.call_attempts import final_failure
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import StatusReporter, TaskExecutionContext
from meshpoint.model.envelopes import decode_request
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import copy_containers
from meshpoint.model.mailbox import MailAccepted
from meshpoint.model.outcomes import Failed, FailureKind, Outcomes
from meshpoint.model.status_metadata import UpdateKind
from meshpoint.model.subtasks import Operation
from meshpoint.model.tasks import Resumable, Run
from meshpoint.model.transitions import (
    BeginCommitted,
    BeginResult,
    CallRetried,
    CancelFound,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    Fenced,
    JoinCompleted,
    Overdue,
    Release,
    StillWaiting,
    TaskLocked,
    TaskReady,
    UnknownCall,
    WrongSender,
)
from meshpoint.model.usage import TokenUsage, parse_usage
from meshpoint.model.waits import received_outcome
from meshpoint.ports.agent import ReadsLog, select_version
from meshpoint.ports.isolation import Isolation

log = logging.getLogger("meshpoint.segment_runner")

_DUPLICATE_RUN_DELAY = timedelta(seconds=1)
"""Delay before a second run continues, after a database outage left the task in two backends."""
_SegmentCode: TypeAlias = Callable[[], Awaitable[running.SegmentResult]]
"""The work to run in a slot.

A callable, not a coroutine: if the replica ends before it starts, there is nothing to close.
"""


class SegmentRunner:
    """Runs agent code in slots, and resumes the tasks whose join a response completes.

    `adjust_prefetch` adapts the prefetch to the number of unacked requests. `unfinished_code` has
    the code that did not stop in a drain.
    """

    def __init__(
        self,
        runtime: ReplicaRuntime,
        agent: Agent,
        tasks: LiveTasks,
        dispatcher: Dispatcher,
        adjust_prefetch: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._agent, self._newest_version = agent, select_version(agent, "")
        self.tasks = tasks
        self._publisher = dispatcher.publisher
        self._spawn = runtime.background.spawn
        self.settlement = Settlement(
            runtime,
            Commits(runtime),
            tasks,
            dispatcher,
            adjust_prefetch,
            self.record_outcomes,
        )
        self.unfinished_code: dict[asyncio.Task[object], Run] = {}

    def abandon_unstarted(self, segment: Segment) -> None:
        """Forget a task that has not started.

        If its row says that it runs here, a drain releases it first.
        """
        if not self.tasks.is_draining or segment.shared_backend is None:
            self.tasks.remove(segment)
            return
        self._runtime.slots.release(-1)  # it holds no slot
        self._launch(segment, partial(_return_result, running.Stopped(StopReason.DRAINING)))

    def start(self, segment: RequestedSegment, request: parsing.Request) -> None:
        """Run the first segment of an arrived task. The caller's slot passes to it."""
        segment.decided.set()
        open_operation = partial(self._open_operation, segment)
        self._launch(segment, partial(self._run_first, segment, request, open_operation))

    def end_overdue(self, backend: Backend, overdue: Overdue) -> None:
        """End a task that was not continued in time, without running its code."""
        state = (
            "parked" if overdue.parked_reason else "suspended" if overdue.is_suspended else "ready"
        )
        why = f": {overdue.parked_reason}" if overdue.parked_reason else ""
        if overdue.past_deadline:
            message = f"the task's deadline has passed while it was {state}{why}"
            failed = Failed(FailureKind.TIMEOUT, message)
        else:
            failed = Failed(FailureKind.ERROR, f"no version continued the parked task{why}")
        self._runtime.slots.release(-1)  # takes a slot without waiting, for `resume` to inherit
        self.resume(backend, overdue.task, failed=failed)

    def resume(
        self,
        backend: Backend,
        task: Resumable,
        *,
        rescued: bool = False,
        isolated: bool = False,
        failed: Failed | None = None,
    ) -> None:
        """Run the next segment of a task that this replica has acquired, or end it as `failed`.

        The segment inherits the caller's slot and, with `isolated`, its slot for suspects. An
        in-process task does not continue once its request was requeued.
        """
        if self.tasks.has_released_all and not backend.is_shared:
            self._runtime.release_slots(is_suspect=isolated)
            return
        if not backend.is_shared:
            self.tasks.unacked.mark_begun(task.run.task_id)
        segment = Segment(
            run=task.run,
            requester=task.requester,
            digest=task.digest,
            backend=backend,
            attached=[*reversed(task.followers)],  # the earliest first
        )
        segment.decided.set()
        if earlier := self.tasks.segments.get(task.run.task_id):
            if earlier.backend is not None and earlier.backend is not backend:
                # Its request was redelivered, so it runs in both backends. Let one run at a time.
                self._runtime.release_slots(is_suspect=isolated)
                command = Release(task.run, _DUPLICATE_RUN_DELAY)
                self._spawn(self._release, backend, command, "its other run is at work here")
                return
            self.tasks.stop_lost(earlier.run)  # this replica stalled, then rescued its own task
        self.tasks.segments[task.run.task_id] = segment
        if failed is not None and not task.cancel_requested:
            self._launch(segment, partial(_return_result, failed))
            return
        code = self._choose_code(segment, backend, task, rescued=rescued, isolated=isolated)
        self._launch(segment, partial(self._run_suspect, code) if isolated else code)

    def _choose_code(
        self, segment: Segment, backend: Backend, task: Resumable, *, rescued: bool, isolated: bool
    ) -> _SegmentCode:
        if (result := self._result_without_code(segment, task, rescued=rescued)) is not None:
            segment.known_usage = _known_usage(task)
            return partial(_return_result, result)
        if task.run.generation == 0 and task.request is not None:
            code = partial(self._restart, segment, backend, task, task.request)
        else:
            code = partial(self._restore_and_resume, segment, backend, task)
        if not isolated:
            return code
        run_alone = partial(self._run_alone, code)
        return (
            run_alone
            if self._runtime.isolation is None
            else partial(self._run_isolated, self._runtime.isolation, segment, task, run_alone)
        )

    def _result_without_code(
        self, segment: Segment, task: Resumable, *, rescued: bool
    ) -> running.SegmentResult | None:
        """The result of a task whose code must not run, or `None`."""
        if task.cancel_requested:
            return running.Stopped(StopReason.CANCELLED)
        if task.requester.is_overdue(self._runtime.clock.now()):
            return overdue_outcome(task)
        if task.refusal_reason is not None:
            return Failed(FailureKind.ERROR, task.refusal_reason)
        if exhausted_reason := find_exhausted_reason(task, self._runtime.options):
            segment.dead_reason = exhausted_reason + _resume_advice(task)
            return final_failure(FailureKind.ERROR, segment.dead_reason)
        if rescued and task.checkpoint is not None and self._runtime.replica.fails_lost:
            reason = f"the replica that ran it is gone{_resume_advice(task)}"
            self._runtime.steps.emit(Step.OWNER_LOST, task.run.task_id, reason=reason)
            return Failed(FailureKind.ERROR, reason)
        return None

    async def _run_suspect(self, code: _SegmentCode) -> running.SegmentResult:
        try:
            return await code()
        finally:
            self._runtime.suspect_slots.release()
            self.tasks.tasks_ready.set()  # a suspect may be waiting

    async def _run_isolated(
        self, isolation: Isolation, segment: Segment, task: Resumable, run_alone: _SegmentCode
    ) -> running.SegmentResult:
        """Run a suspect in its own process.

        If the agent cannot be imported there, the suspect runs alone in this process.
        """
        try:
            return await run_isolated(segment, task, isolation, self._runtime)
        except IsolationImpossible as error:
            log.warning(
                "task %s: runs alone in its replica, its own process %s", task.run.task_id, error
            )
            return await run_alone()

    async def _run_alone(self, code: _SegmentCode) -> running.SegmentResult:
        """Run a suspect while nothing else runs here.

        If it kills this process, no other task is lost.
        """
        async with self._runtime.slots.exclusive():
            return await code()

    async def _restart(
        self, segment: Segment, backend: Backend, task: Resumable, stored_request: bytes
    ) -> running.SegmentResult:
        request = parsing.parse_request(
            decode_request(stored_request), self._runtime.options
        ).with_requester(task.requester)
        if failure := find_refusal(request, self._runtime):
            return failure
        try:
            segment.log = TaskLog.of(task)
        except IncompatibleState as error:
            return running.Incompatible.from_error(error, from_checkpoint=True)
        track = partial(_track, segment, backend, self._runtime)
        return await self._run_first(segment, request, track, (backend, task))

    async def _run_first(
        self,
        segment: Segment,
        request: parsing.Request,
        open_operation: OpenOperation,
        stored: tuple[Backend, Resumable] | None = None,
    ) -> running.SegmentResult:
        """Start the agent. An earlier run may have `stored` an operation."""
        context = request.create_context(partial(self._report, segment))
        agent = (
            self._newest_version
            if stored is None
            else select_version(self._agent, stored[1].state_format)
        )
        workspace = segment.workspace = Workspace(
            segment, context, self._runtime, open_operation, agent, request.input
        )
        if stored is not None:
            _restore_usage(context, stored[1])
            try:
                await workspace.restore_operation(*stored)
            except IncompatibleState as error:
                return running.Incompatible.from_error(error, from_checkpoint=True)
        # A copy, because the row stores the original's digest.
        call_agent = partial(agent.start, context, copy_containers(request.input))
        return await AgentCode(call_agent, segment, workspace, self._runtime).run()

    async def _restore_and_resume(
        self, segment: Segment, backend: Backend, task: Resumable
    ) -> running.SegmentResult:
        agent = select_version(self._agent, task.state_format)
        try:
            with self._runtime.steps.step(
                Step.RESTORE, [task.run.task_id], generation=task.run.generation
            ):
                context, outcomes = restore_context(task, partial(self._report, segment))
                if getattr(agent, "merge_artifacts", True):  # `MergesArtifacts`
                    for outcome in outcomes.values():
                        if outcome.artifacts:
                            context.produced_artifacts.extend(outcome.artifacts)
                segment.log, segment.answers = TaskLog.of(task), task.outcomes
                call_agent = resume_call(agent, context, task, segment.log, outcomes)
                track = partial(_track, segment, backend, self._runtime)
                workspace = segment.workspace = Workspace(
                    segment, context, self._runtime, track, agent
                )
                await workspace.restore_operation(backend, task)
        except IncompatibleState as error:
            return running.Incompatible.from_error(error)
        return await AgentCode(call_agent, segment, workspace, self._runtime).run()

    async def _report(self, segment: Segment, kind: UpdateKind, content: JsonValue) -> None:
        """Send an update of a segment's code to the requester. Dropped once the code has ended."""
        if segment.settling or segment.removed.is_set():
            return
        if segment.updates is None:
            segment.updates = StatusSender(segment, self._runtime, self._publisher)
        await segment.updates.send(kind, content)

    async def _open_operation(
        self, segment: RequestedSegment, operation: Operation | None
    ) -> BeginResult:
        """Write a running task whose first subtask or step is about to run, and ack its request.

        The write continues even if the waiting code is stopped, because whether a row exists
        decides how the task can end.
        """
        if segment.backend is None:
            begins = segment.begin_task is None
            if segment.begin_task is None:
                segment.begin_task = asyncio.create_task(self._write_task(segment, operation))
            _, result = await asyncio.shield(segment.begin_task)
            if begins or operation is None or not isinstance(result, BeginCommitted):
                return result
        if segment.backend is None or operation is None:
            return BeginCommitted(segment.run)
        return await commit_operation(segment, segment.backend, self._runtime, operation)

    async def ensure_row(self, segment: Segment) -> Backend | None:
        """Write the row of a task whose first segment runs here, so that it can keep signals.

        Returns its backend. `None` if it has no row: its code has not started or has ended, or
        another run owns the task.
        """
        if segment.backend is None and isinstance(segment, RequestedSegment):
            if segment.code is None or segment.settling:
                return None
            match await self._open_operation(segment, None):
                case CancelFound():
                    segment.stop(StopReason.CANCELLED)
                case Fenced():
                    segment.stop(StopReason.LOST)
                case BeginCommitted():
                    pass
        return segment.backend

    def handle_mail(self, backend: Backend, task_id: TaskId, accepted: MailAccepted) -> None:
        """Act on a signal or an answer that may have completed a join."""
        if accepted.is_ready:
            self.handle_arrival(backend, TaskReady(task_id, task_id, accepted.cancels))

    async def _write_task(
        self, segment: RequestedSegment, operation: Operation | None
    ) -> tuple[Backend, BeginResult]:
        backend, result = await commit_begin(segment, self._runtime, operation, may_degrade=True)
        if isinstance(result, BeginCommitted):
            segment.run, segment.backend = result.run, backend
            backend.start_renewing(result.run)
            if backend.is_shared:
                await self.settlement.attaches.settle_unrecorded(segment, backend, None)
                await self.settlement.ack(segment)
        return backend, result

    def _launch(self, segment: Segment, code: _SegmentCode) -> None:
        if self.tasks.has_released_all:
            segment.stop(StopReason.DRAINING)
        if segment.backend is not None:
            segment.backend.start_renewing(segment.run)
        self._spawn(self._run, segment, code)

    async def _run(self, segment: Segment, code: _SegmentCode) -> None:
        task_id = segment.run.task_id
        try:
            result = await self._run_code(segment, code)
            await self.settlement.settle(segment, result, self._stop_renewing)
        except BaseException as error:
            if not is_defect(error):
                raise
            log.exception("task %s: left to its lease, or to its request coming again", task_id)
            await self._reschedule(segment)
        finally:
            self._stop_renewing(segment)
            if segment.begin_task is not None:
                segment.begin_task.cancel()
            if segment.workspace is not None:
                await segment.workspace.close()
        self.tasks.remove(segment)
        segment.workspace = segment.updates = None  # break reference cycles
        if segment.deliveries:  # requests not acked yet
            await self.settlement.requeue(segment)
        if self.tasks.has_released_all:
            await self.settlement.requeue_unacked()

    async def _run_code(self, segment: Segment, code: _SegmentCode) -> running.SegmentResult:
        try:
            # A slot limits running code, not waiting for the database: in an outage, in-process
            # tasks need it.
            try:
                if segment.requester.deadline is None:
                    result = await code()
                else:
                    result = await run_until_deadline(segment, code, self._runtime)
            finally:
                self._runtime.slots.release()
            workspace = segment.workspace
            if workspace is not None and (workspace.subtasks or workspace.steps):
                await workspace.cancel_unawaited()
            if segment.updates is not None:
                await segment.updates.close()
            return result
        except BaseException as error:
            if not is_defect(error):
                raise
            log.exception("task %s: its segment could not be settled", segment.run.task_id)
            return Failed(FailureKind.ERROR, internal_error_text(error))

    async def _reschedule(self, segment: Segment) -> None:
        """Retry an in-memory task later.

        It has no lease that could expire, and its request stays unacked.
        """
        if segment.backend is not None and not segment.backend.is_shared:
            try:
                delay = self._runtime.options.incompatible_pause
                command = Release(segment.run, delay, counts_as_attempt=True)
                await self._release(segment.backend, command, "a defect")
            except Exception:
                log.exception("task %s: it cannot be rescheduled", segment.run.task_id)

    async def _release(self, backend: Backend, command: Release, reason: str) -> None:
        await release(backend, command, reason, self._runtime)

    def _stop_renewing(self, segment: Segment) -> None:
        """Stop renewing the lease, unless the code is still running.

        As long as it runs, no other replica may run the task.
        """
        code = segment.code
        if code is not None and not code.done():
            if code not in self.unfinished_code:
                self.unfinished_code[code] = segment.run
                code.add_done_callback(partial(self._on_late_end, segment.run))
        elif segment.run.fence:
            self._runtime.stop_renewing(segment.run)

    def _on_late_end(self, run: Run, code: asyncio.Task[object]) -> None:
        self.unfinished_code.pop(code, None)
        self._runtime.stop_renewing(run)

    async def record_outcomes(
        self, backend: Backend, claims: Sequence[Claim]
    ) -> list[ClaimResult]:
        """Record outcomes and resume the tasks whose join they complete.

        Raises:
            StoreUnavailable: As for `ReplicaRuntime.ask_store`.
        """
        with self.tasks.claiming():
            arrivals = await claim.claim_responses(backend, claims, self._runtime)
            self.handle_arrivals(backend, arrivals)
        return arrivals

    def report_retry(self, retried: CallRetried) -> None:
        """Emit the event of a failed attempt that another attempt follows."""
        self._runtime.steps.emit(
            Step.CALL_RETRIED,
            retried.task_id,
            sub_task_id=retried.sub_task_id,
            next_id=retried.next_id,
            peer=retried.peer,
            kind=retried.kind.value,
            attempt=retried.number,
            seconds=round(retried.wait.total_seconds(), 3),
        )

    def handle_arrivals(self, backend: Backend, arrivals: Sequence[ClaimResult]) -> None:
        """Handle `arrivals`.

        A defect in one arrival frees its slot and is raised after the others have started.
        """
        defects: list[Exception] = []
        for arrival in arrivals:
            try:
                self.handle_arrival(backend, arrival)
            except Exception as error:
                if isinstance(arrival, JoinCompleted):
                    self._runtime.slots.release()
                defects.append(error)
        if defects:
            raise defects[0]

    def handle_arrival(self, backend: Backend, arrival: ClaimResult) -> None:
        """Act on one recorded or refused outcome."""
        match arrival:
            case JoinCompleted(task=task):
                if self.tasks.is_running(task.run):
                    # A repeated claim found its own commit after the task had resumed.
                    self._runtime.slots.release()
                else:
                    self.resume(backend, task)
            case TaskReady():
                self.tasks.tasks_ready.set()
                if backend.is_shared:
                    self._spawn(self._publisher.wake_others)
            case CallRetried():
                self.report_retry(arrival)
            case StillWaiting() | TaskLocked():
                # The response to a locked task is retried. Unsent messages stay due.
                pass
            case DuplicateOutcome():
                self._runtime.steps.emit(
                    Step.DUPLICATE, arrival.task_id, sub_task_id=arrival.sub_task_id
                )
            case UnknownCall():
                self._runtime.steps.emit(
                    Step.LATE, arrival.task_id, sub_task_id=arrival.sub_task_id
                )
            case WrongSender():
                pass  # the delivery is dead-lettered with this as its reason
            case _:
                assert_never(arrival)
        if isinstance(arrival, JoinCompleted | TaskReady) and arrival.cancels:
            self._spawn(self.settlement.send, backend, arrival.cancels)

    async def release_all(self) -> None:
        """Stop running code and hand its tasks, and tasks waiting in memory, to other replicas.

        After that, no code starts here, and nothing here answers a requeued request.
        """
        for segment in list(self.tasks.segments.values()):
            segment.stop(StopReason.DRAINING)
        self.tasks.has_released_all = True
        await self.settlement.requeue_unacked()


async def _track(
    segment: Segment, backend: Backend, runtime: ReplicaRuntime, operation: Operation | None
) -> BeginResult:
    """Make a task with a row an operation, if one is given."""
    if operation is None:
        return BeginCommitted(segment.run)
    return await commit_operation(segment, backend, runtime, operation)


def restore_context(
    task: Resumable, report: StatusReporter
) -> tuple[TaskExecutionContext, Outcomes]:
    """Restore the context of a resumed task and the outcomes it waited for, in call order.

    The peers' token usage is added to the task's, once per pause: the stored context does not
    include it yet, and the next checkpoint will.

    Raises:
        IncompatibleState: A later version of Meshpoint wrote the context.
    """
    context = TaskExecutionContext.from_checkpoint_dict(task.context, report=report)
    for _, peer, outcome in task.outcomes:
        context.token_usage.merge(outcome.usage, source=peer)
    return context, Outcomes(
        {call_id: received_outcome(peer, outcome) for call_id, peer, outcome in task.outcomes}
    )


def _restore_usage(context: TaskExecutionContext, task: Resumable) -> None:
    """Start an attempt with the tokens of the earlier ones.

    A parent has counted the tokens of its child's earlier attempts itself.
    """
    earlier = task.context.get("token_usage")
    if earlier is not None and task.requester.parent_task_id is None:
        context.token_usage.add(TokenUsage.model_validate(earlier))


def _known_usage(task: Resumable) -> TokenUsage:
    """The tokens of a task up to the end of its last pause, including its peers."""
    if task.run.generation == 0 and task.requester.parent_task_id is not None:
        return TokenUsage()
    usage = parse_usage(task.context.get("token_usage")) or TokenUsage()
    for _, peer, outcome in task.outcomes:
        usage.merge(outcome.usage, source=peer)
    return usage


def resume_call(
    agent: Agent, context: TaskExecutionContext, task: Resumable, log: TaskLog, outcomes: Outcomes
) -> Callable[[], Awaitable[Paused | Done[Any]]]:
    """Build the call that resumes `agent` from the task's state and log.

    Raises:
        IncompatibleState: The state has a log, and the agent reads none.
    """
    if isinstance(agent, ReadsLog):
        return partial(agent.resume_with_log, context, task.state, log.agent, outcomes)
    if log.agent:
        raise IncompatibleState(f"{agent.name} reads no logs, and the state has one")
    return partial(agent.resume, context, task.state, outcomes)


def _resume_advice(task: Resumable) -> str:
    if task.checkpoint is None:
        return ""
    if task.checkpoint == 0:
        return "; no checkpoint"
    return f"; checkpoint available: resume with `meshpoint tasks resume {task.run.task_id}`"


async def _return_result(result: running.SegmentResult) -> running.SegmentResult:
    return result
