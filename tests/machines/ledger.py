"""The expected state of every task, checked against each answer of the store and then updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from machines.story import Story, plain
from meshpoint.model.checkpoint import (
    AllArrived,
    Arrival,
    Begin,
    BeginResult,
    Begun,
    Cancel,
    CancelBeforeRequest,
    CancelFound,
    CancelledNow,
    CancelRequested,
    CancelResult,
    CancelTooLate,
    Claim,
    Committed,
    Duplicate,
    End,
    Ended,
    EndResult,
    Fenced,
    MadeReady,
    PastDeadline,
    Pause,
    PauseResult,
    Release,
    Replica,
    Requester,
    Resumable,
    Run,
    StillWaiting,
    TaskState,
    Unknown,
    WrongSender,
)
from meshpoint.model.ids import ReplicaId, RunId, TaskId
from meshpoint.ports.clock import Clock
from meshpoint.testing.conformance.build import TIMINGS


class Ledger:
    """Everything the store has promised.

    Each method raises AssertionError if an answer breaks a promise.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.stories: dict[TaskId, Story] = {}
        self.gone: dict[TaskId, Story] = {}
        self._granted: dict[tuple[TaskId, int], tuple[ReplicaId, RunId]] = {}

    @property
    def now(self) -> datetime:
        """Current time of the store's clock."""
        return self._clock.now()

    def in_state(self, *states: TaskState) -> list[Story]:
        """Tasks whose state is among `states`."""
        return [story for story in self.stories.values() if story.state in states]

    def grant(self, story: Story, run: Run, replica: Replica) -> None:
        """Make `run` the owner.

        A fence is granted once, to one run of one replica, and always rises.
        """
        before = self._granted.setdefault((run.task_id, run.fence), (replica.id, run.id))
        assert before == (replica.id, run.id), f"{run} was given to {before} and to {replica.id}"
        first = not story.runs and story.generation == 0
        assert first or run.fence > story.fence, f"{run} does not raise the fence {story.fence}"
        assert (run.task_id, run.generation) == (story.task_id, story.generation)
        story.own(run, replica, self.now)

    def resumed(self, story: Story, task: Resumable, replica: Replica) -> None:
        """Check that `replica` was given the task with exactly one outcome per call."""
        self.grant(story, task.run, replica)
        self.shows(story, task)

    def shows(self, story: Story, task: Resumable) -> None:
        """Check that the task was shown as it is."""
        outcomes = tuple((call_id, peer, plain(outcome)) for call_id, peer, outcome in task.outcomes)
        shown = replace(task, outcomes=outcomes, request=task.request if story.pause is None else None)
        assert shown == story.resumable(), f"resumed as {shown}\nnot as {story.resumable()}"

    def began(self, begin: Begin, result: BeginResult) -> None:
        """Check and apply one `begin` result."""
        run, story = replace(begin.run, fence=1, generation=0), self.stories.get(begin.run.task_id)
        if story is None:
            assert result == Begun(run), result
            story = Story(run.task_id, run.agent, begin.requester, TaskState.RUNNING, begin.request)
            self.stories[run.task_id] = story
            self.grant(story, run, begin.replica)
        elif story.state is TaskState.CANCELLED:
            assert result == CancelFound(None), result
        else:
            assert result == (Begun(run) if story.owner == run else Fenced()), result

    def paused(self, pause: Pause, result: PauseResult) -> None:
        """Check and apply one `pause` result."""
        story = self.stories.get(pause.run.task_id)
        refusal = self._refusal(pause, story)
        if refusal is not None:
            assert result == refusal, f"{result}, not {refusal}"
            return
        if story is None:
            run, requester = pause.run, pause.requester
            story = Story(run.task_id, run.agent, requester, TaskState.WAITING, pause.request)
            self.stories[run.task_id] = story
        if story.written_by != pause.run.id or story.state is TaskState.RUNNING:
            story.checkpoint(pause, self.now)
        self._committed(story, result)

    def _refusal(self, pause: Pause, story: Story | None) -> PauseResult | None:
        run, deadline = pause.run, pause.requester.deadline
        late = PastDeadline() if deadline is not None and deadline <= self.now else None
        if story is None:
            return late if run.fence == 0 else Fenced()
        if story.state is TaskState.CANCELLED:
            return CancelFound(None)
        if story.state in {TaskState.WAITING, TaskState.READY} and story.written_by == run.id:
            return None if story.generation == run.generation + 1 else Fenced()
        if not story.owned_by(run):
            return Fenced()
        return CancelFound(run) if story.cancel_requested else late

    def _committed(self, story: Story, result: PauseResult) -> None:
        to_send = [(call.id, call.planned.peer, call.deadline) for call in story.pending if not call.dispatched]
        assert isinstance(result, Committed), result
        assert result.state is story.state
        assert [(send.sub_task_id, send.peer, send.deadline) for send in result.dispatches] == to_send

    def claimed(self, claims: Sequence[Claim], replica: Replica, slots: int, results: Sequence[Arrival]) -> None:
        """Check and apply the results of a batch of claims."""
        held = sum(isinstance(result, AllArrived) for result in results)
        taken = refused = 0
        for claim, result in zip(claims, results, strict=True):
            if self._claim(claim, replica, result):
                taken += isinstance(result, AllArrived)
                refused += isinstance(result, MadeReady) and self.stories[claim.task_id].readable_by(replica)
        assert taken <= slots, f"{taken} tasks were acquired with {slots} slots"
        assert not refused or held >= slots, f"{refused} tasks were not acquired with {slots - held} slots free"

    def _claim(self, claim: Claim, replica: Replica, result: Arrival) -> bool:
        """Check one result; return whether the claim met its join."""
        story = self.stories.get(claim.task_id)
        call = next((row for row in story.rows if row.id == claim.sub_task_id), None) if story else None
        if story is None or call is None:
            assert result == Unknown(claim.task_id, claim.sub_task_id), result
            return False
        if claim.sender is not None and claim.sender != call.planned.peer:
            assert result == WrongSender(claim.task_id, claim.sub_task_id, call.planned.peer), result
            return False
        if call.outcome is not None:
            if call.claim_id == claim.id:
                self._repeated(story, claim, replica, result)
            else:
                assert result == Duplicate(claim.task_id, claim.sub_task_id), result
            return False
        call.record(claim.outcome, claim.id)
        if not story.met:
            assert result == StillWaiting(claim.task_id, claim.sub_task_id), result
            return False
        self.gone_on(story, claim.id, replica, result)
        return True

    def gone_on(self, story: Story, run_id: RunId | None, replica: Replica, result: object) -> None:
        """Apply a met join: open calls are closed, and the task has an owner or is ready."""
        notices = story.close_pending(self.now)
        assert isinstance(result, AllArrived | MadeReady), result
        assert result.cancels == notices
        if isinstance(result, MadeReady):
            story.make_ready(self.now, run_id)
        else:
            assert story.readable_by(replica)
            assert run_id in {None, result.task.run.id}
            self.resumed(story, result.task, replica)

    def _repeated(self, story: Story, claim: Claim, replica: Replica, result: Arrival) -> None:
        itself = story.written_by == claim.id
        if itself and story.state is TaskState.RUNNING and story.replica == replica.id:
            assert isinstance(result, AllArrived), result
            self.shows(story, result.task)
        elif itself and story.state is TaskState.READY:
            assert isinstance(result, MadeReady), result
        else:
            assert result == StillWaiting(claim.task_id, claim.sub_task_id), result

    def ended(self, end: End, result: EndResult) -> None:
        """Check and apply one `end` result."""
        story = self.stories.get(end.run.task_id)
        if story is not None and story.owned_by(end.run):
            story.entomb(end.state, end.reply, end.run.id, self.now)
        itself = story is not None and story.state.ended and story.written_by == end.run.id
        expected = Ended(story.reply_at(self.now)) if story is not None and itself else Fenced()
        assert result == expected, f"{result}, not {expected}"

    def released(self, release: Release, result: bool) -> None:
        """Check and apply one `release` result."""
        run, story = release.run, self.stories.get(release.run.task_id)
        if story is None or not story.owned_by(run):
            idle = story is not None and story.state in {TaskState.READY, TaskState.PARKED}
            itself = story is not None and (story.written_by, story.generation) == (run.id, run.generation)
            assert result == (idle and itself), result
            return
        assert result, "the owner's release was refused"
        story.make_ready(self.now + release.not_before, run.id)
        if release.incompatible is not None:
            story.incompatible_since = story.incompatible_since or self.now
            if self.now - story.incompatible_since >= TIMINGS.incompatible_limit:
                story.state, story.due_at = TaskState.PARKED, None

    def cancelled(self, cancel: Cancel, result: CancelResult) -> None:
        """Check and apply one `cancel` result."""
        story = self.stories.get(cancel.task_id)
        expected: CancelResult
        if story is None:
            story = Story(cancel.task_id, cancel.agent, Requester(), TaskState.CANCELLED, fence=0)
            story.entomb(TaskState.CANCELLED, cancel.reply, cancel.run_id, self.now)
            self.stories[cancel.task_id] = story
            expected = CancelBeforeRequest()
        elif story.state is TaskState.RUNNING:
            story.cancel_requested = True
            expected = CancelRequested(story.replica)
        elif story.state.ended:
            again = story.fence == 0 and story.written_by == cancel.run_id
            expected = CancelBeforeRequest() if again else CancelTooLate(story.reply_at(self.now))
        else:
            notices = story.close_pending(self.now)
            story.entomb(TaskState.CANCELLED, cancel.reply, cancel.run_id, self.now)
            expected = CancelledNow(story.reply_at(self.now), notices)
        assert result == expected, f"{result}, not {expected}"
