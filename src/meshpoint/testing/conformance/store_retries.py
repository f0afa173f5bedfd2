"""Retried calls: attempts with their own ids, and one outcome."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshpoint.model.bodies import A2AMessage, Part, RequestBody, parse_body
from meshpoint.model.calls import ALL, FIRST, Join
from meshpoint.model.ids import RunId, TaskId, new_id, resumed_id
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import (
    CallState,
    CallSummary,
    CancelNotice,
    Dispatch,
    PlannedCall,
    TaskState,
)
from meshpoint.model.transitions import (
    CallRetried,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    JoinCompleted,
    Pause,
    StillWaiting,
    TaskReady,
    UnroutableCall,
    WrongSender,
)
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASED,
    PEER,
    SECOND,
    THERE,
    TIMEOUT,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_requester,
    a_revive,
    an_end,
    answered,
    cancels_to_send,
    error,
    kinds,
    ok,
    one,
    operating,
    outcomes,
    paused,
    row,
    sub,
    write_cancel,
    write_pause,
)

FOUR = RetryPolicy(max_attempts=4, initial_interval=2, jitter=False)
"""Waits of 2, 4 and 8 seconds."""
WAIT = 2 * SECOND


def a_retried_call(
    call_id: str = "a", *, retry: RetryPolicy = FOUR, **values: object
) -> PlannedCall:
    """A call with a policy. Its request can be sent under another id."""
    call = replace(a_call(call_id), retry=retry, **values)  # type: ignore[arg-type]
    message = A2AMessage(
        message_id=call.sub_task_id,
        role="ROLE_USER",
        parts=[Part(data={"for": call_id})],
        task_id=call.sub_task_id,
    )
    return replace(call, body=RequestBody(message=message).to_bytes())


async def attempts(store: CheckpointStore, pause: Pause, call_id: str = "a") -> list[CallSummary]:
    """The attempts at a call, oldest first."""
    _, calls = await row(store, pause.run.task_id)
    return [call for call in calls if call.call_id == call_id]


def answer(pause: Pause, sub_task_id: TaskId, outcome: Outcome, **values: object) -> Claim:
    """The response to one attempt."""
    claim = Claim(RunId(new_id()), pause.run.task_id, sub_task_id, outcome, PEER)
    return replace(claim, **values)  # type: ignore[arg-type]


async def fail(store: CheckpointStore, pause: Pause, **values: object) -> ClaimResult:
    """Let the newest attempt at call "a" fail."""
    newest = (await attempts(store, pause))[-1]
    claim = answer(pause, newest.sub_task_id, error(), **values)
    return one(await store.claim([claim], HERE, 1))


async def open_retry(store: CheckpointStore, *calls: str | PlannedCall, **values: object) -> Pause:
    """A task whose call "a" has failed once and waits for its second attempt."""
    pause = await paused(store, *(calls or (a_retried_call(),)), **values)
    await store.confirm_sent(await store.unsent(AGENT, 10))
    assert isinstance(await fail(store, pause), CallRetried)
    return pause


async def send_retry(store: CheckpointStore, clock: FakeClock, wait: timedelta = WAIT) -> Dispatch:
    """Let the next attempt begin, and send it."""
    clock.advance(wait)
    sends = [send for send in await store.unsent(AGENT, 10) if isinstance(send, Dispatch)]
    await store.confirm_sent(sends)
    return one(sends)


class RetrySuite:
    """A failure of an attempt is not counted while attempts remain."""

    async def test_a_failed_attempt_is_followed_by_another(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_retried_call())
        await store.confirm_sent((await write_pause(store, pause)).dispatches)
        clock.advance(SECOND)
        retried = await fail(store, pause)
        first = sub(pause, "a")
        summary, (failed, following) = await row(store, pause.run.task_id)
        next_id, kind = following.sub_task_id, FailureKind.ERROR
        assert retried == CallRetried(pause.run.task_id, first, next_id, PEER, 2, WAIT, kind)
        assert (summary.state, summary.completed, summary.expected) == (TaskState.WAITING, 0, 1)
        assert (failed.sub_task_id, failed.attempt, failed.outcome) == (first, 1, "error")
        assert (failed.is_superseded, failed.state) == (True, CallState.DONE)
        assert (failed.generation, following.generation) == (1, 1)
        assert following.sub_task_id != first
        assert (following.attempt, following.max_attempts) == (2, 4)
        assert (following.state, following.is_superseded) == (CallState.PENDING, False)
        assert (following.due_at, following.sends) == (clock.now() + WAIT, 0)
        assert following.deadline == following.absolute_deadline == clock.now() + WAIT + TIMEOUT

    async def test_an_attempt_is_sent_when_it_is_due(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store)
        clock.advance(WAIT - SECOND)
        assert (await store.due(HERE, 10)).unsent == 0
        assert await store.unsent(AGENT, 10) == []
        clock.advance(SECOND)
        assert (await store.due(HERE, 10)).unsent == 1
        send = one(await store.unsent(AGENT, 10))
        assert isinstance(send, Dispatch)
        newest = (await attempts(store, pause))[-1]
        assert (send.sub_task_id, send.generation) == (newest.sub_task_id, 1)
        assert (send.attempt, send.deadline) == (1, clock.now() + TIMEOUT)
        message = parse_body(RequestBody, send.body).message
        assert (message.task_id, message.message_id) == (send.sub_task_id, send.sub_task_id)
        assert message.parts[0].data == {"for": "a"}
        assert await store.unsent(AGENT, 10) == []
        await store.confirm_sent([send])
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        newest = (await attempts(store, pause))[-1]
        assert (newest.dispatched_at, newest.sends) == (clock.now() - LEASED, 1)

    async def test_a_repeated_pause_sends_no_later_attempt(self, store: CheckpointStore) -> None:
        """The response to its commit was lost, and its call has failed since."""
        pause = a_pause(a_retried_call())
        await write_pause(store, pause)
        assert isinstance(await fail(store, pause), CallRetried)
        assert (await write_pause(store, pause)).dispatches == ()

    async def test_an_unconfirmed_attempt_is_sent_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await open_retry(store)
        clock.advance(WAIT)
        send = one(await store.unsent(AGENT, 10))
        clock.advance(LEASED)
        again = one(await store.unsent(AGENT, 10))
        assert isinstance(send, Dispatch)
        assert isinstance(again, Dispatch)
        assert (again.sub_task_id, again.attempt) == (send.sub_task_id, 2)

    async def test_attempts_end_with_the_last_failure(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store)
        for wait in (2, 4, 8):
            await send_retry(store, clock, wait * SECOND)
            result = await fail(store, pause)
        assert isinstance(result, JoinCompleted)
        assert outcomes(result.task) == {"a": error()}
        found = await attempts(store, pause)
        assert [(each.attempt, each.outcome, each.is_superseded) for each in found] == [
            (1, "error", True),
            (2, "error", True),
            (3, "error", True),
            (4, "error", False),
        ]
        assert len({each.sub_task_id for each in found}) == 4

    async def test_a_later_attempt_has_the_result(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store, "b", a_retried_call(), "c")
        send = await send_retry(store, clock)
        await answered(store, pause, "b", "c")
        result = one(await store.claim([answer(pause, send.sub_task_id, ok(7))], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert list(outcomes(result.task)) == ["b", "a", "c"]
        assert outcomes(result.task)["a"] == ok(7)
        assert result.cancels == ()

    async def test_the_callee_may_forbid_another_attempt(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_retried_call())
        result = await fail(store, pause, retryable=False)
        assert isinstance(result, JoinCompleted)
        assert kinds(result.task) == ["error"]

    async def test_the_callee_may_ask_for_a_longer_wait(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        await store.confirm_sent(await store.unsent(AGENT, 10))
        result = await fail(store, pause, retry_after=300.0)
        assert isinstance(result, CallRetried)
        assert result.wait == 300 * SECOND
        clock.advance(299 * SECOND)
        assert await store.expire(HERE, 10, 1) == []
        assert await store.unsent(AGENT, 10) == []
        clock.advance(SECOND)
        assert isinstance(one(await store.unsent(AGENT, 10)), Dispatch)

    async def test_a_shorter_wait_than_the_policy_asks_for_is_ignored(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store, a_retried_call())
        result = await fail(store, pause, retry_after=0.5)
        assert isinstance(result, CallRetried)
        assert result.wait == WAIT

    @pytest.mark.parametrize("kind", list(FailureKind))
    async def test_the_policy_decides_which_kinds_are_retried(
        self, store: CheckpointStore, kind: FailureKind
    ) -> None:
        pause = await paused(store, a_retried_call(retry=replace(FOUR, retry_on=[kind])))
        other = next(each for each in FailureKind if each is not kind)
        refused = await paused(store, a_retried_call(retry=replace(FOUR, retry_on=[other])))
        result, final = await store.claim(
            [answer(each, sub(each, "a"), Failed(kind, "broken")) for each in (pause, refused)],
            HERE,
            2,
        )
        assert isinstance(final, JoinCompleted)
        is_retried = kind is not FailureKind.CANCELLED
        assert isinstance(result, CallRetried if is_retried else JoinCompleted)

    async def test_the_total_time_is_limited(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call(retry=replace(FOUR, max_elapsed=7)))
        assert isinstance(await fail(store, pause), CallRetried)
        clock.advance(WAIT)
        assert isinstance(await fail(store, pause), CallRetried)  # until 6 s
        clock.advance(SECOND)
        assert isinstance(await fail(store, pause), JoinCompleted)

    async def test_a_wait_beyond_a_deadline_ends_the_call(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + WAIT)
        late = await paused(store, a_retried_call(), requester=requester)
        joined = await paused(store, a_retried_call(), join=Join(deadline=WAIT))
        for pause in (late, joined):
            result = await fail(store, pause)
            assert isinstance(result, JoinCompleted)
            assert kinds(result.task) == ["error"]

    async def test_a_timeout_is_retried(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_retried_call())
        await store.confirm_sent(await store.unsent(AGENT, 10))
        clock.advance(TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        first = sub(pause, "a")
        assert expired.timed_out == (first,)
        assert expired.join_result == StillWaiting(pause.run.task_id, first)
        retried = one(expired.retried)
        assert (retried.sub_task_id, retried.number, retried.wait) == (first, 2, WAIT)
        assert retried.kind is FailureKind.TIMEOUT
        assert [notice.sub_task_id for notice in expired.cancels] == [first]
        summary, (timed_out, following) = await row(store, pause.run.task_id)
        assert (timed_out.state, timed_out.is_superseded) == (CallState.CANCELLING, True)
        assert (summary.completed, summary.wake_at) == (0, clock.now() + WAIT + TIMEOUT)
        assert following.due_at == clock.now() + WAIT
        await store.confirm_sent(expired.cancels)
        timed_out, _ = await attempts(store, pause)
        assert (timed_out.state, timed_out.outcome) == (CallState.DONE, "timeout")
        assert await store.expire(HERE, 10, 1) == []

    async def test_each_attempt_has_its_own_timeout(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        for wait in (2, 4, 8):
            clock.advance(TIMEOUT)
            assert one(await store.expire(HERE, 10, 1)).retried
            await send_retry(store, clock, wait * SECOND)
            clock.advance(TIMEOUT - SECOND)
            assert await store.expire(HERE, 10, 1) == []
            clock.advance(-(TIMEOUT - SECOND))
        clock.advance(TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert kinds(expired.join_result.task) == ["timeout"]
        assert len(await attempts(store, pause)) == 4

    async def test_each_attempt_has_its_own_idle_timeout(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        call = a_retried_call(timeout=None, idle_timeout=5 * SECOND)
        pause = await paused(store, call)
        clock.advance(5 * SECOND)
        assert one(await store.expire(HERE, 10, 1)).retried
        newest = (await attempts(store, pause))[-1]
        assert newest.deadline == clock.now() + WAIT + 5 * SECOND
        assert newest.absolute_deadline is None

    async def test_an_expired_join_retries_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store, join=Join(deadline=30 * SECOND))
        clock.advance(30 * SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert (expired.retried, expired.cancels) == ((), ())  # the attempt was never sent
        assert len(await attempts(store, pause)) == 2

    async def test_an_unsent_attempt_times_out_without_a_cancel(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """No replica could send it in time."""
        pause = await open_retry(store)
        clock.advance(WAIT + TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        assert (expired.cancels, one(expired.retried).number) == ((), 3)
        assert [each.state for each in await attempts(store, pause)] == [
            CallState.DONE,
            CallState.DONE,
            CallState.PENDING,
        ]

    async def test_a_met_join_closes_an_unsent_attempt_without_a_cancel(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store, a_retried_call(), "b", join=FIRST)
        result = one(await store.claim([a_claim(pause, "b")], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert result.cancels == ()
        assert kinds(result.task) == ["cancelled", "ok"]
        clock.advance(10 * LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_met_join_cancels_an_attempt_that_was_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store, a_retried_call(), "b", join=FIRST)
        send = await send_retry(store, clock)
        result = one(await store.claim([a_claim(pause, "b")], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert [notice.sub_task_id for notice in result.cancels] == [send.sub_task_id]
        assert await cancels_to_send(store, clock) == [send.sub_task_id]

    async def test_a_failure_and_a_met_join_in_one_batch(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_retried_call(), "b", join=FIRST)
        failed, met = await store.claim(
            [answer(pause, sub(pause, "a"), error()), a_claim(pause, "b")], HERE, 1
        )
        assert isinstance(failed, CallRetried)
        assert isinstance(met, JoinCompleted)
        assert met.cancels == ()
        assert kinds(met.task) == ["cancelled", "ok"]

    async def test_a_cancelled_task_does_not_cancel_an_unsent_attempt(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store)
        assert (await write_cancel(store, a_cancel(pause.run.task_id))).cancels == ()
        assert await cancels_to_send(store, clock) == []
        other = await open_retry(store)
        send = await send_retry(store, clock)
        cancelled = await write_cancel(store, a_cancel(other.run.task_id))
        assert [notice.sub_task_id for notice in cancelled.cancels] == [send.sub_task_id]

    async def test_a_cancelled_task_still_cancels_a_timed_out_attempt(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        clock.advance(TIMEOUT)
        await store.expire(HERE, 10, 1)
        await write_cancel(store, a_cancel(pause.run.task_id))
        assert await cancels_to_send(store, clock) == [sub(pause, "a")]
        notice = CancelNotice(AGENT, pause.run.task_id, sub(pause, "a"), PEER)
        await store.confirm_sent([notice])
        assert await attempts(store, pause) == []

    @pytest.mark.parametrize("is_sent", [False, True])
    async def test_the_result_of_an_earlier_attempt_wins(
        self, store: CheckpointStore, clock: FakeClock, is_sent: bool
    ) -> None:
        pause = await paused(store, "b", a_retried_call())
        await answered(store, pause, "b")
        clock.advance(TIMEOUT)
        await store.expire(HERE, 10, 1)
        if is_sent:
            await send_retry(store, clock)
        first, second = [each.sub_task_id for each in await attempts(store, pause)]
        result = one(await store.claim([answer(pause, first, ok(1))], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert outcomes(result.task) == {"b": ok("b"), "a": ok(1)}
        won, lost = await attempts(store, pause)
        assert (won.sub_task_id, won.outcome, won.is_superseded) == (first, "ok", False)
        assert (lost.outcome, lost.is_superseded) == ("cancelled", True)
        late = one(await store.claim([answer(pause, second, ok(2))], HERE, 1))
        assert late == DuplicateOutcome(pause.run.task_id, second)
        assert await cancels_to_send(store, clock) == ([second] if is_sent else [])

    async def test_a_winning_earlier_attempt_is_counted_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call(), "b")
        clock.advance(SECOND)
        assert isinstance(await fail(store, pause), CallRetried)
        claim = answer(pause, sub(pause, "a"), ok(1))  # its peer's task was resumed
        waiting = StillWaiting(pause.run.task_id, sub(pause, "a"))
        for _ in range(2):  # the second repeats a lost commit
            assert await store.claim([claim], HERE, 1) == [waiting]
        again = one(await store.claim([answer(pause, sub(pause, "a"), ok(2))], HERE, 1))
        assert isinstance(again, DuplicateOutcome)
        summary, _ = await row(store, pause.run.task_id)
        assert (summary.completed, summary.waiting_for) == (1, (PEER,))
        result = one(await store.claim([a_claim(pause, "b")], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert outcomes(result.task) == {"a": ok(1), "b": ok("b")}

    async def test_a_late_failure_of_an_earlier_attempt_changes_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        clock.advance(TIMEOUT)
        await store.expire(HERE, 10, 1)
        before = await row(store, pause.run.task_id)
        cancelled = Failed(FailureKind.CANCELLED, "cancelled on request")
        late = one(await store.claim([answer(pause, sub(pause, "a"), cancelled)], HERE, 1))
        assert isinstance(late, DuplicateOutcome)
        assert await row(store, pause.run.task_id) == before

    async def test_an_earlier_attempt_cannot_win_a_closed_call(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store, a_retried_call(), "b")
        send = await send_retry(store, clock)
        claims = [
            answer(pause, send.sub_task_id, ok(2)),
            answer(pause, sub(pause, "a"), ok(1)),
        ]
        won, lost = await store.claim(claims, HERE, 1)
        assert isinstance(won, StillWaiting)
        assert isinstance(lost, DuplicateOutcome)
        result = one(await store.claim([a_claim(pause, "b")], HERE, 1))
        assert isinstance(result, JoinCompleted)
        assert outcomes(result.task)["a"] == ok(2)

    async def test_several_responses_of_a_call_in_one_batch(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_retried_call(), "b")
        first = sub(pause, "a")
        results = await store.claim(
            [
                answer(pause, first, error()),
                answer(pause, first, error()),
                answer(pause, first, ok(1)),
                a_claim(pause, "b"),
            ],
            HERE,
            1,
        )
        retried, duplicate, won, met = results
        assert isinstance(retried, CallRetried)
        assert isinstance(duplicate, DuplicateOutcome)
        last = next(each for each in (won, met) if isinstance(each, JoinCompleted))
        assert outcomes(last.task) == {"a": ok(1), "b": ok("b")}
        assert [each.is_superseded for each in await attempts(store, pause)] == [False, True]

    async def test_a_repeated_failure_finds_its_attempt(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_retried_call())
        claim = answer(pause, sub(pause, "a"), error())
        assert isinstance(one(await store.claim([claim], HERE, 1)), CallRetried)
        before = await row(store, pause.run.task_id)
        again = one(await store.claim([claim], HERE, 1))
        assert again == StillWaiting(pause.run.task_id, claim.sub_task_id)
        assert await row(store, pause.run.task_id) == before

    async def test_an_attempt_checks_its_sender(self, store: CheckpointStore) -> None:
        pause = await open_retry(store)
        for each in await attempts(store, pause):
            claim = answer(pause, each.sub_task_id, ok(), sender="weather")
            assert isinstance(one(await store.claim([claim], HERE, 1)), WrongSender)
        assert len(await attempts(store, pause)) == 2

    async def test_undeliverable_attempts(self, store: CheckpointStore, clock: FakeClock) -> None:
        policy = replace(FOUR, retry_on=["undeliverable"])
        pause = await paused(store, a_retried_call(retry=policy))
        unroutable = UnroutableCall(pause.run.task_id, 1, sub(pause, "a"), True, HOUR)
        await store.record_unroutable([unroutable])
        clock.advance(TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        assert one(expired.retried).kind is FailureKind.UNDELIVERABLE
        clock.advance(WAIT)
        send = one(s for s in await store.unsent(AGENT, 10) if isinstance(s, Dispatch))
        assert send.unroutable_for is None
        again = UnroutableCall(pause.run.task_id, 1, send.sub_task_id, True, SECOND)
        await store.record_unroutable([again])
        clock.advance(SECOND)
        send = one(s for s in await store.unsent(AGENT, 10) if isinstance(s, Dispatch))
        assert send.unroutable_for == SECOND
        clock.advance(TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        assert one(expired.retried).kind is FailureKind.UNDELIVERABLE

    async def test_a_pause_deletes_earlier_attempts(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        clock.advance(TIMEOUT)
        await store.expire(HERE, 10, 1)
        await send_retry(store, clock)
        await fail(store, pause)  # the first is cancelling, the second done
        send = await send_retry(store, clock, 4 * SECOND)
        result = one(await store.claim([answer(pause, send.sub_task_id, ok())], HERE, 1))
        assert isinstance(result, JoinCompleted)
        following = a_pause("z", run=result.task.run)
        await write_pause(store, following)
        _, calls = await row(store, pause.run.task_id)
        assert [(call.call_id, call.state) for call in calls] == [
            ("a", CallState.CANCELLING),
            ("z", CallState.PENDING),
        ]
        notice = CancelNotice(AGENT, pause.run.task_id, sub(pause, "a"), PEER)
        await store.confirm_sent([notice])
        _, calls = await row(store, pause.run.task_id)
        assert [call.call_id for call in calls] == ["z"]

    async def test_the_end_deletes_earlier_attempts(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await open_retry(store)
        send = await send_retry(store, clock)
        result = one(await store.claim([answer(pause, send.sub_task_id, ok())], HERE, 1))
        assert isinstance(result, JoinCompleted)
        await store.end([an_end(result.task.run)])
        assert await attempts(store, pause) == []

    async def test_tokens_of_all_attempts_count(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        def used(tokens: int) -> TokenUsage:
            return TokenUsage(total=Tokens(input=tokens))

        pause = await paused(store, a_retried_call())
        first = sub(pause, "a")
        failed = answer(pause, first, Failed(FailureKind.ERROR, "broken", used(1)))
        await store.claim([failed], HERE, 1)
        clock.advance(WAIT + TIMEOUT)
        await store.unsent(AGENT, 10)
        await store.expire(HERE, 10, 1)
        second = (await attempts(store, pause))[1].sub_task_id
        for _ in range(2):  # counted once
            late = answer(pause, second, Failed(FailureKind.CANCELLED, "", used(20)))
            await store.claim([late], HERE, 1)
        await send_retry(store, clock, 4 * SECOND)
        third = (await attempts(store, pause))[2].sub_task_id
        result = one(await store.claim([answer(pause, third, Ok(1, (), used(300)))], HERE, 1))
        assert isinstance(result, JoinCompleted)
        stored = TokenUsage.model_validate(result.task.context["token_usage"])
        assert stored.total.input == 21
        assert outcomes(result.task)["a"].usage.total.input == 300

    async def test_an_attempt_of_a_resumed_call_is_a_new_task_of_the_peer(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await operating(store)
        child = TaskId(new_id())
        call = a_retried_call()
        headers = {**call.headers, Header.RESUME.value: "00000001"}
        call = replace(call, sub_task_id=resumed_id(child, 1), headers=headers)
        known = Child(id=child, peer=PEER, digest="of a", subtask="s", retry=1)
        await store.pause([replace(a_pause(call, run=run), children=(known,))])
        pause = a_pause(call, run=run)
        assert isinstance(await fail(store, pause), CallRetried)
        send = await send_retry(store, clock)
        assert Header.RESUME.value not in send.headers
        await write_cancel(store, a_cancel(run.task_id))
        last = await store.operation(run.task_id)
        assert last is not None
        assert [each.id for each in last.children] == [child, send.sub_task_id]
        assert last.children[1] == known.model_copy(update={"id": send.sub_task_id})

    async def test_a_resumed_operation_retries_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await operating(store)
        policy = replace(
            FOUR, initial_interval=timedelta(seconds=2), max_interval=timedelta(seconds=100)
        )
        pause = a_pause(a_retried_call(retry=policy), run=run)
        await store.pause([pause])
        await fail(store, pause)
        clock.advance(WAIT)
        await write_cancel(store, a_cancel(run.task_id))
        last = await store.last_pause(run.task_id)
        assert last is not None
        planned = one(last.calls).planned
        assert planned.timeout == TIMEOUT
        assert planned.retry is not None
        assert set(planned.retry.retry_on) == {"error", "timeout"}
        assert replace(planned.retry, retry_on=policy.retry_on) == policy
        await store.revive(a_revive(run.task_id, without_checkpoint=True))
        assert await attempts(store, pause) == []

    async def test_a_suspended_task_retries(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        await store.suspend([pause.run.task_id])
        assert isinstance(await fail(store, pause), CallRetried)
        send = await send_retry(store, clock)
        result = one(await store.claim([answer(pause, send.sub_task_id, ok())], HERE, 1))
        assert isinstance(result, TaskReady)
        assert (await row(store, pause.run.task_id))[0].completed == 1

    async def test_an_unreadable_request_is_not_retried(self, store: CheckpointStore) -> None:
        pause = await paused(store, replace(a_call("a"), retry=FOUR))
        assert isinstance(await fail(store, pause), JoinCompleted)

    async def test_calls_of_many_tasks_in_one_batch(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pauses = [await paused(store, a_retried_call(), "b", join=ALL) for _ in range(5)]
        claims = [answer(each, sub(each, "a"), error()) for each in pauses]
        claims += [a_claim(each, "b") for each in pauses]
        results = await store.claim(claims, HERE, 5)
        assert [type(each) for each in results] == [CallRetried] * 5 + [StillWaiting] * 5
        clock.advance(WAIT)
        sends = [send for send in await store.unsent(AGENT, 10) if isinstance(send, Dispatch)]
        assert len({send.sub_task_id for send in sends}) == 5

    async def test_another_replica_retries(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_retried_call())
        claim = answer(pause, sub(pause, "a"), error())
        assert isinstance(one(await other.claim([claim], THERE, 1)), CallRetried)
        clock.advance(WAIT)
        assert len(await store.unsent(AGENT, 10)) == 1
        assert await other.unsent(AGENT, 10) == []
