"""Ended tasks that become ready again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import (
    Ended,
    Fenced,
    Requester,
    Save,
    TaskState,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.operations import NotRevived, OperationStatus, Refusal, Revived
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    FORMAT,
    HERE,
    HOUR,
    LEASE,
    REQUESTER,
    SECOND,
    TIMINGS,
    a_begin,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_release,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_operation,
    begun,
    ended,
    failed,
    one,
    operating,
    paused,
    ready,
    resumed,
    revived,
    row,
    saved,
    state_of,
)
from meshpoint.testing.conformance.store_leases import sent
from meshpoint.testing.conformance.store_operations import ELSEWHERE, latest_of, status_of

DONE, FAILED, CANCELLED = TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED


class ReviveSuite:
    """Ended tasks that become ready again."""

    async def test_a_revived_operation_is_ready_as_new(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, run=await operating(store), requester=a_requester(idle_timeout=HOUR))
        run = (await resumed(store, pause)).run
        last = await saved(store, run)
        await store.end([an_end(run, FAILED, reason="broken", dead_reason="broken")])
        await sent(store, run.task_id)
        wish = a_revive(run.task_id)
        assert await store.revive(wish) == Revived(run.task_id, AGENT, 1)
        assert await status_of(store, run.task_id) == (OperationStatus.PENDING, None, None)
        summary, calls = await row(store, run.task_id)
        assert (summary.attempt, summary.dead_reason, summary.expected, calls) == (0, None, 0, [])
        assert (await store.lookup([run.task_id]))[run.task_id].reply is None
        clock.advance(TIMINGS.checkpoint_ttl + HOUR)
        assert await store.unsent(AGENT, 10) == []
        assert await store.keep_alives(HERE, 10) == []
        assert await store.purge(AGENT, 10) == 0
        task = one(await store.take(HERE, 10))
        assert (task.run.generation, task.run.fence > run.fence + 1) == (0, True)
        assert (task.context, task.state, task.state_format, task.outcomes) == ({}, b"", "", ())
        assert (task.request, task.requester, task.cancel_requested) == (
            b"request",
            Requester(app_id=REQUESTER),
            False,
        )
        assert (task.attempt, task.checkpoint, task.retry_count) == (1, last.seq + 1, 1)

    async def test_a_wish_may_bring_a_request_and_a_requester(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        requester = a_requester(
            reply_to=Address("cli.resp"), deadline=clock.now() + HOUR, idle_timeout=timedelta(seconds=9)
        )
        await store.revive(a_revive(run.task_id, request=b"new", requester=requester))
        task = one(await store.take(HERE, 10))
        assert (task.request, task.requester) == (b"new", requester)
        result = one(await store.end([an_end(task.run, reply=b"at last")]))
        assert isinstance(result, Ended)
        assert (result.reply.requester, result.reply.body) == (requester, b"at last")

    async def test_whoever_still_waits_for_a_reply_gets_the_new_one(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR, idle_timeout=9 * SECOND)
        run = await operating(store)
        await saved(store, run)
        await store.end([an_end(await revived(store, run.task_id, requester=requester, abandoned=True), FAILED)])
        run = await revived(store, run.task_id)  # its reply was never sent
        end = one(await store.end([an_end(run, reply=b"at last")]))
        assert isinstance(end, Ended)
        assert (end.reply.requester, end.reply.body) == (replace(requester, deadline=None), b"at last")

    async def test_whoever_waits_for_a_task_whose_owner_is_gone_gets_the_reply(self, store: CheckpointStore) -> None:
        run = await revived(store, (await operating(store)).task_id, abandoned=True, without_checkpoint=True)
        end = one(await store.end([an_end(run)]))
        assert isinstance(end, Ended)
        assert end.reply.requester == a_requester()

    async def test_whoever_waits_gives_way_to_another_requester(self, store: CheckpointStore) -> None:
        requester = a_requester(parent_task_id="next")
        run = await revived(store, (await failed(store)).task_id, requester=requester)
        end = one(await store.end([an_end(run)]))
        assert isinstance(end, Ended)
        assert end.reply.requester == requester

    async def test_a_revived_operation_goes_on_saving(self, store: CheckpointStore) -> None:
        run = await revived(store, (await failed(store)).task_id)
        assert (await saved(store, run)).seq == 3
        assert [each.seq for each in await store.history(run.task_id)] == [1, 2, 3]
        await store.end([an_end(run, FAILED, reason="again")])
        latest = await latest_of(store, run.task_id)
        assert (latest.failure_reason, latest.retry_count) == ("again", 1)
        assert await store.revive(a_revive(run.task_id)) == Revived(run.task_id, AGENT, 2)

    async def test_one_that_is_revived_outlives_its_old_end(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        await sent(store, run.task_id)
        run = await revived(store, run.task_id)
        clock.advance(2 * HOUR)
        await store.end([an_end(run, FAILED)])
        await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl - HOUR)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(HOUR + SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_the_runs_of_before_are_zombies(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        end = an_end(run, FAILED)
        await store.end([end])
        await store.revive(a_revive(run.task_id))
        before = await row(store, run.task_id)
        assert await store.end([end]) == [Fenced()]
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await store.save(Save(run, a_checkpoint(run, 9))) == Fenced()
        assert await store.renew([run], HERE) == [run]
        assert await row(store, run.task_id) == before

    async def test_a_raised_cancel_flag_is_lowered(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.cancel([a_cancel(run.task_id)])
        await store.end([an_end(run, CANCELLED)])
        assert (await saved(store, await revived(store, run.task_id))).seq == 3

    async def test_a_revived_operation_pauses_and_resumes(self, store: CheckpointStore) -> None:
        run = await revived(store, (await failed(store)).task_id)
        task = await resumed(store, await paused(store, run=run, state_format=FORMAT))
        assert (task.run.generation, task.checkpoint, task.retry_count) == (1, 2, 1)


class RefusalSuite:
    """Reasons for not resuming an operation."""

    async def test_what_is_not_there_is_not_found(self, store: CheckpointStore) -> None:
        run = await failed(store)
        before = await row(store, run.task_id)
        for wish in (a_revive(TaskId("nobody")), a_revive(run.task_id, agent=ELSEWHERE, abandoned=True)):
            assert await store.revive(wish) == NotRevived(Refusal.NOT_FOUND)
        assert await row(store, run.task_id) == before
        assert isinstance(await store.revive(a_revive(run.task_id, agent=AGENT)), Revived)

    async def test_what_somebody_is_at_is_running(self, store: CheckpointStore, clock: FakeClock) -> None:
        running, until = await operating(store), (clock.now() + LEASE).isoformat()
        waiting = await paused(store, run=await operating(store))
        pending = await ready(store, await paused(store, run=await operating(store)))
        found = [(run.task_id, await row(store, run.task_id)) for run in (running, waiting.run, pending.run)]
        details = [f"running, owned by {HERE.id} until {until}", "waiting", "pending"]
        for (task_id, before), detail in zip(found, details, strict=True):
            wish = a_revive(task_id, without_checkpoint=True)
            assert await store.revive(wish) == NotRevived(Refusal.RUNNING, detail)
            assert await row(store, task_id) == before

    async def test_what_a_person_is_waited_for_is_running_too(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.release([a_release(run, incompatible="travel/9")])
        clock.advance(TIMINGS.incompatible_limit + SECOND)
        await store.release([a_release(one(await store.take(HERE, 10)).run, incompatible="travel/9")])
        assert await state_of(store, run.task_id) is TaskState.PARKED
        assert await store.revive(a_revive(run.task_id)) == NotRevived(Refusal.RUNNING, "parked")
        assert isinstance(await store.revive(a_revive(run.task_id, abandoned=True)), Revived)

    async def test_what_has_ended_well_is_completed(self, store: CheckpointStore) -> None:
        run = await operating(store, preserve=True)
        await saved(store, run)
        await store.end([an_end(run)])
        for wish in (a_revive(run.task_id), a_revive(run.task_id, without_checkpoint=True, abandoned=True)):
            assert await store.revive(wish) == NotRevived(Refusal.COMPLETED)

    async def test_what_has_no_checkpoint_is_revived_on_demand_only(self, store: CheckpointStore) -> None:
        task_id = (await failed(store, checkpoints=0)).task_id
        assert await store.revive(a_revive(task_id)) == NotRevived(Refusal.NO_CHECKPOINT)
        assert await store.revive(a_revive(task_id, without_checkpoint=True)) == Revived(task_id, AGENT, 1)
        assert one(await store.take(HERE, 10)).checkpoint == 0

    async def test_a_task_that_is_no_operation_runs_from_its_start(self, store: CheckpointStore) -> None:
        dead = (await ended(store, state=FAILED, dead_reason="five attempts")).task_id
        assert await store.revive(a_revive(dead)) == NotRevived(Refusal.NO_CHECKPOINT)
        assert await store.revive(a_revive(dead, without_checkpoint=True)) == Revived(dead, AGENT, 1)
        assert one(await store.take(HERE, 10)).checkpoint is None

    async def test_a_task_whose_request_is_gone_needs_a_new_one(self, store: CheckpointStore) -> None:
        over = (await ended(store, state=FAILED)).task_id
        refused = await store.revive(a_revive(over, without_checkpoint=True))
        assert isinstance(refused, NotRevived)
        assert refused.refusal is Refusal.NO_CHECKPOINT
        assert isinstance(await store.revive(a_revive(over, without_checkpoint=True, request=b"new")), Revived)

    async def test_an_exclusive_agent_has_one_active_operation(self, store: CheckpointStore) -> None:
        over, other = await failed(store, exclusive=True), await operating(store)
        await begun(store)  # this one is not an operation
        wish = a_revive(over.task_id)
        assert await store.revive(wish) == NotRevived(Refusal.OTHER_ACTIVE, other.task_id)
        await store.end([an_end(other, FAILED)])
        assert isinstance(await store.revive(wish), Revived)

    async def test_the_first_reason_is_told(self, store: CheckpointStore) -> None:
        empty, good = await failed(store, checkpoints=0, exclusive=True), await operating(store, exclusive=True)
        await store.end([an_end(good)])
        active = await operating(store, exclusive=True)
        assert await store.revive(a_revive(active.task_id, agent=ELSEWHERE)) == NotRevived(Refusal.NOT_FOUND)
        wishes = [a_revive(run.task_id, abandoned=run is good) for run in (active, good, empty)]
        found = [await store.revive(wish) for wish in wishes]
        assert [each.refusal for each in found if isinstance(each, NotRevived)] == [
            Refusal.RUNNING,
            Refusal.COMPLETED,
            Refusal.NO_CHECKPOINT,
        ]

    async def test_the_operations_of_other_agents_do_not_count(self, store: CheckpointStore) -> None:
        over = await failed(store, exclusive=True)
        other = replace(a_run(), agent=ELSEWHERE)
        await store.begin([replace(a_begin(other), operation=an_operation(exclusive=True))])
        assert isinstance(await store.revive(a_revive(over.task_id)), Revived)

    async def test_an_agent_that_is_not_exclusive_has_many(self, store: CheckpointStore) -> None:
        over = await failed(store)
        await operating(store)
        assert isinstance(await store.revive(a_revive(over.task_id)), Revived)


class TokenSuite:
    """Manual requests to resume that are repeated or late."""

    async def test_a_repeated_wish_finds_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        wish = a_revive(run.task_id, abandoned=True)
        await store.revive(wish)
        before = await row(store, run.task_id)
        assert await store.revive(wish) == Revived(run.task_id, AGENT, 1, again=True)
        assert await row(store, run.task_id) == before

    async def test_a_wish_by_hand_does_not_depend_on_clocks(self, store: CheckpointStore) -> None:
        run = await failed(store)
        old, new = a_revive(run.task_id), a_revive(run.task_id, order="99", requester=a_requester())
        await store.revive(new)
        await store.end([an_end(one(await store.take(HERE, 10)).run, FAILED)])
        assert await store.revive(old) == Revived(run.task_id, AGENT, 2)

    @pytest.mark.parametrize("step", ["running", "waiting", "ready"])
    async def test_whoever_knows_that_the_owner_is_gone_takes_the_task(
        self, store: CheckpointStore, step: str
    ) -> None:
        run = await operating(store)
        await saved(store, run)
        if step != "running":
            pause = await paused(store, run=run)
            if step == "ready":
                await ready(store, pause)
        assert await store.revive(a_revive(run.task_id, abandoned=True)) == Revived(run.task_id, AGENT, 1)
        task = one(await store.take(HERE, 10))
        assert (task.run.generation, task.outcomes, task.checkpoint, task.request) == (0, (), 1, b"request")
        assert (await row(store, run.task_id))[1] == []
        assert await store.end([an_end(run)]) == [Fenced()]
