"""Recording outcomes, and meeting joins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.calls import AT_LEAST, FIRST, Join
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import CallState, CancelNotice, Resumable, Run, TaskState
from meshpoint.model.transitions import (
    DuplicateOutcome,
    JoinCompleted,
    PauseCommitted,
    StillWaiting,
    TaskReady,
    UnknownCall,
    WrongSender,
)
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FORMAT,
    HERE,
    HOUR,
    LEASE,
    OTHER_FORMAT,
    PEER,
    SECOND,
    STRANGER,
    THERE,
    TIMEOUT,
    a_call,
    a_claim,
    a_pause,
    a_release,
    a_replica,
    a_requester,
    answered,
    cancels_to_send,
    error,
    kinds,
    ok,
    one,
    outcomes,
    paused,
    ready,
    resumed,
    row,
    state_of,
    sub,
    task_ids,
)

USAGE = TokenUsage(total=Tokens(input=3, output=2), by_model={"m": Tokens(input=3, output=2)})


class ClaimSuite:
    """Each call gets exactly one outcome, from the peer that was called."""

    async def test_task_waits_until_last_outcome(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        assert await store.claim([a_claim(pause, "a")], HERE, 1) == [
            StillWaiting(pause.run.task_id, sub(pause, "a"))
        ]
        summary, (a, b) = await row(store, pause.run.task_id)
        assert (summary.state, summary.completed, summary.expected) == (TaskState.WAITING, 1, 2)
        assert (a.state, b.state, b.outcome) == (CallState.DONE, CallState.PENDING, None)
        assert a.outcome is not None

    async def test_last_outcome_gives_task_to_claimant(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a")
        claim = a_claim(pause, "a", ok({"price": 7}))
        run = Run(pause.run.task_id, AGENT, claim.id, fence=2, generation=1)
        arrival = one(await store.claim([claim], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        task = arrival.task
        assert (arrival.task_id, arrival.sub_task_id, arrival.cancels) == (
            run.task_id,
            claim.sub_task_id,
            (),
        )
        assert task == Resumable(
            run=run,
            requester=a_requester(),
            context=pause.context,
            state=pause.state,
            state_format=FORMAT,
            outcomes=(("a", PEER, ok({"price": 7})),),
            request=task.request,  # optional once there is a state
            attempt=1,
        )
        summary, _ = await row(store, run.task_id)
        assert (summary.state, summary.owner, summary.fence, summary.attempt) == (
            TaskState.RUNNING,
            HERE.id,
            2,
            1,
        )

    async def test_claimed_task_has_lease(self, store: CheckpointStore, clock: FakeClock) -> None:
        await resumed(store)
        clock.advance(LEASE - SECOND)
        assert await store.rescue(THERE, 10) == []
        clock.advance(2 * SECOND)
        assert len(await store.rescue(THERE, 10)) == 1

    async def test_outcomes_stand_in_call_order(self, store: CheckpointStore) -> None:
        pause = await paused(store, "z", "a", "m")
        assert list(outcomes(await resumed(store, pause, "m", "z", "a"))) == ["z", "a", "m"]

    async def test_calls_of_several_peers(self, store: CheckpointStore, clock: FakeClock) -> None:
        hotels = AgentName("hotels")
        pauses = [
            a_pause(
                a_call("z"),
                a_call("b", peer=hotels, timeout=HOUR),
                a_call("y"),
                a_call("a", peer=hotels),
            )
            for _ in range(2)
        ]
        committed = await store.pause(pauses)
        soon, late = clock.now() + TIMEOUT, clock.now() + HOUR
        for pause, each in zip(pauses, committed, strict=True):
            assert isinstance(each, PauseCommitted)
            assert [(call.peer, call.deadline) for call in each.dispatches] == [
                (PEER, soon), (hotels, late), (PEER, soon), (hotels, soon),
            ]  # fmt: skip
            _, calls = await row(store, pause.run.task_id)
            assert [(call.call_id, call.peer) for call in calls] == [
                ("z", PEER), ("b", hotels), ("y", PEER), ("a", hotels),
            ]  # fmt: skip
        claims = [
            a_claim(pause, call.call_id, sender=call.peer)
            for pause in pauses
            for call in reversed(pause.calls)
        ]
        arrivals = await store.claim(claims, HERE, 2)
        tasks = [arrival.task for arrival in arrivals if isinstance(arrival, JoinCompleted)]
        assert [task.outcomes for task in tasks] == 2 * [
            (
                ("z", PEER, ok("z")),
                ("b", hotels, ok("b")),
                ("y", PEER, ok("y")),
                ("a", hotels, ok("a")),
            )
        ]

    @pytest.mark.parametrize(
        "outcome",
        [
            Ok({"deep": [1, 2.5, None, "ünï"]}, ({"name": "plan.pdf"}, {"name": "map"}), USAGE),
            Ok(None),
            *(Failed(kind, "why", USAGE) for kind in FailureKind),
        ],
        ids=["ok", "none", *FailureKind],
    )
    async def test_outcome_round_trip(self, store: CheckpointStore, outcome: Outcome) -> None:
        arrival = one(await store.claim([a_claim(await paused(store), "a", outcome)], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert outcomes(arrival.task) == {"a": outcome}

    async def test_repeated_claim_returns_first_result(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        first, last = a_claim(pause, "a"), a_claim(pause, "b")
        still_waiting = await store.claim([first], HERE, 1)
        assert await store.claim([first], HERE, 1) == still_waiting
        assert (await row(store, pause.run.task_id))[0].completed == 1
        all_arrived = await store.claim([last], HERE, 1)
        before = await row(store, pause.run.task_id)
        assert await store.claim([last], HERE, 1) == all_arrived
        assert await store.claim([first], HERE, 1) == still_waiting
        assert await row(store, pause.run.task_id) == before

    async def test_repeated_batch_returns_first_results(self, store: CheckpointStore) -> None:
        pause, short = await paused(store, "a", "b"), await paused(store, "a", "b", join=FIRST)
        claims = [a_claim(pause, "b"), a_claim(short, "a"), a_claim(pause, "a")]
        first = await store.claim(claims, HERE, 2)
        assert [type(arrival) for arrival in first] == [StillWaiting, JoinCompleted, JoinCompleted]
        assert await store.claim(claims, HERE, 2) == first

    async def test_claim_without_slot_is_idempotent(self, store: CheckpointStore) -> None:
        claim = a_claim(await paused(store))
        first = await store.claim([claim], HERE, 0)
        assert isinstance(one(first), TaskReady)
        assert await store.claim([claim], HERE, 0) == first

    async def test_rescue_voids_old_claim(self, store: CheckpointStore, clock: FakeClock) -> None:
        claim = a_claim(await paused(store))
        await store.claim([claim], HERE, 1)
        clock.advance(LEASE + SECOND)
        await store.rescue(THERE, 10)
        before = await row(store, claim.task_id)
        assert not isinstance(one(await store.claim([claim], HERE, 1)), JoinCompleted)
        assert await row(store, claim.task_id) == before

    async def test_claim_repeated_after_pause_is_ignored(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        claim = a_claim(pause)
        arrival = one(await store.claim([claim], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        await paused(store, "a", run=arrival.task.run)
        before = await row(store, claim.task_id)
        assert isinstance(one(await store.claim([claim], HERE, 1)), UnknownCall | DuplicateOutcome)
        assert await row(store, claim.task_id) == before

    async def test_only_a_call_without_its_outcome_has_a_request(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store, "a", "b")
        task_id = pause.run.task_id
        keys = [(task_id, sub(pause, "a")), (task_id, sub(pause, "b")), (task_id, TaskId("other"))]
        assert [each is None for each in await store.find_dispatches(keys)] == [False, False, True]
        await store.claim([a_claim(pause, "a")], HERE, 1)
        assert [each is None for each in await store.find_dispatches(keys)] == [True, False, True]

    async def test_a_duplicate_changes_nothing(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "a", ok("first"))], HERE, 1)
        before = await row(store, pause.run.task_id)
        duplicate = DuplicateOutcome(pause.run.task_id, sub(pause, "a"))
        assert await store.claim([a_claim(pause, "a", ok("second"))], HERE, 1) == [duplicate]
        assert await row(store, pause.run.task_id) == before
        assert outcomes(await resumed(store, pause, "b"))["a"] == ok("first")

    async def test_of_duplicates_in_one_batch_one_wins(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        claims = [a_claim(pause, "a", ok(number)) for number in range(3)]
        arrivals = await store.claim(claims, HERE, 1)
        assert sorted(type(arrival).__name__ for arrival in arrivals) == [
            "DuplicateOutcome",
            "DuplicateOutcome",
            "StillWaiting",
        ]
        winner = next(
            number for number, arrival in enumerate(arrivals) if isinstance(arrival, StillWaiting)
        )
        assert outcomes(await resumed(store, pause, "b"))["a"] == ok(winner)

    async def test_duplicate_after_join_is_ignored(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        run = (await resumed(store, pause)).run
        assert await store.claim([a_claim(pause)], THERE, 1) == [
            DuplicateOutcome(run.task_id, sub(pause, "a"))
        ]
        assert await store.renew([run], HERE) == []

    async def test_a_response_nobody_waits_for_is_unknown(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        no_call = replace(a_claim(pause), sub_task_id=TaskId("nobody"))
        no_task = replace(a_claim(pause), task_id=TaskId("nobody"))
        assert await store.claim([no_call, no_task], HERE, 1) == [
            UnknownCall(pause.run.task_id, TaskId("nobody")),
            UnknownCall(TaskId("nobody"), sub(pause, "a")),
        ]
        assert await state_of(store, pause.run.task_id) is TaskState.WAITING

    async def test_only_the_called_peer_may_answer(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        forged = a_claim(pause, "a", ok("forged"), sender="mallory")
        wrong = WrongSender(pause.run.task_id, sub(pause, "a"), expected=PEER)
        assert await store.claim([forged], HERE, 1) == [wrong]
        assert outcomes(await resumed(store, pause)) == {"a": ok("a")}

    async def test_the_mesh_itself_may_answer(self, store: CheckpointStore) -> None:
        undeliverable = Failed(FailureKind.UNDELIVERABLE, "no such agent")
        arrival = one(
            await store.claim(
                [a_claim(await paused(store), "a", undeliverable, sender=None)], HERE, 1
            )
        )
        assert isinstance(arrival, JoinCompleted)
        assert outcomes(arrival.task) == {"a": undeliverable}

    async def test_responses_are_claimed_in_batch(self, store: CheckpointStore) -> None:
        one_task, two_tasks = await paused(store, "a", "b", "c"), await paused(store, "a")
        claims = [
            a_claim(one_task, "c"),
            a_claim(two_tasks, "a"),
            replace(a_claim(one_task), task_id=TaskId("nobody")),
            a_claim(one_task, "a"),
            a_claim(one_task, "b"),
        ]
        arrivals = await store.claim(claims, HERE, 5)
        assert [type(arrival) for arrival in arrivals] == [
            StillWaiting,
            JoinCompleted,
            UnknownCall,
            StillWaiting,
            JoinCompleted,
        ]
        assert [arrival.sub_task_id for arrival in arrivals] == [
            claim.sub_task_id for claim in claims
        ]

    async def test_claim_without_slot_makes_task_ready(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        made_ready = TaskReady(pause.run.task_id, sub(pause, "a"))
        assert await store.claim([a_claim(pause)], HERE, 0) == [made_ready]
        assert await state_of(store, pause.run.task_id) is TaskState.READY
        task = one(await store.acquire(THERE, 10))
        assert (task.state, outcomes(task), task.attempt) == (pause.state, {"a": ok("a")}, 1)
        assert (task.run.generation, task.run.fence) == (1, 2)

    async def test_claim_takes_no_more_tasks_than_slots(self, store: CheckpointStore) -> None:
        pauses = [await paused(store) for _ in range(3)]
        arrivals = await store.claim([a_claim(pause) for pause in pauses], HERE, 2)
        assert sorted(type(arrival).__name__ for arrival in arrivals) == [
            "JoinCompleted",
            "JoinCompleted",
            "TaskReady",
        ]

    async def test_unknown_format_skipped(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        assert isinstance(await answered(store, pause, replica=STRANGER), TaskReady)
        assert await store.acquire(STRANGER, 10) == []
        assert task_ids(await store.acquire(a_replica(formats=[OTHER_FORMAT, FORMAT]), 10)) == [
            pause.run.task_id
        ]
        clock.advance(LEASE + SECOND)
        assert await store.rescue(STRANGER, 10) == []
        assert task_ids(await store.rescue(HERE, 10)) == [pause.run.task_id]

    async def test_acquire_own_agent_only(self, store: CheckpointStore, clock: FakeClock) -> None:
        foreigner = a_replica(agent=AgentName("hotels"))
        await ready(store)
        assert await store.acquire(foreigner, 10) == []
        await store.acquire(HERE, 10)
        clock.advance(LEASE + SECOND)
        assert await store.rescue(foreigner, 10) == []

    async def test_claiming_nothing_is_fine(self, store: CheckpointStore) -> None:
        assert await store.claim([], HERE, 1) == []

    async def test_all_counts_outcomes_of_any_kind(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "a", error())], HERE, 1)
        assert kinds(await resumed(store, pause, "b")) == ["error", "ok"]

    async def test_first_closes_open_calls(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", a_call("c", peer=AgentName("hotels")), join=FIRST)
        arrival = await answered(store, pause, "b")
        assert isinstance(arrival, JoinCompleted)
        assert kinds(arrival.task) == ["cancelled", "ok", "cancelled"]
        assert arrival.cancels == (
            CancelNotice(AGENT, pause.run.task_id, sub(pause, "a"), PEER),
            CancelNotice(AGENT, pause.run.task_id, sub(pause, "c"), AgentName("hotels")),
        )
        states = [call.state for call in (await row(store, pause.run.task_id))[1]]
        assert states == [CallState.CANCELLING, CallState.DONE, CallState.CANCELLING]
        assert await cancels_to_send(store, clock) == [sub(pause, "a"), sub(pause, "c")]

    async def test_ready_task_reports_closed_calls(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        arrival = await answered(store, pause, "a", slots=0)
        assert isinstance(arrival, TaskReady)
        assert [notice.sub_task_id for notice in arrival.cancels] == [sub(pause, "b")]
        assert kinds(one(await store.acquire(HERE, 10))) == ["ok", "cancelled"]

    async def test_a_failure_does_not_meet_first(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", "c", join=FIRST)
        failed = await store.claim(
            [a_claim(pause, "a", error()), a_claim(pause, "b", error())], HERE, 1
        )
        assert [type(arrival) for arrival in failed] == [StillWaiting, StillWaiting]
        assert kinds(await resumed(store, pause, "c")) == ["error", "error", "ok"]

    async def test_first_is_met_when_it_no_longer_can_be(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        failed = await store.claim(
            [a_claim(pause, "a", error()), a_claim(pause, "b", error())], HERE, 1
        )
        assert [type(arrival) for arrival in failed] == [StillWaiting, JoinCompleted]

    async def test_k_of_n_counts_results(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", "c", "d", join=AT_LEAST(2))
        first = await store.claim([a_claim(pause, "a"), a_claim(pause, "b", error())], HERE, 1)
        assert [type(arrival) for arrival in first] == [StillWaiting, StillWaiting]
        arrival = await answered(store, pause, "d")
        assert isinstance(arrival, JoinCompleted)
        assert kinds(arrival.task) == ["ok", "error", "cancelled", "ok"]
        assert [notice.sub_task_id for notice in arrival.cancels] == [sub(pause, "c")]

    async def test_k_of_n_is_met_when_it_no_longer_can_be(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", "c", join=AT_LEAST(2))
        await store.claim([a_claim(pause, "a", error()), a_claim(pause, "b", error())], HERE, 1)
        assert kinds(await resumed(store, pause, "c")) == ["error", "error", "ok"]

    async def test_two_results_in_batch_complete_first_once(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        arrivals = await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 2)
        task = one(arrival.task for arrival in arrivals if isinstance(arrival, JoinCompleted))
        for arrival, kind in zip(arrivals, kinds(task), strict=True):
            assert kind == ("cancelled" if isinstance(arrival, DuplicateOutcome) else "ok")

    async def test_late_result_of_closed_call_is_ignored(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await answered(store, pause, "a", slots=0)
        before = await row(store, pause.run.task_id)
        assert await store.claim([a_claim(pause, "b")], HERE, 1) == [
            DuplicateOutcome(pause.run.task_id, sub(pause, "b"))
        ]
        assert await row(store, pause.run.task_id) == before
        assert kinds(one(await store.acquire(HERE, 10))) == ["ok", "cancelled"]

    async def test_a_late_response_counts_its_tokens_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=5 * SECOND), a_call("b"))
        clock.advance(6 * SECOND)
        await store.expire(HERE, 10, 1)
        for _ in range(2):
            late = a_claim(pause, "a", replace(ok(), usage=USAGE))
            assert await store.claim([late], HERE, 1) == [
                DuplicateOutcome(late.task_id, late.sub_task_id)
            ]
        task = await resumed(store, pause, "b")
        assert kinds(task) == ["timeout", "ok"]
        assert [outcome.usage for outcome in outcomes(task).values()] == [USAGE, TokenUsage()]

    async def test_a_late_response_counts_its_tokens_until_the_task_runs(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store, "a", "b", "c", join=FIRST)
        late = [a_claim(pause, each, replace(error(), usage=USAGE)) for each in ("b", "c")]
        await store.claim([a_claim(pause, "a"), late[0]], HERE, 0)
        task = one(await store.acquire(HERE, 10))
        await store.claim([late[1]], HERE, 1)
        await store.release([a_release(task.run)])
        task = one(await store.acquire(HERE, 10))
        assert kinds(task) == ["ok", "cancelled", "cancelled"]
        unknown = TokenUsage()
        assert [each.usage for each in outcomes(task).values()] == [unknown, USAGE, unknown]

    async def test_a_late_response_counts_its_tokens_in_the_batch_that_completes_the_join(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=5 * SECOND), a_call("b"))
        clock.advance(6 * SECOND)
        await store.expire(HERE, 10, 1)
        late = a_claim(pause, "a", replace(ok(), usage=USAGE))
        first, last = await store.claim([late, a_claim(pause, "b")], HERE, 1)
        assert first == DuplicateOutcome(late.task_id, late.sub_task_id)
        assert isinstance(last, JoinCompleted)
        assert kinds(last.task) == ["timeout", "ok"]
        assert [each.usage for each in outcomes(last.task).values()] == [USAGE, TokenUsage()]

    async def test_another_peer_counts_no_tokens(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=5 * SECOND), a_call("b"))
        clock.advance(6 * SECOND)
        await store.expire(HERE, 10, 1)
        foreign = a_claim(pause, "a", replace(ok(), usage=USAGE), sender="hotels")
        assert isinstance(one(await store.claim([foreign], HERE, 1)), WrongSender)
        task = await resumed(store, pause, "b")
        assert outcomes(task)["a"].usage == TokenUsage()

    async def test_a_join_that_has_time_left_waits(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=Join(deadline=5 * SECOND))
        assert isinstance(await answered(store, pause, "a"), StillWaiting)
        assert await store.expire(HERE, 10, 1) == []
        assert kinds(await resumed(store, pause, "b")) == ["ok", "ok"]
