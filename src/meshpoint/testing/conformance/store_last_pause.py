"""Operations that have failed keep their last pause, and are resumed there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.bodies import A2AMessage, Part, RequestBody, parse_body
from meshpoint.model.calls import AT_LEAST, FIRST
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import RESUMED_SINCE, LastPause, NotRevived, Refusal, Revived
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import (
    CancelNotice,
    CheckpointDict,
    Dispatch,
    PlannedCall,
    Run,
    TaskState,
)
from meshpoint.model.transitions import (
    Claim,
    DuplicateOutcome,
    JoinCompleted,
    LogChange,
    Pause,
    UnknownCall,
)
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.resuming import at_last_pause
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    CANCELLED,
    FAILED,
    HERE,
    HOUR,
    PEER,
    SECOND,
    TIMINGS,
    a_call,
    a_cancel,
    a_checkpoint,
    a_claim,
    a_pause,
    a_requester,
    a_revive,
    an_end,
    begun,
    error,
    kinds,
    ok,
    one,
    operating,
    outcomes,
    resumed,
    row,
    state_of,
    sub,
    summary_of,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_logs import LOGGED, READER

CONTEXT_USAGE = TokenUsage(total=Tokens(input=1))


def asking(call_id: str, peer: AgentName = PEER) -> PlannedCall:
    """A call whose request is as the engine writes it, with a security context."""
    call = a_call(call_id, peer=peer, timeout=HOUR)
    message = A2AMessage(
        message_id=call.sub_task_id,
        role="ROLE_AGENT",
        parts=[Part(data=call_id)],
        task_id=call.sub_task_id,
    )
    metadata: CheckpointDict = {"userId": "ada", "securityContext": {"token": "secret"}}
    return replace(call, body=RequestBody(message=message, metadata=metadata).to_bytes())


def an_operation_pause(run: Run, *call_ids: str) -> Pause:
    """A pause of an operation, with a security context and with tokens used."""
    pause = a_pause(*map(asking, call_ids), run=run)
    context: CheckpointDict = {
        "flags": {"vip": True},
        "security_context": {"token": "secret"},
        "token_usage": CONTEXT_USAGE.model_dump(mode="json"),
    }
    return replace(pause, context=context)


async def claimed(store: CheckpointStore, pause: Pause, **answers: Outcome) -> Run:
    """Answer the calls of `pause` so that `HERE` runs the task."""
    claims = [a_claim(pause, call_id, outcome) for call_id, outcome in answers.items()]
    arrivals = await store.claim(claims, HERE, 1)
    return one(each.task.run for each in arrivals if isinstance(each, JoinCompleted))


async def failed_after(store: CheckpointStore, **answers: Outcome) -> Pause:
    """The last pause of an operation that has failed after these outcomes."""
    pause = an_operation_pause(await operating(store), *answers)
    await write_pause(store, pause)
    await write_end(store, an_end(await claimed(store, pause, **answers), FAILED, reason="no"))
    return pause


async def last_pause_of(store: CheckpointStore, task_id: TaskId) -> LastPause:
    """The kept pause of an operation."""
    last = await store.last_pause(task_id)
    assert last is not None
    return last


async def resume_at_pause(store: CheckpointStore, task_id: TaskId) -> Pause:
    """Resume an operation at its last pause, and return that as it was written again."""
    command = a_revive(task_id, without_checkpoint=True, requester=a_requester())
    command = await at_last_pause(store, command, "last-pause")
    assert command.pause is not None
    revived = await store.revive(command)
    assert isinstance(revived, Revived)
    assert await store.revive(command) == replace(revived, repeated=True)
    return command.pause


class LastPauseSuite:
    """The last pause of an operation that has not completed."""

    async def test_a_failed_operation_keeps_its_last_pause(self, store: CheckpointStore) -> None:
        pause = await failed_after(store, a=ok(), b=error())
        last = await last_pause_of(store, pause.run.task_id)
        assert (last.state, last.state_format, last.join) == (
            pause.state,
            pause.state_format,
            pause.join,
        )
        assert (last.run.generation, last.run.agent, last.retry_count) == (1, AGENT, 0)
        assert last.context["flags"] == {"vip": True}
        assert [(kept.planned.call_id, kept.outcome) for kept in last.calls] == [
            ("a", ok()),
            ("b", error()),
        ]
        assert await store.last_pause(pause.run.task_id, AgentName("other")) is None

    async def test_security_contexts_are_wiped(self, store: CheckpointStore) -> None:
        pause = await failed_after(store, a=ok(), b=error())
        last = await last_pause_of(store, pause.run.task_id)
        assert not last.context.get("security_context")
        assert last.calls[0].planned.body == b""
        body = parse_body(RequestBody, last.calls[1].planned.body)
        assert body.metadata == {"userId": "ada"}

    @pytest.fixture
    def keeping_security_contexts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let stores opened after this keep security contexts."""
        monkeypatch.setattr(TIMINGS, "keep_security_context", True)

    @pytest.mark.usefixtures("keeping_security_contexts")
    async def test_security_contexts_are_kept_if_configured(self, store: CheckpointStore) -> None:
        secret = {"token": "secret"}
        pause = await failed_after(store, a=ok(), b=error())
        last = await last_pause_of(store, pause.run.task_id)
        assert last.context["security_context"] == secret
        assert last.calls[0].planned.body == b""
        again = await resume_at_pause(store, pause.run.task_id)
        dispatch = one(await store.unsent(AGENT, 10))
        assert isinstance(dispatch, Dispatch)
        body = parse_body(RequestBody, dispatch.body)
        assert body.metadata == {"userId": "ada", "securityContext": secret}
        arrival = one(await store.claim([a_claim(again, "b")], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert arrival.task.context["security_context"] == secret

    @pytest.mark.parametrize("state", [TaskState.COMPLETED, FAILED])
    async def test_other_tasks_keep_no_pause(
        self, store: CheckpointStore, state: TaskState
    ) -> None:
        run = (await resumed(store)).run
        await write_end(store, an_end(run, state))
        never_paused = await operating(store)
        await write_end(store, an_end(never_paused, FAILED, reason="no"))
        completed = an_operation_pause(await operating(store), "a")
        await write_pause(store, completed)
        for task_id in (run.task_id, never_paused.task_id, completed.run.task_id):
            assert await store.last_pause(task_id) is None
        await write_end(store, an_end(await claimed(store, completed, a=ok())))
        assert await store.last_pause(completed.run.task_id) is None
        assert await store.last_pause((await begun(store)).task_id) is None

    async def test_only_calls_without_a_result_are_made_again(
        self, store: CheckpointStore
    ) -> None:
        pause = await failed_after(store, a=ok(), b=error(), c=ok("c"))
        again = await resume_at_pause(store, pause.run.task_id)
        assert await state_of(store, pause.run.task_id) is TaskState.WAITING
        dispatch = one(await store.unsent(AGENT, 10))
        assert isinstance(dispatch, Dispatch)
        assert (dispatch.sub_task_id, dispatch.generation) == (sub(again, "b"), 1)
        assert dispatch.sub_task_id != sub(pause, "b")
        body = parse_body(RequestBody, dispatch.body)
        assert (body.message.task_id, body.input()) == (dispatch.sub_task_id, "b")
        late = a_claim(pause, "b")
        assert await store.claim([late], HERE, 1) == [UnknownCall(late.task_id, late.sub_task_id)]
        claim = Claim(late.id, late.task_id, dispatch.sub_task_id, ok("b"), PEER)
        arrival = one(await store.claim([claim], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert [
            each.value for each in outcomes(arrival.task).values() if isinstance(each, Ok)
        ] == [
            "result",
            "b",
            "c",
        ]
        assert list(outcomes(arrival.task)) == ["a", "b", "c"]
        task = arrival.task
        assert (task.state, task.run.generation, task.retry_count) == (b"state", 1, 1)
        assert task.requester == a_requester()

    async def test_without_failed_calls_the_task_is_ready(self, store: CheckpointStore) -> None:
        pause = await failed_after(store, a=ok(), b=ok())
        await resume_at_pause(store, pause.run.task_id)
        task = one(await store.acquire(HERE, 10))
        assert (task.run.generation, kinds(task), task.state) == (1, ["ok", "ok"], b"state")
        assert task.run.fence > pause.run.fence + 1
        await write_end(store, an_end(task.run))

    async def test_a_join_that_results_complete_asks_nobody(self, store: CheckpointStore) -> None:
        pause = replace(an_operation_pause(await operating(store), "a", "b"), join=FIRST)
        await write_pause(store, pause)
        await write_end(store, an_end(await claimed(store, pause, a=ok()), FAILED, reason="no"))
        await resume_at_pause(store, pause.run.task_id)
        task = one(await store.acquire(HERE, 10))
        assert kinds(task) == ["ok", "cancelled"]

    async def test_a_cancelled_operation_makes_its_open_calls_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = an_operation_pause(await operating(store), "a", "b")
        await write_pause(store, pause)
        await store.claim([a_claim(pause, "a")], HERE, 1)
        await store.cancel([a_cancel(pause.run.task_id)])
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        notices = [
            each for each in await store.unsent(AGENT, 10) if isinstance(each, CancelNotice)
        ]
        assert [notice.sub_task_id for notice in notices] == [sub(pause, "b")]
        await store.confirm_sent(notices)
        again = await resume_at_pause(store, pause.run.task_id)
        dispatches = [each for each in await store.unsent(AGENT, 10) if isinstance(each, Dispatch)]
        assert [each.sub_task_id for each in dispatches] == [sub(again, "b")]

    async def test_the_cancel_of_an_open_call_is_sent_after_a_resume(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = an_operation_pause(await operating(store), "a")
        await write_pause(store, pause)
        await store.cancel([a_cancel(pause.run.task_id)])
        again = await resume_at_pause(store, pause.run.task_id)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        sends = await store.unsent(AGENT, 10)
        assert {
            (type(each), each.sub_task_id)
            for each in sends
            if isinstance(each, CancelNotice | Dispatch)
        } == {(CancelNotice, sub(pause, "a")), (Dispatch, sub(again, "a"))}

    async def test_a_late_confirm_of_the_failed_attempt_confirms_no_new_request(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = an_operation_pause(await operating(store), "a", "b")
        result = await write_pause(store, pause)
        await write_end(
            store, an_end(await claimed(store, pause, a=ok(), b=error()), FAILED, reason="no")
        )
        again = await resume_at_pause(store, pause.run.task_id)
        await store.confirm_sent(result.dispatches)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        sends = await store.unsent(AGENT, 10)
        assert [each.sub_task_id for each in sends if isinstance(each, Dispatch)] == [
            sub(again, "b")
        ]

    async def test_tokens_of_the_failed_attempt_count_once(self, store: CheckpointStore) -> None:
        used = TokenUsage(total=Tokens(input=10))
        pause = await failed_after(store, a=replace(ok(), usage=used), b=error())
        last = await last_pause_of(store, pause.run.task_id)
        usage = TokenUsage.model_validate(last.context["token_usage"])
        assert usage.total == Tokens(input=11)
        again = await resume_at_pause(store, pause.run.task_id)
        carried = one(call.outcome for call in again.calls if call.outcome is not None)
        assert carried.usage == TokenUsage()

    async def test_the_run_that_ends_a_task_counts_its_tokens(
        self, store: CheckpointStore
    ) -> None:
        pause = an_operation_pause(await operating(store), "a")
        await write_pause(store, pause)
        run = await claimed(store, pause, a=replace(ok(), usage=CONTEXT_USAGE))
        total = TokenUsage(total=Tokens(input=50))
        await write_end(store, replace(an_end(run, FAILED, reason="no"), usage=total))
        last = await last_pause_of(store, run.task_id)
        assert TokenUsage.model_validate(last.context["token_usage"]) == total

    @pytest.mark.parametrize("end", [FAILED, CANCELLED])
    async def test_tokens_that_arrive_after_the_end_count_once(
        self, store: CheckpointStore, end: TaskState
    ) -> None:
        used = TokenUsage(total=Tokens(input=10))
        pause = replace(an_operation_pause(await operating(store), "a", "b"), join=AT_LEAST(1))
        await write_pause(store, pause)
        if end is FAILED:
            await write_end(store, an_end(await claimed(store, pause, a=ok()), end, reason="no"))
        else:
            await store.cancel([a_cancel(pause.run.task_id)])
        for _ in range(2):
            late = a_claim(pause, "b", replace(error(), usage=used))
            assert await store.claim([late], HERE, 1) == [
                DuplicateOutcome(late.task_id, late.sub_task_id)
            ]
        summary = await summary_of(store, pause.run.task_id)
        assert summary.usage is not None
        assert summary.usage.total == Tokens(input=11)
        assert summary.usage.by_source == {PEER: Tokens(input=10)}
        last = await last_pause_of(store, pause.run.task_id)
        assert TokenUsage.model_validate(last.context["token_usage"]) == summary.usage

    async def test_a_repeated_response_to_a_resumed_pause_counts_no_tokens(
        self, store: CheckpointStore
    ) -> None:
        answer = replace(ok(), usage=TokenUsage(total=Tokens(input=10)))
        pause = await failed_after(store, a=answer, b=error())
        again = await resume_at_pause(store, pause.run.task_id)
        repeated = a_claim(pause, "a", answer)
        assert await store.claim([repeated], HERE, 1) == [
            DuplicateOutcome(repeated.task_id, repeated.sub_task_id)
        ]
        arrival = one(await store.claim([a_claim(again, "b")], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert outcomes(arrival.task)["a"].usage == TokenUsage()

    async def test_the_log_is_kept(self, store: CheckpointStore) -> None:
        pause = an_operation_pause(await operating(store), "a")
        pause = replace(pause, log=LogChange((b"entry",)), state_format=LOGGED)
        await write_pause(store, pause)
        arrival = one(await store.claim([a_claim(pause)], READER, 1))
        assert isinstance(arrival, JoinCompleted)
        run = arrival.task.run
        await write_end(store, an_end(run, FAILED, reason="no", checkpoint=a_checkpoint(run, 1)))
        await resume_at_pause(store, pause.run.task_id)
        task = one(await store.acquire(READER, 10))
        assert (task.log, task.log_seq, task.state_format) == ((b"entry",), 1, LOGGED)

    async def test_children_belong_to_the_new_attempt(self, store: CheckpointStore) -> None:
        child = Child(id=TaskId("child"), peer=PEER, digest="d")
        pause = an_operation_pause(await operating(store), "a")
        await write_pause(store, replace(pause, children=(child,)))
        run = await claimed(store, pause, a=error())
        await write_end(store, an_end(run, FAILED, reason="no"))
        again = await resume_at_pause(store, run.task_id)
        children = (await summary_of(store, run.task_id)).children
        assert [(each.id, each.retry) for each in children] == [
            ("child", 1),
            (sub(again, "a"), 1),
        ]

    async def test_an_operation_resumes_at_its_pause_repeatedly(
        self, store: CheckpointStore
    ) -> None:
        pause = await failed_after(store, a=ok(), b=error())
        for retry in (1, 2):
            again = await resume_at_pause(store, pause.run.task_id)
            run = await claimed(store, again, b=error())
            await write_end(store, an_end(run, FAILED, reason="no"))
            last = await last_pause_of(store, run.task_id)
            assert (last.retry_count, last.run.generation) == (retry, 1)
            assert [kept.outcome for kept in last.calls] == [ok(), error()]

    async def test_a_pause_read_before_another_resume_is_refused(
        self, store: CheckpointStore
    ) -> None:
        pause = await failed_after(store, a=error())
        task_id = pause.run.task_id
        command = a_revive(task_id, without_checkpoint=True)
        late = await at_last_pause(store, command, "last-pause")
        again = await resume_at_pause(store, task_id)
        await write_end(store, an_end(await claimed(store, again, a=error()), FAILED, reason="no"))
        assert await store.revive(late) == NotRevived(Refusal.RUNNING, RESUMED_SINCE)
        assert await state_of(store, task_id) is FAILED

    async def test_a_resume_from_the_start_drops_the_pause(self, store: CheckpointStore) -> None:
        pause = await failed_after(store, a=ok())
        await store.revive(a_revive(pause.run.task_id, without_checkpoint=True))
        task = one(await store.acquire(HERE, 10))
        assert (task.run.generation, task.state, task.outcomes) == (0, b"", ())
        assert (await row(store, task.run.task_id))[1] == []

    async def test_a_kept_pause_counts_nothing(self, store: CheckpointStore) -> None:
        pause = await failed_after(store, a=ok(), b=error())
        summary, _ = await row(store, pause.run.task_id)
        assert (summary.completed, summary.expected, summary.user_id) == (0, 0, None)

    async def test_a_kept_pause_ends_with_its_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = an_operation_pause(await operating(store), "a")
        await write_pause(store, pause)
        end = await write_end(store, an_end(await claimed(store, pause, a=error()), CANCELLED))
        await store.confirm_sent([end.reply])
        clock.advance(10_000 * HOUR)
        assert await store.purge(AGENT, 10) == 1
        assert await store.last_pause(pause.run.task_id) is None
