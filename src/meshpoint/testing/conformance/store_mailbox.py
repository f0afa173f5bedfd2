"""Signals, kept answers and values."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from pydantic import JsonValue
from pydantic_core import to_json

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.mailbox import (
    MAX_KEPT_BYTES_OF_SENDER,
    MAX_SIGNAL_BYTES,
    MAX_SIGNAL_IDS,
    MAX_SIGNALS_OF_SENDER,
    MAX_VALUES,
    MailAccepted,
    Mailbox,
    MailForbidden,
    MailRefused,
    MailResult,
    MailUnknown,
    RecordAnswer,
    SendSignal,
    SetValue,
    StoredValue,
    TooManyValues,
)
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import AskedQuestion, Question, QuestionKey
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import CallState, PlannedCall, Resumable, Run, TaskState
from meshpoint.model.transitions import (
    CancelFound,
    Fenced,
    JoinCompleted,
    PauseCommitted,
    TaskReady,
)
from meshpoint.model.waits import SIGNAL_PREFIX
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    HERE,
    HOUR,
    REQUESTER,
    SECOND,
    THERE,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_revive,
    a_run,
    an_end,
    begun,
    ended,
    failed,
    kinds,
    one,
    outcomes,
    paused,
    row,
    state_of,
    write_end,
    write_pause,
)

_APPROVAL = AgentName(Question("approval", bool).peer)
_PLACE = TaskId("~?approval.1")


def a_receive(
    name: str = "chat", timeout: timedelta | None = None, *, call_id: str | None = None
) -> PlannedCall:
    """A wait for a signal as part of a pause."""
    peer = AgentName(f"{SIGNAL_PREFIX}{name}")
    return replace(a_call(call_id or name, timeout=timeout, peer=peer), headers={}, body=b"{}")


def a_question(timeout: timedelta | None = None, prompt: str = "Buy?") -> PlannedCall:
    """A question as part of a pause."""
    call = a_call("approval", timeout=timeout, peer=_APPROVAL)
    body = to_json({"prompt": prompt, "schema": {}, "allow": []})
    return replace(call, sub_task_id=_PLACE, headers={}, body=body)


def a_signal(
    task_id: TaskId, value: JsonValue = "hello", name: str = "chat", **values: object
) -> SendSignal:
    """A signal of the task's requester. `values` override its fields."""
    known = SendSignal(task_id, AGENT, new_id(), name, to_json(value), REQUESTER)
    return replace(known, **values)  # type: ignore[arg-type]


def an_answer(task_id: TaskId, value: JsonValue = True) -> RecordAnswer:
    """An answer to the question of `a_question`."""
    return RecordAnswer(RunId(new_id()), QuestionKey(AGENT, task_id, _PLACE), Ok(value))


async def send(store: CheckpointStore, *signals: SendSignal) -> list[MailResult]:
    """Send signals one after another."""
    return [one(await store.signal([each])) for each in signals]


async def answer(store: CheckpointStore, command: RecordAnswer) -> MailResult:
    """Record one answer."""
    return one(await store.answer([command]))


async def asked(store: CheckpointStore, task_id: TaskId) -> AskedQuestion | None:
    """The question of `a_question`."""
    return one(await store.find_questions([QuestionKey(AGENT, task_id, _PLACE)]))


async def acquired(store: CheckpointStore) -> Resumable:
    """The only ready task."""
    return one(await store.acquire(HERE, 10))


async def unanswered(store: CheckpointStore, clock: FakeClock) -> Run:
    """A run whose task has asked a question for an hour, without an answer."""
    await paused(store, a_question(timeout=HOUR))
    clock.advance(HOUR + SECOND)
    expired = one(await store.expire(HERE, 10, 1))
    assert isinstance(expired.join_result, JoinCompleted)
    return expired.join_result.task.run


async def kept(store: CheckpointStore, task_id: TaskId) -> list[str]:
    """The ids of the kept signals."""
    return [each.id for each in (await store.mailbox(task_id)).signals]


class SignalSuite:
    """A signal is kept until its task receives it, in order and once."""

    async def test_a_signal_resumes_the_task_that_waits_for_it(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_receive())
        assert await write_pause(store, pause) == PauseCommitted(TaskState.WAITING, ())
        task_id = pause.run.task_id
        clock.advance(1000 * HOUR)
        assert await store.expire(HERE, 10, 1) == []
        assert await store.unsent(AGENT, 10) == []
        assert (await row(store, task_id))[0].waiting_for == ("chat",)
        assert await send(store, a_signal(task_id, {"text": "hi"})) == [MailAccepted(True)]
        assert outcomes(await acquired(store)) == {"chat": Ok({"text": "hi"})}
        assert await kept(store, task_id) == []

    async def test_signals_of_a_running_task_are_received_in_order(
        self, store: CheckpointStore
    ) -> None:
        run = await begun(store)
        commands = [a_signal(run.task_id, number) for number in range(3)]
        assert await send(store, *commands) == 3 * [MailAccepted()]
        assert await kept(store, run.task_id) == [each.id for each in commands]
        for number in range(3):
            committed = await write_pause(store, a_pause(a_receive(), run=run))
            assert committed == PauseCommitted(TaskState.READY, ())
            task = await acquired(store)
            assert outcomes(task) == {"chat": Ok(number)}
            run = task.run
        assert await kept(store, run.task_id) == []
        await write_pause(store, a_pause(a_receive(), run=run))
        assert await state_of(store, run.task_id) is TaskState.WAITING

    async def test_a_repeated_pause_has_the_same_value(self, store: CheckpointStore) -> None:
        """The result of its commit may be lost."""
        run = await begun(store)
        await send(store, a_signal(run.task_id, 1), a_signal(run.task_id, 2))
        pause = a_pause(a_receive(), run=run)
        first = await write_pause(store, pause)
        assert await write_pause(store, pause) == first
        assert outcomes(await acquired(store)) == {"chat": Ok(1)}
        assert len(await kept(store, run.task_id)) == 1

    async def test_a_signal_waits_for_its_own_name(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_receive("chat"))
        task_id = pause.run.task_id
        other = a_signal(task_id, name="stop")
        assert await send(store, other) == [MailAccepted()]
        assert await state_of(store, task_id) is TaskState.WAITING
        assert await send(store, a_signal(task_id, "hi")) == [MailAccepted(True)]
        assert outcomes(await acquired(store)) == {"chat": Ok("hi")}
        assert await kept(store, task_id) == [other.id]

    async def test_several_waits_take_signals_in_call_order(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await send(store, a_signal(run.task_id, "one"))
        waits = [a_receive(call_id=name) for name in "abc"]
        committed = await write_pause(store, a_pause(*waits, "peer", run=run))
        assert committed.state is TaskState.WAITING
        assert [each.peer for each in committed.dispatches] == [a_call("x").peer]
        for value in ("two", "three"):
            assert await send(store, a_signal(run.task_id, value)) == [MailAccepted()]
        assert await send(store, a_signal(run.task_id, "four")) == [MailAccepted()]
        summary, calls = await row(store, run.task_id)
        assert summary.completed == 3
        pause = a_pause(*waits, run=run)
        peer = one(call for call in calls if call.state is CallState.PENDING)
        claim = replace(a_claim(pause, "a"), sub_task_id=peer.sub_task_id)
        assert isinstance(one(await store.claim([claim], HERE, 0)), TaskReady)
        found = outcomes(await acquired(store))
        assert [found[name] for name in "abc"] == [Ok("one"), Ok("two"), Ok("three")]
        assert len(await kept(store, run.task_id)) == 1

    async def test_a_met_join_takes_no_further_signal(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await send(store, a_signal(run.task_id, 1), a_signal(run.task_id, 2))
        waits = a_receive(call_id="a"), a_receive(call_id="b"), a_call("peer")
        committed = await write_pause(store, a_pause(*waits, run=run, join=FIRST))
        assert committed == PauseCommitted(TaskState.READY, ())
        task = await acquired(store)
        assert kinds(task) == ["ok", "cancelled", "cancelled"]
        assert await store.unsent(AGENT, 10) == []
        assert len(await kept(store, run.task_id)) == 1

    async def test_a_signal_wins_a_race(self, store: CheckpointStore) -> None:
        pause = await paused(store, "peer", a_receive(), join=FIRST)
        (result,) = await send(store, a_signal(pause.run.task_id, 7))
        assert isinstance(result, MailAccepted)
        assert result.is_ready
        assert [each.peer for each in result.cancels] == [a_call("x").peer]
        assert kinds(await acquired(store)) == ["cancelled", "ok"]

    async def test_a_wait_that_lost_a_race_takes_no_signal(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", a_receive(), join=FIRST)
        assert isinstance(one(await store.claim([a_claim(pause)], HERE, 0)), TaskReady)
        await send(store, a_signal(pause.run.task_id))
        task = await acquired(store)
        assert kinds(task) == ["ok", "cancelled"]
        assert len(await kept(store, pause.run.task_id)) == 1

    async def test_a_wait_ends_at_its_timeout(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_receive(timeout=HOUR))
        clock.advance(HOUR + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert expired.cancels == ()
        assert isinstance(expired.join_result, JoinCompleted)
        outcome = expired.join_result.task.outcomes[0][2]
        assert outcome == Failed(FailureKind.TIMEOUT, "no signal arrived in time")
        assert await send(store, a_signal(pause.run.task_id)) == [MailAccepted()]
        assert len(await kept(store, pause.run.task_id)) == 1

    async def test_a_repeated_signal_is_received_once(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_receive())
        command = a_signal(pause.run.task_id, 1)
        assert await send(store, command, command) == [MailAccepted(True), MailAccepted()]
        run = (await acquired(store)).run
        assert await send(store, command) == [MailAccepted()]
        assert await store.signal([command, command]) == 2 * [MailAccepted()]
        await write_pause(store, a_pause(a_receive(), run=run))
        assert await state_of(store, run.task_id) is TaskState.WAITING
        assert await send(store, command) == [MailAccepted()]
        assert await state_of(store, run.task_id) is TaskState.WAITING

    async def test_an_id_with_another_value_is_refused(self, store: CheckpointStore) -> None:
        run = await begun(store)
        command = a_signal(run.task_id, 1)
        other = replace(command, value=b"2")
        renamed = replace(command, name="stop")
        results = await send(store, command, other, renamed)
        assert results[0] == MailAccepted()
        assert all(isinstance(each, MailRefused) for each in results[1:])
        assert len(await kept(store, run.task_id)) == 1

    async def test_only_the_requester_signals(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_receive())
        stranger = a_signal(pause.run.task_id, sender="stranger")
        assert await send(store, stranger) == [MailForbidden(REQUESTER)]
        assert await state_of(store, pause.run.task_id) is TaskState.WAITING
        assert await send(store, replace(stranger, is_trusted=True)) == [MailAccepted(True)]

    async def test_an_unknown_task_is_not_signalled(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_receive())
        signals = [
            a_signal(TaskId("unknown")),
            a_signal(pause.run.task_id, agent=ELSEWHERE),
        ]
        assert await send(store, *signals) == 2 * [MailUnknown()]
        early = a_run()
        await store.cancel([a_cancel(early.task_id)])
        assert await send(store, a_signal(early.task_id)) == [MailUnknown()]

    async def test_too_many_signals_of_one_sender_are_refused(
        self, store: CheckpointStore
    ) -> None:
        run = await begun(store)
        signals = [a_signal(run.task_id, number) for number in range(MAX_SIGNALS_OF_SENDER)]
        assert await store.signal(signals) == MAX_SIGNALS_OF_SENDER * [MailAccepted()]
        (refused,) = await send(store, a_signal(run.task_id))
        assert refused == MailRefused(
            f"task {run.task_id} has {MAX_SIGNALS_OF_SENDER} unreceived signals"
        )
        operator = a_signal(run.task_id, sender="operator", is_trusted=True)
        assert await send(store, operator) == [MailAccepted()]
        await write_pause(store, a_pause(a_receive(), run=run))
        assert await send(store, a_signal(run.task_id)) == [MailAccepted()]

    async def test_too_many_bytes_of_one_sender_are_refused(self, store: CheckpointStore) -> None:
        run = await begun(store)
        value = "x" * (MAX_SIGNAL_BYTES - 2)
        fitting = MAX_KEPT_BYTES_OF_SENDER // MAX_SIGNAL_BYTES
        results = await send(store, *[a_signal(run.task_id, value) for _ in range(fitting + 1)])
        assert results[:-1] == fitting * [MailAccepted()]
        assert isinstance(results[-1], MailRefused)

    async def test_old_signal_ids_are_forgotten(self, store: CheckpointStore) -> None:
        """Otherwise they would grow for as long as the task lives."""
        run = await begun(store)
        first = a_signal(run.task_id, "first")
        await send(store, first)
        await write_pause(store, a_pause(a_receive(), run=run))
        run = (await acquired(store)).run
        for _ in range(2):
            number = MAX_SIGNAL_IDS // 2
            await store.signal([a_signal(run.task_id, each) for each in range(number)])
            waits = [a_receive(call_id=str(each)) for each in range(number)]
            await write_pause(store, a_pause(*waits, run=run))
            run = (await acquired(store)).run
        assert await kept(store, run.task_id) == []
        assert await send(store, first) == [MailAccepted()]
        assert await kept(store, run.task_id) == [first.id]

    async def test_a_suspended_task_keeps_its_signals(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_receive())
        await store.suspend([pause.run.task_id])
        assert await send(store, a_signal(pause.run.task_id, 1)) == [MailAccepted(True)]
        assert await store.acquire(HERE, 10) == []
        await store.unsuspend([pause.run.task_id])
        assert outcomes(await acquired(store)) == {"chat": Ok(1)}

    async def test_a_parked_task_keeps_its_signals(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.release([a_release(run, parked="mismatch")])
        assert await state_of(store, run.task_id) is TaskState.PARKED
        assert await send(store, a_signal(run.task_id, 1)) == [MailAccepted()]
        await store.unpark([run.task_id])
        task = await acquired(store)
        assert await kept(store, run.task_id) != []
        await write_pause(store, a_pause(a_receive(), run=task.run))
        assert outcomes(await acquired(store)) == {"chat": Ok(1)}

    async def test_signals_survive_a_crash_before_the_pause(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        await send(store, a_signal(run.task_id, 1))
        clock.advance(HOUR)
        (rescued,) = await store.rescue(THERE, 10)
        assert one(await store.pause([a_pause(a_receive(), run=run)])) == Fenced()
        assert len(await kept(store, run.task_id)) == 1
        await write_pause(store, a_pause(a_receive(), run=rescued.run))
        assert outcomes(await acquired(store)) == {"chat": Ok(1)}

    async def test_an_ended_task_refuses_signals_and_shows_unreceived_ones(
        self, store: CheckpointStore
    ) -> None:
        run = await begun(store)
        received, left = a_signal(run.task_id, 1), a_signal(run.task_id, 2)
        await send(store, received, left)
        await write_pause(store, a_pause(a_receive(), run=run))
        await write_end(store, an_end((await acquired(store)).run))
        (late,) = await send(store, a_signal(run.task_id, 3))
        assert late == MailRefused(f"task {run.task_id} has already ended (completed)")
        assert await kept(store, run.task_id) == [left.id]
        assert await send(store, received) == [MailAccepted()]
        (unreceived,) = await send(store, left)
        assert unreceived == MailRefused(
            f"task {run.task_id} ended before it received this signal"
        )

    async def test_a_failed_and_a_cancelled_task_refuse_signals(
        self, store: CheckpointStore
    ) -> None:
        run = await ended(store, state=TaskState.FAILED)
        pause = await paused(store, a_receive())
        await store.cancel([a_cancel(pause.run.task_id)])
        results = await send(store, a_signal(run.task_id), a_signal(pause.run.task_id))
        assert all(isinstance(each, MailRefused) for each in results)

    async def test_the_row_takes_the_mailbox_with_it(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        await send(store, a_signal(run.task_id))
        await store.set_value(SetValue(run, "step", b"1"))
        committed = await write_end(store, an_end(run))
        await store.confirm_sent([committed.reply])
        clock.advance(10_000 * HOUR)
        assert await store.purge(AGENT, 10) == 1
        assert await store.mailbox(run.task_id) == Mailbox()
        assert await send(store, a_signal(run.task_id)) == [MailUnknown()]

    async def test_a_new_attempt_receives_the_unreceived_signals(
        self, store: CheckpointStore
    ) -> None:
        run = await failed(store)
        assert isinstance(one(await send(store, a_signal(run.task_id))), MailRefused)
        await store.revive(a_revive(run.task_id))
        assert await send(store, a_signal(run.task_id, 5)) == [MailAccepted()]
        task = await acquired(store)
        await write_pause(store, a_pause(a_receive(), run=task.run))
        assert outcomes(await acquired(store)) == {"chat": Ok(5)}

    async def test_replicas_that_signal_together_lose_nothing(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        run = await begun(store)
        signals = [a_signal(run.task_id, number) for number in range(20)]
        sending = [(store, other)[n % 2].signal([each]) for n, each in enumerate(signals)]
        pausing = store.pause([a_pause(a_receive(), run=run)])
        pause_result, results = await asyncio.gather(pausing, asyncio.gather(*sending))
        assert isinstance(one(pause_result), PauseCommitted)
        accepted = [one(each) for each in results]
        assert all(isinstance(each, MailAccepted) for each in accepted)
        (value,) = outcomes(await acquired(store)).values()
        assert isinstance(value, Ok)
        left = [each.id for each in signals if each.value != to_json(value.value)]
        assert sorted(await kept(store, run.task_id)) == sorted(left)


class KeptAnswerSuite:
    """An answer that arrives while its task is not waiting for it is kept for the next wait."""

    async def test_an_answer_between_two_waits_is_kept(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        question = await asked(store, run.task_id)
        assert question is not None
        assert question.outcome is None
        assert await answer(store, an_answer(run.task_id)) == MailAccepted()
        assert (await store.mailbox(run.task_id)).answered == (_PLACE,)
        pause = a_pause(a_question(timeout=HOUR), run=run)
        assert await write_pause(store, pause) == PauseCommitted(TaskState.READY, ())
        assert await write_pause(store, pause) == PauseCommitted(TaskState.READY, ())
        assert outcomes(await acquired(store)) == {"approval": Ok(True)}
        assert (await store.mailbox(run.task_id)).answered == ()

    async def test_an_answer_during_another_wait_is_kept(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        other = a_pause("a", run=run)
        await write_pause(store, other)
        question = await asked(store, run.task_id)
        assert question is not None
        assert (question.outcome, question.requester) == (None, REQUESTER)
        assert question.details == a_question().body
        assert await answer(store, an_answer(run.task_id)) == MailAccepted()
        assert await state_of(store, run.task_id) is TaskState.WAITING
        result = one(await store.claim([a_claim(other)], HERE, 1))
        assert isinstance(result, JoinCompleted)
        await write_pause(store, a_pause(a_question(), run=result.task.run))
        assert outcomes(await acquired(store)) == {"approval": Ok(True)}

    async def test_an_awaited_question_is_answered(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_question())
        command = an_answer(pause.run.task_id)
        assert await answer(store, command) == MailAccepted(True)
        assert outcomes(await acquired(store)) == {"approval": Ok(True)}

    async def test_a_second_answer_is_refused(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        await answer(store, an_answer(run.task_id))
        second = await answer(store, an_answer(run.task_id, False))
        assert second == MailRefused("'approval' was answered")
        await write_pause(store, a_pause(a_question(), run=run))
        task = await acquired(store)
        assert outcomes(task) == {"approval": Ok(True)}
        await write_pause(store, a_pause("a", run=task.run))  # deletes the question's call
        third = await answer(store, an_answer(run.task_id, False))
        assert third == MailRefused("'approval' was answered")
        question = await asked(store, run.task_id)
        assert question is not None
        assert question.outcome == Ok(True)

    async def test_an_answer_recorded_by_an_earlier_release_counts(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store, a_question())
        claim = replace(a_claim(pause, "approval", Ok(True)), sender=_APPROVAL)
        await store.claim([claim], HERE, 0)
        second = await answer(store, an_answer(pause.run.task_id, False))
        assert second == MailRefused("'approval' was answered")

    async def test_an_answer_to_another_prompt_is_dropped(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        await answer(store, an_answer(run.task_id))
        changed = a_pause(a_question(prompt="Buy two?"), run=run)
        assert await write_pause(store, changed) == PauseCommitted(TaskState.WAITING, ())
        question = await asked(store, run.task_id)
        assert question is not None
        assert question.outcome is None
        assert await answer(store, an_answer(run.task_id)) == MailAccepted(True)

    async def test_an_answer_that_a_met_join_does_not_take_stays(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        await answer(store, an_answer(run.task_id))
        await send(store, a_signal(run.task_id))
        race = a_pause(a_receive(), a_question(), run=run, join=FIRST)
        await write_pause(store, race)
        task = await acquired(store)
        assert kinds(task) == ["ok", "cancelled"]
        await write_pause(store, a_pause(a_question(), run=task.run))
        assert outcomes(await acquired(store)) == {"approval": Ok(True)}

    async def test_no_answer_is_kept_for_a_question_that_was_never_asked(
        self, store: CheckpointStore
    ) -> None:
        run = await begun(store)
        assert await answer(store, an_answer(run.task_id)) == MailUnknown()
        assert await answer(store, an_answer(TaskId("unknown"))) == MailUnknown()
        await write_pause(store, a_pause(a_question(), run=run))
        assert await state_of(store, run.task_id) is TaskState.WAITING
        other = an_answer(run.task_id)
        other = replace(other, key=other.key._replace(sub_task_id=TaskId("~?approval.2")))
        assert await answer(store, other) == MailUnknown()
        foreign = replace(other, key=other.key._replace(agent=ELSEWHERE))
        assert await answer(store, foreign) == MailUnknown()

    async def test_an_answer_is_not_a_signal(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        await answer(store, an_answer(run.task_id))
        await write_pause(store, a_pause(a_receive("approval"), run=run))
        assert await state_of(store, run.task_id) is TaskState.WAITING
        signal = a_signal(run.task_id, "no", "other")
        assert await send(store, signal) == [MailAccepted()]

    async def test_a_signal_is_not_an_answer(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_question())
        signal = a_signal(pause.run.task_id, True, "approval")
        assert await send(store, signal) == [MailAccepted()]
        assert await state_of(store, pause.run.task_id) is TaskState.WAITING

    async def test_an_ended_task_refuses_answers(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await unanswered(store, clock)
        await write_end(store, an_end(run))
        question = await asked(store, run.task_id)
        assert question is not None
        assert isinstance(question.outcome, Failed)
        result = await answer(store, an_answer(run.task_id))
        assert result == MailRefused("'approval' is no longer open: its task has ended")
        other = an_answer(run.task_id)
        other = replace(other, key=other.key._replace(sub_task_id=TaskId("~?approval.2")))
        assert await answer(store, other) == MailUnknown()

    async def test_a_new_attempt_asks_again(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(a_revive(run.task_id))
        task = await acquired(store)
        await write_pause(store, a_pause(a_question(), run=task.run))
        await answer(store, an_answer(run.task_id))
        task = await acquired(store)
        await write_end(store, an_end(task.run, TaskState.FAILED, reason="no"))
        await store.revive(a_revive(run.task_id))
        task = await acquired(store)
        await write_pause(store, a_pause(a_question(), run=task.run))
        assert await state_of(store, run.task_id) is TaskState.WAITING
        assert (await store.mailbox(run.task_id)).questions == (_PLACE,)
        assert await answer(store, an_answer(run.task_id)) == MailAccepted(True)


class ValueSuite:
    """A task keeps the latest value of each key for as long as it has a row."""

    async def test_the_last_value_counts(self, store: CheckpointStore) -> None:
        run = await begun(store)
        for value in (b"1", b"2"):
            assert await store.set_value(SetValue(run, "step", value)) == SaveCommitted()
        found = await store.value(run.task_id, AGENT, "step")
        assert found == StoredValue(REQUESTER, b"2")
        unset = await store.value(run.task_id, AGENT, "other")
        assert unset == StoredValue(REQUESTER, None)

    async def test_a_value_outlives_pauses_and_the_end(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.set_value(SetValue(run, "step", b"1"))
        pause = a_pause("a", run=run)
        await write_pause(store, pause)
        assert await store.value(run.task_id, AGENT, "step") == StoredValue(REQUESTER, b"1")
        await store.claim([a_claim(pause)], HERE, 0)
        await write_end(store, an_end((await acquired(store)).run))
        assert await store.value(run.task_id, AGENT, "step") == StoredValue(REQUESTER, b"1")
        assert (await store.mailbox(run.task_id)).values == (("step", b"1"),)

    async def test_an_unknown_task_has_no_values(self, store: CheckpointStore) -> None:
        run = await begun(store)
        assert await store.value(TaskId("unknown"), AGENT, "step") is None
        assert await store.value(run.task_id, ELSEWHERE, "step") is None
        early = a_run()
        await store.cancel([a_cancel(early.task_id)])
        assert await store.value(early.task_id, AGENT, "step") is None

    async def test_only_the_owner_sets_values(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        clock.advance(HOUR)
        (rescued,) = await store.rescue(THERE, 10)
        assert await store.set_value(SetValue(run, "step", b"1")) == Fenced()
        assert await store.set_value(SetValue(rescued.run, "step", b"2")) == SaveCommitted()
        await write_pause(store, a_pause("a", run=rescued.run))
        assert await store.set_value(SetValue(rescued.run, "step", b"3")) == Fenced()
        assert await store.value(run.task_id, AGENT, "step") == StoredValue(REQUESTER, b"2")
        assert await store.set_value(SetValue(a_run(), "step", b"1")) == Fenced()

    async def test_a_cancelled_task_is_notified(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.cancel([a_cancel(run.task_id)])
        assert await store.set_value(SetValue(run, "step", b"1")) == CancelFound(run)

    async def test_too_many_values_are_refused(self, store: CheckpointStore) -> None:
        run = await begun(store)
        for number in range(MAX_VALUES):
            command = SetValue(run, f"key {number}", b"1")
            assert await store.set_value(command) == SaveCommitted()
        assert await store.set_value(SetValue(run, "one more", b"1")) == TooManyValues()
        assert await store.set_value(SetValue(run, "key 1", b"2")) == SaveCommitted()


class MailboxSuite(SignalSuite, KeptAnswerSuite, ValueSuite):
    """What a store keeps for a task besides its checkpoints."""
