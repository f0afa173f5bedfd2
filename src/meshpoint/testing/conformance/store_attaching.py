"""Further addresses for the reply of a task, and how long its outcome is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import Address
from meshpoint.model.tasks import MAX_REPLY_ADDRESSES, Reply, TaskState
from meshpoint.model.transitions import (
    Attach,
    Attached,
    AttachEnded,
    AttachRefused,
    AttachResult,
    AttachUnknown,
    BeginCommitted,
    EndCommitted,
    Pause,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    HERE,
    HOUR,
    LEASED,
    REQUESTER,
    SECOND,
    TIMINGS,
    a_begin,
    a_cancel,
    a_pause,
    a_progress,
    a_requester,
    an_end,
    an_undelivered_reply,
    existing,
    one,
    parked,
    paused,
    ready,
    resumed,
    row,
    taken_over,
    write_end,
)

FIRST, SECOND_ADDRESS, THIRD = (Address(f"client.private.{number}") for number in (1, 2, 3))


def an_attach(task_id: TaskId, reply_to: Address = SECOND_ADDRESS, **values: object) -> Attach:
    """An attach of the task's requester. `values` override its fields."""
    return replace(Attach(task_id, AGENT, REQUESTER, reply_to), **values)  # type: ignore[arg-type]


async def attach(store: CheckpointStore, command: Attach) -> AttachResult:
    """Attach one address."""
    return one(await store.attach([command]))


async def called(store: CheckpointStore, **values: object) -> Pause:
    """A waiting task whose requester is no task and receives replies at `FIRST`."""
    requester = a_requester(reply_to=FIRST, parent_task_id=None, **values)
    return await paused(store, requester=requester)


async def sent_to(store: CheckpointStore, reply: Reply, clock: FakeClock) -> list[str | None]:
    """The addresses that get `reply`, in the order in which they get it."""
    addresses: list[str | None] = []
    due = [reply]
    while due:
        addresses += [each.requester.reply_to for each in due]
        assert {each.body for each in due} == {reply.body}
        await store.confirm_sent(due)
        due = [each for each in await store.unsent(AGENT, 10) if isinstance(each, Reply)]
    clock.advance(LEASED)
    assert await store.unsent(AGENT, 10) == []
    return addresses


class AttachingSuite:
    """An attached address gets the reply too, no matter how the task ends."""

    async def test_each_address_gets_the_reply(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        task_id = pause.run.task_id
        for address in (SECOND_ADDRESS, THIRD):
            assert await attach(store, an_attach(task_id, address)) == Attached(TaskState.WAITING)
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        assert await sent_to(store, committed.reply, clock) == [THIRD, SECOND_ADDRESS, FIRST]

    async def test_each_address_gets_the_status_updates(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        task_id = pause.run.task_id
        progress = a_progress(pause, "a")
        (alone,) = await store.record_progress([progress])
        assert alone is not None
        assert (alone.requester.reply_to, alone.followers) == (FIRST, ())
        for address in (SECOND_ADDRESS, THIRD):
            await attach(store, an_attach(task_id, address))
        (recorded,) = await store.record_progress([progress])
        assert recorded is not None
        assert recorded.requester.reply_to == THIRD
        assert recorded.followers == (SECOND_ADDRESS, FIRST)
        task = await resumed(store, pause)
        assert task.requester.reply_to == THIRD
        assert task.followers == (SECOND_ADDRESS, FIRST)
        rescued = await taken_over(store, clock)
        assert rescued.followers == (SECOND_ADDRESS, FIRST)

    async def test_an_attached_address_counts_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        for address in (SECOND_ADDRESS, FIRST, SECOND_ADDRESS):
            await attach(store, an_attach(pause.run.task_id, address))
        command = an_attach(pause.run.task_id)
        assert await store.attach([command, command]) == 2 * [Attached(TaskState.WAITING)]
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        assert await sent_to(store, committed.reply, clock) == [SECOND_ADDRESS, FIRST]

    async def test_the_first_of_too_many_addresses_gets_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        addresses = [Address(f"client.private.{number}") for number in range(10, 15)]
        dropped = []
        for address in addresses:
            result = await attach(store, an_attach(pause.run.task_id, address))
            assert isinstance(result, Attached)
            dropped.append(result.dropped)
        assert dropped == [None, None, None, FIRST, addresses[0]]
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        sent = await sent_to(store, committed.reply, clock)
        assert sent == [*reversed(addresses)][:MAX_REPLY_ADDRESSES]

    async def test_a_lost_confirm_repeats_the_reply_to_the_same_address(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """The replica may die between the commit, the publish and the confirm."""
        pause = await called(store)
        await attach(store, an_attach(pause.run.task_id))
        await write_end(store, an_end((await resumed(store, pause)).run))
        clock.advance(LEASED)
        reply = one(await store.unsent(AGENT, 10))
        assert isinstance(reply, Reply)
        assert reply.requester.reply_to == SECOND_ADDRESS
        assert await sent_to(store, reply, clock) == [SECOND_ADDRESS, FIRST]

    async def test_a_repeated_confirm_skips_no_address(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        await attach(store, an_attach(pause.run.task_id))
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        await store.confirm_sent([committed.reply])
        await store.confirm_sent([committed.reply])
        reply = one(await store.unsent(AGENT, 10))
        assert isinstance(reply, Reply)
        assert reply.requester.reply_to == FIRST

    async def test_a_task_attaches_in_every_state(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(reply_to=FIRST, parent_task_id=None)
        (begun,) = await store.begin([a_begin(requester=requester)])
        waits = await called(store)
        is_ready, is_parked = await called(store), await called(store)
        await ready(store, is_ready)
        await parked(store, is_parked)
        assert isinstance(begun, BeginCommitted)
        for task_id, state in (
            (begun.run.task_id, TaskState.RUNNING),
            (waits.run.task_id, TaskState.WAITING),
            (is_ready.run.task_id, TaskState.READY),
            (is_parked.run.task_id, TaskState.PARKED),
        ):
            before = await row(store, task_id)
            assert await attach(store, an_attach(task_id)) == Attached(state)
            assert await row(store, task_id) == before
            assert (await existing(store, task_id)).reply_to == SECOND_ADDRESS

    async def test_the_address_outlives_pauses_and_rescues(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        run = (await resumed(store, pause)).run
        await attach(store, an_attach(run.task_id))
        await store.pause([a_pause("b", run=run, requester=pause.requester)])
        rescued = await self._rescued(store, run.task_id, clock)
        assert rescued.reply.requester.reply_to == SECOND_ADDRESS
        assert await sent_to(store, rescued.reply, clock) == [SECOND_ADDRESS, FIRST]

    async def _rescued(
        self, store: CheckpointStore, task_id: TaskId, clock: FakeClock
    ) -> EndCommitted:
        """Expire the call, lose the run that it resumes, and end the task as its next owner."""
        clock.advance(2 * HOUR)
        one(await store.expire(HERE, 10, 10))
        owner = await taken_over(store, clock)
        assert owner.run.task_id == task_id
        return await write_end(store, an_end(owner.run))

    async def test_a_zombie_does_not_remove_the_address(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        zombie = (await resumed(store, pause)).run
        owner = await taken_over(store, clock)
        await attach(store, an_attach(zombie.task_id))
        await store.pause([a_pause("b", run=zombie, requester=pause.requester)])
        await store.end([an_end(zombie, reply=b"late")])
        committed = await write_end(store, an_end(owner.run))
        assert await sent_to(store, committed.reply, clock) == [SECOND_ADDRESS, FIRST]

    async def test_a_cancelled_task_replies_to_each_address(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        await attach(store, an_attach(pause.run.task_id))
        await store.cancel([a_cancel(pause.run.task_id)])
        clock.advance(LEASED)
        reply = one(each for each in await store.unsent(AGENT, 10) if isinstance(each, Reply))
        await store.confirm_sent([reply])
        again = one(each for each in await store.unsent(AGENT, 10) if isinstance(each, Reply))
        assert [reply.requester.reply_to, again.requester.reply_to] == [SECOND_ADDRESS, FIRST]

    async def test_an_ended_task_has_its_reply(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        await store.confirm_sent([committed.reply])
        before = await row(store, pause.run.task_id)
        command = an_attach(pause.run.task_id)
        assert await store.attach([command, command]) == 2 * [AttachEnded(committed.reply)]
        assert await row(store, pause.run.task_id) == before
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_another_requester_is_refused(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        waits, done = await called(store), await called(store)
        await store.confirm_sent(
            [(await write_end(store, an_end((await resumed(store, done)).run))).reply]
        )
        for task_id in (waits.run.task_id, done.run.task_id):
            before = await existing(store, task_id)
            refused = await attach(store, an_attach(task_id, sender="stranger"))
            assert refused == AttachRefused(REQUESTER)
            assert (await existing(store, task_id)).reply_to == before.reply_to

    async def test_a_task_of_another_agent_is_unknown(self, store: CheckpointStore) -> None:
        pause = await called(store)
        commands = [
            an_attach(pause.run.task_id, agent=ELSEWHERE),
            an_attach(TaskId(new_id())),
        ]
        assert await store.attach(commands) == 2 * [AttachUnknown()]
        assert (await existing(store, pause.run.task_id)).reply_to == FIRST
        assert await store.attach([]) == []

    async def test_an_early_cancel_counts_for_its_sender(self, store: CheckpointStore) -> None:
        task_id = TaskId(new_id())
        await store.cancel([a_cancel(task_id, sender=REQUESTER)])
        result = await attach(store, an_attach(task_id))
        assert isinstance(result, AttachEnded)
        assert (result.reply.state, result.reply.body) == (TaskState.CANCELLED, b"cancelled")
        assert await attach(store, an_attach(task_id, sender="stranger")) == AttachUnknown()

    async def test_a_calling_task_stays_the_first_to_get_the_reply(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        for address in (SECOND_ADDRESS, THIRD):
            await attach(store, an_attach(pause.run.task_id, address))
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        addresses = [pause.requester.reply_to, THIRD, SECOND_ADDRESS]
        assert await sent_to(store, committed.reply, clock) == addresses

    async def test_two_replicas_attach_concurrently(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store)
        await asyncio.gather(
            attach(store, an_attach(pause.run.task_id)),
            attach(other, an_attach(pause.run.task_id, THIRD)),
        )
        committed = await write_end(store, an_end((await resumed(store, pause)).run))
        sent = await sent_to(store, committed.reply, clock)
        assert sorted(map(str, sent)) == sorted([FIRST, SECOND_ADDRESS, THIRD])

    async def test_an_attach_and_the_end_do_not_miss_each_other(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store, await called(store))).run
        result, (committed,) = await asyncio.gather(
            attach(other, an_attach(run.task_id)), store.end([an_end(run)])
        )
        assert isinstance(committed, EndCommitted)
        sent = await sent_to(store, committed.reply, clock)
        assert isinstance(result, AttachEnded) or SECOND_ADDRESS in sent

    async def test_an_outcome_is_kept_as_long_as_its_requester_wants(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await called(store, result_ttl=TIMINGS.tombstone_ttl + HOUR)
        assert (await resumed(store, pause)).requester == pause.requester
        command = an_undelivered_reply(keep=30 * SECOND)
        kept = replace(command.reply, requester=pause.requester)
        stored = replace(command, reply=kept)
        assert await store.store_replies([stored]) == [True]
        owner = await taken_over(store, clock)
        committed = await write_end(store, an_end(owner.run))
        await store.confirm_sent([committed.reply, kept])
        clock.advance(TIMINGS.tombstone_ttl + timedelta(minutes=59))
        assert await store.purge(AGENT, 10) == 0
        clock.advance(timedelta(minutes=2))
        assert await store.purge(AGENT, 10) == 2
