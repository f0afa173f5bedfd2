"""Tasks that are requested again: accepted requests, permitted requesters, and old cancels."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.operations import (
    DIFFERENT_INPUT,
    DIFFERENT_REQUESTER,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
)
from meshpoint.model.tasks import CancelNotice
from meshpoint.model.transitions import (
    DuplicateOutcome,
    JoinCompleted,
    PastDeadline,
    Pause,
    UnknownCall,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    DONE,
    FAILED,
    HERE,
    HOUR,
    PEER,
    REQUESTER,
    SECOND,
    TIMINGS,
    a_begin,
    a_call,
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
    error,
    existing,
    failed,
    one,
    operating,
    outcomes,
    parked,
    paused,
    ready,
    resumed,
    revived,
    row,
    saved,
    state_of,
    sub,
    write_cancel,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_leases import sent


class RerequestSuite:
    """Earlier attempts, the order of repeated requests, and adopted tasks."""

    async def _cancelled(self, store: CheckpointStore) -> Pause:
        """Cancel an operation while it waits for a and b. Its reply is already sent."""
        run = await operating(store)
        await saved(store, run)
        pause = await paused(store, "a", "b", run=run)
        await write_cancel(store, a_cancel(run.task_id))
        await sent(store, run.task_id)
        return pause

    @pytest.mark.parametrize("step", ["ready", "running", "waiting", "ready again", "ended"])
    async def test_cancels_of_earlier_attempt_are_sent(
        self, store: CheckpointStore, clock: FakeClock, step: str
    ) -> None:
        before = await self._cancelled(store)
        task_id = before.run.task_id
        notices = [CancelNotice(AGENT, task_id, sub(before, call), PEER) for call in ("a", "b")]
        await store.revive(a_revive(task_id))
        kept: list[str] = []
        if step != "ready":
            run, kept = one(await store.acquire(HERE, 10)).run, []
            if step == "ended":
                await store.end([an_end(run)])
                await sent(store, task_id)
            elif step != "running":
                kept = ["c"]
                pause = a_pause("c", run=run)
                committed = await write_pause(store, pause)
                await store.confirm_sent(committed.dispatches)
                if step == "ready again":
                    await ready(store, pause)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        assert await store.unsent(AGENT, 10) == notices
        state = await state_of(store, task_id)
        await store.confirm_sent(notices)
        clock.advance(TIMINGS.dispatch_lease * 3)
        assert await store.unsent(AGENT, 10) == []
        assert [call.call_id for call in (await row(store, task_id))[1]] == kept
        assert await state_of(store, task_id) is state

    async def test_cancels_of_all_pauses(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, "a", "b", join=FIRST, run=await operating(store))
        second = await paused(
            store, "c", "d", join=FIRST, run=(await resumed(store, first, "a")).run
        )
        run = (await resumed(store, second, "c")).run
        await saved(store, run)
        await store.end([an_end(run, FAILED)])
        run = await revived(store, run.task_id)
        await paused(store, "e", run=run)
        assert set(await cancels_to_send(store, clock)) == {sub(first, "b"), sub(second, "d")}

    async def test_outcomes_of_earlier_attempt_are_dropped(self, store: CheckpointStore) -> None:
        before = await self._cancelled(store)
        await store.revive(a_revive(before.run.task_id))
        task = one(await store.acquire(HERE, 10))
        assert task.outcomes == ()
        pause = await paused(store, "a", run=task.run)
        late = one(await store.claim([a_claim(before, "a")], HERE, 1))
        assert isinstance(late, UnknownCall | DuplicateOutcome)
        assert list(outcomes(await resumed(store, pause))) == ["a"]

    async def test_purge_after_all_cancels(self, store: CheckpointStore, clock: FakeClock) -> None:
        before = await self._cancelled(store)
        task_id = before.run.task_id
        await store.end([an_end(await revived(store, task_id))])
        await sent(store, task_id)
        clock.advance(TIMINGS.tombstone_ttl + HOUR)
        assert await store.purge(AGENT, 10) == 0
        await store.confirm_sent(
            [CancelNotice(AGENT, task_id, sub(before, call), PEER) for call in ("a", "b")]
        )
        assert await store.purge(AGENT, 10) == 1

    async def test_repeated_order_finds_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        assert await store.revive(again(run.task_id, "01")) == Revived(run.task_id, AGENT, 1)
        before = await row(store, run.task_id)
        assert await store.revive(again(run.task_id, "01")) == Revived(
            run.task_id, AGENT, 1, repeated=True
        )
        assert await row(store, run.task_id) == before
        for state in (FAILED, DONE):
            await store.end([an_end(one(await store.acquire(HERE, 10)).run, state)])
            assert await store.revive(again(run.task_id, "01")) == Revived(
                run.task_id, AGENT, 1 + (state is DONE), repeated=True
            )
            assert await state_of(store, run.task_id) is state
            await store.revive(a_revive(run.task_id))

    async def test_a_smaller_order_is_refused(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "02"))
        refused = NotRevived(Refusal.RUNNING, "asked again since")
        assert await store.revive(again(run.task_id, "01", abandoned=True, adopt=True)) == refused
        await store.end([an_end(one(await store.acquire(HERE, 10)).run, FAILED)])
        assert await store.revive(again(run.task_id, "01")) == refused
        assert await store.revive(again(run.task_id, "10")) == Revived(run.task_id, AGENT, 2)

    async def test_manual_revive_keeps_order(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "02"))
        await store.end([an_end(one(await store.acquire(HERE, 10)).run, FAILED)])
        await store.revive(a_revive(run.task_id))
        for state in ("ready", "failed"):
            assert await store.revive(again(run.task_id, "02")) == Revived(
                run.task_id, AGENT, 2, repeated=True
            )
            assert await store.revive(again(run.task_id, "01")) == NotRevived(
                Refusal.RUNNING, "asked again since"
            )
            if state == "ready":
                await store.end([an_end(one(await store.acquire(HERE, 10)).run, FAILED)])

    async def test_rerequest_after_manual_revive_counts(self, store: CheckpointStore) -> None:
        run = await failed(store)
        command = again(run.task_id, "01", adopt=True)
        await store.revive(a_revive(run.task_id))
        assert await store.revive(command) == Adopted()

    async def test_another_agent_does_not_ask_for_a_task(self, store: CheckpointStore) -> None:
        over, active = (await failed(store)).task_id, (await begun(store)).task_id
        before = [await row(store, task_id) for task_id in (over, active)]
        refused = NotRevived(Refusal.NOT_FOUND, "it was requested by another agent")
        other = a_requester(app_id="stranger", reply_to=Address("stranger.resp"))
        for task_id in (over, active):
            for requester in (other, a_requester(app_id=None)):
                command = again(
                    task_id, "01", requester=requester, adopt=True, without_checkpoint=True
                )
                assert await store.revive(command) == refused
        assert [await row(store, task_id) for task_id in (over, active)] == before

    async def test_another_agents_order_does_not_find_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(again(run.task_id, "01"))
        stranger = again(run.task_id, "01", requester=a_requester(app_id="stranger"))
        assert await store.revive(stranger) == NotRevived(
            Refusal.NOT_FOUND, "it was requested by another agent"
        )

    async def test_manual_revive_keeps_requester(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await sent(store, run.task_id)
        # No requester expects a reply.
        await store.end([an_end(await revived(store, run.task_id), FAILED)])
        stranger = again(run.task_id, "01", requester=a_requester(app_id="stranger"))
        assert await store.revive(stranger) == NotRevived(Refusal.NOT_FOUND, DIFFERENT_REQUESTER)
        assert await store.revive(again(run.task_id, "01")) == Revived(run.task_id, AGENT, 2)

    async def test_a_requester_asks_again_for_the_same_only(self, store: CheckpointStore) -> None:
        active, over = a_run(), a_run()
        for run in (active, over):
            await store.begin([replace(a_begin(run, operation=an_operation()), digest="this")])
        await store.end([an_end(replace(over, fence=1), FAILED)])
        refused = NotRevived(Refusal.NOT_FOUND, DIFFERENT_INPUT)
        for run in (active, over):
            before = await row(store, run.task_id)
            command = again(
                run.task_id,
                "01",
                adopt=True,
                without_checkpoint=True,
                request=b"other",
                digest="that",
            )
            assert await store.revive(command) == refused
            assert await row(store, run.task_id) == before
            assert not isinstance(await store.revive(replace(command, digest="this")), NotRevived)

    async def test_task_of_earlier_release_learns_digest(self, store: CheckpointStore) -> None:
        """Rows of an earlier release have no digest, so any input matches."""
        run = await begun(store)
        assert await store.revive(again(run.task_id, "01", adopt=True, digest="this")) == Adopted()
        known = await existing(store, run.task_id)
        assert (known.requester, known.digest) == (REQUESTER, "this")
        refused = await store.revive(again(run.task_id, "02", adopt=True, digest="that"))
        assert refused == NotRevived(Refusal.NOT_FOUND, DIFFERENT_INPUT)

    async def test_manual_request_replaces_input(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(a_revive(run.task_id, request=b"other", digest="that"))
        assert (await existing(store, run.task_id)).digest == "that"
        assert one(await store.acquire(HERE, 10)).digest == "that"

    async def test_a_person_does_not_need_to_have_asked(self, store: CheckpointStore) -> None:
        run = await failed(store)
        command = a_revive(run.task_id, requester=a_requester(app_id="cli"))
        assert await store.revive(command) == Revived(run.task_id, AGENT, 1)

    @pytest.mark.parametrize("step", ["running", "waiting", "ready"])
    async def test_adopted_task_answers_requester(self, store: CheckpointStore, step: str) -> None:
        run = (await resumed(store)).run
        pause = a_pause(run=run)
        if step != "running":
            await store.pause([pause])
        if step == "ready":
            await ready(store, pause)
        before = await row(store, run.task_id)
        command = again(run.task_id, "01", adopt=True)
        assert await store.revive(command) == Adopted()
        assert await row(store, run.task_id) == before
        if step == "running":
            await store.pause([pause])
        run = (
            one(await store.acquire(HERE, 10)).run
            if step == "ready"
            else (await resumed(store, pause)).run
        )
        end = await write_end(store, an_end(run))
        assert end.reply.requester == command.requester

    @pytest.mark.parametrize(
        ("old", "new", "due"),
        [(HOUR, None, TIMINGS.parked_limit), (None, HOUR, HOUR), (2 * HOUR, HOUR, HOUR)],
    )
    async def test_an_adopted_parked_task_ends_at_its_new_deadline(
        self,
        store: CheckpointStore,
        clock: FakeClock,
        old: timedelta | None,
        new: timedelta | None,
        due: timedelta,
    ) -> None:
        earlier, later = (
            a_requester(deadline=None if each is None else clock.now() + each)
            for each in (old, new)
        )
        run = await parked(store, await paused(store, requester=earlier))
        command = again(run.task_id, "01", adopt=True, requester=later)
        assert await store.revive(command) == Adopted()
        clock.advance(due - SECOND)
        assert await store.acquire_overdue(HERE, 10) == []
        clock.advance(SECOND)
        overdue = one(await store.acquire_overdue(HERE, 10))
        assert overdue.past_deadline is (new is not None)

    async def test_an_adopted_task_has_seen_the_order(self, store: CheckpointStore) -> None:
        run = await begun(store)
        assert await store.revive(again(run.task_id, "02", adopt=True)) == Adopted()
        assert await store.revive(again(run.task_id, "02", adopt=True)) == Revived(
            run.task_id, AGENT, 0, repeated=True
        )
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
        assert await store.revive(again(over.task_id, "01", adopt=True)) == NotRevived(
            Refusal.COMPLETED
        )
        assert await store.revive(again(task_id, "01", adopt=True)) == Revived(task_id, AGENT, 1)

    async def test_adopted_keep_alives(self, store: CheckpointStore, clock: FakeClock) -> None:
        impatient, patient = a_requester(idle_timeout=9 * SECOND), a_requester()
        adopting = await paused(store, requester=patient)
        leaving = await paused(store, requester=impatient)
        now_impatient = again(adopting.run.task_id, "01", adopt=True, requester=impatient)
        now_patient = again(leaving.run.task_id, "01", adopt=True, requester=patient)
        assert [await store.revive(command) for command in (now_impatient, now_patient)] == [
            Adopted()
        ] * 2
        assert await store.keep_alives(HERE, 10) == []
        clock.advance(4 * SECOND)
        assert [(each.task_id, each.requester) for each in await store.keep_alives(HERE, 10)] == [
            (adopting.run.task_id, impatient)
        ]

    async def test_adopted_while_running(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        command = again(
            run.task_id, "01", adopt=True, requester=a_requester(idle_timeout=9 * SECOND)
        )
        await store.revive(command)
        await paused(store, run=run)  # its run still knows the old requester
        clock.advance(4 * SECOND)
        assert one(await store.keep_alives(HERE, 10)).requester == command.requester

    @pytest.mark.parametrize("has_error", [False, True])
    async def test_the_deadline_of_an_adopted_task_limits_its_next_pause(
        self, store: CheckpointStore, clock: FakeClock, has_error: bool
    ) -> None:
        """Its run still knows the old deadline. A call with an error is written separately."""
        old, new = (a_requester(deadline=clock.now() + each * SECOND) for each in (10, 30))
        run = (await resumed(store, await paused(store, requester=old))).run
        command = again(run.task_id, "01", adopt=True, requester=new)
        assert await store.revive(command) == Adopted()
        clock.advance(11 * SECOND)
        calls = ("b", a_call("a", outcome=error())) if has_error else ("b",)
        committed = await write_pause(store, a_pause(*calls, run=run, requester=old))
        assert [each.deadline for each in committed.dispatches] == [new.deadline]
        clock.advance(18 * SECOND)
        assert await store.expire(HERE, 10, 10) == []
        clock.advance(SECOND)
        expired = one(await store.expire(HERE, 10, 10))
        assert isinstance(expired.join_result, JoinCompleted)

    async def test_a_pause_after_the_deadline_of_an_adopted_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run  # without a deadline
        requester = a_requester(deadline=clock.now() + SECOND)
        command = again(run.task_id, "01", adopt=True, requester=requester)
        assert await store.revive(command) == Adopted()
        clock.advance(SECOND)
        assert await store.pause([a_pause(run=run)]) == [PastDeadline()]


def again(task_id: TaskId, order: str, **values: object) -> Revive:
    """A requester's request to resume a task as its next attempt."""
    known = {"requester": a_requester(parent_task_id=f"parent~resume-{order}"), **values}
    return replace(a_revive(task_id, **known), order=order)
