"""The expected state of every task, checked against each answer of the store and then updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from machines.task_model import CallModel, TaskModel, without_message
from meshpoint.model.ids import ReplicaId, RunId, TaskId
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import Replica, Requester, Resumable, Run, TaskState
from meshpoint.model.transitions import (
    Append,
    Attach,
    Attached,
    AttachEnded,
    AttachRefused,
    AttachResult,
    AttachUnknown,
    Begin,
    BeginCommitted,
    BeginResult,
    CallRetried,
    Cancel,
    CancelBeforeRequest,
    CancelCommitted,
    CancelFound,
    CancelRequested,
    CancelResult,
    CancelTooLate,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    End,
    EndCommitted,
    EndResult,
    Fenced,
    JoinCompleted,
    PastDeadline,
    Pause,
    PauseCommitted,
    PauseResult,
    Release,
    SaveResult,
    StillWaiting,
    SuspendRefused,
    TaskReady,
    TaskSuspended,
    UnknownCall,
    WrongSender,
)
from meshpoint.ports.clock import Clock


class Ledger:
    """Everything the store has promised.

    Each method raises AssertionError if an answer breaks a promise.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.models: dict[TaskId, TaskModel] = {}
        self.purged: dict[TaskId, TaskModel] = {}
        self._owner_by_fence: dict[tuple[TaskId, int], tuple[ReplicaId, RunId]] = {}

    @property
    def now(self) -> datetime:
        """Current time of the store's clock."""
        return self._clock.now()

    def in_state(self, *states: TaskState) -> list[TaskModel]:
        """Tasks whose state is among `states`."""
        return [model for model in self.models.values() if model.state in states]

    def grant(self, model: TaskModel, run: Run, replica: Replica) -> None:
        """Make `run` the owner.

        A fence is granted once, to one run of one replica, and always rises.
        """
        granted = self._owner_by_fence.setdefault((run.task_id, run.fence), (replica.id, run.id))
        assert granted == (replica.id, run.id), f"{run} was given to {granted} and to {replica.id}"
        is_first = not model.runs and model.generation == 0
        assert is_first or run.fence > model.fence, f"{run} does not raise the fence {model.fence}"
        assert (run.task_id, run.generation) == (model.task_id, model.generation)
        model.set_owner(run, replica, self.now)

    def check_resumed(self, model: TaskModel, task: Resumable, replica: Replica) -> None:
        """Check that `replica` was given the task with exactly one outcome per call."""
        self.grant(model, task.run, replica)
        self.check_shown(model, task)

    def check_shown(self, model: TaskModel, task: Resumable) -> None:
        """Check that the task was shown as it is."""
        outcomes = tuple(
            (call_id, peer, without_message(outcome)) for call_id, peer, outcome in task.outcomes
        )
        shown = replace(
            task, outcomes=outcomes, request=task.request if model.pause is None else None
        )
        assert shown == model.to_resumable(), f"resumed as {shown}\nnot as {model.to_resumable()}"

    def check_begin(self, begin: Begin, result: BeginResult) -> None:
        """Check and apply one `begin` result."""
        run, model = replace(begin.run, fence=1, generation=0), self.models.get(begin.run.task_id)
        if model is None:
            assert result == BeginCommitted(run), result
            model = TaskModel(
                run.task_id, run.agent, begin.requester, TaskState.RUNNING, begin.request
            )
            self.models[run.task_id] = model
            model.schedule_keep_alive(self.now)
            self.grant(model, run, begin.replica)
        elif model.state is TaskState.CANCELLED:
            assert result == CancelFound(None), result
        else:
            assert result == (BeginCommitted(run) if model.owner == run else Fenced()), result

    def check_pause(self, pause: Pause, result: PauseResult) -> None:
        """Check and apply one `pause` result."""
        model = self.models.get(pause.run.task_id)
        refusal = self._expected_refusal(pause, model)
        if refusal is not None:
            assert result == refusal, f"{result}, not {refusal}"
            return
        if model is None:
            run, requester = pause.run, pause.requester
            model = TaskModel(run.task_id, run.agent, requester, TaskState.WAITING, pause.request)
            self.models[run.task_id] = model
        if model.written_by != pause.run.id or model.state is TaskState.RUNNING:
            model.checkpoint(pause, self.now)
        self._check_committed(model, result)

    def _expected_refusal(self, pause: Pause, model: TaskModel | None) -> PauseResult | None:
        run, requester = pause.run, (pause if model is None else model).requester
        late = PastDeadline() if requester.is_overdue(self.now) else None
        if model is None:
            return late if run.fence == 0 else Fenced()
        if model.state is TaskState.CANCELLED:
            return CancelFound(None)
        if model.state in {TaskState.WAITING, TaskState.READY} and model.written_by == run.id:
            return None if model.generation == run.generation + 1 else Fenced()
        if not model.is_owned_by(run):
            return Fenced()
        if pause.log is not None and pause.log.after != model.log_seq:
            return Fenced()
        return CancelFound(run) if model.cancel_requested else late

    def _check_committed(self, model: TaskModel, result: PauseResult) -> None:
        to_send = [
            (call.id, call.planned.peer, call.deadline)
            for call in model.pending_calls
            if not call.dispatched and call.attempt == 1  # the sweeper sends later attempts
        ]
        assert isinstance(result, PauseCommitted), result
        assert result.state is model.state
        assert [
            (send.sub_task_id, send.peer, send.deadline) for send in result.dispatches
        ] == to_send

    def check_append(self, append: Append, result: SaveResult) -> None:
        """Check and apply one `append` result."""
        run, model = append.run, self.models.get(append.run.task_id)
        if model is None or not model.is_owned_by(run):
            assert result == Fenced(), result
            return
        is_repeat = _has_written(model, append)
        if not is_repeat and model.log_seq != append.log.after:
            assert result == Fenced(), result
            return
        assert result == (CancelFound(run) if model.cancel_requested else SaveCommitted()), result
        if not is_repeat:
            model.append(append.log)
            model.appends.append(append)

    def check_claims(
        self, claims: Sequence[Claim], replica: Replica, slots: int, results: Sequence[ClaimResult]
    ) -> None:
        """Check and apply the results of a batch of claims."""
        slots_used = sum(isinstance(result, JoinCompleted) for result in results)
        acquired = refused = 0
        for claim, result in zip(claims, results, strict=True):
            if self._check_claim(claim, replica, result):
                acquired += isinstance(result, JoinCompleted)
                model = self.models[claim.task_id]
                left_ready = isinstance(result, TaskReady) and model.suspended_at is None
                refused += left_ready and model.is_readable_by(replica)
        assert acquired <= slots, f"{acquired} tasks were acquired with {slots} slots"
        assert not refused or slots_used >= slots, (
            f"{refused} tasks were not acquired with {slots - slots_used} slots free"
        )

    def _check_claim(self, claim: Claim, replica: Replica, result: ClaimResult) -> bool:
        """Check one result; return whether the claim met its join."""
        model = self.models.get(claim.task_id)
        call = (
            next((row for row in model.calls_with_row if row.id == claim.sub_task_id), None)
            if model
            else None
        )
        if model is None or call is None:
            assert result == UnknownCall(claim.task_id, claim.sub_task_id), result
            return False
        if claim.sender is not None and claim.sender != call.planned.peer:
            assert result == WrongSender(claim.task_id, claim.sub_task_id, call.planned.peer), (
                result
            )
            return False
        if call.outcome is not None:
            if call.claim_id == claim.id:
                self._check_repeated(model, claim, replica, result)
                return False
            if isinstance(claim.outcome, Failed) or not model.let_win(call, self.now):
                assert result == DuplicateOutcome(claim.task_id, claim.sub_task_id), result
                return False
        elif self._check_retried(model, call, claim, result):
            return False
        call.record(claim.outcome, claim.id)
        if not model.is_join_met:
            assert result == StillWaiting(claim.task_id, claim.sub_task_id), result
            return False
        self.check_join(model, claim.id, replica, result)
        return True

    def _check_retried(
        self, model: TaskModel, call: CallModel, claim: Claim, result: ClaimResult
    ) -> bool:
        """Apply a failure that another attempt follows. Returns `False` for any other outcome."""
        if not isinstance(claim.outcome, Failed) or not claim.retryable:
            return False
        kind, at_least = claim.outcome.kind, claim.retry_after or 0.0
        wait = model.next_wait(call, kind, self.now, at_least=at_least)
        if wait is None:
            return False
        call.record(claim.outcome, claim.id)
        self.add_attempt(model, call, kind, wait, result)
        return True

    def add_attempt(
        self, model: TaskModel, call: CallModel, kind: FailureKind, wait: timedelta, result: object
    ) -> None:
        """Check that another attempt follows `call`, and learn its id, which must be new."""
        assert isinstance(result, CallRetried), result
        assert result.next_id not in model.calls
        assert result == CallRetried(
            model.task_id,
            call.id,
            result.next_id,
            call.planned.peer,
            call.attempt + 1,
            wait,
            kind,
        )
        model.add_attempt(call, result.next_id, wait, self.now)

    def check_join(
        self, model: TaskModel, run_id: RunId | None, replica: Replica, result: object
    ) -> None:
        """Apply a met join: open calls are closed, and the task has an owner or is ready."""
        notices = model.close_pending(self.now)
        assert isinstance(result, JoinCompleted | TaskReady), result
        assert result.cancels == notices
        if isinstance(result, TaskReady):
            model.make_ready(self.now, run_id)
        else:
            assert model.is_readable_by(replica)
            assert model.suspended_at is None
            assert run_id in {None, result.task.run.id}
            self.check_resumed(model, result.task, replica)

    def _check_repeated(
        self, model: TaskModel, claim: Claim, replica: Replica, result: ClaimResult
    ) -> None:
        is_own_write = model.written_by == claim.id
        if is_own_write and model.state is TaskState.RUNNING and model.replica == replica.id:
            assert isinstance(result, JoinCompleted), result
            self.check_shown(model, result.task)
        elif is_own_write and model.state is TaskState.READY:
            assert isinstance(result, TaskReady), result
        else:
            assert result == StillWaiting(claim.task_id, claim.sub_task_id), result

    def check_end(self, end: End, result: EndResult) -> None:
        """Check and apply one `end` result."""
        model = self.models.get(end.run.task_id)
        if model is not None and model.is_owned_by(end.run):
            model.end_with_reply(end.state, end.reply, end.run.id, self.now)
        is_own_write = (
            model is not None and model.state.is_final and model.written_by == end.run.id
        )
        expected = (
            EndCommitted(model.reply_at(self.now))
            if model is not None and is_own_write
            else Fenced()
        )
        assert result == expected, f"{result}, not {expected}"

    def check_release(self, release: Release, result: bool) -> None:
        """Check and apply one `release` result."""
        run, model = release.run, self.models.get(release.run.task_id)
        if model is None or not model.is_owned_by(run):
            has_no_owner = model is not None and model.state in {TaskState.READY, TaskState.PARKED}
            is_own_write = model is not None and (model.written_by, model.generation) == (
                run.id,
                run.generation,
            )
            assert result == (has_no_owner and is_own_write), result
            return
        assert result, "the owner's release was refused"
        model.make_ready(self.now + release.delay, run.id)
        if release.parked_reason is not None and not model.cancel_requested:
            model.park(release.parked_reason, release.version, self.now)

    def check_unparked(self, task_ids: Sequence[TaskId], results: Sequence[bool]) -> None:
        """Check and apply the results of `unpark`."""
        for task_id, result in zip(task_ids, results, strict=True):
            model = self.models.get(task_id)
            is_parked = model is not None and model.state is TaskState.PARKED
            assert result == is_parked, result
            if model is not None and is_parked:
                model.state, model.due_at, model.suspended_at = TaskState.READY, self.now, None
                model.forget_parking()

    def check_suspended(self, task_ids: Sequence[TaskId], results: Sequence[object]) -> None:
        """Check and apply the results of `suspend`."""
        for task_id, result in zip(task_ids, results, strict=True):
            model = self.models.get(task_id)
            if model is None:
                assert result == SuspendRefused(None), result
            elif model.cancel_requested and not model.state.is_final:
                assert result == SuspendRefused(model.state, is_cancelled=True), result
            elif model.state.can_be_suspended or model.suspended_at is not None:
                repeated = model.suspended_at is not None
                assert result == TaskSuspended(model.state, repeated=repeated), result
                model.suspend(self.now)
            else:
                assert result == SuspendRefused(model.state), result

    def check_unsuspended(self, task_ids: Sequence[TaskId], results: Sequence[bool]) -> None:
        """Check and apply the results of `unsuspend`."""
        for task_id, result in zip(task_ids, results, strict=True):
            model = self.models.get(task_id)
            is_suspended = model is not None and model.suspended_at is not None
            assert result == is_suspended, result
            if model is not None and is_suspended:
                model.unsuspend(self.now)

    def check_attach(self, attach: Attach, result: AttachResult) -> None:
        """Check and apply one `attach` result."""
        model = self.models.get(attach.task_id)
        expected: AttachResult
        if model is None:
            expected = AttachUnknown()
        elif model.requester.app_id not in {None, attach.sender}:
            expected = AttachRefused(model.requester.app_id)
        elif model.state.is_final:
            expected = AttachEnded(model.reply_at(self.now))
        else:
            expected = Attached(model.state)
            before = model.addresses
            model.attach(attach.reply_to)
            dropped = [None, *(each for each in before if each not in model.addresses)]
            assert isinstance(result, Attached)
            assert result.dropped == dropped[-1]
        assert result == expected, f"{result}, not {expected}"

    def check_cancel(self, cancel: Cancel, result: CancelResult) -> None:
        """Check and apply one `cancel` result."""
        model = self.models.get(cancel.task_id)
        expected: CancelResult
        if model is None:
            model = TaskModel(
                cancel.task_id, cancel.agent, Requester(), TaskState.CANCELLED, fence=0
            )
            model.end_with_reply(TaskState.CANCELLED, cancel.reply, cancel.run_id, self.now)
            self.models[cancel.task_id] = model
            expected = CancelBeforeRequest()
        elif model.state is TaskState.RUNNING:
            model.cancel_requested, model.suspended_at = True, None
            expected = CancelRequested(model.replica)
        elif model.state.is_final:
            is_repeated = model.fence == 0 and model.written_by == cancel.run_id
            expected = (
                CancelBeforeRequest() if is_repeated else CancelTooLate(model.reply_at(self.now))
            )
        else:
            notices = model.close_pending(self.now)
            model.end_with_reply(TaskState.CANCELLED, cancel.reply, cancel.run_id, self.now)
            expected = CancelCommitted(model.reply_at(self.now), notices)
        assert result == expected, f"{result}, not {expected}"


def _has_written(model: TaskModel, append: Append) -> bool:
    """Whether the last append to the log is this one: a run appends one change at a time."""
    return any(
        (each.run.id, each.log.after, len(each.log.entries))
        == (append.run.id, append.log.after, len(append.log.entries))
        for each in model.appends[-1:]
    )
