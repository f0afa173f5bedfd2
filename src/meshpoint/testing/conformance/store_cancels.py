"""Cancels of tasks in every state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.tasks import CancelNotice, Reply, TaskState
from meshpoint.model.transitions import (
    BeginCommitted,
    CancelBeforeRequest,
    CancelCommitted,
    CancelFound,
    CancelRefused,
    CancelRequested,
    CancelStale,
    CancelTooLate,
    DuplicateOutcome,
    Fenced,
    PauseCommitted,
    UnknownCall,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    PEER,
    REQUESTER,
    SECOND,
    THERE,
    a_begin,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_requester,
    a_run,
    an_end,
    begun,
    cancels_to_send,
    ended,
    existing,
    one,
    parked,
    paused,
    ready,
    resumed,
    row,
    state_of,
    sub,
    taken_over,
    write_cancel,
    write_end,
)


class CancelSuite:
    """A cancel ends waiting tasks, flags running ones, and leaves a tombstone for unknown ones."""

    async def test_waiting_task_cancelled(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", "c")
        task_id = pause.run.task_id
        await store.claim([a_claim(pause, "b")], HERE, 1)
        reply = Reply(AGENT, task_id, TaskState.CANCELLED, b"cancelled", a_requester(), fence=1)
        notices = tuple(
            CancelNotice(AGENT, task_id, sub(pause, call), PEER) for call in ("a", "c")
        )
        assert await store.cancel([a_cancel(task_id)]) == [CancelCommitted(reply, notices)]
        assert (await existing(store, task_id)).reply == reply
        assert await cancels_to_send(store, clock) == [sub(pause, "a"), sub(pause, "c")]

    async def test_responses_to_cancelled_task_are_ignored(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.cancel([a_cancel(pause.run.task_id)])
        before = await row(store, pause.run.task_id)
        late = await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 1)
        assert all(isinstance(arrival, UnknownCall | DuplicateOutcome) for arrival in late)
        assert await row(store, pause.run.task_id) == before

    async def test_a_ready_task_ends_at_once(self, store: CheckpointStore) -> None:
        task_id = (await ready(store)).run.task_id
        await write_cancel(store, a_cancel(task_id))
        assert await state_of(store, task_id) is TaskState.CANCELLED
        assert await store.acquire(HERE, 10) == []

    async def test_parked_task_cancelled(self, store: CheckpointStore) -> None:
        run = await parked(store)
        assert await state_of(store, run.task_id) is TaskState.PARKED
        await write_cancel(store, a_cancel(run.task_id))

    async def test_a_running_task_gets_a_flag(self, store: CheckpointStore) -> None:
        resumed_run, begun_run = (await resumed(store)).run, await begun(store, THERE)
        cancels = [a_cancel(resumed_run.task_id), a_cancel(begun_run.task_id)]
        assert await store.cancel(cancels) == [CancelRequested(HERE.id), CancelRequested(THERE.id)]
        assert await store.cancel(cancels) == [CancelRequested(HERE.id), CancelRequested(THERE.id)]
        assert await state_of(store, resumed_run.task_id) is TaskState.RUNNING
        assert await store.renew([resumed_run, begun_run], HERE) == []

    async def test_pause_sees_cancel_flag_and_run_ends(self, store: CheckpointStore) -> None:
        for run in ((await resumed(store)).run, await begun(store)):
            await store.cancel([a_cancel(run.task_id)])
            found = one(await store.pause([a_pause(run=run)]))
            assert found == CancelFound(run)
            assert await state_of(store, run.task_id) is TaskState.RUNNING
            await write_end(store, an_end(run, TaskState.CANCELLED))

    async def test_rescue_sees_cancel_flag(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        await store.cancel([a_cancel(run.task_id)])
        assert (await taken_over(store, clock)).cancel_requested

    async def test_owner_after_release_sees_cancel_flag(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.cancel([a_cancel(run.task_id)])
        await store.release([a_release(run)])
        assert one(await store.acquire(THERE, 10)).cancel_requested

    async def test_an_ended_task_keeps_its_reply(self, store: CheckpointStore) -> None:
        run = await ended(store, reply=b"answer")
        reply = Reply(
            AGENT, run.task_id, TaskState.COMPLETED, b"answer", a_requester(), fence=run.fence
        )
        assert await store.cancel([a_cancel(run.task_id)]) == [CancelTooLate(reply)]

    async def test_repeated_cancel_gets_cancelled_reply(self, store: CheckpointStore) -> None:
        cancel = a_cancel((await paused(store)).run.task_id)
        first = await write_cancel(store, cancel)
        assert await store.cancel([cancel]) == [CancelTooLate(first.reply)]
        assert await store.cancel([a_cancel(cancel.task_id)]) == [CancelTooLate(first.reply)]

    async def test_an_unknown_task_gets_a_tombstone(self, store: CheckpointStore) -> None:
        cancel = a_cancel(TaskId(new_id()))
        assert await store.cancel([cancel]) == [CancelBeforeRequest()]
        known = await existing(store, cancel.task_id)
        assert known.state is TaskState.CANCELLED
        assert known.reply is not None
        assert known.reply.body == cancel.reply
        assert isinstance(one(await store.cancel([cancel])), CancelBeforeRequest | CancelTooLate)
        assert isinstance(one(await store.cancel([a_cancel(cancel.task_id)])), CancelTooLate)

    @pytest.mark.parametrize("known", [True, False], ids=["waiting", "unknown"])
    async def test_cancelled_request_is_not_run(self, store: CheckpointStore, known: bool) -> None:
        task_id = (await paused(store)).run.task_id if known else TaskId(new_id())
        await store.cancel([a_cancel(task_id)])
        before = await row(store, task_id)
        assert await store.begin([a_begin(a_run(task_id))]) == [CancelFound(None)]
        assert await store.pause([a_pause(run=a_run(task_id))]) == [CancelFound(None)]
        assert await row(store, task_id) == before

    async def test_cancel_closes_call_once(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await store.claim([a_claim(pause, "a")], HERE, 0)
        await write_cancel(store, a_cancel(pause.run.task_id))
        assert await cancels_to_send(store, clock) == [sub(pause, "b")]

    async def test_stale_cancel_is_ignored(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = [
            (await paused(store)).run,
            (await ready(store)).run,
            await begun(store),
            await ended(store),
        ]
        before = [await row(store, run.task_id) for run in tasks]
        cancels = [a_cancel(run.task_id, "earlier") for run in tasks]
        assert await store.cancel(cancels) == [CancelStale()] * len(tasks)
        assert [await row(store, run.task_id) for run in tasks] == before
        assert not (await taken_over(store, clock)).cancel_requested

    async def test_cancel_for_own_parent_cancels_task(self, store: CheckpointStore) -> None:
        waiting, running = (await paused(store)).run, await begun(store)
        cancels = [a_cancel(run.task_id, "parent") for run in (waiting, running)]
        assert [type(result) for result in await store.cancel(cancels)] == [
            CancelCommitted,
            CancelRequested,
        ]

    async def test_cancel_for_parent_ends_parentless_task(self, store: CheckpointStore) -> None:
        waiting = (await paused(store, requester=a_requester(parent_task_id=None))).run
        await write_cancel(store, a_cancel(waiting.task_id, "parent"))

    async def test_cancel_of_unknown_child_leaves_tombstone(self, store: CheckpointStore) -> None:
        cancel = a_cancel(TaskId(new_id()), "parent")
        assert await store.cancel([cancel]) == [CancelBeforeRequest()]
        assert await store.cancel([cancel]) == [CancelBeforeRequest()]
        assert await state_of(store, cancel.task_id) is TaskState.CANCELLED

    async def test_batch_drops_cancel_for_earlier_parent(self, store: CheckpointStore) -> None:
        task_id = (await paused(store)).run.task_id
        stale, own = await store.cancel(
            [a_cancel(task_id, "earlier"), a_cancel(task_id, "parent")]
        )
        assert (stale, type(own)) == (CancelStale(), CancelCommitted)

    async def test_cancel_results_in_argument_order(self, store: CheckpointStore) -> None:
        tasks = [
            await ended(store),
            (await resumed(store)).run,
            (await paused(store)).run,
            a_run(),
        ]
        results = await store.cancel([a_cancel(run.task_id) for run in tasks])
        assert [type(result) for result in results] == [
            CancelTooLate,
            CancelRequested,
            CancelCommitted,
            CancelBeforeRequest,
        ]

    async def test_zombie_of_cancelled_task_is_fenced(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.release([a_release(run)])
        await store.cancel([a_cancel(run.task_id)])
        before = await row(store, run.task_id)
        assert await store.end([an_end(run)]) == [Fenced()]
        assert isinstance(one(await store.pause([a_pause(run=run)])), Fenced | CancelFound)
        assert await store.renew([run], HERE) == [run]
        assert await store.release([a_release(run)]) == [False]
        assert await row(store, run.task_id) == before

    @pytest.mark.parametrize("step", ["running", "waiting", "ready", "ended"])
    async def test_cancel_from_stranger_is_refused(
        self, store: CheckpointStore, clock: FakeClock, step: str
    ) -> None:
        match step:
            case "running":
                task_id = (await begun(store)).task_id
            case "waiting":
                task_id = (await paused(store)).run.task_id
            case "ready":
                task_id = (await ready(store)).run.task_id
            case _:
                task_id = (await ended(store)).task_id
        before = await row(store, task_id)
        assert await store.cancel([a_cancel(task_id, sender="mallory")]) == [CancelRefused()]
        assert await row(store, task_id) == before
        if step == "running":
            assert not (await taken_over(store, clock)).cancel_requested

    @pytest.mark.parametrize(
        "sender", [REQUESTER, AGENT, None], ids=["requester", "agent", "anybody"]
    )
    async def test_authorized_cancel(self, store: CheckpointStore, sender: str | None) -> None:
        waiting, running = (await paused(store)).run, await begun(store)
        cancels = [a_cancel(run.task_id, sender=sender) for run in (waiting, running)]
        assert [type(result) for result in await store.cancel(cancels)] == [
            CancelCommitted,
            CancelRequested,
        ]

    async def test_repeated_cancel_repeats_broadcast(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.cancel([a_cancel(run.task_id)])
        assert await store.cancel([a_cancel(run.task_id, sender="mallory")]) == [
            CancelRequested(HERE.id)
        ]
        await store.end([an_end(run, TaskState.CANCELLED)])
        before = await row(store, run.task_id)
        assert isinstance(
            one(await store.cancel([a_cancel(run.task_id, sender="mallory")])), CancelTooLate
        )
        assert await row(store, run.task_id) == before

    @pytest.mark.parametrize("written", ["pause", "begin"])
    async def test_early_cancel_binds_sender(self, store: CheckpointStore, written: str) -> None:
        runs = {name: a_run() for name in ("mallory", REQUESTER)}
        for name, run in runs.items():
            assert await store.cancel([a_cancel(run.task_id, sender=name)]) == [
                CancelBeforeRequest()
            ]
            known = await existing(store, run.task_id)
            assert (known.is_early_cancel, known.requester) == (True, name)
        for name, run in runs.items():
            (result,) = (
                await store.pause([a_pause(run=run, digest="this")])
                if written == "pause"
                else await store.begin([replace(a_begin(run), digest="this")])
            )
            assert isinstance(
                result, CancelFound if name == REQUESTER else PauseCommitted | BeginCommitted
            )
        known = await existing(store, runs["mallory"].task_id)
        assert (known.is_early_cancel, known.requester, known.digest) == (False, REQUESTER, "this")

    async def test_early_cancel_of_stranger_leaves_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester, run = a_requester(deadline=clock.now() + SECOND), a_run()
        await store.cancel([a_cancel(run.task_id, sender="mallory")])
        await paused(store, run=run, requester=requester)
        _, (call,) = await row(store, run.task_id)
        assert call.absolute_deadline == requester.deadline

    @pytest.mark.parametrize("first", ["mallory", REQUESTER])
    async def test_early_cancels_by_two_senders(self, store: CheckpointStore, first: str) -> None:
        run, second = a_run(), REQUESTER if first == "mallory" else "mallory"
        further = a_cancel(run.task_id, sender=second)
        await store.cancel([a_cancel(run.task_id, sender=first)])
        assert await store.cancel([further]) == [CancelBeforeRequest()]
        assert isinstance(one(await store.cancel([further])), CancelBeforeRequest | CancelTooLate)
        for name in ("mallory", REQUESTER):
            asked = a_begin(run, requester=a_requester(app_id=name))
            assert await store.begin([asked]) == [CancelFound(None)]
        other = a_begin(run, requester=a_requester(app_id="other"))
        assert isinstance(one(await store.begin([other])), BeginCommitted)

    async def test_early_cancel_without_sender_binds_all(self, store: CheckpointStore) -> None:
        """It also widens the tombstone of a cancel from another sender."""
        plain, widened = a_run(), a_run()
        await store.cancel([a_cancel(widened.task_id, sender="mallory")])
        for run in (plain, widened):
            assert await store.cancel([a_cancel(run.task_id)]) == [CancelBeforeRequest()]
            assert await store.begin([a_begin(run)]) == [CancelFound(None)]

    async def test_early_cancel_for_other_agent_binds_nobody(self, store: CheckpointStore) -> None:
        run = a_run()
        elsewhere = a_cancel(run.task_id, sender=REQUESTER, agent=PEER)
        assert await store.cancel([elsewhere]) == [CancelBeforeRequest()]
        assert await store.cancel([a_cancel(run.task_id, sender=REQUESTER)]) == [
            CancelBeforeRequest()
        ]
        assert isinstance(one(await store.begin([a_begin(run)])), BeginCommitted)

    @pytest.mark.parametrize("sender", [REQUESTER, None])
    async def test_cancel_for_other_agent_is_ignored(
        self, store: CheckpointStore, clock: FakeClock, sender: str | None
    ) -> None:
        tasks = [(await paused(store)).run, await begun(store), await ended(store)]
        before = [await row(store, run.task_id) for run in tasks]
        cancels = [a_cancel(run.task_id, sender=sender, agent=PEER) for run in tasks]
        assert await store.cancel(cancels) == [CancelBeforeRequest()] * len(tasks)
        assert [await row(store, run.task_id) for run in tasks] == before
        assert not (await taken_over(store, clock)).cancel_requested

    @pytest.mark.parametrize("cancelled", [True, False])
    async def test_other_requester_fenced(self, store: CheckpointStore, cancelled: bool) -> None:
        task_id = (await paused(store)).run.task_id
        if cancelled:
            await store.cancel([a_cancel(task_id)])
        before = await row(store, task_id)
        other = a_requester(app_id="mallory")
        assert await store.pause([a_pause(run=a_run(task_id), requester=other)]) == [Fenced()]
        assert await store.begin([a_begin(a_run(task_id), requester=other)]) == [Fenced()]
        assert await row(store, task_id) == before

    async def test_a_row_knows_who_asked_for_what(self, store: CheckpointStore) -> None:
        pause = await paused(store, digest="this")
        task_id = pause.run.task_id
        for _ in range(2):
            known = await existing(store, task_id)
            assert (known.requester, known.digest, known.is_early_cancel) == (
                REQUESTER,
                "this",
                False,
            )
            if known.state is TaskState.WAITING:
                task = await resumed(store, pause)
                assert task.digest == "this"
                await store.end([an_end(task.run)])
