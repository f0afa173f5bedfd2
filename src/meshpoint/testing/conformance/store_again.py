"""Tasks that are requested again: accepted requests, permitted requesters, and old cancels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import FIRST
from meshpoint.model.checkpoint import (
    CancelledNow,
    CancelNotice,
    Committed,
    Duplicate,
    Ended,
    Pause,
    TaskState,
    Unknown,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.operations import (
    ASKED_BY_ANOTHER,
    ASKED_FOR_OTHERWISE,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    PEER,
    REQUESTER,
    SECOND,
    TIMINGS,
    a_begin,
    a_cancel,
    a_claim,
    a_pause,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_operation,
    begun,
    cancels_to_send,
    ended,
    failed,
    one,
    operating,
    outcomes,
    paused,
    ready,
    resumed,
    revived,
    row,
    saved,
    state_of,
    sub,
)
from meshpoint.testing.conformance.store_leases import sent

DONE, FAILED = TaskState.COMPLETED, TaskState.FAILED


class ApartSuite:
    """Cancels that an earlier attempt has not sent yet."""

    async def _cancelled(self, store: CheckpointStore) -> Pause:
        """Cancel an operation while it waits for a and b. Its reply is already sent."""
        run = await operating(store)
        await saved(store, run)
        pause = await paused(store, "a", "b", run=run)
        assert isinstance(one(await store.cancel([a_cancel(run.task_id)])), CancelledNow)
        await sent(store, run.task_id)
        return pause

    @pytest.mark.parametrize("step", ["ready", "running", "waiting", "ready again", "ended"])
    async def test_cancels_of_the_earlier_attempt_are_sent(
        self, store: CheckpointStore, clock: FakeClock, step: str
    ) -> None:
        before = await self._cancelled(store)
        task_id = before.run.task_id
        notices = [CancelNotice(AGENT, task_id, sub(before, call), PEER) for call in ("a", "b")]
        await store.revive(a_revive(task_id))
        kept: list[str] = []
        if step != "ready":
            run, kept = one(await store.take(HERE, 10)).run, []
            if step == "ended":
                await store.end([an_end(run)])
                await sent(store, task_id)
            elif step != "running":
                kept = ["c"]
                pause = a_pause("c", run=run)
                committed = one(await store.pause([pause]))
                assert isinstance(committed, Committed)
                await store.mark_sent(committed.dispatches)
                if step == "ready again":
                    await ready(store, pause)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        assert await store.unsent(AGENT, 10) == notices
        state = await state_of(store, task_id)
        await store.mark_sent(notices)
        clock.advance(TIMINGS.dispatch_lease * 3)
        assert await store.unsent(AGENT, 10) == []
        assert [call.call_id for call in (await row(store, task_id))[1]] == kept
        assert await state_of(store, task_id) is state

    async def test_cancels_of_all_its_pauses_are_sent(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, "a", "b", join=FIRST, run=await operating(store))
        second = await paused(store, "c", "d", join=FIRST, run=(await resumed(store, first, "a")).run)
        run = (await resumed(store, second, "c")).run
        await saved(store, run)
        await store.end([an_end(run, FAILED)])
        run = await revived(store, run.task_id)
        await paused(store, "e", run=run)
        assert set(await cancels_to_send(store, clock)) == {sub(first, "b"), sub(second, "d")}

    async def test_outcomes_of_the_earlier_attempt_are_nobodys(self, store: CheckpointStore) -> None:
        before = await self._cancelled(store)
        await store.revive(a_revive(before.run.task_id))
        task = one(await store.take(HERE, 10))
        assert task.outcomes == ()
        pause = await paused(store, "a", run=task.run)
        late = one(await store.claim([a_claim(before, "a")], HERE, 1))
        assert isinstance(late, Unknown | Duplicate)
        assert list(outcomes(await resumed(store, pause))) == ["a"]

    async def test_a_task_stays_until_the_cancels_of_all_its_attempts_are_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        before = await self._cancelled(store)
        task_id = before.run.task_id
        await store.end([an_end(await revived(store, task_id))])
        await sent(store, task_id)
        clock.advance(TIMINGS.tombstone_ttl + HOUR)
        assert await store.purge(AGENT, 10) == 0
        await store.mark_sent([CancelNotice(AGENT, task_id, sub(before, call), PEER) for call in ("a", "b")])
        assert await store.purge(AGENT, 10) == 1


class OrderSuite:
    """The order of a requester's repeated requests."""

    async def test_the_order_that_a_task_has_seen_finds_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        assert await store.revive(again(run.task_id, "01")) == Revived(run.task_id, AGENT, 1)
        before = await row(store, run.task_id)
        assert await store.revive(again(run.task_id, "01")) == Revived(run.task_id, AGENT, 1, again=True)
        assert await row(store, run.task_id) == before
        for state in (FAILED, DONE):
            await store.end([an_end(one(await store.take(HERE, 10)).run, state)])
            assert await store.revive(again(run.task_id, "01")) == Revived(
                run.task_id, AGENT, 1 + (state is DONE), again=True
            )
            assert await state_of(store, run.task_id) is state
            await store.revive(a_revive(run.task_id))

    async def test_a_smaller_order_is_refused(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "02"))
        refused = NotRevived(Refusal.RUNNING, "asked again since")
        assert await store.revive(again(run.task_id, "01", abandoned=True, adopt=True)) == refused
        await store.end([an_end(one(await store.take(HERE, 10)).run, FAILED)])
        assert await store.revive(again(run.task_id, "01")) == refused
        assert await store.revive(again(run.task_id, "10")) == Revived(run.task_id, AGENT, 2)

    async def test_a_wish_by_hand_leaves_the_order_as_it_is(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "02"))
        await store.end([an_end(one(await store.take(HERE, 10)).run, FAILED)])
        await store.revive(a_revive(run.task_id))
        for state in ("ready", "failed"):
            assert await store.revive(again(run.task_id, "02")) == Revived(run.task_id, AGENT, 2, again=True)
            assert await store.revive(again(run.task_id, "01")) == NotRevived(Refusal.RUNNING, "asked again since")
            if state == "ready":
                await store.end([an_end(one(await store.take(HERE, 10)).run, FAILED)])

    async def test_a_wish_that_came_after_one_by_hand_counts(self, store: CheckpointStore) -> None:
        run = await failed(store)
        wish = again(run.task_id, "01", adopt=True)
        await store.revive(a_revive(run.task_id))
        assert await store.revive(wish) == Adopted()

    async def test_another_agent_does_not_ask_for_a_task(self, store: CheckpointStore) -> None:
        over, active = (await failed(store)).task_id, (await begun(store)).task_id
        before = [await row(store, task_id) for task_id in (over, active)]
        refused = NotRevived(Refusal.NOT_FOUND, "it was requested by another agent")
        other = a_requester(app_id="stranger", reply_to=Address("stranger.resp"))
        for task_id in (over, active):
            for requester in (other, a_requester(app_id=None)):
                wish = again(task_id, "01", requester=requester, adopt=True, without_checkpoint=True)
                assert await store.revive(wish) == refused
        assert [await row(store, task_id) for task_id in (over, active)] == before

    async def test_another_agents_order_does_not_find_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "01"))
        stranger = again(run.task_id, "01", requester=a_requester(app_id="stranger"))
        assert await store.revive(stranger) == NotRevived(Refusal.NOT_FOUND, "it was requested by another agent")

    async def test_a_task_that_was_resumed_by_hand_stays_its_requesters(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await sent(store, run.task_id)
        # No requester expects a reply.
        await store.end([an_end(await revived(store, run.task_id), FAILED)])
        stranger = again(run.task_id, "01", requester=a_requester(app_id="stranger"))
        assert await store.revive(stranger) == NotRevived(Refusal.NOT_FOUND, ASKED_BY_ANOTHER)
        assert await store.revive(again(run.task_id, "01")) == Revived(run.task_id, AGENT, 2)

    async def test_a_requester_asks_again_for_the_same_only(self, store: CheckpointStore) -> None:
        active, over = a_run(), a_run()
        for run in (active, over):
            await store.begin([replace(a_begin(run, operation=an_operation()), digest="this")])
        await store.end([an_end(replace(over, fence=1), FAILED)])
        refused = NotRevived(Refusal.NOT_FOUND, ASKED_FOR_OTHERWISE)
        for run in (active, over):
            before = await row(store, run.task_id)
            wish = again(run.task_id, "01", adopt=True, without_checkpoint=True, request=b"other", digest="that")
            assert await store.revive(wish) == refused
            assert await row(store, run.task_id) == before
            assert not isinstance(await store.revive(replace(wish, digest="this")), NotRevived)

    async def test_a_task_of_the_release_before_learns_its_input(self, store: CheckpointStore) -> None:
        """Rows of an earlier release have no digest, so any input matches."""
        run = await begun(store)
        assert await store.revive(again(run.task_id, "01", adopt=True, digest="this")) == Adopted()
        known = (await store.lookup([run.task_id]))[run.task_id]
        assert (known.requester, known.digest) == (REQUESTER, "this")
        refused = await store.revive(again(run.task_id, "02", adopt=True, digest="that"))
        assert refused == NotRevived(Refusal.NOT_FOUND, ASKED_FOR_OTHERWISE)

    async def test_a_new_request_by_hand_brings_its_own_input(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(a_revive(run.task_id, request=b"other", digest="that"))
        assert (await store.lookup([run.task_id]))[run.task_id].digest == "that"
        assert one(await store.take(HERE, 10)).digest == "that"

    async def test_a_person_does_not_need_to_have_asked(self, store: CheckpointStore) -> None:
        run = await failed(store)
        wish = a_revive(run.task_id, requester=a_requester(app_id="cli"))
        assert await store.revive(wish) == Revived(run.task_id, AGENT, 1)


class AdoptSuite:
    """A new requester attaches to an active task."""

    @pytest.mark.parametrize("step", ["running", "waiting", "ready"])
    async def test_an_active_task_answers_the_new_requester(self, store: CheckpointStore, step: str) -> None:
        run = (await resumed(store)).run
        pause = a_pause(run=run)
        if step != "running":
            await store.pause([pause])
        if step == "ready":
            await ready(store, pause)
        before = await row(store, run.task_id)
        wish = again(run.task_id, "01", adopt=True)
        assert await store.revive(wish) == Adopted()
        assert await row(store, run.task_id) == before
        if step == "running":
            await store.pause([pause])
        run = one(await store.take(HERE, 10)).run if step == "ready" else (await resumed(store, pause)).run
        end = one(await store.end([an_end(run)]))
        assert isinstance(end, Ended)
        assert end.reply.requester == wish.requester

    async def test_an_adopted_task_has_seen_the_order(self, store: CheckpointStore) -> None:
        run = await begun(store)
        assert await store.revive(again(run.task_id, "02", adopt=True)) == Adopted()
        assert await store.revive(again(run.task_id, "02", adopt=True)) == Revived(run.task_id, AGENT, 0, again=True)
        smaller = again(run.task_id, "01", adopt=True)
        assert await store.revive(smaller) == NotRevived(Refusal.RUNNING, "asked again since")
        assert await store.revive(again(run.task_id, "03", adopt=True)) == Adopted()

    async def test_a_task_is_only_adopted_on_demand(self, store: CheckpointStore) -> None:
        run = await begun(store)
        refused = await store.revive(again(run.task_id, "01"))
        assert isinstance(refused, NotRevived)
        assert refused.refusal is Refusal.RUNNING
        assert await store.revive(again(run.task_id, "01", adopt=True)) == Adopted()

    async def test_an_ended_task_is_not_adopted(self, store: CheckpointStore) -> None:
        over, task_id = await ended(store), (await failed(store)).task_id
        assert await store.revive(again(over.task_id, "01", adopt=True)) == NotRevived(Refusal.COMPLETED)
        assert await store.revive(again(task_id, "01", adopt=True)) == Revived(task_id, AGENT, 1)

    async def test_the_new_requester_hears_that_its_task_is_alive_as_often_as_it_says(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        impatient, patient = a_requester(idle_timeout=9 * SECOND), a_requester()
        adopting, leaving = await paused(store, requester=patient), await paused(store, requester=impatient)
        now_impatient = again(adopting.run.task_id, "01", adopt=True, requester=impatient)
        now_patient = again(leaving.run.task_id, "01", adopt=True, requester=patient)
        assert [await store.revive(wish) for wish in (now_impatient, now_patient)] == [Adopted()] * 2
        assert await store.keep_alives(HERE, 10) == []
        clock.advance(4 * SECOND)
        assert [(each.task_id, each.requester) for each in await store.keep_alives(HERE, 10)] == [
            (adopting.run.task_id, impatient)
        ]

    async def test_a_task_adopted_while_it_ran_tells_its_new_requester(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run
        wish = again(run.task_id, "01", adopt=True, requester=a_requester(idle_timeout=9 * SECOND))
        await store.revive(wish)
        await paused(store, run=run)  # its run still knows the old requester
        clock.advance(4 * SECOND)
        assert one(await store.keep_alives(HERE, 10)).requester == wish.requester


def again(task_id: TaskId, order: str, **values: object) -> Revive:
    """A requester's request to resume a task as its next attempt."""
    known = {"requester": a_requester(parent_task_id=f"parent~resume-{order}"), **values}
    return replace(a_revive(task_id, **known), order=order)
