"""Questions: calls of a pause that a person answers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.model.tasks import PlannedCall, TaskFilter, TaskState
from meshpoint.model.transitions import (
    DuplicateOutcome,
    JoinCompleted,
    PauseCommitted,
    TaskReady,
    WrongSender,
)
from meshpoint.model.waits import received_outcome
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
    a_claim,
    a_pause,
    one,
    row,
)
from meshpoint.testing.conformance.store_sleeps import a_sleep

_PEER = AgentName(Question("approval", bool).peer)
_PLACE = TaskId("~?approval.1")


def a_question(timeout: timedelta | None = None) -> PlannedCall:
    """A question as part of a pause."""
    call = a_call("approval", timeout=timeout, peer=_PEER)
    return replace(call, sub_task_id=_PLACE, headers={})


class QuestionSuite:
    """A question waits without a limit, is found by its key, and has one answer."""

    async def test_a_question_waits_for_its_answer(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_question())
        assert await store.pause([pause]) == [PauseCommitted(TaskState.WAITING, ())]
        task_id = pause.run.task_id
        clock.advance(1000 * HOUR)
        assert await store.expire(HERE, 10, 1) == []
        assert await store.unsent(AGENT, 10) == []
        summary, _ = await row(store, task_id)
        assert summary.waiting_for == ("approval",)
        where = TaskFilter(waiting_for="approval")
        assert [each.task_id for each in await store.tasks(where=where)] == [task_id]
        claim = replace(a_claim(pause, "approval", Ok(True)), sender=_PEER)
        assert isinstance(one(await store.claim([claim], HERE, 0)), TaskReady)
        second = replace(a_claim(pause, "approval", Ok(False)), sender=_PEER)
        assert isinstance(one(await store.claim([second], THERE, 1)), DuplicateOutcome)
        task = one(await store.acquire(HERE, 1))
        assert task.outcomes == (("approval", _PEER, Ok(True)),)

    async def test_a_question_is_found_by_its_key(self, store: CheckpointStore) -> None:
        pause = a_pause(a_question())
        await store.pause([pause])
        key = QuestionKey(AGENT, pause.run.task_id, _PLACE)
        others = [
            key._replace(agent=ELSEWHERE),
            key._replace(task_id=TaskId("unknown")),
            key._replace(sub_task_id=TaskId("~?approval.2")),
        ]
        asked, *missing = await store.find_questions([key, *others])
        assert missing == [None, None, None]
        assert asked is not None
        assert (asked.name, asked.requester, asked.outcome) == ("approval", REQUESTER, None)
        assert asked.details == pause.calls[0].body
        claim = replace(a_claim(pause, "approval", Ok(True)), sender=_PEER)
        await store.claim([claim], HERE, 0)
        (answered,) = await store.find_questions([key])
        assert answered is not None
        assert answered.outcome == Ok(True)

    async def test_a_rejection_says_who_and_when(self, store: CheckpointStore) -> None:
        pause = a_pause(a_question())
        await store.pause([pause])
        who = {"answeredBy": "ada"}
        failed = Failed(FailureKind.ERROR, "rejected by 'ada': no", artifacts=(dict(who),))
        claim = replace(a_claim(pause, "approval", failed), sender=_PEER)
        await store.claim([claim], HERE, 0)
        (asked,) = await store.find_questions([QuestionKey(AGENT, pause.run.task_id, _PLACE)])
        assert asked is not None
        assert asked.outcome == failed
        task = one(await store.acquire(HERE, 1))
        assert received_outcome(*task.outcomes[0][1:]) == replace(failed, artifacts=())

    async def test_no_peer_answers_a_question(self, store: CheckpointStore) -> None:
        pause = a_pause(a_question())
        await store.pause([pause])
        assert isinstance(
            one(await store.claim([a_claim(pause, "approval")], HERE, 1)), WrongSender
        )

    async def test_a_question_is_asked_again_under_its_id(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_question(timeout=HOUR))
        await store.pause([pause])
        clock.advance(HOUR + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert expired.cancels == ()
        task = expired.join_result.task
        unanswered = task.outcomes[0][2]
        assert isinstance(unanswered, Failed)
        assert unanswered.kind is FailureKind.TIMEOUT
        again = a_pause(a_question(timeout=HOUR), run=task.run)
        assert one(await store.pause([again])) == PauseCommitted(TaskState.WAITING, ())
        (asked,) = await store.find_questions([QuestionKey(AGENT, task.run.task_id, _PLACE)])
        assert asked is not None
        assert asked.outcome is None

    async def test_a_sleep_is_no_question(self, store: CheckpointStore) -> None:
        nap = a_sleep("nap", HOUR)
        pause = a_pause(nap)
        await store.pause([pause])
        key = QuestionKey(AGENT, pause.run.task_id, nap.sub_task_id)
        assert await store.find_questions([key]) == [None]
